"""What protection costs, in seconds of the processor.

    python benchmarks/privacy.py

Of noise on answers, the seconds that clients' doors take, beside all others of the round; of private training
(DP-SGD), the seconds of a round beside those of the same round without it. Digits, three clients, one thread; a second
round, for the first one warms up. DFFKE's decoder has fewer steps than by default: in a short round noise counts more.
Prints a Markdown table and writes results/privacy.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from barter import DFFKE, Algorithm, Experiment, FedAvg
from barter.privacy import Privacy
from barter.privacy.guard import Guard

HERE = Path(__file__).parent
DOORS: dict[str, tuple[str, dict[str, str]]] = {
    "dffke, gaussian on embeddings, response on labels": (
        "dffke",
        {"learn.embeddings": "gaussian clip=4 noise=2", "learn.labels": "response epsilon=1"},
    ),
    "dffke, means of classes": ("dffke", {"learn.embeddings": "means clip=4 noise=2"}),
    "fedavg, gaussian on the change of weights": (
        "fedavg",
        {"client_update": "gaussian clip=1 noise=2 of=change"},
    ),
}
METHODS: dict[str, Algorithm[Any, Any]] = {
    "dffke": DFFKE(decoder_steps=30, decoder_epochs=1),
    "fedavg": FedAvg(),
}
TRAININGS = ("small-mlp", "small-cnn", "small-resnet")


class Clock:
    """Seconds of the processor within a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.process_time() - start

        return run


def second_round(algorithm: str, models: str, privacy: Privacy) -> tuple[float, float]:
    """Seconds of the round, and of its clients' doors."""
    options: dict[str, Any] = {
        "clients": 3,
        "models": models,
        "device": "cpu",
        "threads": 1,
        "rounds": 2,
    }
    experiment, door = Experiment(METHODS[algorithm], privacy=privacy, **options), Clock()
    experiment.step()
    with (
        patch.object(Guard, "protect", door.timed(Guard.protect)),
        patch.object(Guard, "copy_arguments", door.timed(Guard.copy_arguments)),
    ):
        start = time.process_time()
        experiment.step()
        return time.process_time() - start, door.seconds


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def tell(what: str, plain: float, protected: float) -> None:
        rows.append(
            {"what": what, "plain": plain, "protected": protected, "factor": protected / plain}
        )
        sys.stdout.write(f"| {what} | {plain:.2f} | {protected:.2f} | {protected / plain:.3f} |\n")
        sys.stdout.flush()

    sys.stdout.write("| what | plain, s | protected, s | factor |\n|---|---|---|---|\n")
    for what, (algorithm, parts) in DOORS.items():
        models = "small-cnn,small-mlp" if algorithm == "dffke" else "small-cnn"
        whole, door = second_round(algorithm, models, Privacy(parts=parts))
        tell(what, whole - door, whole)
    for models in TRAININGS:
        plain, private = (
            second_round("fedavg", models, Privacy(training=how))[0]
            for how in ("", "clip=1 noise=1")
        )
        tell(f"fedavg, private training, {models}", plain, private)
    out = HERE / "results" / "privacy.json"
    out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
