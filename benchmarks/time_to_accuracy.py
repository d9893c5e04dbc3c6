"""Accuracy against simulated hours and against bytes, for six methods on one network.

    python benchmarks/time_to_accuracy.py --preset mobile --seeds 0,1
    python benchmarks/time_to_accuracy.py --table

Ten clients with digits, Dirichlet alpha 1, on the CPU. Every round is one line of the results (JSON) as soon as its
run is finished; runs that have lines are skipped, so the command can be repeated. The table and the figures, by time
and by bytes, are made of all lines of a preset.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "time" / "runs.jsonl"
CLIENTS = 10
TWO = "small-mlp,small-cnn"  # clients have one of two architectures, in turn
LOCAL = {"epochs": 3, "batch_size": 16, "lr": 0.05}  # local training of a round
# Of each method its fields, number of rounds, networks, and whether it learns from public images.
# Fields that are not named have their defaults.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"fields": LOCAL, "rounds": 6, "models": "small-cnn"},
    "fedproto": {"fields": LOCAL, "rounds": 6, "models": TWO},
    "fedkd": {"fields": LOCAL, "rounds": 6, "models": TWO},
    "feddf": {
        "fields": {**LOCAL, "distil_steps": 50},
        "rounds": 4,
        "models": TWO,
        "public": True,
    },
    "dfrd": {
        "fields": {**LOCAL, "base": "fedavg", "iterations": 5},
        "rounds": 4,
        "models": "small-cnn",
    },
    "dffke": {
        "fields": {
            "max_epochs": 10,
            "decoder_epochs": 1,
            "decoder_steps": 30,
            "decoder_batch": 5,
            "code_dim": 64,
            "docking_epochs": 30,
            "exchange_steps": 20,
            "batch_size": 40,
            "parts": 2,
            "share": 0.2,
        },
        "rounds": 3,
        "models": TWO,
    },
}


def write_digits(folder: Path) -> tuple[str, str]:
    """Write private digits, and public ones that no client has; return both as sources."""
    import numpy as np
    from sklearn.datasets import load_digits

    source = load_digits()
    x = (source.images * (255 / 16)).round().astype(np.uint8)[..., None]
    y = source.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(y))
    train, public, test = np.split(order, [1200, 1440])
    test_images = {"x_test": x[test], "y_test": y[test]}
    np.savez(folder / "private.npz", x_train=x[train], y_train=y[train], **test_images)
    np.savez(folder / "public.npz", x_train=x[public], y_train=y[public], **test_images)
    return f"npz:{folder / 'private.npz'}", f"npz:{folder / 'public.npz'}"


def measure(method: str, preset: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Run one experiment and return a line for each round."""
    import torch

    from barter import Experiment
    from barter.core.wire_settings import WireSettings
    from barter.data.partition import Dirichlet
    from barter.data.task import Data
    from barter.engines.network import Network
    from barter.setup.config import find_algorithm

    torch.set_num_threads(1)
    start = time.process_time()
    settings = METHODS[method]
    private, public = write_digits(folder)
    experiment = Experiment(
        find_algorithm(method)(**settings["fields"]),
        data=Data(source=private, public=public if settings.get("public") else ""),
        partition=Dirichlet(alpha=1.0),
        clients=CLIENTS,
        models=settings["models"],
        seed=seed,
        device="cpu",
        threads=1,
        min_clients=2,
        network=Network.preset(preset),
        wire=WireSettings(profile="exact"),  # as in the stored results
    )
    lines = []
    hours = 0.0
    gigabytes = 0.0
    for record in experiment.rounds(settings["rounds"], progress=False):
        hours += (record.simulated_seconds or 0.0) / 3600
        gigabytes += (record.traffic("up") + record.traffic("down")) / 1e9
        lines.append(
            {
                "preset": preset,
                "method": method,
                "seed": seed,
                "round": record.round,
                "hours": hours,
                "gigabytes": gigabytes,
                "accuracy": record.headline(),
                "primary": record.primary,
                "seconds_by_phase": record.simulated,
                "failures": len(record.failures),
                "cpu_seconds": time.process_time() - start,
            }
        )
    return lines


def read(path: Path, preset: str) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return the lines of a preset: method -> seed -> rounds."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        if line["preset"] == preset:
            found.setdefault(line["method"], {}).setdefault(line["seed"], []).append(line)
    return {method: found[method] for method in METHODS if method in found}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def until(rounds: list[dict[str, Any]], target: float, cost: str) -> float | None:
    """Return a cost at the end of the first round at the target."""
    return next((line[cost] for line in rounds if line["accuracy"] >= target), None)


def table_cells(
    results: dict[str, dict[int, list[dict[str, Any]]]], target: float
) -> list[list[str]]:
    """Return a table, the heading first, with a row for each method; means over seeds."""
    heading = ["method", "rounds", "accuracy", "seconds a round", "server's share", "MB"]
    table = [[*heading, *(f"{cost} to {100 * target:.0f} %" for cost in ("seconds", "MB"))]]
    for method, seeds in results.items():
        last = [rounds[-1] for rounds in seeds.values()]
        everything = [line for rounds in seeds.values() for line in rounds]
        total = sum(line["seconds_by_phase"]["round"] for line in everything)
        server = sum(line["seconds_by_phase"]["server"] for line in everything)
        cells = [
            method,
            str(last[0]["round"]),
            f"{100 * mean([line['accuracy'] for line in last]):.1f} %",
            f"{total / len(everything):.2f}",
            f"{100 * server / total:.0f} %",
            f"{1000 * mean([line['gigabytes'] for line in last]):.1f}",
        ]
        for cost, scale in (("hours", 3600.0), ("gigabytes", 1000.0)):
            found = [until(rounds, target, cost) for rounds in seeds.values()]
            known = [scale * value for value in found if value is not None]
            missed = f" ({len(known)} of {len(found)} seeds)" if 0 < len(known) < len(found) else ""
            cells.append(f"{mean(known):.1f}{missed}" if known else "never")
        table.append(cells)
    return table


def draw(results: dict[str, dict[int, list[dict[str, Any]]]], preset: str, folder: Path) -> None:
    """Draw accuracy against simulated time and against bytes, as SVG files."""
    from barter.runs.picture import draw_curves

    curves = {
        method: {
            seed: [(line["round"], line["accuracy"]) for line in rounds]
            for seed, rounds in seeds.items()
        }
        for method, seeds in results.items()
    }
    axes = {
        "hours": (3600.0, f"simulated time (seconds), preset {preset}", "time"),
        "gigabytes": (1000.0, "bytes of all clients, both ways (MB)", "bytes"),
    }
    for cost, (scale, label, name) in axes.items():
        positions: dict[str, dict[int, float]] = {}
        for method, seeds in results.items():
            by_round: dict[int, list[float]] = {}
            for line in (line for rounds in seeds.values() for line in rounds):
                by_round.setdefault(line["round"], []).append(scale * line[cost])
            positions[method] = {t: mean(values) for t, values in by_round.items()}
        path = folder / f"time_to_accuracy-{preset}-{name}.svg"
        draw_curves(curves, "accuracy on the global test set (%)", path, positions, label)
        sys.stdout.write(f"{path}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="mobile", help="of the table [network]")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    done = read(args.results, args.preset)
    planned = [] if args.table else product(args.methods.split(","), args.seeds.split(","))
    for method, seed in planned:
        if int(seed) in done.get(method, {}):
            continue
        with TemporaryDirectory() as folder:
            lines = measure(method, args.preset, int(seed), Path(folder))
        with args.results.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        last = lines[-1]
        sys.stdout.write(
            f"{method}, seed {seed}: {last['accuracy']:.1%}, {last['cpu_seconds']:.0f} s of CPU\n"
        )
    results = read(args.results, args.preset)
    for cells in table_cells(results, args.target):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    draw(results, args.preset, args.results.parent)


if __name__ == "__main__":
    main()
