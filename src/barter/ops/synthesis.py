"""Data-free distillation: a generator of images, and a student trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.compute.batches import Batch
from barter.core import robust
from barter.core.contracts import Counts
from barter.core.images import Spec, channel_statistics
from barter.core.model import Classifier
from barter.core.nodes import Node, Server
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import Decoder, resize_images
from barter.ops.ensemble import class_shares
from barter.ops.fit import Recipe, Trainer
from barter.ops.modules import copy_state, restore_module
from barter.ops.prototypes import class_means
from barter.ops.statistics import compare_statistics
from barter.ops.zeroth import waves

__all__ = [
    "Artist",
    "Ensemble",
    "Output",
    "Player",
    "Rule",
    "build_ensemble",
    "collapse_remarks",
    "diversity",
    "fidelity",
    "fidelity_by_label",
    "generate_from_codes",
    "images_for_display",
    "joint_prediction",
    "label_codes",
    "label_weights",
    "merge_spectra",
    "sample_canvases",
    "server_generator",
    "spectrum",
    "store_generator",
    "to_network_input",
    "train_alternately",
    "usefulness",
    "variety",
    "within_range",
]

Output: TypeAlias = Literal["matched", "tanh"]
Rule: TypeAlias = Literal["student-wrong", "all", "differ"]


class Artist(Server):
    """A server with an image generator."""

    generator: State = {}  # the generator of the last round; empty before the first


def joint_prediction(predictions: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of predictions, or their robust aggregate.

    The run's defence on logits decides which.

    Args:
        predictions: Logits or probabilities (clients, images, classes).
        weights: Weight of each client for each image (clients, images).

    Returns:
        Joint predictions (images, classes).
    """
    if robust.active().defends("logits"):
        return robust.aggregate(predictions, "logits", weights[:, :, None])
    return (weights[:, :, None] * predictions).sum(0)


class Ensemble(nn.Module):
    """The clients' models as one: the mean of their logits, weighted for each image."""

    def __init__(self, models: Iterable[Classifier]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def logits_by_model(self, x: Tensor) -> Tensor:
        """Return the logits of every model (clients, images, classes)."""
        return torch.stack(lanes.run_branches([partial(model, x) for model in self.models]))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the models' logits; weights are (clients, images).

        The run's defence replaces the sum.
        """
        return joint_prediction(self.logits_by_model(x), weights)

    def logits_and_distance(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ensemble's logits, and the images' distance from batch statistics.

        The distance is DeepInversion's, from the running statistics of each model's batch
        normalisation (`compare_statistics`), summed over layers and models. An image counts in a
        model's distance by its weight there, and the model by its mean weight. The run's defence
        replaces the sum of logits, and drops the distances of outlying models.

        Args:
            x: Normalised images.
            weights: Weight of each client for each image (clients, images).

        Returns:
            Logits (images, classes), and a scalar.
        """

        def inspect(model: nn.Module, image_weights: Tensor) -> tuple[Tensor, Tensor]:
            with compare_statistics(model, image_weights) as distances:
                logits = model(x).float()
            return logits, image_weights.mean() * sum(distances)

        jobs = [
            partial(inspect, model, image_weights)
            for model, image_weights in zip(self.models, weights, strict=True)
        ]
        logits, distances = zip(*lanes.run_branches(jobs), strict=True)
        joint = joint_prediction(torch.stack(logits), weights)
        return joint, robust.without_outliers(torch.stack(distances), "logits").sum()


class Teacher(TypedDict):
    """A client's model, and its number of training images of each class."""

    weights: State
    counts: Annotated[Tensor, Counts("classes")]


def build_ensemble(server: Server, weights: Mapping[int, State]) -> Ensemble:
    """Return the frozen ensemble of the models that clients uploaded.

    Its models are in the order of `weights`, in evaluation mode. On a lane the next call for the
    same clients returns the same module with other weights.
    """

    def new() -> Ensemble:
        return Ensemble(server.architectures[k]() for k in weights).to(server.device)

    ensemble = lanes.lane_module(("ensemble", *weights), new)
    for model, w in zip(ensemble.models, weights.values(), strict=True):
        model.load_state_dict(w)
    return ensemble.eval().requires_grad_(False)


def server_generator(server: Artist, width: int) -> Decoder:
    """Return the server's generator, in training mode, with its last weights.

    At first the weights are random.

    Args:
        server: The server.
        width: Length of the codes.
    """
    new = Decoder(width, server.spec)
    return restore_module(server, "generator", new, server.generator).train()


def generate_from_codes(generator: Decoder, codes: Tensor, spec: Spec) -> Tensor:
    """Generate an image per code (images, width), resized to the networks' input."""
    return resize_images(generator(codes[:, None]), spec)


def label_codes(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Concatenate noise (N, d) and one-hot labels to codes (N, d + classes)."""
    return torch.cat([z, F.one_hot(y, classes).to(z)], 1)


@torch.no_grad()
def store_generator(
    server: Artist, generator: Decoder, codes: Tensor, y: Tensor | None = None
) -> None:
    """Store the generator at the server, and report the variety of its images.

    Args:
        server: The server, whose `generator` and `report` are updated.
        generator: The generator.
        codes: Codes of the images by which variety is measured.
        y: Labels of the codes; if None, the predictions of the server's model, which is left in
            evaluation mode.
    """
    server.generator = copy_state(generator)
    x = generate_from_codes(generator, codes, server.spec)
    server.report |= variety(x, server.model.eval()(x).argmax(1) if y is None else y)


@torch.no_grad()
def images_for_display(
    party: Node, codes: Tensor, y: Tensor | None, wanted: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return labels and generated images for display; None without a generator.

    Args:
        party: The party; only an `Artist` has a generator.
        codes: The codes.
        y: Labels of the codes; if None, the predictions of the party's model, which is left in
            evaluation mode.
        wanted: Called with all labels; returns the indices of the images to show.
    """
    if not isinstance(party, Artist) or not party.generator:
        return None
    x = generate_from_codes(server_generator(party, codes.shape[1]), codes, party.spec)
    labels = party.model.eval()(x).argmax(1) if y is None else y
    chosen = wanted(labels)
    return labels[chosen], x[chosen]


def fidelity(ensemble: Tensor, y: Tensor) -> Tensor:
    """Return L_fid: mean cross entropy of the ensemble's logits with the labels."""
    return F.cross_entropy(ensemble, y)


def fidelity_by_label(logits: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the clients' cross entropies, averaged over images.

    Args:
        logits: Logits (clients, images, classes).
        y: Labels of the images.
        weights: Weights (clients, images): how well a client knows the label of an image.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none")
    return (weights * losses.view_as(weights)).sum(0).mean()


def diversity(x: Tensor, h: Tensor, y: Tensor | None = None, *, norm: int = 2) -> Tensor:
    """Return L_div, which falls as images of different inputs differ more.

    It is exp(-m), where m is the mean over all pairs of image distance times input distance, each
    image with itself included. With labels it is the mean over pairs of different images of one
    class, and the loss is 1 if there are none.

    The distances are mean squares, not norms: with the norms of the papers' equations the
    exponential underflows.

    Args:
        x: The generated images.
        h: The inputs that they were generated from.
        y: Labels. With them only pairs of one class count: nine in ten of all pairs are of
            different classes, which fidelity keeps apart anyway, so that a generator that makes one
            image per class would have hardly anything left to gain.
        norm: 2 compares images by mean squared, 1 by mean absolute differences.
    """
    images = x.flatten(1)
    inputs = h.flatten(1)
    image_distance = torch.cdist(images, images, p=norm).pow(norm) / images.shape[1]
    product = image_distance * torch.cdist(inputs, inputs).square() / inputs.shape[1]
    if y is None:
        return torch.exp(-product.mean())
    same_class = (y[:, None] == y).to(product).fill_diagonal_(0)
    return torch.exp(-(product * same_class).sum() / same_class.sum().clamp_min(1))


def spectrum(x: Tensor) -> Tensor:
    """Return mean and standard deviation of the images' cosine transform.

    Args:
        x: Images (images, channels, height, width).

    Returns:
        A tensor (2, channels, height, width), lowest frequency first.
    """
    height, width = x.shape[-2:]
    vertical = waves(height, height, x.device)
    horizontal = waves(width, width, x.device)
    frequencies = vertical.T @ x.float() @ horizontal
    return torch.stack([frequencies.mean(0), frequencies.std(0, correction=0)])


def merge_spectra(spectra: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the spectrum of all images, exactly, from those of several parties.

    Args:
        spectra: Each party's spectrum.
        sizes: Each party's number of images.
    """
    weights = torch.tensor(sizes, device=spectra[0].device) / sum(sizes)
    means, deviations = torch.stack(list(spectra), 1)
    weights = weights.view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    squares = (weights * (deviations.square() + means.square())).sum(0)
    return torch.stack([mean, (squares - mean.square()).clamp_min(0).sqrt()])


def sample_canvases(count: int, known: Tensor) -> Tensor:
    """Return random images with a given spectrum and no content.

    The result is (count, channels, height, width). Frequencies are independent and normal. The
    images' variety is that of the spectrum, so that no generator can lose it.

    Args:
        count: Number of images.
        known: Mean and standard deviation of the frequencies, from `spectrum`.
    """
    height, width = known.shape[-2:]
    vertical = waves(height, height, known.device)
    horizontal = waves(width, width, known.device)
    mean, deviation = known
    frequencies = mean + deviation * torch.randn(count, *mean.shape, device=known.device)
    images: Tensor = vertical @ frequencies @ horizontal.T
    return images


def within_range(x: Tensor, spec: Spec) -> Tensor:
    """Clamp normalised images to valid pixels, between black and white."""
    mean, std = channel_statistics(spec, x.device)
    return torch.maximum(torch.minimum(x, (1 - mean) / std), -mean / std)


def usefulness(ensemble: Tensor, student: Tensor, y: Tensor, rule: Rule) -> Tensor:
    """Return 1 for images worth more training, otherwise 0 (ε of DFRD's Eq. 3).

    Args:
        ensemble: The ensemble's logits.
        student: The student's logits.
        y: The images' labels.
        rule: "student-wrong" wants images whose label the ensemble predicts and the student does
            not, "differ" (DENSE) those on which the two predictions differ, "all" every image.
    """
    teacher_class = ensemble.argmax(1)
    student_class = student.argmax(1)
    if rule == "student-wrong":
        return ((teacher_class == y) & (student_class != y)).float()
    if rule == "differ":
        return (teacher_class != student_class).float()
    return torch.ones_like(y, dtype=torch.float)


def label_weights(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return τ (clients, classes) and p (classes) from the clients' class counts.

    τ is each client's share of a class's images, zero for classes that no client has seen; p is the
    frequency of each class over all clients. At least one count must be positive.
    """
    total = counts.sum(0)
    return class_shares(counts) * (total > 0), total / total.sum()


def to_network_input(images: Tensor, spec: Spec, output: Output) -> Tensor:
    """Convert images between -1 and 1 to inputs of the networks.

    Args:
        images: The images.
        spec: Format of the inputs.
        output: "matched" brings them to the range of normalised data, "tanh" leaves them as they
            are.
    """
    if output == "tanh":
        return images
    mean, std = channel_statistics(spec, images.device)
    return ((images + 1) / 2 - mean) / std


def variety(x: Tensor, y: Tensor) -> dict[str, float]:
    """Measure how varied synthetic images are, within classes and between them.

    Distances are root mean squares over pixels and images, in the units of `x`: standard deviations
    of the data if it is normalised. A generator that makes one image per class has no variety; one
    that makes the same image for all classes has no contrast.

    Args:
        x: The images (N, C, H, W), at least one.
        y: Their classes (N,).

    Returns:
        `variety`, the distance of images from the mean of their class, with the squares divided by
        N - classes instead of N, so that a class with a single image does not count (0 if all
        are); `contrast`, the distance of each image's class mean from the mean of all images;
        `shown_classes`, the number of classes in `y`; and `shown_fewest`, the number of images of
        the rarest of them.
    """
    rows = x.flatten(1).float()
    classes, class_index = torch.unique(y, return_inverse=True)
    means = class_means(rows, y)["vectors"][class_index]
    within = (rows - means).square().mean(1).sum() / max(1, len(rows) - len(classes))
    between = (means - rows.mean(0)).square().mean()
    return {
        "variety": float(within.sqrt()),
        "contrast": float(between.sqrt()),
        "shown_classes": float(len(classes)),
        "shown_fewest": float(torch.bincount(class_index).min()),
    }


# Typical variety of real images of one class, in standard deviations of the data: digits have 0.55,
# Fashion-MNIST 0.65.
REAL_VARIETY = 0.5


def collapse_remarks(rounds: Sequence[Round], advice: str) -> list[str]:
    """Return a warning if the generator collapsed in the last round.

    It has collapsed if the `variety` that the server recorded is below a tenth of REAL_VARIETY,
    that of real images.

    Args:
        rounds: The records of the run.
        advice: What to change, the end of the warning.

    Returns:
        One warning, or an empty list; also empty if the last round recorded no variety.
    """
    last = rounds[-1].server.get("variety") if rounds else None
    if last is None or last >= REAL_VARIETY / 10:
        return []
    return [
        f"the generator has collapsed: its images of one class differ by {last:.3f} standard "
        f"deviations of the data, where those of a class usually differ by {REAL_VARIETY}; {advice}"
    ]


@dataclass(frozen=True)
class Player:
    """One of two modules that are trained alternately, with its loss and its batches."""

    module: nn.Module
    recipe: Recipe
    loss: Callable[..., Tensor]
    draw: Callable[[], Sequence[Batch]]  # samples a batch, the arguments of the loss
    steps: int  # consecutive steps in each turn


def train_alternately(
    server: Server,
    generator: Player,
    student: Player,
    turns: int,
    *,
    training: bool,
    lasting: bool = True,
) -> None:
    """Train a generator and a student alternately, both in place.

    The student is frozen and in evaluation mode while the generator is trained; in the end all its
    parameters are trainable. Learning rates stay constant. The mean losses and the numbers of steps
    are put into the server's report as generator_loss, generator_steps, global_loss and
    global_steps.

    Args:
        server: The server, which reports progress and losses.
        generator: The generator, trained first in each turn.
        student: The student.
        turns: Number of turns, at least 1; each player must have steps.
        training: Have the student normalise by its batch while it is trained; otherwise it stays in
            evaluation mode.
        lasting: Keep the optimizers' state over all turns; otherwise each turn starts with new
            ones.
    """
    model = student.module
    losses = torch.zeros(2, device=server.device)
    for turn in server.track("distil", range(turns)):
        if turn == 0 or not lasting:
            generator_trainer = Trainer.of(generator.module.train(), generator.recipe)
            student_trainer = Trainer.of(model, student.recipe)
        model.eval().requires_grad_(False)
        for _ in range(generator.steps):
            losses[0] += generator_trainer.step(generator.loss, *generator.draw())
        model.train(training).requires_grad_(True)
        for _ in range(student.steps):
            losses[1] += student_trainer.step(student.loss, *student.draw())
    generator_steps = turns * generator.steps
    student_steps = turns * student.steps
    server.report["generator_steps"] = float(generator_steps)
    server.report["generator_loss"] = float(losses[0]) / generator_steps
    server.report["global_steps"] = float(student_steps)
    server.report["global_loss"] = float(losses[1]) / student_steps
