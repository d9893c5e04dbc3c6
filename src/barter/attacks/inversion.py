"""Inversion: reconstruct private images from what was uploaded for each.

The attacker is the server. It has each client's uploaded network and images of the same kind that
belong to no client, and it knows how answers are protected. It computes what a client would upload
for the attacker's own images, and trains a network that maps uploads back to images. From its
output, gradient descent on the image minimises the distance between the image's embedding and the
uploaded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.attacks.measures import is_nearest_original, psnr, ssim
from barter.attacks.overheard import Upload, clients_of, guard_of
from barter.attacks.result import Result, mean_result
from barter.core import seeds
from barter.core.images import Augment, Images, Spec, augment_images, channel_statistics
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.experiment import Experiment
from barter.ops.fit import Trainer, adam, epoch_length, index_batches
from barter.ops.views import count_views, embed_all_views, extract_views, parts_of_views
from barter.privacy.mechanisms import Additive
from barter.runs.picture import ImageRow

__all__ = ["inversion_attacks"]

N_RECONSTRUCTED = 30  # number of each client's images to reconstruct
PUBLIC = 500  # limit on the attacker's images to learn from
COPIES = 1500  # approximate number of training pairs, with shifted copies and new noise
EPOCHS = 25
INVERSION_BATCH = 100
WIDTH = 256  # width of the attacker's network
DESCENT = 150  # steps of gradient descent on an image
SHEET_COLUMNS = 10  # images per row of the sheet

# Names of attacks.
NETWORK = "network from embeddings"
SLOPE = "descent from there"
DECODED = "transfer images"
GIVEN = "nearest of the images given away"
# Names of baselines that use no upload.
CLASS_MEAN = "mean of the class"
NEAREST = "nearest image of the class"


def inversion_attacks(
    experiment: Experiment, uploads: dict[int, Upload], public: Images
) -> tuple[list[Result], list[ImageRow]]:
    """Run every inversion attack that the clients' uploads allow.

    Args:
        experiment: The attacked run.
        uploads: What each client uploaded.
        public: The attacker's images.

    Returns:
        The results, and rows of a sheet with private images and their best reconstructions.
    """
    values: dict[str, dict[int, dict[str, float]]] = {}
    pictures: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]] = {}
    for k, client in clients_of(experiment).items():
        if k not in uploads or (places := uploads[k].places) is None:
            continue
        chosen = torch.arange(min(N_RECONSTRUCTED, len(places)))
        with seeds.scope(experiment.config.seed, "inversion", k):
            reconstructions = dict(_attempts(experiment, client, uploads[k], chosen, public))
        every = denormalise(client.data.batch(torch.arange(len(client.data))), client.data.spec)
        originals = places[chosen]
        real = every[originals]
        labels = client.data.labels[originals]
        reconstructions |= _guesses(real, labels, public)
        for name, images in reconstructions.items():
            decibels = psnr(real, images)
            values.setdefault(name, {})[k] = {
                "psnr": float(decibels.mean()),
                "best_psnr": float(decibels.max()),
                "ssim": float(ssim(real, images).mean()),
                "found": float(is_nearest_original(every, originals, images).double().mean()),
            }
        pictures[k] = (real, labels, reconstructions)
    if not values:
        why = "nothing that left the clients belongs to a single image"
        return [Result("inversion", "images", note=why)], []
    results = [
        mean_result("inversion", name, by_client, guess=name in (CLASS_MEAN, NEAREST))
        for name, by_client in values.items()
    ]
    if NETWORK not in values:
        why = "no embeddings left the clients, or not with the network"
        results.append(Result("inversion", NETWORK, note=why))
    return results, _sheet(experiment, results, pictures)


def _attempts(
    experiment: Experiment, client: Client, upload: Upload, chosen: Tensor, public: Images
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the reconstructions of each attack on one client.

    Args:
        experiment: The attacked run.
        client: The attacked client.
        upload: What it uploaded.
        chosen: Indices of the rows to reconstruct.
        public: The attacker's images.
    """
    spec = client.data.spec
    if upload.rows is not None and upload.network is not None and upload.places is not None:
        true_labels = client.data.labels[upload.places[chosen]]
        labels = None if upload.labels is None else upload.labels[1]
        attacker = _Attacker(experiment, client.id, upload, upload.network, public)
        rows = attacker.match_rows(upload.rows[1], labels, chosen, true_labels)
        first = attacker.invert(rows)
        yield NETWORK, first
        if not attacker.means:
            yield SLOPE, attacker.descend(first, rows)
    if upload.images is not None:
        yield DECODED, denormalise(upload.images[chosen], spec)
    if upload.given is not None and upload.places is not None:
        real = denormalise(client.data.batch(upload.places[chosen]), spec)
        yield GIVEN, _nearest(real, denormalise(upload.given, spec))


class _Attacker:
    """A server that reconstructs images from the rows of one client.

    Args:
        experiment: The attacked run.
        k: The client's id.
        upload: What the client uploaded, with rows.
        network: The client's network.
        public: The attacker's images.
    """

    def __init__(
        self, experiment: Experiment, k: int, upload: Upload, network: Classifier, public: Images
    ) -> None:
        assert upload.rows is not None
        part, rows = upload.rows
        self.experiment = experiment
        self.k = k
        self.upload = upload
        self.network = network
        self.spec = public.spec
        self.guard = guard_of(experiment)
        self.part = part
        self.shape = rows.shape[1:]
        self.views = 1 if rows.ndim == 2 else rows.shape[1]
        self.public = Images(public.pixels[:PUBLIC], public.labels[:PUBLIC], public.spec)
        plan = self.guard.plan
        self.mechanism = plan.mechanisms.get(plan.covers.get(part, ""))
        # Whether rows are means of classes, and do not belong to single images.
        self.means = self.mechanism is not None and self.mechanism.second_key is not None

    def clip(self, rows: Tensor) -> Tensor:
        """Return rows clipped as the client does; unchanged unless it clips single rows."""
        mechanism = self.mechanism
        if not isinstance(mechanism, Additive):
            return rows
        by_row = (mechanism.each or self.guard.plan.each(self.part)) == "image"
        return mechanism.clip_rows(rows) if by_row else rows

    def match_rows(
        self, rows: Tensor, labels: Tensor | None, chosen: Tensor, own: Tensor
    ) -> Tensor:
        """Return the uploaded row of each chosen image, flattened (chosen, numbers).

        If rows are means of classes, this is the row of the image's class, or the mean of all rows
        for a class without a row.

        Args:
            rows: The uploaded rows.
            labels: The uploaded labels of the rows; None if there are none.
            chosen: For each image, the index of its row, unless rows are means of classes.
            own: The true labels of the chosen images.
        """
        rows = rows.flatten(1)
        if not self.means or labels is None:
            return rows[chosen]
        candidates = torch.cat([rows, rows.mean(0, keepdim=True)])
        row_of_class = torch.full((self.spec.classes,), -1)
        for c in range(self.spec.classes):
            matches = (labels == c).nonzero()[:, 0]
            if len(matches):
                row_of_class[c] = matches[0]
        return candidates[row_of_class[own]]

    def rows_for(self, images: Images, stream: int) -> Tensor:
        """Return the protected rows that this client would upload for other images.

        They are flattened, one per image, see `match_rows`.

        Args:
            images: The images.
            stream: The seed of the mechanism's noise.
        """
        everything = torch.arange(len(images))
        rows = embed_all_views(self.network, images, everything, parts_of_views(self.views))
        method, _, key = self.part.partition(".")
        label_key = None if self.upload.labels is None else self.upload.labels[0].partition(".")[2]
        answer = {**self.upload.answers[method], key: rows.view(len(images), *self.shape)}
        if label_key is not None:
            answer[label_key] = images.labels
        with torch.no_grad():
            client = Client(self.k, self.network, images.device, images, {})
            answer = self.guard.protect(client, method, answer, (), stream)
        labels = None if label_key is None else answer[label_key]
        return self.match_rows(answer[key], labels, everything, images.labels)

    def invert(self, rows: Tensor) -> Tensor:
        """Reconstruct images with a network trained on the attacker's images.

        The reconstructions come from the epoch with the smallest error on held-out images.

        Args:
            rows: The uploaded row of each image, flattened.

        Returns:
            Images of the spec's shape, with pixels between 0 and 1.
        """
        held = len(self.public) // 5
        copies = max(1, COPIES // len(self.public))
        x, y = self._pairs(self.public.pixels[held:], self.public.labels[held:], copies)
        x_held, y_held = self._pairs(self.public.pixels[:held], self.public.labels[:held], copies)
        mean = x.mean(0)
        deviation = x.std(0).clamp(min=1e-6)
        network = nn.Sequential(
            nn.Linear(x.shape[1], WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, y.shape[1]),
            nn.Sigmoid(),
        )

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(network(inputs), targets)

        trainer = Trainer.of(network, adam(1e-3, cosine=True))
        per_epoch = epoch_length(len(x), INVERSION_BATCH)
        batches = index_batches(len(x), INVERSION_BATCH, x.device)
        smallest = math.inf
        best = rows
        for epoch in self.experiment.server.track(f"inversion of client {self.k}", range(EPOCHS)):
            for index in islice(batches, per_epoch):
                trainer.step(loss, (x[index] - mean) / deviation, y[index])
            trainer.anneal((epoch + 1) / EPOCHS)
            with torch.no_grad():
                error = float(F.mse_loss(network((x_held - mean) / deviation), y_held))
                if error < smallest:
                    smallest = error
                    best = network((rows - mean) / deviation)
        return best.view(-1, *self.spec.shape)

    def _pairs(self, pixels: Tensor, labels: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        """Return training pairs for the attacker's network.

        Args:
            pixels: The attacker's images.
            labels: Their labels.
            copies: The number of copies of each image; all but the first are shifted at random, and
                each has new noise.

        Returns:
            The rows that the client would upload, and the flattened images.
        """
        shift = Augment(crop=max(1, pixels.shape[-1] // 8))
        groups = [augment_images(pixels, shift) if i else pixels for i in range(copies)]
        if self.means:  # The mean over more images is more informative.
            groups = [torch.cat(groups)]
        inputs = []
        targets = []
        for i, group in enumerate(groups):
            images = Images(group, labels.repeat(len(group) // len(labels)), self.spec)
            stream = seeds.stream_seed(
                self.experiment.config.seed, "inversion", self.k, len(pixels), i
            )
            inputs.append(self.rows_for(images, stream))
            targets.append(
                denormalise(images.batch(torch.arange(len(images))), self.spec).flatten(1)
            )
        return torch.cat(inputs), torch.cat(targets)

    def descend(self, start: Tensor, rows: Tensor) -> Tensor:
        """Refine images by gradient descent on their embeddings' distance to rows.

        Args:
            start: The first reconstructions, with pixels between 0 and 1.
            rows: The uploaded rows, flattened, to which clipped embeddings are compared.

        Returns:
            The refined images, with pixels between 0 and 1.
        """
        mean, deviation = channel_statistics(self.spec, start.device)
        parts = parts_of_views(self.views)
        images = start.clone().requires_grad_(True)
        views = torch.arange(count_views(parts)).repeat(len(start))
        optimizer = torch.optim.Adam([images], lr=0.02)
        for _ in self.experiment.server.track(f"descent of client {self.k}", range(DESCENT)):
            x = ((images.clamp(0, 1) - mean) / deviation).repeat_interleave(count_views(parts), 0)
            features = self.network.features(extract_views(x, views, parts, self.spec))
            computed = self.clip(features.reshape(len(start), -1))
            (images.grad,) = torch.autograd.grad((computed - rows).square().sum(), images)
            optimizer.step()
        return images.detach().clamp(0, 1)


def _guesses(real: Tensor, labels: Tensor, public: Images) -> dict[str, Tensor]:
    """Return baselines by class: the attacker's mean and nearest image of it.

    For a class of which the attacker has no image, all of its images count.

    Args:
        real: The private images.
        labels: Their labels.
        public: The attacker's images.
    """
    have = denormalise(public.batch(torch.arange(len(public))), public.spec)
    means = torch.empty_like(real)
    nearest = torch.empty_like(real)
    for i, (image, label) in enumerate(zip(real, labels, strict=True)):
        same_class = public.labels == label
        candidates = have[same_class] if bool(same_class.any()) else have
        means[i] = candidates.mean(0)
        nearest[i] = _nearest(image[None], candidates)[0]
    return {CLASS_MEAN: means, NEAREST: nearest}


def _nearest(wanted: Tensor, have: Tensor) -> Tensor:
    """Return the nearest of `have` to each wanted image, by Euclidean pixel distance."""
    return have[torch.cdist(wanted.flatten(1), have.flatten(1)).argmin(1)]


def denormalise(images: Tensor, spec: Spec) -> Tensor:
    """Return normalised images with pixels from 0 to 1; values beyond are clamped."""
    mean, deviation = channel_statistics(spec, images.device)
    return (images * deviation + mean).clamp(0, 1)


def _sheet(
    experiment: Experiment,
    results: list[Result],
    pictures: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]],
) -> list[ImageRow]:
    """Return two rows per client: private images and best attack; best guess.

    Args:
        experiment: The attacked run.
        results: The results of all attacks.
        pictures: For each client private images, their labels, and reconstructions by attack.
    """

    def best(reconstructions: dict[str, Tensor], guess: bool) -> Tensor:
        candidates = [r for r in results if r.guess == guess and r.attack in reconstructions]
        attack = max(candidates, key=lambda r: r.values["psnr"]).attack
        return reconstructions[attack][:SHEET_COLUMNS].permute(0, 2, 3, 1)

    rows: list[ImageRow] = []
    for k, (real, labels, reconstructions) in pictures.items():
        names = [experiment.task.classes[c] for c in labels[:SHEET_COLUMNS]]
        originals = real[:SHEET_COLUMNS].permute(0, 2, 3, 1)
        rows.append((f"client {k}", originals, best(reconstructions, False), names))
        rows.append(("guess", None, best(reconstructions, True), [""] * len(names)))
    return rows
