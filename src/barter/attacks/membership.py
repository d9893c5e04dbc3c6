"""Was this image a client's? Membership inference on what clients told.

RMIA (Zarifzadeh et al., "Low-Cost High-Power Membership Inference Attacks", ICML 2024), online: some runs like the one
that is attacked, in which each client has a random half of its own images and of others, show how likely a network
finds an image whether or not it knows it. Threshold γ is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from barter.attacks.measures import auc, true_positives
from barter.attacks.overheard import Told, clients_of, overheard
from barter.attacks.result import Result
from barter.core import seeds
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Monitor
from barter.experiment import Experiment
from barter.ops.views import embeddings, parts_of
from barter.setup.config import Config

__all__ = ["Pool", "calibrated", "halves", "membership", "pool"]

RATES = (1e-2, 1e-3)  # of false positives


@dataclass(frozen=True)
class Pool:
    """A client's images and, behind them, some that are nobody's."""

    images: Images
    members: int  # how many of them are the client's
    judged: Tensor  # places of those that are told apart: of each class as many members as others


def pool(own: Images, others: Images, seed: int) -> Pool:
    """Of each class as many images of others as there are and as the client has, and of its own as many again."""
    draw = torch.Generator().manual_seed(seeds.stream_seed(seed, "pool"))
    inside, outside = [], []
    for c in range(own.spec.classes):
        mine, theirs = ((images.labels == c).nonzero()[:, 0] for images in (own, others))
        count = min(len(mine), len(theirs))
        inside.append(mine[torch.randperm(len(mine), generator=draw)[:count]])
        outside.append(theirs[torch.randperm(len(theirs), generator=draw)[:count]])
    chosen = torch.cat(outside)
    pixels, labels = (
        torch.cat([own.pixels, others.pixels[chosen]]),
        torch.cat([own.labels, others.labels[chosen]]),
    )
    judged = torch.cat([*inside, len(own) + torch.arange(len(chosen))])
    return Pool(Images(pixels, labels, own.spec, own.augment), len(own), judged)


def halves(count: int, shadows: int, seed: int) -> list[Tensor]:
    """Places of one half of so many, then of the other, then of a new half, ...: each is in as many as it is not."""
    draw, found = torch.Generator().manual_seed(seeds.stream_seed(seed, "halves")), list[Tensor]()
    while len(found) < shadows:
        found += torch.randperm(count, generator=draw).tensor_split(2)
    return [half.sort().values for half in found[:shadows]]


def membership(
    experiment: Experiment,
    told: Mapping[int, Told],
    public: Images,
    others: Images,
    shadows: int,
    monitor: Monitor,
) -> list[Result]:
    """How well images of clients are told from others, by each attack; public ones show what is usual."""
    clients = {k: client for k, client in clients_of(experiment).items() if k in told}
    pools = {
        k: pool(client.data, others, experiment.config.seed + k) for k, client in clients.items()
    }
    known = {k: network for k in clients if (network := told[k].network) is not None}
    given = {k: images for k in clients if (images := told[k].given) is not None}
    if not known and not given:
        why = "no client uploaded weights, predictions on public images or images: nothing is tried"
        return [Result("membership", "weights", note=why)]
    results = []
    if known:
        by = told[next(iter(known))].source
        own = {k: (likelihood(network, pools[k].images), pools[k]) for k, network in known.items()}
        results.append(_judged(f"loss threshold, {by}", own))
        runs = _shadows(experiment.config, experiment.round - 1, pools, shadows, monitor)
        alike = {
            k: [run[k].network for run in runs if k in run] for k in known
        }  # clients are drawn anew in each run
        scores = {
            k: (_compared(known[k], them, pools[k], public), pools[k])
            for k, them in alike.items()
            if them
        }
        if scores:
            results.append(_judged(f"RMIA with {shadows} shadow runs, {by}", scores))
    rows = {
        k: (_nearness(told[k], pools[k].images), pools[k])
        for k in known
        if told[k].rows is not None
    }
    if rows:
        results.append(_judged("nearest row, embeddings and weights", rows))
    if given:
        likeness = {
            k: (_likeness(images, pools[k].images), pools[k]) for k, images in given.items()
        }
        results.append(_judged("nearest of the images given away", likeness))
    return results


def likelihood(network: Classifier, images: Images) -> Tensor:
    """The logarithm of how likely a network finds each image's label."""
    logits = predict(network.eval(), images.batch, torch.arange(len(images)))
    return logits.double().log_softmax(1).gather(1, images.labels[:, None])[:, 0]


def calibrated(own: Tensor, shadows: Tensor, own_public: Tensor, shadows_public: Tensor) -> Tensor:
    """Of each image, the share of public ones that it is above in how much likelier this network finds it than others.

    Numbers are logarithms; shadows' have a line for each network. How many they are is the same on both sides.
    """
    usual = (own_public - shadows_public.logsumexp(0)).sort().values
    return torch.searchsorted(usual, own - shadows.logsumexp(0), right=True).double() / len(usual)


def _compared(
    own: Classifier, others: Sequence[Classifier | None], pool: Pool, public: Images
) -> Tensor:
    networks = [own, *(network for network in others if network is not None)]
    here, there = (
        torch.stack([likelihood(n, images) for n in networks]) for images in (pool.images, public)
    )
    return calibrated(here[0], here[1:], there[0], there[1:])


def _shadows(
    config: Config, rounds: int, pools: Mapping[int, Pool], count: int, monitor: Monitor
) -> list[dict[int, Told]]:
    """What is told in runs like this one, of halves of the pools and with other seeds."""
    inside = {k: halves(len(pool.images), count, config.seed + k) for k, pool in pools.items()}
    return [
        _shadow(config, rounds, pools, {k: inside[k][i] for k in pools}, i, count, monitor)
        for i in range(count)
    ]


def _shadow(
    config: Config,
    rounds: int,
    pools: Mapping[int, Pool],
    inside: Mapping[int, Tensor],
    i: int,
    count: int,
    monitor: Monitor,
) -> dict[int, Told]:
    experiment = Experiment.from_config(config)
    for k, client in clients_of(experiment).items():
        if k in pools:
            images, chosen = pools[k].images, inside[k]
            client.data = Images(
                images.pixels[chosen], images.labels[chosen], images.spec, images.augment
            )
    experiment.engine.seed = seeds.stream_seed(config.seed, "shadow", i)
    with monitor.phase(f"shadow run {i + 1} of {count}", rounds + 1):
        for _ in range(rounds):
            experiment.step()
            monitor.advance(1)
        told = overheard(experiment)
        monitor.advance(1)
    return told


def _nearness(told: Told, images: Images) -> Tensor:
    """How near each image's row, as this network makes it, is to the nearest one that was told."""
    assert told.rows is not None
    assert told.network is not None
    rows = told.rows[1]
    views = 1 if rows.ndim == 2 else rows.shape[1]
    mine = embeddings(told.network, images, torch.arange(len(images)), parts_of(views)).flatten(1)
    return -torch.cdist(mine.double(), rows.flatten(1).double()).min(1).values


def _likeness(given: Tensor, images: Images) -> Tensor:
    """How near each image is to the nearest of those that were given away."""
    return (
        -torch.cdist(images.batch(torch.arange(len(images))).flatten(1), given.flatten(1))
        .min(1)
        .values
    )


def _judged(attack: str, scores: Mapping[int, tuple[Tensor, Pool]]) -> Result:
    """Of all clients' images together, and of each client's."""
    pairs = {k: _apart(score, pool) for k, (score, pool) in scores.items()}
    every = tuple(torch.cat(column) for column in zip(*pairs.values(), strict=True))
    clients = {k: _values(*pair) for k, pair in pairs.items() if all(map(len, pair))}
    note = f"{len(every[0])} members and {len(every[1])} others" + (
        "; so few that 0.1 % of them is none" if len(every[1]) * RATES[-1] < 1 else ""
    )
    return Result("membership", attack, _values(*every), clients, note)


def _apart(score: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    inside = pool.judged < pool.members
    return score[pool.judged[inside]], score[pool.judged[~inside]]


def _values(members: Tensor, others: Tensor) -> dict[str, float]:
    area, error = auc(members, others)
    return {"auc": area, "error": error} | {
        f"tpr_{rate:.1%}": true_positives(members, others, rate) for rate in RATES
    }
