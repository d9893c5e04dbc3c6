"""What Flower costs on one machine: a call, a megabyte, a round, and what its own SuperNode would cost.

    python benchmarks/flower.py                        all sections
    python benchmarks/flower.py --sections calls rounds
    python benchmarks/flower.py --sections calls --profiles lean --megabytes 0 0 1 10 100

All runs over TLS on loopback, as `barter run --engine flower` starts it. `calls` sends rows of 512 floats to one site
and back with each profile of `[wire]`, and compares them; `nodes` sends empty ones, to sites with barter's node and,
with `--supernode`, with Flower's SuperNode; `rounds` compares FedAvg on digits in one process and on Flower.

CPU seconds are those of all processes of a run, or of one kind of them: they depend less than seconds on what else the
machine does. Prints Markdown tables and writes a JSON, which keeps what it has of other sections, profiles and numbers
of sites, and says how busy the machine was when a section began.
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
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor

from barter import Algorithm, Client, Clients, Crossing, FedAvg, Server
from barter.core.contracts import Floats
from barter.core.wire_settings import WireSettings
from barter.experiment import Experiment
from barter.flower import loopback
from barter.flower.deploy import create_deployment
from barter.runs.progress import Watcher
from barter.setup.config import Config

MARK = "BARTER_BENCHMARK"  # in the environment of all processes of a run
KINDS = {
    "flower.gateway": "SuperLink",
    "serverapp": "server app",
    "--worker": "worker",
    "flower.node": "node",
}
ROW = 512  # floats in a row of what `Echo` sends
TICKS = os.sysconf("SC_CLK_TCK")


def processes() -> Iterator[tuple[str, Path]]:
    """Yield the kind and the folder in /proc of every process of this run."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (path / "environ").read_bytes().split(b"\0"):
                continue
            command = (path / "cmdline").read_text()
        except OSError:  # It has ended.
            continue
        yield next((kind for word, kind in KINDS.items() if word in command), "other"), path


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this run's processes so far, with their ended children, by kind."""
    found: dict[str, float] = defaultdict(float)
    for kind, path in processes():
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[kind] += sum(map(int, fields[11:15])) / TICKS
    return dict(found)


@dataclass(frozen=True, kw_only=True)
class Echo(Algorithm[Server, Client]):
    """Sends rows of the round's size down and gets them back."""

    crosses = {"echo": Crossing(down="numbers", up="the same")}
    megabytes: str = "0"  # by round

    def round(self, server: Server, clients: Clients, t: int) -> None:
        size = float(self.megabytes.split()[t - 1]) * 1e6
        numbers = torch.randn(int(size / (4 * ROW)), ROW)
        before = cpu_seconds()
        answers = clients.run(self.echo, numbers)
        for kind, seconds in cpu_seconds().items():
            server.report[f"cpu_{kind}"] = seconds - before.get(kind, 0.0)
        for answer in answers.values():
            error = (answer - numbers).square().mean().sqrt() if len(numbers) else torch.zeros(())
            server.report["error"] = float(error)  # of values whose mean square is 1

    def echo(
        self, client: Client, numbers: Annotated[Tensor, Floats("n", "vector")]
    ) -> Annotated[Tensor, Floats("n", "vector")]:
        return numbers


@dataclass(frozen=True, kw_only=True)
class Timed(FedAvg):
    """FedAvg that reports the CPU seconds of all processes before each round."""

    def round(self, server: Server, clients: Clients, t: int) -> None:
        server.report["cpu"] = sum(cpu_seconds().values())
        super().round(server, clients, t)


@contextmanager
def peaks() -> Iterator[dict[str, float]]:
    """Mark the processes of a run, and note the most memory that one of each kind had, in MB."""
    found: dict[str, float] = defaultdict(float)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            for kind, path in processes():
                try:
                    lines = (path / "status").read_text().splitlines()
                except OSError:
                    continue
                for line in lines:
                    if line.startswith("VmHWM"):
                        found[kind] = max(found[kind], int(line.split()[1]) / 1000)

    watcher = threading.Thread(target=watch)
    with patch.dict(os.environ, {MARK: uuid.uuid4().hex}):
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


def cpu_of(record: Any) -> dict[str, float]:
    """Return the CPU seconds of a round's call by kind of process, as `Echo` reports them."""
    return {
        name.removeprefix("cpu_"): round(value, 2)
        for name, value in record.server.items()
        if name.startswith("cpu_")
    }


def calls(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Send trees of several sizes to one site and back, with each profile."""
    found: dict[str, Any] = {}
    for profile in args.profiles:
        config = Config(
            algorithm=Echo(megabytes=" ".join(map(str, args.megabytes))),
            clients=1,
            rounds=len(args.megabytes),
            device="cpu",
            wire=WireSettings(profile=profile),
        )
        with peaks() as memory:
            records = flower(config, folder / profile)
        rows = [
            {
                "mb": size,
                "seconds": record.seconds["echo"],
                "cpu": cpu_of(record),
                "sent_mb": (record.traffic("up") + record.traffic("down")) / 1e6,
                "error": record.server["error"],
            }
            for size, record in zip(args.megabytes, records, strict=True)
        ]
        found[profile] = {"rows": rows, "peak_mb": {k: round(mb) for k, mb in memory.items()}}
    return found


def nodes(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Send nothing to several sites and back."""
    found: dict[str, Any] = {}
    for clients in args.sites:
        config = Config(algorithm=Echo(megabytes="0 " * 6), clients=clients, rounds=6, device="cpu")
        both: dict[str, Any] = {}
        for name in ("barter", "flower") if clients == 1 and args.supernode else ("barter",):
            with peaks() as memory:
                records = flower(config, folder / f"{name}-{clients}", supernode=name == "flower")
            both[name] = statistics.median(record.seconds["echo"] for record in records[1:])
            calls = [cpu_of(record) for record in records[1:]]
            both[f"{name}_cpu"] = {
                kind: statistics.median(call.get(kind, 0.0) for call in calls) for kind in calls[0]
            }
            both[f"{name}_peak_mb"] = {kind: round(mb) for kind, mb in memory.items()}
        found[str(clients)] = both
    return found


def rounds(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run FedAvg on digits in one process and on Flower."""
    found = {}
    for clients in args.sites:
        config = Config(
            algorithm=Timed(epochs=5),
            clients=clients,
            models="small-cnn",
            rounds=4,
            device="cpu",
            wire=WireSettings(profile="exact"),  # the same work on both engines
        )
        row = {}
        with peaks():
            here = list(Experiment.from_config(config).rounds(4))
        with peaks():
            there = flower(replace(config, engine="flower"), folder / str(clients))
        for name, records in (("local", here), ("flower", there)):
            row[name] = statistics.median(record.seconds["round"] for record in records[1:])
            so_far = [record.server["cpu"] for record in records]
            row[f"{name}_cpu"] = statistics.median(
                later - earlier for earlier, later in pairwise(so_far[1:])
            )
        found[str(clients)] = row
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    if "calls" in found:
        lines += [
            "| tree | profile | sent, both ways | seconds | CPU s | SuperLink's CPU s | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for profile, measured in found["calls"].items():
            for row in measured["rows"]:
                lines.append(
                    f"| {row['mb']:g} MB | {profile} | {row['sent_mb']:.1f} MB "
                    f"| {row['seconds']:.1f} | {sum(row['cpu'].values()):.1f} "
                    f"| {row['cpu'].get('SuperLink', 0):.1f} | {row['error']:.2g} |"
                )
        for profile, measured in found["calls"].items():
            peak = ", ".join(
                f"{kind} {mb:,} MB" for kind, mb in sorted(measured["peak_mb"].items())
            )
            lines += ["", f"Peak memory with {profile}: {peak}."]
    if "nodes" in found:
        lines += [
            "",
            "| sites | an empty call | its CPU s | SuperLink's CPU s | with Flower's SuperNode |",
            "|---|---|---|---|---|",
        ]
        for clients, both in found["nodes"].items():
            other = f"{both['flower']:.1f} s" if "flower" in both else ""
            cpu = both.get("barter_cpu", {})
            lines.append(
                f"| {clients} | {both['barter']:.2f} s | {sum(cpu.values()):.2f} "
                f"| {cpu.get('SuperLink', 0):.2f} | {other} |"
            )
    if "rounds" in found:
        lines += [
            "",
            "| clients | a round in one process | on Flower | CPU s in one process | on Flower |",
            "|---|---|---|---|---|",
        ]
        for clients, row in found["rounds"].items():
            lines.append(
                f"| {clients} | {row['local']:.2f} s | {row['flower']:.1f} s "
                f"| {row.get('local_cpu', 0):.1f} | {row.get('flower_cpu', 0):.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = {"calls": calls, "nodes": nodes, "rounds": rounds}
    parser.add_argument("--sections", nargs="+", choices=list(sections), default=list(sections))
    parser.add_argument("--profiles", nargs="+", default=["exact", "lean", "small"])
    parser.add_argument(
        "--megabytes", nargs="+", type=float, default=[0, 0, 0, 1, 10, 100, 500], help="of calls"
    )
    parser.add_argument("--sites", nargs="+", type=int, default=[1, 4, 10])
    parser.add_argument("--supernode", action="store_true", help="measure Flower's node too")
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
            measured = sections[section](Path(folder) / section, args)
            found[section] = {**found.get(section, {}), **measured}
        sys.stderr.write(f"{section}: {time.perf_counter() - start:.0f} s\n")
        file.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    sys.path.insert(0, "")
    from benchmarks.flower import (
        main as run,
    )  # under the name that the processes Flower starts know

    run()
