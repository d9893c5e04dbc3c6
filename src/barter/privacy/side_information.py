"""What leaves a client beside its answers, by names that no method can have."""

from __future__ import annotations

from collections.abc import Collection

__all__ = [
    "BESIDE",
    "EPSILON",
    "ERRORS",
    "HARMLESS",
    "HELLO",
    "PIXELS",
    "RESULTS",
    "measured",
    "said_of_itself",
]

EPSILON = "epsilon"  # of a client's report: what all that has left it costs
EXAMPLES, NAMES, NUMBERS = "number of images", "names of classes", "number of classes, by labels"
PIXELS, RESULTS, ERRORS = (
    "mean and deviation of pixels",
    "results of evaluation",
    "messages of errors",
)
HELLO = (EXAMPLES, NAMES, NUMBERS, PIXELS)  # what a site says of itself before round 1
HARMLESS = (EXAMPLES, NAMES)  # public: no image changes them
BESIDE = {
    EXAMPLES: "of the client's own, for training; before round 1",
    NAMES: "those that the run is about; before round 1",
    NUMBERS: "one more than the largest label, as nobody named them; before round 1",
    PIXELS: "of all training and validation images; before round 1",
    RESULTS: "accuracies on the client's test and validation images, and what it notes of its training",
    ERRORS: "what went wrong at the client, which may quote its data",
}


def measured(evaluation: object) -> bool:
    """Whether an evaluation says more than what the client has spent."""
    return not isinstance(evaluation, Collection) or bool(set(evaluation) - {EPSILON})


def said_of_itself(*, numbered: bool, pixels: bool) -> dict[str, int]:
    """What a site has told before round 1, if need be with numbers of classes in place of names, and of its pixels."""
    return {EXAMPLES: 1, NUMBERS if numbered else NAMES: 1, **({PIXELS: 1} if pixels else {})}
