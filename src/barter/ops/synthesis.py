"""Training a generator on what networks see in its images, and a network on what others see in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.contracts import Counts
from barter.core.images import Spec, statistics
from barter.core.model import Classifier
from barter.core.nodes import Node, Server
from barter.core.payload import State, isolate
from barter.core.record import Round
from barter.models.generators import Decoder, resized
from barter.ops.ensemble import class_shares
from barter.ops.fit import Recipe, Trainer
from barter.ops.prototypes import class_means
from barter.ops.statistics import compared
from barter.ops.zeroth import waves

__all__ = [
    "Artist",
    "Ensemble",
    "Output",
    "Player",
    "Rule",
    "assembled",
    "canvases",
    "collapsed",
    "diversity",
    "duel",
    "exhibited",
    "fidelity",
    "fidelity_by_label",
    "label_weights",
    "named",
    "painted",
    "painter",
    "pooled",
    "put_away",
    "shown",
    "spectrum",
    "useful",
    "variety",
    "within_range",
]

Output: TypeAlias = Literal["matched", "tanh"]
Rule: TypeAlias = Literal["student-wrong", "all", "differ"]


class Artist(Server):
    """A server with a generator of images."""

    generator: State = {}


class Ensemble(nn.Module):
    """The clients' models; their opinion is the mean of their logits, each weighted by how much it knows of a label."""

    def __init__(self, models: Iterable[Classifier]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def said(self, x: Tensor) -> Tensor:
        """What each of them says (clients, images, classes)."""
        return torch.stack(lanes.abreast([partial(model, x) for model in self.models]))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return (weights[:, :, None] * self.said(x)).sum(0)

    def inspected(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Their opinion, and how strange images look to them beside their own, by the statistics their networks keep.

        To each of them an image counts as its label does: of labels drawn as often as they came up, everybody then
        judges as many as it has.
        """

        def asked(model: nn.Module, known: Tensor) -> tuple[Tensor, Tensor]:
            with compared(model, known) as distances:
                said = known[:, None] * model(x).float()
            return said, known.mean() * sum(distances)

        jobs = [
            partial(asked, model, known) for model, known in zip(self.models, weights, strict=True)
        ]
        opinions, strangeness = zip(*lanes.abreast(jobs), strict=True)
        return torch.stack(opinions).sum(0), torch.stack(strangeness).sum()


class Teacher(TypedDict):
    """A client's model, and how many images of each class it has learned from."""

    weights: State
    counts: Annotated[Tensor, Counts("classes")]


def assembled(server: Server, weights: Mapping[int, State]) -> Ensemble:
    """The models that came back, frozen."""

    def new() -> Ensemble:
        return Ensemble(server.architectures[k]() for k in weights).to(server.device)

    ensemble = lanes.kept(("ensemble", *weights), new)
    for model, w in zip(ensemble.models, weights.values(), strict=True):
        model.load_state_dict(w)
    return ensemble.eval().requires_grad_(False)


def painter(server: Artist, width: int) -> Decoder:
    """The server's generator as the last round left it, for codes of this width."""
    generator = lanes.keep("generator", Decoder(width, server.spec).to(server.device))
    if server.generator:
        generator.load_state_dict(server.generator)
    return generator.train()


def painted(generator: Decoder, codes: Tensor, spec: Spec) -> Tensor:
    """The images that codes (images, width) stand for, as networks get to see them."""
    return resized(generator(codes[:, None]), spec)


def named(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Noise and labels as one code."""
    return torch.cat([z, F.one_hot(y, classes).to(z)], 1)


@torch.no_grad()
def put_away(server: Artist, generator: Decoder, codes: Tensor, y: Tensor | None = None) -> None:
    """Remember the generator, and report how different its images of these codes are.

    Without labels, an image is of the class that the server's model sees in it.
    """
    server.generator = isolate(dict(generator.state_dict()))
    x = painted(generator, codes, server.spec)
    server.report |= variety(x, server.model.eval()(x).argmax(1) if y is None else y)


@torch.no_grad()
def exhibited(
    party: Node, codes: Tensor, y: Tensor | None, wanted: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Labels and pictures of these codes, for the experimenter's eyes; nobody but an artist has any."""
    if not isinstance(party, Artist) or not party.generator:
        return None
    x = painted(painter(party, codes.shape[1]), codes, party.spec)
    labels = party.model.eval()(x).argmax(1) if y is None else y
    chosen = wanted(labels)
    return labels[chosen], x[chosen]


def fidelity(ensemble: Tensor, y: Tensor) -> Tensor:
    """L_fid: the clients together should see in an image what it was made for."""
    return F.cross_entropy(ensemble, y)


def fidelity_by_label(said: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Each client by itself should see it, as far as it knows the label (clients, images)."""
    wrong = F.cross_entropy(said.flatten(0, 1), y.repeat(len(said)), reduction="none").view_as(
        weights
    )
    return (weights * wrong).sum(0).mean()


def diversity(x: Tensor, h: Tensor, y: Tensor | None = None, *, norm: int = 2) -> Tensor:
    """L_div: what is made of different origins should differ, by mean squares or (norm 1) by means.

    With labels only pairs of one class count. Of all pairs nine in ten are of different classes, which fidelity keeps
    apart anyway: a generator that draws one image for each class has hardly anything left to gain.
    Not by norms: with those of the papers' equations the exponential underflows.
    """
    made, origins = x.flatten(1), h.flatten(1)
    apart = torch.cdist(made, made, p=norm).pow(norm) / made.shape[1]
    product = apart * torch.cdist(origins, origins).square() / origins.shape[1]
    if y is None:
        return torch.exp(-product.mean())
    alike = (y[:, None] == y).to(product).fill_diagonal_(0)
    return torch.exp(-(product * alike).sum() / alike.sum().clamp_min(1))


def spectrum(x: Tensor) -> Tensor:
    """Mean and standard deviation of images' frequencies (2, channels, height, width), the lowest first."""
    high, wide = (waves(size, size, x.device) for size in x.shape[-2:])
    rows = high.T @ x.float() @ wide
    return torch.stack([rows.mean(0), rows.std(0, correction=0)])


def pooled(spectra: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The spectrum of all images, from those of several parties with so many each."""
    shares = torch.tensor(sizes, device=spectra[0].device) / sum(sizes)
    means, deviations = torch.stack(list(spectra), 1)
    shares = shares.view(-1, *[1] * (means.dim() - 1))
    mean = (shares * means).sum(0)
    squares = (shares * (deviations.square() + means.square())).sum(0)
    return torch.stack([mean, (squares - mean.square()).clamp_min(0).sqrt()])


def canvases(count: int, known: Tensor) -> Tensor:
    """Images that show nothing, with frequencies like these: their variety is given, no generator can lose it."""
    high, wide = (waves(size, size, known.device) for size in known.shape[-2:])
    mean, deviation = known
    drawn: Tensor = (
        high @ (mean + deviation * torch.randn(count, *mean.shape, device=known.device)) @ wide.T
    )
    return drawn


def within_range(x: Tensor, spec: Spec) -> Tensor:
    """Images whose pixels are no darker than black and no brighter than white."""
    mean, std = statistics(spec, x.device)
    return torch.maximum(torch.minimum(x, (1 - mean) / std), -mean / std)


def useful(ensemble: Tensor, student: Tensor, y: Tensor, rule: Rule) -> Tensor:
    """1 for the images that a rule wants more of (ε of DFRD's Eq. 3; DENSE's is "differ")."""
    taught, known = ensemble.argmax(1), student.argmax(1)
    if rule == "student-wrong":
        return ((taught == y) & (known != y)).float()
    return (taught != known).float() if rule == "differ" else torch.ones_like(y, dtype=torch.float)


def label_weights(counts: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """τ (clients, classes) and p (classes) from how often each client saw each class; zero for classes nobody saw."""
    total = counts.sum(0)
    return class_shares(counts, smoothing) * (total > 0), total / total.sum()


def shown(drawn: Tensor, spec: Spec, output: Output) -> Tensor:
    """Images between -1 and 1 as networks get to see them: in the range of the data, or as they are."""
    if output == "tanh":
        return drawn
    mean, std = statistics(spec, drawn.device)
    return ((drawn + 1) / 2 - mean) / std


def variety(x: Tensor, y: Tensor) -> dict[str, float]:
    """How far images lie from the mean of their class, and the classes' means from each other; and what they show.

    Root mean squares over pixels, in standard deviations of the data. A generator that draws one image for each class
    has no variety; one that draws the same for all classes has no contrast. Of a class's single image nothing follows.
    Then how many classes are shown, and how many images there are of the one with the fewest.
    """
    rows = x.flatten(1).float()
    classes, place = torch.unique(y, return_inverse=True)
    means = class_means(rows, y)["vectors"][place]
    within = (rows - means).square().mean(1).sum() / max(1, len(rows) - len(classes))
    between = (means - rows.mean(0)).square().mean()
    looks = {"variety": float(within.sqrt()), "contrast": float(between.sqrt())}
    return {
        **looks,
        "shown_classes": float(len(classes)),
        "shown_fewest": float(torch.bincount(place).min()),
    }


# The variety of images of one class, in standard deviations of the data: digits have 0.55, Fashion-MNIST 0.65.
USUAL = 0.5


def collapsed(rounds: Sequence[Round], way_out: str) -> list[str]:
    """A remark on a run whose last images of a class are less than a tenth as different as images usually are."""
    found = rounds[-1].server.get("variety") if rounds else None
    if found is None or found >= USUAL / 10:
        return []
    return [
        f"the generator has collapsed: its images of one class differ by {found:.3f} standard deviations of the data, "
        f"where those of a class usually differ by {USUAL}; {way_out}"
    ]


@dataclass(frozen=True)
class Player:
    """A module that is trained, so many steps a turn, each on a batch that is drawn for it."""

    module: nn.Module
    recipe: Recipe
    loss: Callable[..., Tensor]
    draw: Callable[[], Sequence[Tensor]]
    steps: int


def duel(
    server: Server,
    generator: Player,
    student: Player,
    turns: int,
    *,
    training: bool,
    lasting: bool = True,
) -> None:
    """Generator and student in turn: one looks for images that teach the other something.

    The student is frozen while the generator learns, and normalises by its batch only if it is `training`. Optimizers
    last for all turns, or for one.
    """
    losses, model = torch.zeros(2, device=server.device), student.module
    for turn in server.track("distil", range(turns)):
        if turn == 0 or not lasting:
            drawing = Trainer.of(generator.module.train(), generator.recipe)
            learning = Trainer.of(model, student.recipe)
        model.eval().requires_grad_(False)
        for _ in range(generator.steps):
            losses[0] += drawing.step(generator.loss, *generator.draw())
        model.train(training).requires_grad_(True)
        for _ in range(student.steps):
            losses[1] += learning.step(student.loss, *student.draw())
    for k, (name, steps) in enumerate((("generator", generator.steps), ("global", student.steps))):
        server.report[f"{name}_steps"] = float(turns * steps)
        server.report[f"{name}_loss"] = float(losses[k]) / (turns * steps)
