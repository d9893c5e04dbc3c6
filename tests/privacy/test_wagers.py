"""Somebody who sees all that leaves, over many tries, tells images apart no better than ε allows.

Small δ leave room for a promise that is broken by little; with larger ones, ε is nearly what the best attack proves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn

from barter import Classifier, FedAvg
from barter.core.images import Images, Spec
from barter.engines.local import LocalEngine
from barter.privacy import Privacy
from barter.privacy.account import GaussianRelease, SampledRelease, composed_epsilon
from tests.conftest import small_federation
from tests.privacy.test_runs import Told, telling

SHADES = (0, 255)  # of the image that is replaced, and its label: 0 or 1


def most_certain(no: Tensor, yes: Tensor, delta: float) -> float:
    """The largest ε that some threshold proves, each with 99.9% certainty (Clopper and Pearson)."""
    n, bounds = len(no), []
    for threshold in torch.quantile(
        yes[:10_000], torch.tensor([0.3, 0.5, 0.7, 0.9, 0.97]).double()
    ):
        hits, alarms = int((yes > threshold).sum()), int((no > threshold).sum())
        low, high = beta.ppf(0.001, hits, n - hits + 1), beta.ppf(0.999, alarms + 1, n - alarms)
        bounds.append(math.log(max(low - delta, 1e-12) / high))
    return max(bounds)


def overheard(
    mechanism: str, statistic: Callable[[list[Told]], Tensor], calls: int
) -> list[Tensor]:
    """Of so many answers on black images, and on white ones; each row is of one image: a try of its own."""
    tries, values = 40_000, []
    for shade in SHADES:
        experiment = telling(
            {"tell.rows": mechanism, "tell.labels": "response epsilon=1"}, epsilon=None
        )
        engine = experiment.engine
        assert isinstance(engine, LocalEngine)
        pixels = torch.full((tries, 1, 2, 2), shade, dtype=torch.uint8)
        engine.clients[0].data = Images(
            pixels, torch.full((tries,), int(shade > 0)), experiment.task.spec
        )
        heard = []
        for t in range(calls):
            engine.round = t + 1 + (shade > 0) * calls  # other noise
            heard.append(engine.call("tell", {0: ()})[0])
        values.append(statistic(heard))
    return values


@pytest.mark.parametrize(("noise", "calls"), [(1.5, 1), (3.0, 4)])
def test_nobody_tells_images_apart_better_than_epsilon_allows(noise: float, calls: int) -> None:
    no, yes = overheard(
        f"gaussian clip=2 noise={noise}",
        lambda heard: sum(told["rows"].double().sum(1) for told in heard),
        calls,
    )
    for delta, least in ((1e-5, 0.2), (0.05, 0.8)):
        promised = composed_epsilon({GaussianRelease(noise): calls}, delta)
        assert least * promised < most_certain(no, yes, delta) < promised, (
            "a good attack, and not too good"
        )


def test_nobody_tells_labels_apart_better_than_epsilon_allows() -> None:
    no, yes = overheard(
        "withhold", lambda heard: (heard[0]["labels"] == 1).double() + 1e-9 * torch.rand(40_000), 1
    )
    assert 0.8 < most_certain(no, yes, 1e-5) < 1.0


class Pixels(Classifier):
    """Nothing but a head."""

    feature_dim = 64

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.head = nn.Linear(64, spec.classes, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


def trained(noise: float, tries: int) -> list[Tensor]:
    """How far networks went in two steps, each with one image in two, to where an image's label 1 leads and 0 does not.

    Where only these two classes are likely, their slopes are opposite: the worst case. The other image's is orthogonal.
    """
    algorithm, privacy = (
        FedAvg(epochs=2, batch_size=1, lr=0.01),
        Privacy(training=f"clip=1 noise={noise}"),
    )
    experiment = small_federation(algorithm, models=[Pixels], clients=1, privacy=privacy)
    engine, values = experiment.engine, []
    assert isinstance(engine, LocalEngine)
    client = engine.clients[0]
    spec = replace(client.data.spec, mean=(0.5,), std=(0.5,))
    lines = torch.tensor([1.0] * 4 + [-1.0] * 4)
    one, other = lines.repeat(8), lines.repeat_interleave(8)
    pixels = (255 * (torch.stack([one, other]) > 0)).to(torch.uint8).view(2, 1, 8, 8)
    w = {"head.weight": torch.cat([torch.zeros(2, 64), -one.repeat(spec.classes - 2, 1)])}
    for label in (0, 1):
        client.data, found = Images(pixels, torch.tensor([label, 2]), spec), []
        for t in range(tries):
            engine.round, client.released = 1 + label * tries + t, {}
            change = w["head.weight"] - engine.call("client_update", {0: (w,)})[0]["head.weight"]
            found.append(float((change[0] - change[1]) @ one))
        values.append(torch.tensor(found, dtype=torch.float64))
    return values


@pytest.mark.slow
def test_nobody_tells_trained_networks_apart_better_than_epsilon_allows() -> None:
    no, yes = trained(noise=1.0, tries=500)
    promised = composed_epsilon({SampledRelease(1.0, 0.5): 2}, 0.2)
    assert 0.2 * promised < most_certain(no, yes, 0.2) < promised
