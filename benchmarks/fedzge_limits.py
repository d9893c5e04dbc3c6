"""Where FedZGE's server loses: by its gradient, by its images, or by what the clients know?

    python -m benchmarks.fedzge_limits --data cifar10.npz --models resnets-3-3-4 --clients 10 --alpha 0.5 --rounds 8

Three runs with the same seed: the default; with private images in place of generated ones, which separates what the
images lose from the rest; and these with ten times the server's steps. After each round of the default,
the estimated gradient is compared with the true one, which autograd gives with the clients' networks at hand.
`RealImages` is a measuring instrument without any privacy. Curves are stored as in `barter.recipes.stored`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

import barter
from barter import Experiment
from barter.algorithms.fedzge import FedZGE, LocalStatistics, Oracle, QueryServer
from barter.core.algorithm import Crossing
from barter.core.clients import Replies
from barter.core.contracts import Floats, Labels
from barter.data.partition import Dirichlet
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.models.generators import LabelGenerator
from barter.recipes.stored import StoredRun, read_stored_runs, write_stored_runs
from benchmarks.zeroth import cosine

OUT = Path(__file__).parent / "results" / "fedzge-limits.jsonl"


class ImageStatistics(LocalStatistics):
    """A client's upload with some of its private images."""

    images: Annotated[Tensor, Floats("n", "channels", "height", "width")]
    labels: Annotated[Tensor, Labels("n")]


@dataclass(frozen=True, kw_only=True)
class RealImages(FedZGE):
    """FedZGE whose images are the clients' private images, to measure what generation loses."""

    crosses = {**FedZGE.crosses, "learn": Crossing(up="some of the private images themselves")}

    def learn(self, client: Oracle) -> ImageStatistics:
        """Train on private images; return the data's statistics and `samples` of the images."""
        statistics = super().learn(client)
        data = client.data
        index = torch.randperm(len(data), device=data.device)[: self.samples]
        return {**statistics, "images": data.batch(index), "labels": data.labels[index]}

    def merge_statistics(self, server: QueryServer, uploads: Replies[Any]) -> None:
        """Store all clients' images and their classes in the place of the spectrum."""
        images = torch.cat([upload["images"] for upload in uploads.values()])
        labels = torch.cat([upload["labels"] for upload in uploads.values()])
        server.spectrum = [images, labels]

    def generate_images(
        self, server: QueryServer, generator: LabelGenerator, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return random images of the clients, class-balanced where possible."""
        images, labels = server.spectrum
        order = torch.randperm(len(labels), device=labels.device)
        # Rank each image among those of its class, in random order; low ranks are taken first.
        rank = torch.zeros_like(labels)
        for c in range(server.spec.classes):
            own = order[labels[order] == c]
            rank[own] = torch.arange(len(own), device=labels.device)
        chosen = order[rank[order].argsort(stable=True)][:count]
        z = torch.randn(len(chosen), self.noise, device=server.device)
        return images[chosen], z, labels[chosen]


RUNS: dict[str, tuple[type[FedZGE], dict[str, object]]] = {
    "default": (FedZGE, {}),
    "private images": (RealImages, {"queries": 0}),
    "private images, 600 steps": (RealImages, {"queries": 0, "global_steps": 600}),
}


def measure_run(name: str, args: argparse.Namespace) -> StoredRun:
    """Run one of `RUNS` and return its curves.

    Besides accuracies and seconds: `recognised`, the share of images whose class the clients together predict,
    `agreement` of the server's model with them on these images, and `cosine` of the estimated
    gradient with the true one (of the default only).
    """
    kind, fields = RUNS[name]
    source = Path(args.data).stem if args.data else "digits"
    experiment = Experiment(
        kind(**fields),  # type: ignore[arg-type]
        data=Data(source=f"npz:{args.data}", flip=True, size=args.size) if args.data else "digits",
        partition=Dirichlet(alpha=args.alpha),
        clients=args.clients,
        models=args.models,
        seed=args.seed,
        device=args.device,
    )
    assert isinstance(experiment.engine, LocalEngine)
    curve: dict[str, list[float | None]] = {}
    for record in experiment.rounds(args.rounds, progress=False):
        values = {
            "round": record.round,
            "server": record.server["global"],
            "global": record.mean("global"),
            "recognised": record.server["recognised"],
            "agreement": record.server["agreement"],
            "seconds": record.seconds["round"],
        }
        if kind is FedZGE:
            cosines = [
                cosine("sound", FedZGE().queries, experiment, seed) for seed in range(args.batches)
            ]
            values["cosine"] = sum(cosines) / len(cosines)
        for key, value in values.items():
            curve.setdefault(key, []).append(value if key == "round" else round(value, 4))
        sys.stdout.write(f"{name}: {json.dumps(values)}\n")
        sys.stdout.flush()
    settings = {
        "algorithm.name": "fedzge" if kind is FedZGE else f"{__spec__.name}:{kind.__name__}",
        **{f"algorithm.{field}": value for field, value in fields.items()},
        "data.source": source if source == "digits" else f"npz:{source}.npz",
        "data.flip": bool(args.data),
        "data.size": args.size or "none",
        "partition.alpha": args.alpha,
        "clients": args.clients,
        "models": args.models,
    }
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    return StoredRun(
        row=f"fedzge-limits: {source}, {name}",
        seed=args.seed,
        curve=curve,
        settings=settings,
        hardware=f"{device}, torch {torch.__version__.partition('+')[0]}",
        date=date.today().isoformat(),
        version=barter.__version__,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="an npz file; by default digits")
    parser.add_argument("--size", type=int, help="pixels of a side; by default those of the file")
    parser.add_argument("--models", default="small-5")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=3, help="of each comparison of gradients")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    for name in args.only:
        run = measure_run(name, args)
        stored = read_stored_runs(args.out) if args.out.exists() else []
        others = [one for one in stored if (one.row, one.seed) != (run.row, run.seed)]
        write_stored_runs(args.out, [*others, run])


if __name__ == "__main__":
    main()
