"""Membership inference: find out if a client trained on an image.

RMIA (Zarifzadeh et al., "Low-Cost High-Power Membership Inference Attacks", ICML 2024), online: in
shadow runs each client trains on a random half of its own and of other images. They show how likely
a network finds an image with and without training on it. The threshold γ is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from barter.attacks.measures import auc_with_error, true_positive_rate
from barter.attacks.overheard import Upload, clients_of, collect_uploads, record_wire
from barter.attacks.result import Result
from barter.core import seeds
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Monitor
from barter.experiment import Experiment
from barter.ops.views import embed_all_views, parts_of_views
from barter.setup.config import Config

__all__ = ["ImagePool", "make_pool", "membership_attacks", "rmia_scores", "shadow_indices"]

RATES = (1e-2, 1e-3)  # false positive rates


@dataclass(frozen=True)
class ImagePool:
    """A client's images (members), followed by images of no client."""

    images: Images
    members: int  # number of the client's images
    candidates: Tensor  # indices of the images to classify: per class as many members as others


def make_pool(own: Images, others: Images, seed: int) -> ImagePool:
    """Join a client's images with equally many others of each class.

    The pool has all images of the client. If a class has fewer others, a random choice of as many
    of the client's images are candidates, which the attack classifies.

    Args:
        own: The client's images.
        others: Images of no client.
        seed: The seed of the choice.
    """
    draw = torch.Generator().manual_seed(seeds.stream_seed(seed, "pool"))
    inside = []
    outside = []
    for c in range(own.spec.classes):
        mine = (own.labels == c).nonzero()[:, 0]
        theirs = (others.labels == c).nonzero()[:, 0]
        count = min(len(mine), len(theirs))
        inside.append(mine[torch.randperm(len(mine), generator=draw)[:count]])
        outside.append(theirs[torch.randperm(len(theirs), generator=draw)[:count]])
    chosen = torch.cat(outside)
    pixels = torch.cat([own.pixels, others.pixels[chosen]])
    labels = torch.cat([own.labels, others.labels[chosen]])
    candidates = torch.cat([*inside, len(own) + torch.arange(len(chosen))])
    return ImagePool(Images(pixels, labels, own.spec, own.augment), len(own), candidates)


def shadow_indices(count: int, shadows: int, seed: int) -> list[Tensor]:
    """Return the sorted indices of the images that each shadow run trains on.

    Runs 2i and 2i + 1 have the two halves of a random split, so that each image is in half of the
    runs if their number is even.

    Args:
        count: The number of images.
        shadows: The number of shadow runs.
        seed: The seed of the splits.
    """
    draw = torch.Generator().manual_seed(seeds.stream_seed(seed, "halves"))
    parts: list[Tensor] = []
    while len(parts) < shadows:
        parts += torch.randperm(count, generator=draw).tensor_split(2)
    return [half.sort().values for half in parts[:shadows]]


def membership_attacks(
    experiment: Experiment,
    uploads: Mapping[int, Upload],
    public: Images,
    others: Images,
    shadows: int,
    monitor: Monitor,
) -> list[Result]:
    """Run every membership attack that the clients' uploads allow.

    Uploaded or learnt networks allow the loss threshold and RMIA, uploaded rows and images the
    nearest of them. Without any, there is a single result with a note.

    Args:
        experiment: The attacked run, after the round of the uploads.
        uploads: What each client uploaded.
        public: The attacker's images, which calibrate its scores.
        others: Images of no client, to be distinguished from members.
        shadows: The number of shadow runs; 0 leaves out RMIA.
        monitor: Shows progress.
    """
    clients = {k: client for k, client in clients_of(experiment).items() if k in uploads}
    pools = {
        k: make_pool(client.data, others, experiment.config.seed + k)
        for k, client in clients.items()
    }
    known = {k: network for k in clients if (network := uploads[k].network) is not None}
    given = {k: images for k in clients if (images := uploads[k].given) is not None}
    if not known and not given:
        why = "no client uploaded weights, predictions on public images or images: nothing is tried"
        return [Result("membership", "weights", note=why)]
    results = []
    if known:
        source = uploads[next(iter(known))].source
        own = {
            k: (label_likelihood(network, pools[k].images), pools[k])
            for k, network in known.items()
        }
        results.append(_summarise_scores(f"loss threshold, {source}", own))
        runs = _shadows(experiment.config, experiment.round - 1, pools, shadows, monitor)
        scores = {}
        for k, network in known.items():
            # Each run samples its own clients, so a client is missing from some.
            uploaded = [run[k].network for run in runs if k in run]
            shadow_networks = [network for network in uploaded if network is not None]
            if shadow_networks:
                score = _pool_scores(network, shadow_networks, pools[k], public)
                scores[k] = (score, pools[k])
        if scores:
            results.append(_summarise_scores(f"RMIA with {shadows} shadow runs, {source}", scores))
    rows = {
        k: (_nearness(uploads[k], pools[k].images), pools[k])
        for k in known
        if uploads[k].rows is not None
    }
    if rows:
        results.append(_summarise_scores("nearest row, embeddings and weights", rows))
    if given:
        likeness = {
            k: (_likeness(images, pools[k].images), pools[k]) for k, images in given.items()
        }
        results.append(_summarise_scores("nearest of the images given away", likeness))
    return results


def label_likelihood(network: Classifier, images: Images) -> Tensor:
    """Return a network's log-probability of each image's label (images,).

    Images are not augmented, and the network is put into evaluation mode.
    """
    logits = predict(network.eval(), images.batch, torch.arange(len(images)))
    return logits.double().log_softmax(1).gather(1, images.labels[:, None])[:, 0]


def rmia_scores(own: Tensor, shadows: Tensor, own_public: Tensor, shadows_public: Tensor) -> Tensor:
    """Return the RMIA score of each image, from 0 to 1; members have higher ones.

    It is the fraction of public images whose ratio of likelihoods, that under the attacked network
    to the mean under the shadow networks, does not exceed the image's.

    Args:
        own: Log-likelihoods of the images under the attacked network.
        shadows: The same under shadow networks (networks, images).
        own_public: Log-likelihoods of public images under the attacked network.
        shadows_public: The same under the shadow networks (networks, public images).
    """
    # The number of shadow networks cancels, as it is the same on both sides.
    public_ratios = (own_public - shadows_public.logsumexp(0)).sort().values
    ratios = own - shadows.logsumexp(0)
    return torch.searchsorted(public_ratios, ratios, right=True).double() / len(public_ratios)


def _pool_scores(
    target: Classifier, shadows: Sequence[Classifier], pool: ImagePool, public: Images
) -> Tensor:
    """Return the RMIA score of each image of a pool.

    Args:
        target: The attacked network.
        shadows: The client's network in each shadow run in which it uploaded one.
        pool: The images to score.
        public: Images that calibrate the scores.
    """
    networks = [target, *shadows]
    in_pool = torch.stack([label_likelihood(network, pool.images) for network in networks])
    in_public = torch.stack([label_likelihood(network, public) for network in networks])
    return rmia_scores(in_pool[0], in_pool[1:], in_public[0], in_public[1:])


def _shadows(
    config: Config, rounds: int, pools: Mapping[int, ImagePool], count: int, monitor: Monitor
) -> list[dict[int, Upload]]:
    """Return the uploads of shadow runs on random halves of the pools.

    Each run has its own seed.
    """
    inside = {
        k: shadow_indices(len(pool.images), count, config.seed + k) for k, pool in pools.items()
    }
    return [
        _shadow(config, rounds, pools, {k: inside[k][i] for k in pools}, i, count, monitor)
        for i in range(count)
    ]


def _shadow(
    config: Config,
    rounds: int,
    pools: Mapping[int, ImagePool],
    inside: Mapping[int, Tensor],
    i: int,
    count: int,
    monitor: Monitor,
) -> dict[int, Upload]:
    """Run shadow run `i` and return what each client uploads in its last round, or once in the run.

    Args:
        config: The configuration of the attacked run.
        rounds: The number of rounds before the recorded one.
        pools: Images of each client.
        inside: Indices of the pool's images that each client trains on.
        i: The number of this shadow run.
        count: The number of shadow runs.
        monitor: Shows progress.
    """
    experiment = Experiment.from_config(config)
    for k, client in clients_of(experiment).items():
        if k in pools:
            images = pools[k].images
            chosen = inside[k]
            client.data = Images(
                images.pixels[chosen], images.labels[chosen], images.spec, images.augment
            )
    experiment.engine.seed = seeds.stream_seed(config.seed, "shadow", i)
    wire = record_wire(experiment)
    with monitor.phase(f"shadow run {i + 1} of {count}", rounds + 1):
        for _ in range(rounds):
            experiment.step()
            monitor.advance(1)
        uploads = collect_uploads(experiment, wire)
        monitor.advance(1)
    return uploads


def _nearness(upload: Upload, images: Images) -> Tensor:
    """Return each image's negative distance to the nearest uploaded row.

    The distance is between the image's embedding in the uploaded network and the row.
    """
    assert upload.rows is not None
    assert upload.network is not None
    rows = upload.rows[1]
    views = 1 if rows.ndim == 2 else rows.shape[1]
    index = torch.arange(len(images))
    computed = embed_all_views(upload.network, images, index, parts_of_views(views)).flatten(1)
    return -torch.cdist(computed.double(), rows.flatten(1).double()).min(1).values


def _likeness(given: Tensor, images: Images) -> Tensor:
    """Return the negative distance of each image to the nearest uploaded image."""
    own = images.batch(torch.arange(len(images))).flatten(1)
    return -torch.cdist(own, given.flatten(1)).min(1).values


def _summarise_scores(attack: str, scores: Mapping[int, tuple[Tensor, ImagePool]]) -> Result:
    """Return the result of an attack over all clients' images, and for each client.

    Args:
        attack: The name of the attack.
        scores: Score of each image of a client's pool, and the pool.
    """
    pairs = {k: _split_scores(score, pool) for k, (score, pool) in scores.items()}
    members = torch.cat([own for own, _ in pairs.values()])
    others = torch.cat([other for _, other in pairs.values()])
    clients = {k: _values(*pair) for k, pair in pairs.items() if all(map(len, pair))}
    note = f"{len(members)} members and {len(others)} others"
    if not len(members) or not len(others):
        return Result("membership", attack, note=f"{note}: nothing to tell apart")
    too_few = [rate for rate in RATES if not _can_measure(rate, others)]
    if too_few:
        note += f"; too few for a false positive rate of {max(too_few):.1%}"
    return Result("membership", attack, _values(members, others), clients, note)


def _split_scores(score: Tensor, pool: ImagePool) -> tuple[Tensor, Tensor]:
    """Return the scores of members and of others."""
    inside = pool.candidates < pool.members
    return score[pool.candidates[inside]], score[pool.candidates[~inside]]


def _can_measure(rate: float, others: Tensor) -> bool:
    """Return whether this false positive rate of the non-members is at least one image."""
    return len(others) * rate >= 1


def _values(members: Tensor, others: Tensor) -> dict[str, float]:
    """Return area under the curve, its standard error, and the true positive rates of `RATES`.

    Rates that need more images of others are left out.
    """
    area, error = auc_with_error(members, others)
    values = {"auc": area, "error": error}
    for rate in RATES:
        if _can_measure(rate, others):
            values[f"tpr_{rate:.1%}"] = true_positive_rate(members, others, rate)
    return values
