"""What Flower costs on one machine: a call, a megabyte, a round, and what its own SuperNode would cost.

    python benchmarks/flower.py                        all sections
    python benchmarks/flower.py --sections calls rounds

All runs over TLS on loopback, as `barter run --engine flower` starts it. `calls` sends trees to one site and back
and compares them; `nodes` sends empty ones, to sites with barter's node and with Flower's SuperNode; `rounds` compares
FedAvg on digits in one process and on Flower. Prints Markdown tables and writes a JSON, which keeps what it has of
other sections, and says how busy the machine was when a section began.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor

from barter import Algorithm, Client, Clients, Crossing, FedAvg, Server
from barter.experiment import Experiment
from barter.flower import loopback
from barter.flower.deploy import create_deployment
from barter.runs.progress import Watcher
from barter.setup.config import Config


@dataclass(frozen=True, kw_only=True)
class Echo(Algorithm[Server, Client]):
    """Sends a tensor of the round's size down and gets it back."""

    crosses = {"echo": Crossing(down="numbers", up="the same")}
    megabytes: str = "0"  # by round

    def round(self, server: Server, clients: Clients, t: int) -> None:
        numbers = torch.randn(int(float(self.megabytes.split()[t - 1]) * 250_000))
        for answer in clients.run(self.echo, numbers).values():
            server.report["exact"] = float(torch.equal(answer, numbers))

    def echo(self, client: Client, numbers: Tensor) -> Tensor:
        return numbers


@contextmanager
def peaks(folder: Path) -> Iterator[dict[str, float]]:
    """The most memory that processes of a run ever had, in MB, by kind."""
    found: dict[str, float] = defaultdict(float)
    kinds = {
        "flower.gate": "SuperLink",
        "serverapp": "server app",
        "--worker": "worker",
        "flower.node": "node",
    }
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.3):
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    command = (path / "cmdline").read_text()
                    kind = next((k for word, k in kinds.items() if word in command), None)
                    if kind is not None:
                        line = next(
                            x
                            for x in (path / "status").read_text().splitlines()
                            if x.startswith("VmHWM")
                        )
                        found[kind] = max(found[kind], int(line.split()[1]) / 1000)
                except (OSError, StopIteration):
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def flower(config: Config, folder: Path, *, supernode: bool = False) -> list[Any]:
    """The records of a run on Flower."""

    def asked(where: Path, run: Config, sites: Sequence[Mapping[str, Any]], address: str) -> None:
        create_deployment(where, run, [{**site, "supernode": supernode} for site in sites], address)

    with patch.object(loopback, "create_deployment", asked):
        return loopback.run_here(
            config, folder, Watcher(Console(file=sys.stderr), config.rounds), resume=False
        )


def calls(folder: Path) -> dict[str, Any]:
    sizes = [0.0, 0.0, 0.0, 1.0, 10.0, 100.0, 500.0]
    echo = Echo(megabytes=" ".join(map(str, sizes)))
    with peaks(folder) as memory:
        records = flower(Config(algorithm=echo, clients=1, rounds=len(sizes), device="cpu"), folder)
    times = [
        (size, record.seconds["echo"], record.server["exact"])
        for size, record in zip(sizes, records, strict=True)
    ]
    return {"calls": times, "peak_mb": dict(memory)}


def nodes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clients in (1, 4, 10):
        config = Config(algorithm=Echo(megabytes="0 " * 6), clients=clients, rounds=6, device="cpu")
        both = {}
        for name in ("barter", "flower") if clients == 1 else ("barter",):
            records = flower(config, folder / f"{name}-{clients}", supernode=name == "flower")
            both[name] = statistics.median(record.seconds["echo"] for record in records[1:])
        found[str(clients)] = both
    return found


def rounds(folder: Path) -> dict[str, Any]:
    found = {}
    for clients in (1, 4, 10):
        config = Config(
            algorithm=FedAvg(epochs=5), clients=clients, models="small-cnn", rounds=4, device="cpu"
        )
        ours = [record.seconds["round"] for record in Experiment.from_config(config).rounds(4)]
        theirs = [
            record.seconds["round"]
            for record in flower(replace(config, engine="flower"), folder / str(clients))
        ]
        found[str(clients)] = {
            "local": statistics.median(ours[1:]),
            "flower": statistics.median(theirs[1:]),
        }
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    if "calls" in found:
        lines += [
            "| a tree there and back | seconds | MB/s, both ways together | exact |",
            "|---|---|---|---|",
        ]
        for size, seconds, exact in found["calls"]["calls"]:
            rate = f"{2 * size / seconds:.0f}" if size else "-"
            lines.append(f"| {size:g} MB | {seconds:.1f} | {rate} | {'yes' if exact else 'NO'} |")
        peak = ", ".join(
            f"{kind} {mb:,.0f} MB" for kind, mb in sorted(found["calls"]["peak_mb"].items())
        )
        lines += ["", f"Peak memory: {peak}."]
    if "nodes" in found:
        lines += ["", "| sites | an empty call | with Flower's SuperNode |", "|---|---|---|"]
        for clients, both in found["nodes"].items():
            other = f"{both['flower']:.1f} s" if "flower" in both else ""
            lines.append(f"| {clients} | {both['barter']:.2f} s | {other} |")
    if "rounds" in found:
        lines += [
            "",
            "| clients | a round in one process | on Flower | ratio |",
            "|---|---|---|---|",
        ]
        for clients, pair in found["rounds"].items():
            ratio = pair["flower"] / pair["local"]
            lines.append(
                f"| {clients} | {pair['local']:.2f} s | {pair['flower']:.1f} s | {ratio:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = {"calls": calls, "nodes": nodes, "rounds": rounds}
    parser.add_argument("--sections", nargs="+", choices=list(sections), default=list(sections))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    file = args.out / "flower.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found |= {
        "torch": torch.__version__,
        "cores": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    for section in args.sections:
        start = time.perf_counter()
        found["load"] = {**found.get("load", {}), section: round(os.getloadavg()[0], 1)}
        with tempfile.TemporaryDirectory() as folder:
            found[section] = sections[section](Path(folder) / section)
        sys.stderr.write(f"{section}: {time.perf_counter() - start:.0f} s\n")
        file.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    sys.path.insert(0, "")
    from benchmarks.flower import (
        main as run,
    )  # under the name that the processes Flower starts know

    run()
