"""What Flower costs on one machine: a call, a megabyte, a round, and the resident worker's share in it.

    python benchmarks/flower.py                        all sections
    python benchmarks/flower.py --sections calls rounds

All runs over TLS on loopback, as `barter run --engine flower` starts it. `calls` sends trees to one site and back
and compares them; `worker` asks the same of a client app that loads torch, data and memory for every message, as one
without a resident worker must; `rounds` compares FedAvg on digits in one process and on Flower. Prints Markdown tables
and writes a JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from rich.console import Console
from torch import Tensor

from barter import Algorithm, Client, Clients, FedAvg, Server
from barter.config import Config
from barter.experiment import Experiment
from barter.flower.codec import decode, encode
from barter.flower.front import from_records, to_records
from barter.flower.loopback import run_here
from barter.runs.progress import Watcher

FOLDER = "BARTER_BENCHMARK_FOLDER"
fresh = ClientApp()


@fresh.query("hello")
@fresh.train("call")
def everything_anew(message: Message, context: Context) -> Message:
    """What a site without a worker does for every message."""
    from barter.flower.sites import make_site
    from barter.flower.supervise import load_setup

    name = str(context.node_config["name"])
    home = Path(os.environ[FOLDER]) / "sites" / name
    site = make_site(load_setup(home / "site.toml"), home / "memory")
    return Message(to_records(encode(site.answer(decode(from_records(message.content))))), reply_to=message)


@dataclass(frozen=True, kw_only=True)
class Echo(Algorithm[Server, Client]):
    """Sends a tensor of the round's size down and gets it back."""

    crosses = {"echo": "down: numbers; up: the same"}
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
    kinds = {"superlink": "SuperLink", "serverapp": "server app", "--worker": "worker", "clientapp": "front"}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.3):
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    command = (path / "cmdline").read_text()
                    kind = next((k for word, k in kinds.items() if word in command), None)
                    if kind is not None:
                        line = next(x for x in (path / "status").read_text().splitlines() if x.startswith("VmHWM"))
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


def flower(config: Config, folder: Path, client_app: str | None = None) -> list[Any]:
    """The records of a run on Flower."""
    from barter.flower import deploy

    original, os.environ[FOLDER] = deploy.init, str(folder / "flower")

    def init(where: Path, *args: Any) -> None:
        original(where, *args)
        if client_app is not None:
            app = where / "pyproject.toml"
            app.write_text(app.read_text().replace("barter.flower.front:app", client_app))

    import barter.flower.loopback as loopback

    loopback.init = init
    try:
        return run_here(config, folder, Watcher(Console(file=sys.stderr), config.rounds), resume=False)
    finally:
        loopback.init = original


def calls(folder: Path) -> dict[str, Any]:
    sizes = [0.0, 0.0, 0.0, 1.0, 10.0, 100.0, 500.0]
    echo = Echo(megabytes=" ".join(map(str, sizes)))
    with peaks(folder) as memory:
        records = flower(Config(algorithm=echo, clients=1, rounds=len(sizes), device="cpu"), folder)
    times = [
        (size, record.seconds["echo"], record.server["exact"]) for size, record in zip(sizes, records, strict=True)
    ]
    return {"calls": times, "peak_mb": dict(memory)}


def worker(folder: Path) -> dict[str, float]:
    found = {}
    for name, client_app in (("with", None), ("without", "benchmarks.flower:fresh")):
        echo = Echo(megabytes="0 0 0 0 0")
        records = flower(Config(algorithm=echo, clients=1, rounds=5, device="cpu"), folder / name, client_app)
        found[name] = statistics.median(record.seconds["echo"] for record in records[1:])
    return found


def rounds(folder: Path) -> dict[str, Any]:
    found = {}
    for clients in (4, 10):
        config = Config(algorithm=FedAvg(epochs=5), clients=clients, models="small-cnn", rounds=3, device="cpu")
        ours = [record.seconds["round"] for record in Experiment.from_config(config).rounds(3)]
        theirs = [record.seconds["round"] for record in flower(replace(config, engine="flower"), folder / str(clients))]
        found[str(clients)] = {"local": statistics.median(ours[1:]), "flower": statistics.median(theirs[1:])}
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    if "calls" in found:
        lines += ["| a tree there and back | seconds | MB/s, both ways together | exact |", "|---|---|---|---|"]
        for size, seconds, exact in found["calls"]["calls"]:
            rate = f"{2 * size / seconds:.0f}" if size else "-"
            lines.append(f"| {size:g} MB | {seconds:.1f} | {rate} | {'yes' if exact else 'NO'} |")
        peak = ", ".join(f"{kind} {mb:,.0f} MB" for kind, mb in sorted(found["calls"]["peak_mb"].items()))
        lines += ["", f"Peak memory: {peak}."]
    if "worker" in found:
        both = found["worker"]
        lines += ["", f"An empty call: {both['with']:.1f} s with a resident worker, {both['without']:.1f} s without."]
    if "rounds" in found:
        lines += ["", "| clients | a round in one process | on Flower | ratio |", "|---|---|---|---|"]
        for clients, pair in found["rounds"].items():
            ratio = pair["flower"] / pair["local"]
            lines.append(f"| {clients} | {pair['local']:.2f} s | {pair['flower']:.1f} s | {ratio:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"calls": calls, "worker": worker, "rounds": rounds}
    parser.add_argument("--sections", nargs="+", choices=list(sections), default=list(sections))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "cores": torch.get_num_threads()}
    for section in args.sections:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[section] = sections[section](Path(folder) / section)
        sys.stderr.write(f"{section}: {time.perf_counter() - start:.0f} s\n")
        (args.out / "flower.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    sys.path.insert(0, "")
    from benchmarks.flower import main as run  # under the name that the processes Flower starts know

    run()
