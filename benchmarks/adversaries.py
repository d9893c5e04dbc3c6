"""Accuracy of honest clients beside adversarial ones, with and without robust aggregation.

    python benchmarks/adversaries.py --data digits --jobs 15
    python benchmarks/adversaries.py --data fashion --source fashion-mnist.npz --jobs 15
    python benchmarks/adversaries.py --table

Ten clients, Dirichlet alpha 1, ten methods, every attack that applies to a method, 0, 10, 20 and 30 % adversarial
clients, robust = none and auto, three seeds. Every job is a process with one thread. Each run is one line of the
results (JSON) as soon as it is finished; runs that have a line are skipped, so the command can be repeated.

Every cell is compared with two runs without an attack and without a defence, both measured on the same clients, those
that are honest in the cell: one in which all ten clients are honest, and one in which the adversarial clients are
absent. The second is what a perfect defence could reach, because honest clients lose the data of the others too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "adversaries" / "runs.jsonl"
CLIENTS = 10
PERCENT = (10, 20, 30)
ATTACKS = ("scaled-weights", "flipped-labels", "random-logits", "extreme-prototypes")
ABSENT = "absent"
TWO = "small-mlp,small-cnn"  # clients have one of two architectures, in turn
AVERAGES: dict[str, Any] = {
    "fields": {"epochs": 2},
    "fashion": {"epochs": 1, "batch_size": 32},
    "rounds": 8,
    "attacks": ATTACKS[:2],
    "models": "small-cnn",
}
# Of each method its fields (on Fashion-MNIST with changes), number of rounds, the attacks that apply
# to what its clients upload, the networks, and whether it learns from public images.
# Methods with quick runs come first.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": AVERAGES,
    "fedprox": AVERAGES,
    "fedproto": {
        "fields": {"epochs": 2},
        "fashion": {"epochs": 1, "batch_size": 32},
        "rounds": 8,
        "attacks": (ATTACKS[1], ATTACKS[3]),
        "models": TWO,
    },
    "fedgh": {
        "fields": {"epochs": 2},
        "fashion": {"epochs": 1, "batch_size": 32, "server_epochs": 50},
        "rounds": 8,
        "attacks": (ATTACKS[1], ATTACKS[3]),
        "models": TWO,
    },
    "heterofl": AVERAGES,
    "fedmd": {
        "fields": {"public_epochs": 5, "private_epochs": 10, "epochs": 2, "distil_epochs": 5},
        "fashion": {"public_epochs": 2, "private_epochs": 3, "epochs": 1, "distil_epochs": 1},
        "rounds": 5,
        "attacks": ATTACKS[1:3],
        "models": TWO,
        "public": True,
    },
    "feddf": {
        "fields": {"epochs": 5, "distil_steps": 50},
        "fashion": {"epochs": 1, "batch_size": 32},
        "rounds": 6,
        "attacks": ATTACKS[:2],
        "models": TWO,
        "public": True,
    },
    "fedaf": {
        "fields": {
            "preset": "small-images",
            "steps": 30,
            "server_epochs": 50,
            "batch_size": 64,
        },
        "fashion": {"server_epochs": 20},
        "rounds": 4,
        "attacks": ATTACKS[1:],
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
        "fashion": {"max_epochs": 3, "share": 0.03},
        "rounds": 3,
        "attacks": ATTACKS,
        "models": TWO,
    },
    "dfrd": {
        "fields": {"epochs": 2, "base": "fedavg", "iterations": 5},
        "fashion": {"epochs": 1, "batch_size": 32},
        "rounds": 8,
        "attacks": ATTACKS[:2],
        "models": "small-cnn",
    },
}


def prepare(data: str, source: Path | None, folder: Path) -> None:
    """Write the images of a data set, and public images that no client has, as npz files."""
    folder.mkdir(parents=True, exist_ok=True)
    private = folder / f"{data}.npz"
    public = folder / f"{data}-public.npz"
    if private.exists() and public.exists():
        return
    if data == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = (digits.images * (255 / 16)).round().astype(np.uint8)[..., None]
        y = digits.target.astype(np.int64)
        order = np.random.default_rng(0).permutation(len(y))
        parts = np.split(order, [1200, 1440])
    else:
        if source is None:
            raise SystemExit("--data fashion needs --source fashion-mnist.npz")
        with np.load(source) as archive:
            x, y = archive["x_train"], archive["y_train"].astype(np.int64)
        order = np.random.default_rng(0).permutation(len(y))
        parts = np.split(order[:14000], [10000, 12000])
    train, public_part, test = parts
    arrays = {"x_test": x[test], "y_test": y[test]}
    np.savez_compressed(private, x_train=x[train], y_train=y[train], **arrays)
    np.savez_compressed(public, x_train=x[public_part], y_train=y[public_part], **arrays)


def plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all runs of a data set: those of the first seed first, then quick methods first."""
    runs = []
    for seed in args.seeds:
        for method in args.methods:
            for robust in args.robust:
                shared = {
                    "data": args.data,
                    "method": method,
                    "robust": robust,
                    "seed": seed,
                    "device": args.device,
                }
                if 0 in args.percent:
                    runs.append({**shared, "attack": "none", "percent": 0})
                # Without an attack there is nothing to defend against.
                base = [ABSENT] if robust == "none" else []
                for attack in [*base, *METHODS[method]["attacks"]]:
                    if attack not in args.attacks:
                        continue
                    for percent in args.percent:
                        if percent:
                            runs.append({**shared, "attack": attack, "percent": percent})
    return runs


def settings(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a run's configuration as a TOML file holds it."""
    method = METHODS[run["method"]]
    fields = dict(method["fields"])
    if run["data"] == "fashion":
        fields |= method.get("fashion", {})
    data = {"source": f"npz:{folder / run['data']}.npz"}
    if method.get("public"):
        data["public"] = f"npz:{folder / run['data']}-public.npz"
    adversaries: dict[str, Any] = {"fraction": run["percent"] / 100}
    if run["percent"]:
        adversaries["attack"] = run["attack"]
    return {
        "algorithm": {"name": run["method"], **fields},
        "data": data,
        "partition": {"name": "dirichlet", "alpha": 1.0},
        "clients": CLIENTS,
        "models": method["models"],
        "rounds": method["rounds"],
        "seed": run["seed"],
        "device": run["device"],
        "threads": 1,
        "robust": run["robust"],
        "adversaries": adversaries,
        "min_clients": 1,
    }


def measure(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one experiment in this process and return its accuracies."""
    import torch

    from barter import Experiment
    from barter.core.errors import BarterError
    from barter.engines.adversaries import choose
    from barter.setup.config import resolve

    torch.set_num_threads(1)
    start = time.process_time()
    config = resolve(settings(run, folder))
    experiment = Experiment.from_config(config)
    rounds = [0.0]  # A run whose first round fails is worth nothing.
    by_client: dict[int, float] = {}  # of the last round; empty if the server's model is evaluated
    failures = 0
    ended = ""
    try:
        for record in experiment.rounds(config.rounds, progress=False):
            rounds.append(record.headline("global") or 0.0)
            if record.primary != "server":
                by_client = dict(record.values("global"))
            failures += len(record.failures)
    except BarterError as error:
        ended = str(error)[:200]  # The attack has stopped the run: its last round counts.
    result = {"accuracy": rounds[-1], "rounds": rounds[1:], "failures": failures, "ended": ended}
    result["clients"] = by_client
    result["adversarial"] = choose(config.adversaries, CLIENTS, config.seed)
    return {**run, **result, "seconds": round(time.process_time() - start, 1)}


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells one run from another."""
    return tuple(run[name] for name in ("data", "method", "robust", "attack", "percent", "seed"))


def run_all(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Run experiments in processes with one thread each and append their lines to the results."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    until = time.time() + args.seconds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        waiting = [pool.submit(measure_before, until, run, args.folder) for run in runs]
        for future in as_completed(waiting):
            error = future.exception()
            if error is not None:
                sys.stderr.write(f"failed: {error}\n")
                continue
            result = future.result()
            if result is None:  # The time was over.
                continue
            with args.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            words = [*map(str, key(result)), f"{result['accuracy']:.3f}", f"{result['seconds']} s"]
            sys.stdout.write(" ".join(words) + "\n")
            sys.stdout.flush()


def measure_before(until: float, run: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Run one experiment unless the time is over."""
    return measure(run, folder) if time.time() < until else None


def finished(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def honest_mean(run: dict[str, Any], adversarial: Collection[int]) -> float:
    """Return a run's accuracy in per cent, without the clients that are adversarial elsewhere."""
    kept = [value for k, value in run.get("clients", {}).items() if int(k) not in adversarial]
    return 100 * (statistics.fmean(kept) if kept else run["accuracy"])


def table_cells(results: list[dict[str, Any]], data: str) -> list[list[str]]:
    """Return the table of a data set, the heading first: mean accuracies over seeds in per cent.

    One row per method and attack. Every cell is the accuracy of the clients that are honest with
    this percentage of adversarial ones. Cells with several numbers are of 10, 20 and 30 %. The
    last column is the loss with the defence at 20 %: against the same clients when all clients are
    honest, and when the adversarial clients are absent.
    """
    found = {key(run): run for run in results if run["data"] == data}
    seeds = sorted({run["seed"] for run in found.values()})

    def mean(method: str, robust: str, attack: str, percent: int) -> float | None:
        runs = [found.get((data, method, robust, attack, percent, seed)) for seed in seeds]
        values = [100 * run["accuracy"] for run in runs if run is not None]
        return statistics.fmean(values) if values else None

    def all_honest(method: str, attack: str, percent: int) -> float | None:
        values = []
        for seed in seeds:
            base = found.get((data, method, "none", "none", 0, seed))
            attacked = found.get((data, method, "none", attack, percent, seed))
            if base is not None and attacked is not None:
                values.append(honest_mean(base, attacked.get("adversarial", ())))
        return statistics.fmean(values) if values else None

    def by_percent(method: str, robust: str, attack: str) -> str:
        values = [mean(method, robust, attack, percent) for percent in PERCENT]
        return " / ".join("-" if value is None else f"{value:.1f}" for value in values)

    def loss(method: str, attack: str) -> str:
        defended = mean(method, "auto", attack, 20)
        bases = [all_honest(method, attack, 20), mean(method, "none", ABSENT, 20)]
        if defended is None:
            return "-"
        return ", ".join("-" if base is None else f"{defended - base:+.1f}" for base in bases)

    heading = ["method", "attack", "seeds", "none adversarial, off / on"]
    rows = [[*heading, "absent", "off", "on", "loss"]]
    for method, about in METHODS.items():
        clean = [mean(method, robust, "none", 0) for robust in ("none", "auto")]
        if None in clean:
            continue
        for attack in about["attacks"]:
            done = [s for s in seeds if (data, method, "auto", attack, 30, s) in found]
            cells = [
                method,
                attack,
                str(len(done)),
                " / ".join(f"{value:.1f}" for value in clean),
                by_percent(method, "none", ABSENT),
                by_percent(method, "none", attack),
                by_percent(method, "auto", attack),
                loss(method, attack),
            ]
            if done:
                rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--source", type=Path, help="fashion-mnist.npz")
    parser.add_argument("--folder", type=Path, default=Path("adversaries-data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where runs train; all jobs share it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--attacks", nargs="+", default=[ABSENT, *ATTACKS])
    parser.add_argument("--percent", type=int, nargs="+", default=[0, *PERCENT])
    parser.add_argument("--robust", nargs="+", default=["none", "auto"])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this long")
    parser.add_argument("--table", action="store_true", help="print the table of finished runs")
    args = parser.parse_args()
    if not args.table:
        prepare(args.data, args.source, args.folder)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        known = {key(run) for run in finished(args.out)}
        run_all([run for run in plan(args) if key(run) not in known], args)
    results = finished(args.out)
    for data in sorted({run["data"] for run in results}):
        sys.stdout.write(f"\n{data}\n\n")
        for cells in table_cells(results, data):
            sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
