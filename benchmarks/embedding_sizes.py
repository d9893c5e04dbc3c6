"""Measure how large the embeddings of a trained network are, and how much their sizes differ.

    python -m benchmarks.embedding_sizes cifar100.npz --clients 4 2

Clients of DFFKE with the family HtFE-5 train on their own images as before their first exchange
(CIFAR-100 at 32 pixels, 50 clients of 1,000 images, alpha 1.0), on one thread of the CPU. Client k
has the network number k mod 5 of the family. Then the embeddings of its first 200 images and their
parts are computed. The size of an embedding is the root mean square of its features; a *large*
embedding is more than five times as large as the client's median one. `rms` is the root mean
square of all sizes, `largest` the largest size as a multiple of the median.

Prints a line for every client and writes it to results/embedding-sizes.json, in place of an earlier
one of that client.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from barter.algorithms.dffke import DFFKE, DFFKEClient
from barter.attacks.overheard import clients_of
from barter.experiment import Experiment
from barter.models.families import FAMILIES
from barter.ops.views import embed_all_views, parts_per_side
from barter.setup.config import resolve

OUT = Path(__file__).parent / "results" / "embedding-sizes.json"
IMAGES = 200
LARGE = 5.0  # times the median size


def build_experiment(data: Path, max_epochs: int) -> Experiment:
    """Return the experiment whose clients are trained."""
    config = {
        "algorithm": {"name": "dffke", "max_epochs": max_epochs},
        "data": {"source": f"npz:{data}", "flip": True},
        "partition": {"name": "dirichlet", "alpha": 1.0, "balanced": True},
        "models": "htfe-5",
        "clients": 50,
        "device": "cpu",
    }
    return Experiment.from_config(resolve(config))


@torch.no_grad()
def measure_sizes(client: DFFKEClient, parts: int) -> dict[str, float]:
    """Return the numbers described above, of a client's network.

    Args:
        client: The client.
        parts: Number of parts along each side of an image.
    """
    data = client.data
    index = torch.arange(min(IMAGES, len(data)))
    embeddings = embed_all_views(client.model, data, index, parts)
    sizes = embeddings.square().mean(-1).sqrt().flatten()
    median = float(sizes.median())
    return {
        "median": median,
        "rms": float(embeddings.double().square().mean().sqrt()),
        "largest": float(sizes.max()) / median,
        "share_of_large": float((sizes > LARGE * median).float().mean()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="CIFAR-100 as an npz file")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4], help="by default 2 4")
    parser.add_argument("--max-epochs", type=int, default=30, help="by default %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="by default %(default)s")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    experiment = build_experiment(args.data, args.max_epochs)
    algorithm = experiment.algorithm
    assert isinstance(algorithm, DFFKE)
    clients = clients_of(experiment)
    for k in args.clients:
        client = clients[k]
        assert isinstance(client, DFFKEClient)
        torch.manual_seed(k)
        algorithm.train(client)
        row: dict[str, Any] = {
            "network": FAMILIES["htfe-5"][k % 5],
            "client": k,
            "epochs": client.report["epochs"],
            **measure_sizes(client, parts_per_side(algorithm.parts, client.data.spec)),
        }
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
        rows = json.loads(args.out.read_text()) if args.out.exists() else []
        rows = [*(other for other in rows if other["client"] != k), row]
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
