"""Images from what clients told of single images: embeddings, and what the server draws of them.

The attacker is the server. It has each client's network as the client told it, images of the same kind that are no
client's, and knows how answers are protected. So it can make pairs of its own images and of what would have been told
of them, and train a network that turns the one into the other; from there, it goes down the slope of how far an image's
embedding is from the one that was told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.attacks.measures import found, psnr, ssim
from barter.attacks.overheard import Told, clients_of, guard_of
from barter.attacks.result import Result, averaged
from barter.core import seeds
from barter.core.images import Augment, Images, Spec, augmented, statistics
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.experiment import Experiment
from barter.ops.fit import Trainer, adam, epoch_length, index_batches
from barter.ops.views import embeddings, number, parts_of, seen
from barter.privacy.mechanisms import Additive, Mechanism
from barter.runs.picture import Row

__all__ = ["inversion"]

IMAGES = 30  # of each client that are looked for
PUBLIC = 500  # of the attacker's images that it learns from, at most
COPIES = 1500  # of them, shifted and with other noise, about so many together
EPOCHS = 25
BATCH = 100
WIDTH = 256  # of the attacker's network
DESCENT = 150  # steps
COLUMNS = 10  # of the sheet

NETWORK, SLOPE, DRAWN = "network from embeddings", "descent from there", "transfer images"
GIVEN = "nearest of the images given away"
MEAN, NEAREST = "mean of the class", "nearest image of the class"


def inversion(
    experiment: Experiment, told: dict[int, Told], public: Images
) -> tuple[list[Result], list[Row]]:
    """What each attack comes to, and rows of a sheet: of each client, images and the nearest that was made of them."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    pictures: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]] = {}
    for k, client in clients_of(experiment).items():
        if k not in told or (places := told[k].places) is None:
            continue
        chosen = torch.arange(min(IMAGES, len(places)))
        with seeds.scope(experiment.config.seed, "inversion", k):
            made = dict(_attempts(experiment, client, told[k], chosen, public))
        every = visible(client.data.batch(torch.arange(len(client.data))), client.data.spec)
        real, labels = every[places[chosen]], client.data.labels[places[chosen]]
        made |= _guesses(real, labels, public)
        for name, images in made.items():
            near, alike, hit = (
                psnr(real, images),
                ssim(real, images),
                found(every, places[chosen], images),
            )
            values.setdefault(name, {})[k] = {
                **{"psnr": float(near.mean()), "best_psnr": float(near.max())},
                **{"ssim": float(alike.mean()), "found": float(hit.double().mean())},
            }
        pictures[k] = real, labels, made
    if not values:
        why = "nothing that left the clients belongs to a single image"
        return [Result("inversion", "images", note=why)], []
    results = [
        averaged("inversion", name, found, guess=name in (MEAN, NEAREST))
        for name, found in values.items()
    ]
    if NETWORK not in values:
        results.append(
            Result(
                "inversion", NETWORK, note="no embeddings left the clients, or not with the network"
            )
        )
    return results, _sheet(experiment, results, pictures)


def _attempts(
    experiment: Experiment, client: Client, told: Told, chosen: Tensor, public: Images
) -> Iterator[tuple[str, Tensor]]:
    spec = client.data.spec
    if told.rows is not None and told.network is not None and told.places is not None:
        own = client.data.labels[told.places[chosen]]
        attacker = _Attacker(experiment, client.id, told, told.network, public)
        rows = attacker.paired(
            told.rows[1], None if told.labels is None else told.labels[1], chosen, own
        )
        first = attacker.invert(rows)
        yield NETWORK, first
        if not attacker.means:
            yield SLOPE, attacker.descend(first, rows)
    if told.images is not None:
        yield DRAWN, visible(told.images[chosen], spec)
    if told.given is not None and told.places is not None:
        yield (
            GIVEN,
            _nearest(
                visible(client.data.batch(told.places[chosen]), spec), visible(told.given, spec)
            ),
        )


class _Attacker:
    """A server that turns one client's rows into images."""

    def __init__(
        self, experiment: Experiment, k: int, told: Told, network: Classifier, public: Images
    ) -> None:
        assert told.rows is not None
        self.experiment, self.k, self.told, self.network, self.spec = (
            experiment,
            k,
            told,
            network,
            public.spec,
        )
        self.guard, (self.part, rows) = guard_of(experiment), told.rows
        self.shape, self.views = rows.shape[1:], 1 if rows.ndim == 2 else rows.shape[1]
        mechanism: Mechanism | None = self.guard.plan.mechanisms.get(
            self.guard.plan.covers.get(self.part, "")
        )
        self.means = (
            mechanism is not None and mechanism.beside is not None
        )  # rows are those of classes, not of images
        alone = (
            isinstance(mechanism, Additive)
            and (mechanism.each or self.guard.plan.each(self.part)) == "image"
        )
        self.cut: Callable[[Tensor], Tensor] = mechanism.clipped if alone else lambda rows: rows  # type: ignore[union-attr]
        self.public = Images(public.pixels[:PUBLIC], public.labels[:PUBLIC], public.spec)

    def paired(self, rows: Tensor, labels: Tensor | None, chosen: Tensor, own: Tensor) -> Tensor:
        """The row that was told of each chosen image; where rows are those of classes, its class's, if there is one."""
        rows = rows.flatten(1)
        if not self.means or labels is None:
            return rows[chosen]
        first = [
            int(at[0]) if len(at := (labels == c).nonzero()[:, 0]) else -1
            for c in range(self.spec.classes)
        ]
        every = torch.cat(
            [rows, rows.mean(0, keepdim=True)]
        )  # of a class that nothing was told of, the mean of all
        return every[torch.tensor(first)[own]]

    def told_of(self, images: Images, stream: int) -> Tensor:
        """What this client would have told of other images, row by row."""
        everything = torch.arange(len(images))
        rows = embeddings(self.network, images, everything, parts_of(self.views))
        method, _, key = self.part.partition(".")
        answer = {**self.told.answers[method], key: rows.view(len(images), *self.shape)}
        if self.told.labels is not None:
            answer[self.told.labels[0].partition(".")[2]] = images.labels
        with torch.no_grad():
            client = Client(self.k, self.network, images.device, images, {})
            answer = self.guard.protect(client, method, answer, (), stream)
        labels = None if self.told.labels is None else answer[self.told.labels[0].partition(".")[2]]
        return self.paired(answer[key], labels, everything, images.labels)

    def invert(self, rows: Tensor) -> Tensor:
        """What a network makes of rows that has learnt from the attacker's images what was told of which image.

        It stops learning where it is nearest to some of these images that it does not learn from.
        """
        held = len(self.public) // 5
        copies = max(1, COPIES // len(self.public))
        x, y = self._pairs(self.public.pixels[held:], self.public.labels[held:], copies)
        x_held, y_held = self._pairs(self.public.pixels[:held], self.public.labels[:held], copies)
        mean, deviation = x.mean(0), x.std(0).clamp(min=1e-6)
        network = nn.Sequential(
            *(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, y.shape[1]), nn.Sigmoid()),
        )
        trainer, per_epoch = (
            Trainer.of(network, adam(1e-3, cosine=True)),
            epoch_length(len(x), BATCH),
        )
        batches, nearest, made = index_batches(len(x), BATCH, x.device), math.inf, rows
        for epoch in self.experiment.server.track(f"inversion of client {self.k}", range(EPOCHS)):
            for index in islice(batches, per_epoch):
                trainer.step(
                    lambda a, b: F.mse_loss(network(a), b), (x[index] - mean) / deviation, y[index]
                )
            trainer.anneal((epoch + 1) / EPOCHS)
            with torch.no_grad():
                distance = float(F.mse_loss(network((x_held - mean) / deviation), y_held))
                if distance < nearest:
                    nearest, made = distance, network((rows - mean) / deviation)
        return made.view(-1, *self.spec.shape)

    def _pairs(self, pixels: Tensor, labels: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        """What would be told of these images and of shifted copies of them, each time with other noise; and they."""
        shift = Augment(crop=max(1, pixels.shape[-1] // 8))
        every = [augmented(pixels, shift) if i else pixels for i in range(copies)]
        given, wanted = [], []
        for i, group in enumerate(
            [torch.cat(every)] if self.means else every
        ):  # the mean of more tells more
            images = Images(group, labels.repeat(len(group) // len(labels)), self.spec)
            stream = seeds.stream_seed(
                self.experiment.config.seed, "inversion", self.k, len(pixels), i
            )
            given.append(self.told_of(images, stream))
            wanted.append(visible(images.batch(torch.arange(len(images))), self.spec).flatten(1))
        return torch.cat(given), torch.cat(wanted)

    def descend(self, start: Tensor, rows: Tensor) -> Tensor:
        """Images near these whose embeddings, cut as the client's are, are nearest to the rows."""
        mean, deviation = statistics(self.spec, start.device)
        parts, images = parts_of(self.views), start.clone().requires_grad_(True)
        views = torch.arange(number(parts)).repeat(len(start))
        optimizer = torch.optim.Adam([images], lr=0.02)
        for _ in self.experiment.server.track(f"descent of client {self.k}", range(DESCENT)):
            x = ((images.clamp(0, 1) - mean) / deviation).repeat_interleave(number(parts), 0)
            made = self.cut(
                self.network.features(seen(x, views, parts, self.spec)).reshape(len(start), -1)
            )
            (images.grad,) = torch.autograd.grad((made - rows).square().sum(), images)
            optimizer.step()
        return images.detach().clamp(0, 1)


def _guesses(real: Tensor, labels: Tensor, public: Images) -> dict[str, Tensor]:
    """What needs nothing but the class: the mean of the attacker's images of it, and the nearest of them."""
    have = visible(public.batch(torch.arange(len(public))), public.spec)
    means, nearest = torch.empty_like(real), torch.empty_like(real)
    for i, (image, label) in enumerate(zip(real, labels, strict=True)):
        alike = have[public.labels == label] if bool((public.labels == label).any()) else have
        means[i], nearest[i] = alike.mean(0), _nearest(image[None], alike)[0]
    return {MEAN: means, NEAREST: nearest}


def _nearest(wanted: Tensor, have: Tensor) -> Tensor:
    """Of what one has, the nearest to each."""
    return have[torch.cdist(wanted.flatten(1), have.flatten(1)).argmin(1)]


def visible(images: Tensor, spec: Spec) -> Tensor:
    """Normalised images with pixels between 0 and 1."""
    mean, deviation = statistics(spec, images.device)
    return (images * deviation + mean).clamp(0, 1)


def _sheet(
    experiment: Experiment,
    results: list[Result],
    pictures: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]],
) -> list[Row]:
    """For each client, images, what the best attack made of them, and the best guess."""
    rows: list[Row] = []
    for k, (real, labels, made) in pictures.items():
        for guess in (False, True):
            best = max(
                (r for r in results if r.guess == guess and r.attack in made),
                key=lambda r: r.values["psnr"],
            )
            names = [experiment.task.classes[c] for c in labels[:COLUMNS]]
            before = None if guess else real[:COLUMNS].permute(0, 2, 3, 1)
            shown = made[best.attack][:COLUMNS].permute(0, 2, 3, 1)
            rows.append(
                (
                    "guess" if guess else f"client {k}",
                    before,
                    shown,
                    [""] * len(names) if guess else names,
                )
            )
    return rows
