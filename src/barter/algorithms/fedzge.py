"""FedZGE: Ma et al., "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025,
Algorithm 1.

Clients show nobody their networks: they only answer with logits. The server trains a generator on what their answers
to slightly changed images say of the slope, lets its own model learn the clients' joint opinion of the generated
images, and tells them that opinion, from which they learn too.

Where the paper is silent or at odds with itself:

- One generator step and one batch of queries per round: only so do the paper's byte counts come out.
- Eq. 17 has Gaussian directions and a factor d. The factor belongs to directions on the unit sphere, which the authors'
  code draws; `direction = "gaussian"` has the factor 1.
- Eq. 7 has norms, with which the exponential underflows; the mean squares of the code are used. Eq. 9 is minimised.
- The images of the round's distillation are those from before the generator's step.
- Labels come in turn instead of being drawn, so that there are as many of each.
- The server's model is the first client's network; the paper's is the largest of its clients'.

Preset "paper" is the authors' code: one difference of the whole batch's loss per direction, a new optimizer in each
round, batch statistics in queries and distillation, images between -1 and 1 whatever the data's range. It leaves out
what is a mistake there: entropies that mix two batches, test images seen in training mode, the best epoch reported; and
data are normalised and augmented as the task says.

The default is what we would stand behind. A generator that only has to please the clients draws one picture for each
class, from which nobody learns (docs/algorithms/fedzge.md has the numbers). So:

- it changes canvases: images that are random but for mean and deviation of their frequencies, which are the data's and
  which clients tell. Variety is then given, and diversity asks for more of it within classes, where it is lost;
- a client counts by its images of a class, of which it tells the number;
- clients see private images in every step of distillation, and the images of the last rounds while they train;
- their networks do not learn what is frequent at home, which would say no to whatever others know: clients add it where
  they judge images of their own kind, and not where they answer;
- the round's images come in several portions with a step of the generator after each, for the same bytes;
- changes have low frequencies, differences are of logits, contracted with the exact derivative of the loss, and what
  needs no client is differentiated exactly; a lasting optimizer; images in the data's range; a step large enough for
  float32, in which queries are computed on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.compute.precision import exact
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, Floats, When
from barter.core.evaluation import adjusted, note_before, predict
from barter.core.images import Augment, Images, Spec, prepared, statistics
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import LabelGenerator
from barter.ops.distill import kl, tempered
from barter.ops.ensemble import class_shares, mixed
from barter.ops.fit import Trainer, adam, epoch_length, fit, index_batches
from barter.ops.shares import log_shares
from barter.ops.synthesis import (
    Output,
    canvases,
    collapsed,
    diversity,
    fidelity,
    pooled,
    shown,
    spectrum,
    variety,
    within_range,
)
from barter.ops.zeroth import Direction, directional, directions, loss_estimate

__all__ = ["Asked", "FedZGE", "Oracle", "Told"]

Logits: TypeAlias = Annotated[Tensor, Floats("looks", "images", "classes")]
Drawn: TypeAlias = tuple[Tensor, Tensor, Tensor]  # images, the noise and the classes they come of


class Told(TypedDict):
    """What a client says of its private images, where anybody needs to know."""

    counts: Annotated[
        Tensor, Counts("classes"), When("by_class")
    ]  # how many there are of each class
    spectrum: Annotated[
        Tensor, Floats(2, "channels", "height", "width"), When("canvas")
    ]  # see ops.synthesis


class Asked(Server):
    """A generator, the moments of its optimizer, and the last rounds' images with the clients' opinion of them."""

    generator: State = {}
    moments: list[State] = []
    lessons: list[list[Tensor]] = []
    spectrum: list[Tensor] = []  # of all clients' images


class Oracle(Client):
    """A client that answers with logits only."""

    batch: list[Tensor] = []  # the images it was asked about in this round
    lessons: list[list[Tensor]] = []  # those of the last rounds, and everybody's opinion of them


def transferability(ensemble: Tensor, student: Tensor, tau: float) -> Tensor:
    """L_adv: images on which the global model does not yet agree with the clients."""
    return -kl(ensemble / tau, student / tau)


def equilibrium(ensemble: Tensor) -> Tensor:
    """L_info: minus the entropy of the clients' mean prediction."""
    p = ensemble.softmax(1).mean(0)
    return (p * (p + 1e-12).log()).sum()


def distillation(model: Classifier, tau: float, x: Tensor, ensemble: Tensor) -> Tensor:
    """What a model learns from the clients' joint opinion."""
    return tempered(tau, model(x), ensemble)


def rehearsal(
    model: Classifier,
    tau: float,
    spec: Spec,
    augment: Augment,
    x: Tensor,
    ensemble: Tensor,
    pixels: Tensor,
    labels: Tensor,
    home: Tensor | None = None,
) -> Tensor:
    """The same, beside what a client knows of its private images and of how frequent classes are among them."""
    own, made = model(torch.cat([prepared(pixels, spec, augment), x])).split([len(pixels), len(x)])
    return F.cross_entropy(adjusted(own, home), labels) + tempered(tau, made, ensemble)


@dataclass(frozen=True, kw_only=True)
class FedZGE(Algorithm[Asked, Oracle]):
    """Black-box clients: images go down, logits come up."""

    primary = "server"
    global_model = True
    crosses = {
        "learn": "up: how many images of each class; mean and deviation of each frequency over all images",
        "answer": "down: generated images and slightly changed copies of them; up: logits on all of them",
        "distil": "down: everybody's opinion of the round's images",
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

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 10  # E1: local epochs, the learning rate falling to zero in each round
    batch_size: Count = 256  # images per step of local training
    lr: Positive = 0.01  # Adam's learning rate of local training
    # clients count by images of a class; by all in the paper
    weighting: Literal["classes", "examples"] = "classes"
    samples: Count = 500  # B: generated images per round
    noise: Count = 100  # d_z: width of the noise
    canvas: bool = True  # the generator changes random images with the data's frequencies; it draws all in the paper
    # of the generator per round, each on its part of the B images; 1 in the paper
    generator_steps: Count = 10
    generator_lr: Positive = 2e-3  # η_G: Adam's learning rate of the generator; 1e-3 in the paper
    # the generator's optimizer goes on from round to round; new in each in the paper
    lasting_optimizer: bool = True
    queries: Whole = 10  # q: changed copies of each image; 0 leaves the generator as it is, and canvases as they are
    # ε: length of a change; 1e-3 in the paper, too little for differences in float32
    eps: Positive = 1e-2
    direction: Direction = "sphere"  # of the changes
    # a side, that changes are made of: the lowest; none is all, as in the paper
    frequencies: Count | None = 6
    # differences of logits, or of the batch's loss as in the paper
    estimator: Literal["logits", "loss"] = "logits"
    # of clients that answer and distil; "batch" as published
    statistics: Literal["own", "batch"] = "own"
    # range of generated images without a canvas: the data's, or -1 to 1 (paper)
    output: Output = "matched"
    beta_adv: NonNegative = 1.0  # β1: weight of transferability
    beta_div: NonNegative = 1.0  # β2: weight of diversity
    beta_info: NonNegative = 1.0  # β3: weight of equilibrium
    # that are to differ: those of one class, or all as in the paper
    pairs: Literal["class", "all"] = "class"
    tau: Positive = 2.0  # τ: temperature of distillation and transferability; 5 in the paper
    memory: Count = 10  # rounds whose images are learnt from; 1 in the paper
    # generated images per step of distillation; none is all, as in the paper
    distil_batch: Count | None = 100
    distil_lr: Positive = 2e-3  # Adam's learning rate of distillation; 0.01 in the paper
    global_steps: Count = 60  # E2: steps of the global model; 10 in the paper
    local_steps: Count = 30  # E3: steps of each client; 10 in the paper
    # clients that distil see private images too in every step, lest they forget them
    rehearse: bool = True
    balanced: bool = True  # cross entropy is told how frequent classes are at home, so networks need not learn it; ours

    @property
    def by_class(self) -> bool:
        """Whether clients count by their images of a class, and say how many these are."""
        return self.weighting == "classes"

    @property
    def looks(self) -> int:
        """What a client is asked about: images, and changed copies of them."""
        return 1 + self.queries

    def round(self, server: Asked, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        told = active.run(self.learn)
        active, generator, lessons = active.only(told), self.recalled(server), []
        if self.canvas:
            server.spectrum = [
                pooled(
                    [said["spectrum"] for said in told.values()], list(told.num_examples.values())
                )
            ]
        optimizer = self.optimizer(server, generator)
        for _ in server.track("generator", range(self.generator_steps)):
            x, z, y = self.drawn(server, generator, -(-self.samples // self.generator_steps))
            u = directions(x, self.queries, self.direction, self.frequencies)
            answers = active.run(self.answer, x.detach(), x.detach() + self.eps * u)
            active, shares = active.only(answers), self.shares(answers, told)
            said = torch.stack(list(answers.values()), 1)  # (1 + q, K, b, C)
            if self.queries:
                self.improve(server, optimizer, (x, z, y), u, said, shares)
            lessons.append([x.detach(), self.opinion(said[0], shares), y])
        y = self.remember(server, generator, optimizer, lessons)
        self.study(server.model.train(), server.lessons, self.global_steps, self.distil_lr, None, 0)
        self.judge(server, y, shares)
        active.run(self.distil, server.lessons[-1][1])

    def learn(self, client: Oracle) -> Told:
        """Train on private data."""
        if self.rehearse and client.lessons:
            steps = self.epochs * epoch_length(len(client.data), self.batch_size)
            self.study(
                client.model.train(), client.lessons, steps, self.lr, client.data, self.batch_size
            )
        else:
            recipe = adam(self.lr, cosine=True)
            fit(
                client,
                epochs=self.epochs,
                batch_size=self.batch_size,
                recipe=recipe,
                by_class=self.at_home(client),
            )
        note_before(client, self.at_home(client))
        client.batch, data = [], client.data
        counts, images = (
            data.class_counts(),
            data.batch(torch.arange(len(data), device=data.device)),
        )
        return {
            "counts": counts if self.by_class else counts[:0],
            "spectrum": spectrum(images) if self.canvas else images[:0],
        }

    def at_home(self, client: Oracle) -> Tensor | None:
        return log_shares(client.data) if self.balanced else None

    def answer(
        self, client: Oracle, x: Annotated[Tensor, Floats("images", ...)], changed: Tensor
    ) -> Logits:
        """Say what one thinks of images and of their changed copies."""
        client.batch = [*client.batch, x]
        client.model.train(self.statistics == "batch")
        with torch.no_grad(), exact():
            return torch.stack([client.model(batch) for batch in (x, *changed)])

    def recalled(self, server: Asked) -> LabelGenerator:
        """The generator as the last round left it; one that changes canvases begins by changing nothing."""
        generator = LabelGenerator(server.spec, self.noise).to(server.device)
        if server.generator:
            generator.load_state_dict(server.generator)
        elif self.canvas:
            generator.body[-2].load_state_dict(
                {"weight": torch.zeros(server.spec.channels)}, strict=False
            )
        return generator.train()

    def drawn(self, server: Asked, generator: LabelGenerator, count: int) -> Drawn:
        """So many images as the clients are shown them, and the noise and labels they are made of: classes in turn."""
        z = torch.randn(count, self.noise, device=server.device)
        y = torch.arange(count, device=server.device) % server.spec.classes
        made = generator(z, y)
        if not self.canvas:
            return shown(made, server.spec, self.output), z, y
        _, std = statistics(server.spec, server.device)
        return within_range(canvases(count, server.spectrum[0]) + made / std, server.spec), z, y

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapsed(
            rounds,
            "canvas=true gives them the variety of the data"
            if not self.canvas
            else "ask fewer queries",
        )

    @torch.no_grad()
    def creations(
        self, party: Asked | Oracle, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Asked) or not party.generator:
            return None
        x, _, y = self.drawn(party, self.recalled(party), self.samples)
        chosen = wanted(y)
        return y[chosen], x[chosen]

    def shares(self, answers: Replies[Tensor], told: Replies[Told]) -> Tensor:
        """How much each of those who answered counts for each class (clients, classes)."""
        if self.by_class:
            return class_shares(torch.stack([told[k]["counts"] for k in answers]).float())
        sizes = torch.tensor(
            [answers.num_examples[k] for k in answers], device=next(iter(answers.values())).device
        )
        return (sizes / sizes.sum())[:, None]

    def opinion(self, said: Tensor, shares: Tensor) -> Tensor:
        """What the clients (..., clients, images, classes) say together."""
        if self.by_class:
            return mixed(said, shares)
        return (shares[:, None] * said).sum(-3)

    def optimizer(self, server: Asked, generator: LabelGenerator) -> torch.optim.Adam:
        """The generator's, with what it gathered in earlier rounds."""
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.generator_lr, fused=True)
        for parameter, gathered in zip(
            generator.parameters() if server.moments else (), server.moments, strict=True
        ):
            optimizer.state[parameter] = {name: tensor.clone() for name, tensor in gathered.items()}
        return optimizer

    def improve(
        self,
        server: Asked,
        optimizer: torch.optim.Adam,
        drawn: Drawn,
        u: Tensor,
        said: Tensor,
        shares: Tensor,
    ) -> None:
        """One step of the generator."""
        x, z, y = drawn
        loss = partial(self.loss, shares, z, y)
        estimate = self.by_logits if self.estimator == "logits" else self.by_loss
        slope = estimate(server.model.eval(), loss, x.detach(), u, said)
        optimizer.zero_grad()
        torch.autograd.backward(x, slope)
        optimizer.step()

    def loss(
        self, shares: Tensor, z: Tensor, y: Tensor, said: Tensor, student: Tensor, x: Tensor
    ) -> Tensor:
        """The generator's objective, of what clients and global model say of images."""
        ensemble = self.opinion(said, shares)
        terms = self.beta_adv * transferability(
            ensemble, student, self.tau
        ) + self.beta_info * equilibrium(ensemble)
        terms = terms + self.beta_div * diversity(x, z, y if self.pairs == "class" else None)
        return fidelity(ensemble, y) + terms

    def by_loss(
        self, model: Classifier, loss: Callable[..., Tensor], x: Tensor, u: Tensor, said: Tensor
    ) -> Tensor:
        """From one difference of the batch's loss for each direction, as the authors' code has it."""
        with torch.no_grad(), exact():
            points = [x, *(x + self.eps * direction for direction in u)]
            losses = torch.stack(
                [loss(s, model(point), point) for s, point in zip(said, points, strict=True)]
            )
        return loss_estimate(
            u, losses[1:] - losses[0], self.eps, self.direction, self.frequencies
        ) / len(x)

    def by_logits(
        self, model: Classifier, loss: Callable[..., Tensor], x: Tensor, u: Tensor, said: Tensor
    ) -> Tensor:
        """Exact but for the clients' part: their logits' differences, contracted with the loss's own derivative."""
        seen, images = said[0].clone().requires_grad_(), x.clone().requires_grad_()
        cotangent, direct = torch.autograd.grad(loss(seen, model(images), images), (seen, images))
        for k, slope in enumerate(cotangent):
            direct = direct + directional(
                u, said[1:, k], said[0, k], slope, self.eps, self.direction, self.frequencies
            )
        return direct

    def remember(
        self,
        server: Asked,
        generator: LabelGenerator,
        optimizer: torch.optim.Adam,
        lessons: Iterable[list[Tensor]],
    ) -> Tensor:
        """The generator, and the round's images with everybody's opinion; the classes they were drawn for."""
        x, ensemble, y = (torch.cat(column) for column in zip(*lessons, strict=True))
        server.generator = dict(generator.state_dict())
        server.moments = [
            optimizer.state[p]
            for p in generator.parameters()
            if self.lasting_optimizer and self.queries
        ]
        server.lessons = [*server.lessons, [x, ensemble]][-self.memory :]
        return y

    def judge(self, server: Asked, y: Tensor, shares: Tensor) -> None:
        """Report how the round's images vary, what the clients see in them, and whether the server's model does too."""
        x, ensemble = server.lessons[-1]
        seen = ensemble.argmax(1)
        said = predict(server.model.eval(), x.__getitem__, torch.arange(len(x), device=x.device))
        server.report |= variety(x, y)
        server.report["recognised"] = float((seen == y).float().mean())
        server.report["agreement"] = float((said.argmax(1) == seen).float().mean())
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
        """Steps towards the clients' opinion of the last rounds' images, beside so many of a client's own in each."""
        rows = [torch.cat(column) for column in zip(*lessons, strict=True)]
        trainer = Trainer.of(model, adam(lr, cosine=True))
        batches = index_batches(len(rows[0]), self.distil_batch or len(rows[0]), rows[0].device)
        loss: Callable[..., Tensor] = partial(distillation, model, self.tau)
        if own is not None:
            loss = partial(rehearsal, model, self.tau, own.spec, own.augment)
            private, home = (
                index_batches(len(own), size, own.device),
                [log_shares(own)] if self.balanced else [],
            )
        for step in range(steps):
            chosen = next(batches)
            beside = (
                () if own is None else (own.pixels[part := next(private)], own.labels[part], *home)
            )
            trainer.step(loss, *(row[chosen] for row in rows), *beside)
            trainer.anneal((step + 1) / steps)

    def distil(self, client: Oracle, ensemble: Tensor) -> None:
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
