"""What a round costs beside its forward and backward passes, for every method, on the CPU.

    python benchmarks/overhead.py                    all methods of suites/baselines.toml
    python benchmarks/overhead.py fedavg fedproto

A clock runs while a loss, a gradient or a network outside of a loss is computed, and another while an optimizer steps;
the rest of the second round is choosing batches, what crosses between parties, averages, bookkeeping and records. The
images are random: speed does not depend on them. Prints a Markdown table and writes results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from speed import random_images  # type: ignore[import-not-found]
from torch import nn

from barter import Experiment
from barter.compute.trainer import Trainer
from barter.setup.config import resolve, with_settings

HERE = Path(__file__).parent
SMALL = ["clients=5", "rounds=2", "device=cpu", "threads=1"]


class Clock:
    """Seconds within certain functions; a function that calls another of them counts once."""

    def __init__(self) -> None:
        self.seconds, self.inside = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside -= 1
                if not self.inside:
                    self.seconds += time.perf_counter() - start

        return run


@contextmanager
def watched(passes: Clock, updates: Clock) -> Iterator[None]:
    """Time all passes through networks, and all steps of optimizers."""
    step, call = Trainer.eager, nn.Module._call_impl

    def eager(self: Trainer, loss: Callable[..., Any], batch: Any) -> Any:
        return step(self, passes.timed(loss), batch)

    with (
        patch.object(Trainer, "eager", eager),
        patch.object(nn.Module, "__call__", passes.timed(call)),
        patch.object(torch.autograd, "backward", passes.timed(torch.autograd.backward)),
        patch.object(torch.autograd, "grad", passes.timed(torch.autograd.grad)),
        patch.object(torch.optim.Adam, "step", updates.timed(torch.optim.Adam.step)),
        patch.object(torch.optim.SGD, "step", updates.timed(torch.optim.SGD.step)),
    ):
        yield


def measured(name: str, settings: list[str], suite: dict[str, Any]) -> dict[str, Any]:
    """Where the seconds of a method's second round go."""
    base = {key: value for key, value in suite.items() if key != "compare"}
    experiment = Experiment.from_config(resolve(with_settings(base, [*settings, *SMALL])))
    experiment.step()
    passes, updates = Clock(), Clock()
    with watched(passes, updates):
        start = time.perf_counter()
        experiment.step()
        seconds = time.perf_counter() - start
    return {"method": name, "round": seconds, "passes": passes.seconds, "updates": updates.seconds}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("methods", nargs="*", help="variants of the suite; without any, all")
    args = parser.parse_args()
    suite = tomllib.loads((HERE / "suites" / "baselines.toml").read_text())
    variants = suite["compare"]["variants"]
    say(
        "| method | a round, s | passes, s | optimizers, s | round / passes | round / (passes + optimizers) |"
    )
    say("|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        suite["data"]["source"] = random_images(Path(folder), 28, 1, 10, 2000, 500)
        instead = {
            "data.public": f"data.public={random_images(Path(folder), 28, 1, 10, 500, 10)}",
            "algorithm.generator": "algorithm.generator=generator:grey28",
            "algorithm.weights": "algorithm.weights=",  # untrained is as fast
        }
        for name in args.methods or variants:
            row = measured(
                name, [instead.get(s.partition("=")[0], s) for s in variants[name]], suite
            )
            rows.append(row)
            whole, passes, updates = row["round"], row["passes"], row["updates"]
            ratios = [f"{whole / part:.2f}" if part else "-" for part in (passes, passes + updates)]
            say(f"| {name} | {whole:.2f} | {passes:.2f} | {updates:.2f} | {' | '.join(ratios)} |")
    out = HERE / "results" / "overhead.json"
    out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
