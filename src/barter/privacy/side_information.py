"""Side information: what clients send in addition to answers.

Its names are such that no method can have them.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = [
    "EPSILON",
    "ERRORS",
    "FAILURES",
    "HELLO",
    "PIXELS",
    "PROGRESS",
    "PUBLIC_DATA_FACT",
    "PUBLIC_FACTS",
    "RESULTS",
    "SIDE_INFORMATION",
    "facts_in_hello",
    "holds_metrics",
]

EPSILON = "epsilon"  # key in a client's report: ε of everything that it has released
EXAMPLES = "number of images"
CLASS_NAMES = "names of classes"
CLASS_NUMBER = "number of classes, by labels"
PIXELS = "mean and deviation of pixels"
RESULTS = "results of evaluation"
PROGRESS = "progress of calls"
FAILURES = "failures of calls"
ERRORS = "messages of errors"  # from sites of older versions
PUBLIC_DATA_FACT = "public images"  # sent by no client, but a part of what other parties know
HELLO = (EXAMPLES, CLASS_NAMES, CLASS_NUMBER, PIXELS)  # sent by a site before round 1
# Public, as replacing an image does not change them; and that a call failed, which is not counted.
PUBLIC_FACTS = (EXAMPLES, CLASS_NAMES, FAILURES)
SIDE_INFORMATION = {
    EXAMPLES: "number of the client's training images; before round 1",
    CLASS_NAMES: "classes of the run; before round 1",
    CLASS_NUMBER: "largest label plus one, as classes have no names; before round 1",
    PIXELS: "of all training and validation images; before round 1",
    RESULTS: "accuracies on the client's test and validation images, and records of its training",
    PROGRESS: "share of a call that is done, asked for while it runs",
    FAILURES: "that a call failed, in the same words whatever the reason",
    ERRORS: "error messages of the client, which may quote its data",
}


def holds_metrics(evaluation: object) -> bool:
    """Return whether an evaluation holds more than the ε that the client has spent."""
    return not isinstance(evaluation, Collection) or bool(set(evaluation) - {EPSILON})


def facts_in_hello(*, numbered: bool, pixels: bool) -> dict[str, int]:
    """Return the side information a site sends before round 1: name -> 1, its count.

    Args:
        numbered: Whether the site sends the number of classes, because they have no names.
        pixels: Whether it sends mean and standard deviation of its pixels.
    """
    sent = {EXAMPLES: 1, CLASS_NUMBER if numbered else CLASS_NAMES: 1}
    if pixels:
        sent[PIXELS] = 1
    return sent
