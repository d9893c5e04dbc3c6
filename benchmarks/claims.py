"""What clients of a DFRD run see in images that its server drew and in real ones; what fine-tuning did to each class.

    python benchmarks/claims.py runs/dfrd

Of the last round. For every class: how many of 100 of its images each client names so, or which class instead it names
most often; and how many of the test images the server's model names rightly, averaged and fine-tuned. Last, how many of
100 names clients would have to change on drawn images, on average, to name as many of each class as on real ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from barter.algorithms.dfrd import DFRD, Distiller, use_average
from barter.engines.local import LocalEngine
from barter.experiment import Experiment


def claim(names: Tensor, label: int) -> str:
    """How often of 100 a class is named, or which is named most often instead."""
    share = 100 * torch.bincount(names, minlength=label + 1) / max(1, len(names))
    most = int(share.argmax())
    return (
        f"{share[label]:.0f}"
        if most == label
        else f"{share[label]:.0f} ({share[most]:.0f} are {most})"
    )


def apart(drawn: Tensor, real: Tensor, classes: int) -> float:
    """How many of 100 names must change in one list for it to have as many of each class as the other."""
    shares = [
        torch.bincount(names, minlength=classes) / max(1, len(names)) for names in (drawn, real)
    ]
    return 50 * float((shares[0] - shares[1]).abs().sum())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "run", type=Path, help="the folder of a run of DFRD after averaging, with a checkpoint"
    )
    experiment = Experiment.restore(parser.parse_args().run)
    algorithm, server, engine, test = (
        experiment.algorithm,
        experiment.server,
        experiment.engine,
        experiment.test,
    )
    assert isinstance(algorithm, DFRD)
    assert isinstance(server, Distiller)
    assert isinstance(engine, LocalEngine)
    assert test is not None
    torch.manual_seed(0)
    generator, _ = algorithm.load_generators(server)
    drawn = [
        algorithm.generate_batch(server, generator, torch.ones(test.spec.classes))
        for _ in range(20)
    ]
    x, y = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    real, labels = test.batch(torch.arange(len(test))), test.labels
    clients = engine.clients
    sees = {
        k: [client.model.eval()(images).argmax(1) for images in (x, real)]
        for k, client in clients.items()
    }
    tuned = server.model.eval()(real).argmax(1)
    with use_average(server):
        averaged = server.model.eval()(real).argmax(1)
    heads = [f"client {k}: has, drawn, real" for k in clients]
    sys.stdout.write(
        " | ".join(["| class", *heads, "averaged", "fine-tuned |\n"])
        + "|---" * (len(heads) + 3)
        + "|\n"
    )
    for c in range(test.spec.classes):
        cells = [
            f"{int(client.data.class_counts()[c])}, {claim(sees[k][0][y == c], c)}, {claim(sees[k][1][labels == c], c)}"
            for k, client in clients.items()
        ]
        ends = [claim(named[labels == c], c) for named in (averaged, tuned)]
        sys.stdout.write(f"| {c} | {' | '.join([*cells, *ends])} |\n")
    pairs = [
        (a[y == c], b[labels == c]) for a, b in sees.values() for c in range(test.spec.classes)
    ]
    changed = sum(apart(a, b, test.spec.classes) for a, b in pairs) / len(pairs)
    sys.stdout.write(f"\nnames of drawn and of real images differ in {changed:.0f} of 100\n")


if __name__ == "__main__":
    main()
