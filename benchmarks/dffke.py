"""DFFKE against `local` with the same local training: presets and options, several seeds, one table.

    python benchmarks/dffke.py                                    digits, seeds 0 to 4, two workers
    python benchmarks/dffke.py --data npz:fashion-mnist.npz --seeds 0 1 2 --device cuda

Mean accuracy of all clients on the global test set and on their own, after each round. Writes a JSON and a Markdown
table under benchmarks/results/.
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

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "local": ("local", []),
    "dffke (default)": ("dffke", []),
    "dffke, without local_review": ("dffke", ["algorithm.local_review=false"]),
    "dffke, preset paper": ("dffke", ["algorithm.preset=paper"]),
    "dffke, preset code": ("dffke", ["algorithm.preset=code"]),
    "dffke, with embedding_loss": ("dffke", ["algorithm.embedding_loss=true"]),
    "dffke, with logit_loss": ("dffke", ["algorithm.logit_loss=true"]),
    "dffke, embeddings=noise": ("dffke", ["algorithm.embeddings=noise"]),
}


def one(job: tuple[str, int], args: argparse.Namespace, folder: Path) -> tuple[str, int, list[dict[str, float]]]:
    """One run in a process of its own: its mean accuracies after each round."""
    name, seed = job
    algorithm, settings = VARIANTS[name]
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
    rounds = []
    for line in lines:
        clients = json.loads(line)["clients"].values()
        rounds.append({metric: statistics.fmean(c[metric] for c in clients) for metric in ("global", "local")})
    sys.stderr.write(f"{name}, seed {seed}: {[round(100 * r['global'], 1) for r in rounds]}\n")
    return name, seed, rounds


def cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.1f} ± {100 * spread:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="digits")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting for every variant, such as algorithm.tau=0.9"
    )
    args = parser.parse_args()
    args.env = {"OMP_NUM_THREADS": "1"}
    folder = Path("runs") / f"benchmark-{args.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    jobs = [(name, seed) for seed in args.seeds for name in args.variants]
    with ThreadPoolExecutor(args.workers) as pool:
        results = [r for r in pool.map(lambda job: one(job, args, folder), jobs) if len(r[2]) == args.rounds]
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [
        ", ".join([f"{args.name}, {args.clients} clients, small-5, Dirichlet alpha 0.1, seeds {args.seeds}", *args.set])
        + ": mean",
        "accuracy of the clients in %, mean ± standard deviation over seeds.",
        "",
        "| method | seeds | global, round 1 | "
        + f"global, round {args.rounds} | own, round {args.rounds} | above local, by seed |",
        "|---|---|---|---|---|---|",
    ]
    base = {seed: rounds for name, seed, rounds in results if name == "local"}
    for name in args.variants:
        mine = {seed: rounds for n, seed, rounds in results if n == name}
        if not mine:
            continue
        gains = [f"{100 * (r[-1]['global'] - base[s][-1]['global']):+.1f}" for s, r in mine.items() if s in base]
        first, last, own = (
            [r[at][m] for r in mine.values()] for at, m in ((0, "global"), (-1, "global"), (-1, "local"))
        )
        lines.append(f"| {name} | {len(mine)} | {cell(first)} | {cell(last)} | {cell(own)} | {' '.join(gains)} |")
    (args.out / f"{args.name}.md").write_text("\n".join(lines) + "\n")
    (args.out / f"{args.name}.json").write_text(json.dumps([list(r) for r in results]) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
