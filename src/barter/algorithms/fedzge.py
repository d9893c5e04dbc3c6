"""FedZGE: Ma et al., "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025,
Algorithm 1.

Clients keep their networks to themselves: they only answer queries with logits. One round
(Algorithm 1):

1. Clients train on their private images.
2. The server generates images and slightly perturbed copies of them. Clients upload logits on all
   of them, from whose differences the server estimates the gradient that trains the generator.
3. The server distils the clients' ensemble logits on the generated images into its own model.
4. The server sends the ensemble logits to the clients, which learn from them too.

Differences from the paper, where it is silent or contradicts itself:

- One generator step and one batch of queries per round: only these give the paper's byte counts.
- `direction`: Eq. 17 has Gaussian directions and a factor d. The factor belongs to directions on
  the unit sphere, which the authors' code samples; with "gaussian" the factor is 1.
- Eq. 7 has norms, with which the exponential underflows; the mean squares of the code are used.
  Eq. 9 is minimised.
- The images of a round's distillation are those generated before the generator's step.
- Labels cycle through the classes instead of being sampled, so that all are equally frequent.
- The server's model is the first client's network; the paper's is the largest of its clients'.

Preset "paper" is the authors' code: one difference of the full batch's loss per direction, a new
optimizer in each round, batch statistics in queries and distillation, images between -1 and 1
whatever the range of the data. It leaves out what is a mistake there: entropies that mix two
batches, evaluation of test images in training mode, and reporting the best epoch. Data are
normalised and augmented as the task says.

In training mode, generated images would update the running statistics of normalisation, with which
networks are evaluated here and never in the authors' code. So queries leave a client's statistics
unchanged, and after distillation the client recomputes them on its own images. The server has only
generated images, and its model keeps their statistics; its accuracy with the statistics of each
test batch, which the authors log, is `global_by_batch` in the record.

Differences from the paper by default (preset "sound"). A generator that only has to satisfy the
clients generates one image per class, from which no network learns (docs/background/fedzge.md has
the numbers). So:

- `canvas`: the generator modifies canvases, random images whose frequencies have the mean and
  deviation of the data's, which clients upload. This gives variety.
- `pairs`: diversity is asked for within classes, where variety is lost.
- `weighting`: a client is weighted by its number of images of a class, which it uploads.
- `rehearse`, `memory`: clients see private images in every step of distillation, and the generated
  images of the last rounds in local training.
- `balanced`: networks do not learn the local class prior, which would contradict what others know.
  Clients add it to their logits for images of their own distribution, and not in their answers.
- `generator_steps`: the round's images are split into portions with a step of the generator after
  each, for the same bytes.
- `frequencies`: perturbations have low frequencies.
- `estimator`: differences are of logits, multiplied by the exact derivative of the loss; parts of
  the loss that need no client are differentiated exactly.
- `lasting_optimizer`: the generator's optimizer is kept over rounds.
- `output`: images have the range of the data.
- `eps`: a perturbation large enough for float32, in which queries are computed on any device.
- `tau`, `generator_lr`, `distil_batch`, `distil_lr`, `global_steps`, `local_steps`: other values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.compute.precision import full_precision
from barter.core import robust
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients, Replies
from barter.core.contracts import Content, Counts, Floats, When
from barter.core.evaluation import add_offset, predict, record_before_exchange
from barter.core.images import Augment, Images, Spec, channel_statistics, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import LabelGenerator
from barter.models.width import without_running_statistics
from barter.ops.distill import kl, tempered_kl
from barter.ops.ensemble import class_shares, merge_logits
from barter.ops.fit import LabelledBatch, Trainer, adam, epoch_length, fit, index_batches
from barter.ops.modules import stack_field
from barter.ops.shares import log_class_prior
from barter.ops.statistics import normalise_by_batch, renew_statistics
from barter.ops.synthesis import (
    Output,
    collapse_remarks,
    diversity,
    fidelity,
    merge_spectra,
    sample_canvases,
    spectrum,
    to_network_input,
    variety,
    within_range,
)
from barter.ops.zeroth import DirectionKind, directional_estimate, loss_estimate, sample_directions

__all__ = ["FedZGE", "LocalStatistics", "Oracle", "QueryServer"]

# Gradients are estimated from small differences of logits, which an encoding would hide. Clients with
# few classes answer generated images with very large logits, which only enter a softmax.
Logits: TypeAlias = Annotated[
    Tensor, Floats("versions", "images", "classes", compared=False), Content("exact")
]
GeneratedBatch: TypeAlias = tuple[
    Tensor, Tensor, Tensor
]  # generated images, their noise and their labels


class LocalStatistics(TypedDict):
    """A client's upload after local training: statistics of its private images."""

    # number of images of each class
    counts: Annotated[Tensor, Counts("classes"), When("by_class")]
    # mean and standard deviation of the images' frequencies, see `ops.synthesis.spectrum`
    spectrum: Annotated[Tensor, Floats(2, "channels", "height", "width"), When("canvas")]


class QueryServer(Server):
    """A server with a generator and the last rounds' images and ensemble logits."""

    generator: State = {}
    moments: list[State] = []  # the state of the generator's optimizer, for each parameter
    lessons: list[list[Tensor]] = []  # of each of the last rounds: images, ensemble logits
    spectrum: list[Tensor] = []  # of all clients' images


class Oracle(Client):
    """A client that answers with logits only."""

    batch: list[Tensor] = []  # the images it was asked about in this round
    lessons: list[list[Tensor]] = []  # of each of the last rounds: images, ensemble logits


def adversarial_loss(ensemble: Tensor, student: Tensor, tau: float) -> Tensor:
    """Return L_adv, minus KL(ensemble ‖ global model), averaged over images.

    Args:
        ensemble: The logits of the clients' ensemble (images, classes).
        student: The global model's logits (images, classes).
        tau: τ, the temperature of both; the divergence is not multiplied by τ².
    """
    return -kl(ensemble / tau, student / tau)


def equilibrium(ensemble: Tensor) -> Tensor:
    """Return L_info: minus the entropy of the ensemble's mean prediction over images.

    The entropy is in nats. `ensemble` are its logits (images, classes).
    """
    p = ensemble.softmax(1).mean(0)
    return (p * (p + 1e-12).log()).sum()


def distillation(model: Classifier, tau: float, x: Tensor, ensemble: Tensor) -> Tensor:
    """Return τ² KL(ensemble ‖ model) on a batch of images at temperature τ.

    See `tempered_kl`.
    """
    return tempered_kl(tau, model(x), ensemble)


def rehearsal(
    model: Classifier,
    tau: float,
    spec: Spec,
    augment: Augment,
    x: Tensor,
    ensemble: Tensor,
    own: LabelledBatch,
    log_prior: Tensor | None = None,
) -> Tensor:
    """Return the loss of `distillation` plus the cross entropy on private images.

    One forward pass takes both kinds of images, so batch normalisation sees them together.

    Args:
        model: The network to train.
        tau: τ, the temperature of distillation.
        spec: The format of the images.
        augment: Augmentation of the private images.
        x: Generated images, as network input.
        ensemble: The ensemble's logits on them.
        own: Private images, as bytes, and their labels.
        log_prior: Log class prior of the private images, added to their logits; None adds nothing.
    """
    inputs = torch.cat([prepare_batch(own.pixels, spec, augment), x])
    private, generated = model(inputs).split([len(own.pixels), len(x)])
    return F.cross_entropy(add_offset(private, log_prior), own.labels) + tempered_kl(
        tau, generated, ensemble
    )


def accuracy_by_batch(model: Classifier, test: Images) -> float:
    """Return a model's accuracy (0 to 1) with each test batch normalised by itself.

    Images are shuffled, because a test set may be sorted by class; the order is always the same.
    Batches are the chunks of `predict`. The model is not changed.
    """
    normalising = without_running_statistics(copy.deepcopy(model)).eval()
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).to(test.device)
    predicted = predict(normalising, test.batch, order).argmax(1)
    return float((predicted == test.labels[order]).double().mean())


@dataclass(frozen=True, kw_only=True)
class FedZGE(Algorithm[QueryServer, Oracle]):
    """Black-box clients answer with logits on the images that the server generates."""

    primary = "server"
    server_model = ServerModel("own")
    aggregates = ("logits",)
    sizes = ("versions",)
    crosses = {
        "learn": Crossing(
            up="number of images of each class; mean and deviation of each frequency over "
            "all images",
        ),
        "answer": Crossing(
            down="generated images and slightly perturbed copies of them",
            up="logits on all of them",
        ),
        "distil": Crossing(down="the ensemble's logits on the round's images"),
    }
    presets = {
        "paper": {
            "weighting": "examples",
            "generator_steps": 1,
            "generator_lr": 1e-3,
            "frequencies": None,
            "estimator": "loss",
            "lasting_optimizer": False,
            "statistics": "batch",
            "output": "tanh",
            "eps": 1e-3,
            "pairs": "all",
            "canvas": False,
            "tau": 5.0,
            "memory": 1,
            "distil_batch": None,
            "distil_lr": 0.01,
            "global_steps": 10,
            "local_steps": 10,
            "rehearse": False,
            "balanced": False,
        },
        "sound": {},
    }

    # -- The paper's fields

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 10  # E1: local epochs; the learning rate decays to zero in each round
    batch_size: Count = 256  # images per step of local training
    lr: Positive = 0.01  # Adam's learning rate of local training
    samples: Count = 500  # B: generated images per round
    noise: Count = 100  # d_z: width of the noise
    # q: perturbed copies of each image; 0 does not train the generator, and leaves canvases
    # unmodified
    queries: Whole = 10
    # ε: length of a perturbation; 1e-3 in the paper, too small for differences in float32
    eps: Positive = 1e-2
    direction: DirectionKind = "sphere"  # distribution of the perturbations' directions
    generator_lr: Positive = 2e-3  # η_G: Adam's learning rate of the generator; 1e-3 in the paper
    beta_adv: NonNegative = 1.0  # β1: weight of transferability
    beta_div: NonNegative = 1.0  # β2: weight of diversity
    beta_info: NonNegative = 1.0  # β3: weight of equilibrium
    tau: Positive = 2.0  # τ: temperature of distillation and transferability; 5 in the paper
    global_steps: Count = 60  # E2: distillation steps of the global model; 10 in the paper
    local_steps: Count = 30  # E3: distillation steps of each client; 10 in the paper
    distil_lr: Positive = 2e-3  # Adam's learning rate of distillation; 0.01 in the paper

    # -- Additions of barter; preset "paper" is without them

    # clients are weighted by their images of a class; by all their images in the paper
    weighting: Literal["classes", "examples"] = "classes"
    # the generator modifies random images with the data's frequencies; in the paper it generates
    # images from noise and label only
    canvas: bool = True
    # steps of the generator per round, each on its portion of the B images; 1 in the paper
    generator_steps: Count = 10
    # keep the generator's optimizer over rounds; a new one in each round in the paper
    lasting_optimizer: bool = True
    # perturbations consist of this many lowest frequencies along each side; none is all, as in the
    # paper
    frequencies: Count | None = 6
    # gradients are estimated from differences of logits, or of the batch's loss as in the paper
    estimator: Literal["logits", "loss"] = "logits"
    # normalisation statistics of clients in queries and distillation; "batch" in the paper
    statistics: Literal["own", "batch"] = "own"
    # range of generated images without a canvas: the data's, or -1 to 1 (paper)
    output: Output = "matched"
    # pairs of images that diversity compares: those of one class, or all as in the paper
    pairs: Literal["class", "all"] = "class"
    # number of last rounds whose images are used in distillation; 1 in the paper
    memory: Count = 10
    # generated images per step of distillation; none is all, as in the paper
    distil_batch: Count | None = 100
    # clients see private images too in every step of distillation, so that they do not forget
    # them; not in the paper
    rehearse: bool = True
    # add the log class prior to logits in the cross entropy, so that networks do not learn the
    # local class frequencies; not in the paper
    balanced: bool = True

    @property
    def by_class(self) -> bool:
        """Return whether clients upload their class counts and are weighted by them."""
        return self.weighting == "classes"

    @property
    def versions(self) -> int:
        """Return the number of versions of an image in a query: the image and its copies."""
        return 1 + self.queries

    def round(self, server: QueryServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        uploads = active.run(self.learn)
        active = active.only(uploads)
        self.merge_statistics(server, uploads)
        generator = self.load_generator(server)
        optimizer = self.optimizer(server, generator)
        portion = math.ceil(self.samples / self.generator_steps)
        lessons = []
        for _ in server.track("generator", range(self.generator_steps)):
            x, z, y = self.generate_images(server, generator, portion)
            u = sample_directions(x, self.queries, self.direction, self.frequencies)
            answers = active.run(self.answer, x.detach(), x.detach() + self.eps * u)
            active = active.only(answers)
            shares = self.shares(answers, uploads)
            logits = torch.stack(list(answers.values()), 1)  # (1 + q, clients, images, classes)
            if self.queries:
                self.improve(server, optimizer, (x, z, y), u, logits, shares)
            lessons.append([x.detach(), self.ensemble_logits(logits[0], shares), y])
        labels = self.remember(server, generator, optimizer, lessons)
        self.study(server.model.train(), server.lessons, self.global_steps, self.distil_lr, None, 0)
        self.report_quality(server, labels, shares)
        _, ensemble = server.lessons[-1]
        active.run(self.distil, ensemble)

    def learn(self, client: Oracle) -> LocalStatistics:
        """Train on private images; return the data's statistics.

        With `rehearse`, the images and ensemble logits of earlier rounds are learned from too. The
        metrics before the exchange are reported.

        Returns:
            The number of images of each class if `by_class`, and the images' spectrum if `canvas`;
            otherwise empty tensors.
        """
        data = client.data
        log_prior = self.local_offset(client)
        if self.rehearse and client.lessons:
            steps = self.epochs * epoch_length(len(data), self.batch_size)
            self.study(client.model.train(), client.lessons, steps, self.lr, data, self.batch_size)
        else:
            fit(
                client,
                epochs=self.epochs,
                batch_size=self.batch_size,
                recipe=adam(self.lr, cosine=True),
                by_class=log_prior,
            )
        record_before_exchange(client, log_prior)
        client.batch = []
        counts = data.class_counts()
        images = data.batch(torch.arange(len(data), device=data.device))
        return {
            "counts": counts if self.by_class else counts[:0],
            "spectrum": spectrum(images) if self.canvas else images[:0],
        }

    def local_offset(self, client: Oracle) -> Tensor | None:
        return log_class_prior(client.data) if self.balanced else None

    def merge_statistics(self, server: QueryServer, uploads: Replies[LocalStatistics]) -> None:
        """Store the spectrum of all clients' images at the server, if `canvas`."""
        if self.canvas:
            spectra = [upload["spectrum"] for upload in uploads.values()]
            server.spectrum = [merge_spectra(spectra, list(uploads.num_examples.values()))]

    def answer(
        self,
        client: Oracle,
        x: Annotated[Tensor, Floats("images", ...), Content("exact")],
        changed: Annotated[Tensor, Content("exact")],
    ) -> Logits:
        """Return the client's logits on images and on their perturbed copies.

        Running statistics stay the same.

        Args:
            client: The client, which stores the images for `distil`.
            x: Generated images (images, channels, height, width).
            changed: Their perturbed copies (q, images, channels, height, width).

        Returns:
            Logits (1 + q, images, classes) in full precision, those of `x` first.
        """
        client.batch = [*client.batch, x]
        client.model.train(self.statistics == "batch")
        with torch.no_grad(), full_precision(), normalise_by_batch(client.model):
            return torch.stack([client.model(batch) for batch in (x, *changed)])

    def load_generator(self, server: QueryServer) -> LabelGenerator:
        """Return the generator in training mode, as the last round left it, or a new one.

        A new generator that modifies canvases starts by leaving them unchanged.
        """
        generator = LabelGenerator(server.spec, self.noise).to(server.device)
        if server.generator:
            generator.load_state_dict(server.generator)
        elif self.canvas:
            zero_weight = {"weight": torch.zeros(server.spec.channels)}
            generator.body[-2].load_state_dict(zero_weight, strict=False)
        return generator.train()

    def generate_images(
        self, server: QueryServer, generator: LabelGenerator, count: int
    ) -> GeneratedBatch:
        """Generate `count` images, with labels that cycle through the classes.

        Returns:
            The images as clients are sent them, with the generator's graph; their noise; and their
            labels.
        """
        z = torch.randn(count, self.noise, device=server.device)
        y = torch.arange(count, device=server.device) % server.spec.classes
        generated = generator(z, y)
        if not self.canvas:
            return to_network_input(generated, server.spec, self.output), z, y
        _, std = channel_statistics(server.spec, server.device)
        x = sample_canvases(count, server.spectrum[0]) + generated / std
        return within_range(x, server.spec), z, y

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if self.canvas:
            return collapse_remarks(rounds, "use fewer queries")
        return collapse_remarks(rounds, "canvas=true gives them the variety of the data")

    @torch.no_grad()
    def creations(
        self, party: QueryServer | Oracle, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, QueryServer) or not party.generator:
            return None
        x, _, y = self.generate_images(party, self.load_generator(party), self.samples)
        chosen = wanted(y)
        return y[chosen], x[chosen]

    def shares(self, answers: Replies[Tensor], statistics: Replies[LocalStatistics]) -> Tensor:
        """Return the weights of the clients that answered, which sum to 1 over clients.

        If `by_class`, they are shares of each class's images (clients, classes), otherwise of all
        images (clients, 1).

        Args:
            answers: The clients' logits.
            statistics: What `learn` returned, by client.
        """
        if self.by_class:
            return class_shares(stack_field({k: statistics[k] for k in answers}, "counts").float())
        device = next(iter(answers.values())).device
        sizes = torch.tensor([answers.num_examples[k] for k in answers], device=device)
        return (sizes / sizes.sum())[:, None]

    def ensemble_logits(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Combine the clients' logits into those of the ensemble.

        If `by_class` or with a defence on logits, it is the logarithm of the weighted mean
        probability, or of its robust aggregate (`merge_logits`); otherwise the weighted mean of
        logits.

        Args:
            logits: Logits (..., clients, images, classes).
            shares: The clients' weights, see `shares`.

        Returns:
            Logits (..., images, classes).
        """
        if self.by_class or robust.active().defends("logits"):
            return merge_logits(logits, shares)
        return (shares[:, None] * logits).sum(-3)

    def optimizer(self, server: QueryServer, generator: LabelGenerator) -> torch.optim.Adam:
        """Return a new Adam for the generator, with earlier rounds' moments if stored."""
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.generator_lr, fused=True)
        if server.moments:
            for parameter, moments in zip(generator.parameters(), server.moments, strict=True):
                optimizer.state[parameter] = {name: m.clone() for name, m in moments.items()}
        return optimizer

    def improve(
        self,
        server: QueryServer,
        optimizer: torch.optim.Adam,
        generated: GeneratedBatch,
        u: Tensor,
        client_logits: Tensor,
        shares: Tensor,
    ) -> None:
        """Take one step of the generator by an estimate of its gradient.

        Args:
            server: The server, whose model is put into evaluation mode and not trained.
            optimizer: The generator's optimizer.
            generated: Generated images, with the generator's graph, their noise and their labels.
            u: Directions of the perturbations (q, *images).
            client_logits: The clients' logits (1 + q, clients, images, classes).
            shares: The clients' weights.
        """
        x, z, y = generated
        loss = partial(self.loss, shares, z, y)
        estimate = self.by_logits if self.estimator == "logits" else self.by_loss
        gradient = estimate(server.model.eval(), loss, x.detach(), u, client_logits)
        optimizer.zero_grad()
        torch.autograd.backward(x, gradient)
        optimizer.step()

    def loss(
        self,
        shares: Tensor,
        z: Tensor,
        y: Tensor,
        client_logits: Tensor,
        student: Tensor,
        x: Tensor,
    ) -> Tensor:
        """Return the generator's loss: fidelity plus three weighted terms.

        These are L_adv, L_info and L_div, with the weights `beta_adv`, `beta_info` and `beta_div`.
        With `pairs` "class", L_div compares images of the same label only.

        Args:
            shares: The clients' weights.
            z: The noise of the images.
            y: Their labels.
            client_logits: The clients' logits on the images (clients, images, classes).
            student: The global model's logits on them.
            x: The images.
        """
        ensemble = self.ensemble_logits(client_logits, shares)
        adversarial = self.beta_adv * adversarial_loss(ensemble, student, self.tau)
        information = self.beta_info * equilibrium(ensemble)
        diverse = self.beta_div * diversity(x, z, y if self.pairs == "class" else None)
        # The order of the sum is part of the results' bits.
        return fidelity(ensemble, y) + (adversarial + information + diverse)

    def by_loss(
        self,
        model: Classifier,
        loss: Callable[..., Tensor],
        x: Tensor,
        u: Tensor,
        client_logits: Tensor,
    ) -> Tensor:
        """Estimate the gradient from one difference of the batch's loss per direction.

        This is the estimator of the authors' code. Arguments are those of `by_logits`.

        Returns:
            The estimate divided by the number of images, a tensor like `x`.
        """
        with torch.no_grad(), full_precision():
            points = [x, *(x + self.eps * direction for direction in u)]
            losses = torch.stack(
                [
                    loss(logits, model(point), point)
                    for logits, point in zip(client_logits, points, strict=True)
                ]
            )
        differences = losses[1:] - losses[0]
        estimate = loss_estimate(u, differences, self.eps, self.direction, self.frequencies)
        return estimate / len(x)

    def by_logits(
        self,
        model: Classifier,
        loss: Callable[..., Tensor],
        x: Tensor,
        u: Tensor,
        client_logits: Tensor,
    ) -> Tensor:
        """Estimate the gradient from differences of the clients' logits.

        Only the clients' Jacobian is estimated: differences of their logits are multiplied by the
        exact derivative of the loss. All other parts of the gradient are exact.

        Args:
            model: The server's model.
            loss: Called with the clients' logits, the model's logits and the images (see `loss`).
            x: The images, without the generator's graph.
            u: Directions of the perturbations (q, *images).
            client_logits: The clients' logits (1 + q, clients, images, classes).

        Returns:
            The gradient of the loss with respect to the images, a tensor like `x`.
        """
        logits = client_logits[0].clone().requires_grad_()
        images = x.clone().requires_grad_()
        value = loss(logits, model(images), images)
        logits_gradient, gradient = torch.autograd.grad(value, (logits, images))
        for k, client_gradient in enumerate(logits_gradient):
            gradient = gradient + directional_estimate(
                u,
                client_logits[1:, k],
                client_logits[0, k],
                client_gradient,
                self.eps,
                self.direction,
                self.frequencies,
            )
        return gradient

    def remember(
        self,
        server: QueryServer,
        generator: LabelGenerator,
        optimizer: torch.optim.Adam,
        lessons: Iterable[list[Tensor]],
    ) -> Tensor:
        """Store generator, optimizer, and the round's images and logits at the server.

        The last `memory` rounds stay; the optimizer is stored with `lasting_optimizer` only.

        Args:
            lessons: Of each portion of the round: images, ensemble logits, labels.

        Returns:
            The labels of the round's images.
        """
        x, ensemble, y = (torch.cat(column) for column in zip(*lessons, strict=True))
        server.generator = dict(generator.state_dict())
        server.moments = []
        if self.lasting_optimizer and self.queries:
            server.moments = [optimizer.state[p] for p in generator.parameters()]
        server.lessons = [*server.lessons, [x, ensemble]][-self.memory :]
        return y

    def report_quality(self, server: QueryServer, y: Tensor, shares: Tensor) -> None:
        """Report the quality of the round's images, and agreement with the ensemble.

        These are the images' variety (see `variety`), how often the ensemble predicts the label
        (`recognised`), how often the server's model predicts the same class as the ensemble
        (`agreement`), and if `by_class` the mean share of clients that have images of the label
        (`known`).

        Args:
            server: The server, whose last lesson has the images.
            y: Labels of the images.
            shares: The clients' weights, see `shares`.
        """
        x, ensemble = server.lessons[-1]
        predicted = ensemble.argmax(1)
        every = torch.arange(len(x), device=x.device)
        logits = predict(server.model.eval(), x.__getitem__, every)
        server.report |= variety(x, y)
        server.report["recognised"] = float((predicted == y).float().mean())
        server.report["agreement"] = float((logits.argmax(1) == predicted).float().mean())
        if self.by_class:
            server.report["known"] = float((shares > 0).float().mean(0)[y].mean())

    def study(
        self,
        model: Classifier,
        lessons: Sequence[list[Tensor]],
        steps: int,
        lr: float,
        own: Images | None,
        size: int,
    ) -> None:
        """Distil the ensemble's logits on the last rounds' images into a model.

        Args:
            model: The model, trained in place in the mode that it has.
            lessons: Of each round: images, ensemble logits.
            steps: Number of steps.
            lr: Adam's learning rate, which falls to zero over the steps.
            own: Private images that are used in every step too (see `rehearsal`), or None.
            size: Number of private images per step.
        """
        images, ensemble = (torch.cat(column) for column in zip(*lessons, strict=True))
        trainer = Trainer.of(model, adam(lr, cosine=True))
        batches = index_batches(len(images), self.distil_batch or len(images), images.device)
        if own is not None:
            rehearse = partial(rehearsal, model, self.tau, own.spec, own.augment)
            private_batches = index_batches(len(own), size, own.device)
            log_prior = log_class_prior(own) if self.balanced else None
        for step in range(steps):
            index = next(batches)
            if own is None:
                trainer.step(partial(distillation, model, self.tau), images[index], ensemble[index])
            else:
                private = next(private_batches)
                batch = LabelledBatch(own.pixels[private], own.labels[private])
                trainer.step(rehearse, images[index], ensemble[index], batch, log_prior)
            trainer.anneal((step + 1) / steps)

    def evaluate_server(self, server: QueryServer, test: Images) -> dict[str, float]:
        scores = super().evaluate_server(server, test)
        if self.statistics == "batch" and "global" in scores:
            scores["global_by_batch"] = accuracy_by_batch(server.model, test)
        return scores

    def distil(self, client: Oracle, ensemble: Tensor) -> None:
        """Learn from the ensemble's logits on the images of this and the last rounds.

        With `rehearse`, private images are in every step too. The client stores the last `memory`
        rounds. If `statistics` is "batch", running statistics are then recomputed from the client's
        own images.

        Args:
            client: The client, which was sent the round's images by `answer`.
            ensemble: The ensemble's logits on all of them, in the order of the calls.
        """
        client.lessons = [*client.lessons, [torch.cat(client.batch), ensemble]][-self.memory :]
        client.batch = []
        model = client.model.train(self.rehearse or self.statistics == "batch")
        own = client.data if self.rehearse else None
        self.study(
            model,
            client.lessons,
            self.local_steps,
            self.distil_lr,
            own,
            self.distil_batch or self.batch_size,
        )
        if self.statistics == "batch":
            # Distillation leaves statistics of generated images; evaluation needs the client's own.
            renew_statistics(client.model, client.data, self.batch_size)
