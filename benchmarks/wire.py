"""Measure what encoded payloads cost: bytes per client and round, and accuracy, by profile.

    python benchmarks/wire.py                                        digits on the CPU, minutes
    python benchmarks/wire.py --device cuda --data cifar100.npz      as for the tables, on a GPU
    python benchmarks/wire.py --methods dffke --profiles exact lean "small embeddings=int4"

A profile may be followed by encodings of fields, which override it, and by `deflate` or
`stochastic`. Every profile starts from the same seeds. Prints a Markdown table; `--out` also writes
every run's numbers as JSON, as in results/wire-digits.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch

from barter import ALGORITHMS, Experiment
from barter.algorithms.fedaf import FedAF
from barter.core.wire_settings import WireSettings
from barter.data.partition import Dirichlet

METHODS = ("dffke", "fedavg", "fedkd", "fedproto", "fedaf", "dfrd")
PROFILES = ("exact", "lean", "small")
# Shorter work for digits: the table is about bytes, and accuracies need only be far from chance.
QUICK: dict[str, dict[str, Any]] = {
    "dffke": {
        "max_epochs": 5,
        "share": 0.3,
        "code_dim": 32,
        "docking_epochs": 5,
        "decoder_epochs": 2,
        "decoder_steps": 20,
        "exchange_epochs": 1,
        "exchange_steps": 20,
    },
    "fedavg": {"epochs": 3, "batch_size": 50},
    "fedkd": {"epochs": 2, "batch_size": 50},
    "fedproto": {"epochs": 2, "batch_size": 50},
    "fedaf": {
        **FedAF.presets["small-images"],
        "ipc": 5,
        "steps": 5,
        "server_epochs": 60,
        "server_lr": 0.05,
    },
    "dfrd": {"epochs": 2, "batch_size": 50, "iterations": 2, "samples": 16, "global_steps": 2},
}
# As in the comparison of methods on CIFAR-100.
FULL: dict[str, dict[str, Any]] = {
    "dffke": {},
    "fedavg": {"epochs": 5, "batch_size": 100},
    "fedkd": {
        "shared": "resnet18",
        "epochs": 5,
        "batch_size": 100,
        "optimizer": "adam",
        "lr": 0.001,
    },
    "fedproto": {"epochs": 5, "batch_size": 100},
    "fedaf": {},
    "dfrd": {},
}


@dataclass(frozen=True)
class Outcome:
    """One run in numbers."""

    method: str
    profile: str
    seed: int
    megabytes_up: float  # per client and round
    megabytes_down: float
    accuracy: float  # of the method's primary model after the last round
    seconds: float
    failures: int

    @property
    def megabytes(self) -> float:
        return self.megabytes_up + self.megabytes_down


def parse_profile(text: str) -> WireSettings:
    """Return the settings that a profile of the command line stands for."""
    profile, *changes = text.split()
    fields: dict[str, Any] = dict(
        cast(tuple[str, str], tuple(change.split("=", 1))) for change in changes if "=" in change
    )
    return WireSettings(
        profile=cast(Any, profile),
        fields=fields,
        deflate=True if "deflate" in changes else None,
        rounding="stochastic" if "stochastic" in changes else "nearest",
    )


def run(method: str, profile: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Run a method and return its bytes and its accuracy."""
    on_digits = options.data == "digits"
    fields = (QUICK if on_digits else FULL)[method]
    source = options.data if on_digits else f"npz:{options.data}"
    one = "small-cnn" if on_digits else "resnet18"
    start = time.perf_counter()
    experiment = Experiment(
        ALGORITHMS[method](**fields),
        data=source,
        partition=Dirichlet(alpha=1.0),
        clients=options.clients,
        models=one,
        rounds=options.rounds,
        seed=seed,
        device=options.device,
        wire=parse_profile(profile),
    )
    records = list(experiment.rounds(options.rounds, progress=False))
    accuracy = records[-1].headline()
    assert accuracy is not None
    shares = 1e6 * options.clients * len(records)
    return Outcome(
        method,
        profile,
        seed,
        sum(record.traffic("up") for record in records) / shares,
        sum(record.traffic("down") for record in records) / shares,
        100 * accuracy,
        time.perf_counter() - start,
        sum(len(record.failures) for record in records),
    )


def print_table(outcomes: list[Outcome], profiles: list[str]) -> None:
    """Print bytes and accuracies by method and profile."""
    lines = [
        "| method | profile | up | down | fewer bytes | accuracy | difference | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        runs = {p: [o for o in outcomes if (o.method, o.profile) == (method, p)] for p in profiles}
        base = {o.seed: o for o in runs[profiles[0]]}
        for profile, found in runs.items():
            if not found:
                continue
            pairs = [(o, base[o.seed]) for o in found if o.seed in base]
            times = statistics.fmean(b.megabytes / o.megabytes for o, b in pairs)
            gained = statistics.fmean(o.accuracy - b.accuracy for o, b in pairs)
            cells = [
                method,
                profile,
                f"{statistics.fmean(o.megabytes_up for o in found):.3g} MB",
                f"{statistics.fmean(o.megabytes_down for o in found):.3g} MB",
                f"{times:.1f}x",
                f"{statistics.fmean(o.accuracy for o in found):.1f} %",
                f"{gained:+.1f}",
                f"{statistics.fmean(o.seconds for o in found):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def write(path: Path, outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """Write every run's numbers, and where they were measured, as JSON."""
    found = {
        "command": " ".join(["python benchmarks/wire.py", *sys.argv[1:]]),
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "data": options.data,
        "clients": options.clients,
        "rounds": options.rounds,
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and accuracy by wire profile.")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, help="default 4 on digits, 8 otherwise")
    parser.add_argument("--clients", type=int, help="default 5 on digits, 10 otherwise")
    parser.add_argument("--data", default="digits", help="digits, or an npz file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where to write every run's numbers as JSON")
    options = parser.parse_args()
    on_digits = options.data == "digits"
    options.rounds = options.rounds or (4 if on_digits else 8)
    options.clients = options.clients or (5 if on_digits else 10)
    outcomes: list[Outcome] = []
    for method in options.methods:
        for seed in options.seeds:
            for profile in options.profiles:
                outcomes.append(run(method, profile, seed, options))
                if options.out is not None:
                    write(options.out, outcomes, options)
    print_table(outcomes, options.profiles)


if __name__ == "__main__":
    main()
