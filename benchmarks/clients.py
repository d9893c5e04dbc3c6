"""Seconds and memory of a round by the number of clients, with ten sampled per round.

    python benchmarks/clients.py                                   10, 100 and 1,000 clients
    python benchmarks/clients.py --clients 10,5000 --methods fedavg --device cuda

Every client has 20 random images of 8x8 pixels: speed and memory do not depend on their contents.
Each row runs in a process of its own, writes its checkpoints to a temporary folder, and evaluates
the clients that the run evaluates by default. Prints a Markdown table and writes
results/clients-DEVICE.json.

Columns: seconds until the experiment is ready; seconds of a round and CPU seconds of this process,
which do not depend on what else the machine does (medians of all rounds but the first);
host memory beyond an imported barter, when ready and at its peak, without the images themselves;
bytes that a round writes to the run's folder (median).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from barter import ALGORITHMS, Experiment

HERE = Path(__file__).parent
IMAGES = 20  # training images of a client
SAMPLED = 10
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch_size": 10},
    "fedproto": {"features": 48, "batch_size": 10},
    "dffke": {
        "peers": 3,
        "max_epochs": 1,
        "later_epochs": 1,
        "share": 0.5,
        "code_dim": 16,
        "docking_epochs": 1,
        "decoder_epochs": 1,
        "decoder_batch": 10,
        "decoder_steps": 2,
        "exchange_epochs": 1,
        "exchange_steps": 2,
    },
}
MODELS = {"fedavg": "small-mlp", "fedproto": "small-mlp,small-cnn", "dffke": "small-mlp,small-cnn"}
MIB = 2**20


def resident() -> int:
    """Return the bytes of host memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Return the largest number of bytes of host memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def written() -> int:
    """Return the bytes that this process has written to files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def measure(method: str, clients: int, rounds: int, device: str, models: str) -> dict[str, Any]:
    """Run a few rounds and return what they cost."""
    generator = torch.Generator().manual_seed(0)
    count = IMAGES * clients
    images = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 10
    source = (images, labels, images[:200], labels[:200])
    settings = {"fraction": min(1.0, SAMPLED / clients), **METHODS[method]}
    algorithm = ALGORITHMS[method](**settings)
    gc.collect()
    before = resident()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        experiment = Experiment(
            algorithm,
            data=source,
            partition="iid",
            clients=clients,
            models=models or MODELS[method],
            rounds=rounds,
            device=device,
            threads=1,
            out=Path(folder) / "run",
        )
        ready = time.perf_counter() - start
        memory_ready = resident() - before
        seconds = []
        cpu_seconds = []
        traffic = []
        for _ in range(rounds):
            start = time.perf_counter()
            cpu_start = time.process_time()
            bytes_before = written()
            experiment.step()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
            traffic.append(written() - bytes_before)
    peers = {"peers": settings["peers"]} if "peers" in settings else {}
    row = {
        "method": method,
        **peers,
        "clients": clients,
        "ready_s": round(ready, 2),
        "round_s": round(statistics.median(seconds[1:]), 3),
        "round_cpu_s": round(statistics.median(cpu_seconds[1:]), 3),
        "ready_mib": round(memory_ready / MIB, 1),
        "peak_mib": round((peak() - before) / MIB, 1),
        "written_mib": round(statistics.median(traffic[1:]) / MIB, 2),
    }
    if device.startswith("cuda"):
        row["device_mib"] = round(torch.cuda.max_memory_reserved() / MIB, 1)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---" for _ in columns]]
    lines += [[row.get(column, "") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--clients", default="10,100,1000")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="", help="other networks, such as resnet18")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    parser.add_argument("--row", action="store_true", help="measure one row in this process")
    options = parser.parse_args()
    if options.row:
        row = measure(
            options.methods, int(options.clients), options.rounds, options.device, options.models
        )
        sys.stdout.write(json.dumps(row) + "\n")
        return
    rows = []
    for method in options.methods.split(","):
        for clients in options.clients.split(","):
            command = [sys.executable, __file__, "--row", "--methods", method]
            command += ["--clients", clients, "--rounds", str(options.rounds)]
            command += ["--device", options.device, "--models", options.models]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows))
    target = options.out or HERE / "results" / f"clients-{options.device.partition(':')[0]}.json"
    target.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
