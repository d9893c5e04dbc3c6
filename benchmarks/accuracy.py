"""Methods against their baselines with the same local training: variants, several seeds, one table.

    python benchmarks/accuracy.py dffke                           digits, seeds 0 to 4, two workers
    python benchmarks/accuracy.py dffke --data npz:fashion-mnist.npz --seeds 0 1 2 --device cuda
    python benchmarks/accuracy.py fedfree --set partition.name=dominant
    python benchmarks/accuracy.py fedaf --set partition.alpha=0.05
    python benchmarks/accuracy.py submodels --seeds 0 1 2
    python benchmarks/accuracy.py dfrd --seeds 0 1 2

Mean accuracy of all clients on the global test set and on their own, after each round; "trained" is after local
training and before what the round gives a client back. The last column is of the server's model where there is one.
Writes a JSON under benchmarks/results/ and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

METRICS = {
    "global": "global",
    "local": "own",
    "before_global": "trained: global",
    "before_local": "trained: own",
    "server": "server's model",
}
Variants = dict[str, tuple[str, list[str]]]  # the first is what the others are compared with

SGD = ["algorithm.optimizer=sgd", "algorithm.lr=0.01", "algorithm.weight_decay=0", "algorithm.tau=none"]

SUITES: dict[str, Variants] = {
    "dffke": {
        "local": ("local", []),
        "dffke (default)": ("dffke", []),
        "dffke, preset paper": ("dffke", ["algorithm.preset=paper"]),
        "dffke, preset code": ("dffke", ["algorithm.preset=code"]),
        "dffke, whiten=0": ("dffke", ["algorithm.whiten=0"]),
        "dffke, whiten=0.01": ("dffke", ["algorithm.whiten=0.01"]),
        "dffke, whiten=1": ("dffke", ["algorithm.whiten=1"]),
        **{
            f"dffke, without {name}": ("dffke", [f"algorithm.{name}=false"])
            for name in ("mixed", "warm_decoder", "cosine", "augmented", "renewed", "local_review")
        },
        "dffke, memory=0": ("dffke", ["algorithm.memory=0"]),
        "dffke, share=0.15": ("dffke", ["algorithm.share=0.15"]),
        "dffke, later_epochs=6": ("dffke", ["algorithm.later_epochs=6"]),
        "dffke, with embedding_loss": ("dffke", ["algorithm.embedding_loss=true"]),
        "dffke, with logit_loss": ("dffke", ["algorithm.logit_loss=true"]),
        "dffke, embeddings=noise": ("dffke", ["algorithm.embeddings=noise"]),
        "dffke, peers=1": ("dffke", ["algorithm.peers=1"]),
        "dffke, peers=2": ("dffke", ["algorithm.peers=2"]),
    },
    "fedaf": {
        "fedavg": ("fedavg", ["algorithm.batch_size=50"]),
        "feddm": ("feddm", []),
        "fedaf (default)": ("fedaf", []),
        "fedaf, without CDC": ("fedaf", ["algorithm.lambda_loc=0"]),
        "fedaf, without LGKM": ("fedaf", ["algorithm.lambda_glob=0"]),
        "fedaf, image_lr=1": ("fedaf", ["algorithm.image_lr=1.0"]),
    },
    "fedfree": {
        "local": ("local", [*SGD, "algorithm.batch_size=10", "algorithm.max_epochs=5"]),
        "fedfree (default)": ("fedfree", []),
        "fedfree, preset paper": ("fedfree", ["algorithm.preset=paper"]),
        "fedfree, fill=zero": ("fedfree", ["algorithm.fill=zero"]),
        "fedfree, transfer=analytic": ("fedfree", ["algorithm.transfer=analytic"]),
        "fedfree, server_lr=0.25": ("fedfree", ["algorithm.server_lr=0.25"]),
    },
}

UNMASKED = ["algorithm.masked_loss=false"]
AS_FEDAVG = [*UNMASKED, "algorithm.rho=0", "algorithm.own_rows=false", "algorithm.weighting=examples"]
PUBLISHED = ["norm=batch", "steps=20", "batch_size=64", "lr=0.01", "momentum=0", "weight_decay=0"]
SUITES["submodels"] = {
    "fedavg": ("fedrolex", AS_FEDAVG),  # which at full width is FedAvg, here with the same local training as the others
    "heterofl": ("heterofl", []),
    "feddropout": ("feddropout", []),
    "fedrolex": ("fedrolex", []),
    "fedrolex, norm=batch": ("fedrolex", ["algorithm.norm=batch"]),
    "fedrolex, norm=running": ("fedrolex", ["algorithm.norm=running"]),
    "fedrolex, scaler=false": ("fedrolex", ["algorithm.scaler=false"]),
    "fedrolex, masked_loss=false": ("fedrolex", UNMASKED),
    "fedrolex, own_rows=false": ("fedrolex", ["algorithm.own_rows=false"]),
}
SUITES["dfrd"] = {
    "fedrolex": ("fedrolex", UNMASKED),
    "fedrolex + dfrd (default)": ("dfrd", []),
    "heterofl": ("heterofl", UNMASKED),
    "heterofl + dfrd": ("dfrd", ["algorithm.base=heterofl"]),
    "feddropout": ("feddropout", UNMASKED),
    "feddropout + dfrd": ("dfrd", ["algorithm.base=feddropout"]),
    "fedavg": ("fedrolex", AS_FEDAVG),
    "fedavg + dfrd": ("dfrd", ["algorithm.base=fedavg"]),
    "dfrd alone": ("dfrd", ["algorithm.base=none", "models=small-cnn"]),
    "fedrolex + dfrd, rule=all": ("dfrd", ["algorithm.rule=all"]),
    "fedrolex + dfrd, rule=differ": ("dfrd", ["algorithm.rule=differ"]),
    "fedrolex + dfrd, merge=add": ("dfrd", ["algorithm.merge=add"]),
    "fedrolex + dfrd, merge=none": ("dfrd", ["algorithm.merge=none"]),
    "fedrolex + dfrd, alpha=0": ("dfrd", ["algorithm.alpha=0"]),
    "fedrolex + dfrd, beta_tran=0": ("dfrd", ["algorithm.beta_tran=0"]),
    "fedrolex + dfrd, beta_div=0": ("dfrd", ["algorithm.beta_div=0"]),
    "fedrolex, as published": ("fedrolex", [*UNMASKED, *(f"algorithm.{setting}" for setting in PUBLISHED)]),
    "fedrolex + dfrd, preset paper": ("dfrd", ["algorithm.preset=paper", "algorithm.rho=2"]),
}


def one(job: tuple[str, int], args: argparse.Namespace, folder: Path) -> tuple[str, int, list[dict[str, float]]]:
    """One run in a process of its own: its mean accuracies after each round."""
    name, seed = job
    algorithm, settings = SUITES[args.suite][name]
    out = folder / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
    options = [f"seed={seed}", f"rounds={args.rounds}", f"clients={args.clients}", f"data.source={args.data}"]
    flags = [
        flag
        for setting in [f"algorithm.name={algorithm}", *options, *settings, *args.set]
        for flag in ("--set", setting)
    ]
    command = [sys.executable, "-m", "barter", "run", "--out", str(out), "--device", args.device, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **args.env})
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    if done.returncode != 0 or len(lines) < args.rounds:
        sys.stderr.write(f"{name}, seed {seed}: {done.stderr[-500:]}\n")
    rounds = [numbers(json.loads(line)) for line in lines]
    sys.stderr.write(f"{name}, seed {seed}: {[round(100 * r['global'], 1) for r in rounds]}\n")
    return name, seed, rounds


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The mean of each accuracy over the clients, and that of the server's model if it has one."""
    clients = list(record["clients"].values())
    means = {m: statistics.fmean(c[m] for c in clients) for m in METRICS if all(m in c for c in clients)}
    return means | ({"server": record["server"]["global"]} if "global" in record["server"] else {})


def cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.1f} ± {100 * spread:.1f}" if values else "-"


def table(results: list[tuple[str, int, list[dict[str, float]]]], names: list[str]) -> list[str]:
    """The last round of every variant, and by how much it is above the first variant, seed by seed."""
    columns = {m: text for m, text in METRICS.items() if any(m in r[2][-1] for r in results)}
    lines = ["| method | seeds | " + " | ".join(columns.values()) + f" | global above {names[0]}, by seed |"]
    lines.append("|---|---|" + "---|" * (len(columns) + 1))
    base = {seed: rounds[-1] for name, seed, rounds in results if name == names[0]}
    for name in names:
        mine = {seed: rounds[-1] for n, seed, rounds in results if n == name}
        best = {s: r.get("server", r["global"]) for s, r in mine.items()}
        gains = [f"{100 * (best[s] - base[s].get('server', base[s]['global'])):+.1f}" for s in mine if s in base]
        cells = [cell([r[m] for r in mine.values() if m in r]) for m in columns]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(cells) + f" | {' '.join(gains)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--data", default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", nargs="+", help="some of the suite's; all without it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--set", action="append", default=[], help="a setting for all, such as partition.alpha=0.05")
    args = parser.parse_args()
    names = args.variants or list(SUITES[args.suite])
    if unknown := set(names) - SUITES[args.suite].keys():
        parser.error(f"{args.suite} has no variant {unknown}: there are {list(SUITES[args.suite])}")
    args.env = {"OMP_NUM_THREADS": "1"}
    source = Path(args.data.partition(":")[2] or args.data).stem
    folder = Path("runs") / f"benchmark-{args.suite}-{source}-{time.strftime('%Y%m%d-%H%M%S')}"
    jobs = [(name, seed) for seed in args.seeds for name in names]
    with ThreadPoolExecutor(args.workers) as pool:
        results = [r for r in pool.map(lambda job: one(job, args, folder), jobs) if len(r[2]) == args.rounds]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.suite}-{source}.json").write_text(json.dumps([list(r) for r in results]) + "\n")
    sys.stdout.write("\n".join(table(results, names)) + "\n")


if __name__ == "__main__":
    main()
