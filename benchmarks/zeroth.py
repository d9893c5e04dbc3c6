"""How near FedZGE's estimate comes to the true gradient, by the number of queries, for both of its estimators.

    python benchmarks/zeroth.py

Trained clients on digits answer as they would in a round; beside them stands the gradient that autograd gives with
their networks at hand. The cosine between the two, mean and standard deviation over batches. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import torch

from barter import Experiment
from barter.algorithms.fedzge import FedZGE
from barter.compute.precision import full_precision
from barter.core.clients import Replies
from barter.engines.local import LocalEngine
from barter.ops.zeroth import sample_directions


def cosine(preset: str, queries: int, experiment: Experiment, seed: int) -> float:
    """Between the estimate of one batch and autograd's gradient."""
    algorithm: Any = FedZGE.preset(preset, {"queries": queries, "statistics": "own"})
    assert isinstance(experiment.engine, LocalEngine)
    server, clients = experiment.server, experiment.engine.clients
    torch.manual_seed(seed)
    images, z, y = algorithm.generate_images(
        server, algorithm.load_generator(server), algorithm.samples
    )
    x = images.detach()
    u = sample_directions(x, queries, algorithm.direction, algorithm.frequencies)
    told: Any = {k: {"counts": client.data.class_counts()} for k, client in clients.items()}
    sizes = {k: len(client.data) for k, client in clients.items()}
    shares = algorithm.shares(Replies(dict.fromkeys(clients, x), sizes, {}), told)
    loss = partial(algorithm.loss, shares, z, y)

    def said(points: torch.Tensor) -> torch.Tensor:
        return torch.stack([client.model.eval()(points) for client in clients.values()])

    model, images = server.model.eval(), x.clone().requires_grad_()
    with full_precision():
        (true,) = torch.autograd.grad(loss(said(images), model(images), images), images)
    with torch.no_grad(), full_precision():
        answers = torch.stack(
            [said(points) for points in (x, *(x + algorithm.eps * direction for direction in u))]
        )
    estimate = algorithm.by_logits if algorithm.estimator == "logits" else algorithm.by_loss
    slope = estimate(model, loss, x, u, answers)
    return float(torch.cosine_similarity(slope.flatten().double(), true.flatten().double(), 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 5, 10, 20, 50])
    parser.add_argument("--batches", type=int, default=5)
    args = parser.parse_args()
    experiment = Experiment(FedZGE(), device="cpu")
    list(experiment.rounds(2))
    lines = ["| queries q | preset paper | default |", "|---|---|---|"]
    for queries in args.queries:
        cells = []
        for preset in ("paper", "sound"):
            found = [cosine(preset, queries, experiment, seed) for seed in range(args.batches)]
            cells.append(f"{statistics.fmean(found):.3f} ± {statistics.stdev(found):.3f}")
        lines.append(f"| {queries} | {cells[0]} | {cells[1]} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
