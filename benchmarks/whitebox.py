"""FedZGE against a version of it that may look inside its clients, and against clients that learn alone.

    python benchmarks/whitebox.py --rounds 20 --seeds 0 1 2

`white box` takes the generator's gradient by autograd through the clients' networks instead of asking about changed
images; all else is FedZGE's default. Digits, five clients with `small-5`. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from barter import Client, Experiment, Local
from barter.algorithms.fedzge import FedZGE
from barter.core.model import Classifier

clients: Mapping[int, Client] = {}  # those of the run that goes on in this process


@dataclass(frozen=True, kw_only=True)
class WhiteBox(FedZGE):
    """The true gradient in place of the estimate."""

    def by_logits(
        self, model: Classifier, loss: Callable[..., Tensor], x: Tensor, u: Tensor, said: Tensor
    ) -> Tensor:
        images = x.clone().requires_grad_()
        seen = torch.stack([client.model.eval()(images) for client in clients.values()])
        (slope,) = torch.autograd.grad(loss(seen, model(images), images), images)
        return slope


VARIANTS: dict[str, Any] = {
    "local": Local(lr=0.01, max_epochs=10, tau=None, batch_size=256),
    "fedzge, white box": WhiteBox(),
    "fedzge (default)": FedZGE(),
    "fedzge, preset paper": FedZGE.preset("paper"),
}


def run(name: str, seed: int, rounds: int) -> tuple[str, list[float]]:
    """Accuracies in % after the last round: clients on the global test set and on their own, the server's model."""
    global clients
    torch.set_num_threads(1)
    experiment = Experiment(VARIANTS[name], seed=seed, device="cpu")
    clients = experiment.engine.clients  # type: ignore[attr-defined]
    *_, last = experiment.rounds(rounds)
    sys.stderr.write(f"{name}, seed {seed}: {last.mean('global'):.3f}\n")
    return name, [
        100 * last.mean("global"),
        100 * last.mean("local"),
        100 * last.server.get("global", float("nan")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    jobs = [(name, seed, args.rounds) for name in VARIANTS for seed in args.seeds]
    with ProcessPoolExecutor(args.workers) as pool:
        found = list(pool.map(run, *zip(*jobs, strict=True)))
    lines = ["| method | clients, global | clients, own | server's model |", "|---|---|---|---|"]
    for name in VARIANTS:
        columns = zip(*(values for n, values in found if n == name), strict=True)
        cells = [
            f"{statistics.fmean(c):.1f} ± {statistics.stdev(c):.1f}" if c[0] == c[0] else "-"
            for c in columns
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
