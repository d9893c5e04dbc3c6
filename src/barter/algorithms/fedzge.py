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
- Training and answering are one call, for the queries do not depend on the training.
- The server's model is the first client's network; the paper's is the largest of its clients'.

Preset "paper" is the authors' code: one difference of the whole batch's loss per direction, a new optimizer in each
round, batch statistics in queries and distillation, images between -1 and 1 whatever the data's range. It leaves out
what is a mistake there: entropies that mix two batches, test images seen in training mode, the best epoch reported; and
data are normalised and augmented as the task says.

The default is what we would stand behind: differences of logits, contracted with the exact derivative of the loss;
exact derivatives for what needs no client; a lasting optimizer; images in the data's range; clients that keep their own
statistics; a step large enough for float32, in which queries are computed on any device. Its estimate is closer to the
true gradient for the same queries (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.evaluation import evaluate
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.core.precision import exact
from barter.models.generators import LabelGenerator
from barter.ops.distill import kl, tempered
from barter.ops.fit import Trainer, adam, fit
from barter.ops.synthesis import Output, diversity, fidelity, shown, variety
from barter.ops.zeroth import Direction, directional, directions, loss_estimate

__all__ = ["Asked", "FedZGE", "Oracle"]


class Asked(Server):
    """A generator, and the moments of its optimizer."""

    generator: State = {}
    moments: list[State] = []


class Oracle(Client):
    """A client that answers with logits only."""

    batch: list[Tensor] = []  # the images it was last asked about


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


@dataclass(frozen=True, kw_only=True)
class FedZGE(Algorithm[Asked, Oracle]):
    """Black-box clients: images go down, logits come up."""

    global_model = True
    crosses = {
        "answer": "down: generated images and slightly changed copies of them; up: logits on all of them",
        "distil": "down: the mean of everybody's logits",
    }
    presets = {
        "paper": {
            "estimator": "loss",
            "lasting_optimizer": False,
            "statistics": "batch",
            "output": "tanh",
            "eps": 1e-3,
        },
        "sound": {},
    }

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 10  # E1: local epochs, the learning rate falling to zero in each round
    batch_size: Count = 256  # images per step of local training
    lr: Positive = 0.01  # Adam's learning rate of clients and global model
    samples: Count = 500  # B: generated images per round
    noise: Count = 100  # d_z: width of the noise
    queries: Count = 10  # q: changed copies of each image
    eps: Positive = 1e-2  # ε: length of a change; 1e-3 in the paper, too little for differences in float32
    direction: Direction = "sphere"  # of the changes
    estimator: Literal["logits", "loss"] = "logits"  # differences of logits, or of the batch's loss as in the paper
    generator_lr: Positive = 1e-3  # η_G: Adam's learning rate of the generator
    lasting_optimizer: bool = True  # the generator's optimizer goes on from round to round; new in each in the paper
    statistics: Literal["own", "batch"] = "own"  # of clients that answer and distil; "batch" as published
    output: Output = "matched"  # range of generated images: the data's, or -1 to 1 as in the paper
    beta_adv: NonNegative = 1.0  # β1: weight of transferability
    beta_div: NonNegative = 1.0  # β2: weight of diversity
    beta_info: NonNegative = 1.0  # β3: weight of equilibrium
    tau: Positive = 5.0  # τ: temperature of distillation and transferability
    global_steps: Count = 10  # E2: steps of the global model on the round's images
    local_steps: Count = 10  # E3: steps of each client on them

    def round(self, server: Asked, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        generator, z, y = self.prepare(server)
        x = self.pictures(generator, server.spec, z, y)
        u = directions(x, self.queries, self.direction)
        answers = active.run(self.answer, torch.cat([x.detach()[None], x.detach() + self.eps * u]))
        ensemble = self.opinion(answers)  # (1 + q, B, C)
        server.report |= variety(x.detach(), y)
        self.improve(server, generator, x, z, y, u, ensemble)
        self.learn(server.model.train(), x.detach(), ensemble[0], self.global_steps)
        active.only(answers).run(self.distil, ensemble[0])

    def prepare(self, server: Asked) -> tuple[LabelGenerator, Tensor, Tensor]:
        """The generator, noise and labels for a batch."""
        generator = LabelGenerator(server.spec, self.noise).to(server.device)
        if server.generator:
            generator.load_state_dict(server.generator)
        z = torch.randn(self.samples, self.noise, device=server.device)
        y = torch.randint(server.spec.classes, (self.samples,), device=server.device).sort().values
        return generator.train(), z, y

    def pictures(self, generator: LabelGenerator, spec: Spec, z: Tensor, y: Tensor) -> Tensor:
        """Generated images as the clients are shown them."""
        return shown(generator(z, y), spec, self.output)

    @torch.no_grad()
    def creations(self, party: Asked | Oracle, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Asked):
            return None
        generator, z, y = self.prepare(party)
        chosen = wanted(y)
        return y[chosen], self.pictures(generator, party.spec, z, y)[chosen]

    def answer(self, client: Oracle, batches: Tensor) -> Tensor:
        """Train on private data, then say what one thinks of the images and of their changed copies."""
        recipe = adam(self.lr, cosine=True)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=recipe)
        client.report |= {f"before_{name}": value for name, value in evaluate(client).items()}
        client.batch = [batches[0].clone()]
        client.model.train(self.statistics == "batch")
        with torch.no_grad(), exact():
            return torch.stack([client.model(batch) for batch in batches])

    def opinion(self, answers: Replies[Tensor]) -> Tensor:
        """The mean of the clients' logits, weighted by their numbers of images."""
        total = sum(answers.num_examples.values())
        return torch.stack([answers.num_examples[k] / total * logits for k, logits in answers.items()]).sum(0)

    def improve(
        self, server: Asked, generator: LabelGenerator, x: Tensor, z: Tensor, y: Tensor, u: Tensor, ensemble: Tensor
    ) -> None:
        """One step of the generator."""
        model = server.model.eval()
        estimate = self.by_logits if self.estimator == "logits" else self.by_loss
        slope = estimate(model, x, z, y, u, ensemble)
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.generator_lr, fused=True)
        if self.lasting_optimizer and server.moments:
            for parameter, moments in zip(generator.parameters(), server.moments, strict=True):
                optimizer.state[parameter] = {name: tensor.clone() for name, tensor in moments.items()}
        torch.autograd.backward(x, slope)
        optimizer.step()
        server.moments = [optimizer.state[p] for p in generator.parameters()] if self.lasting_optimizer else []
        server.generator = dict(generator.state_dict())

    def loss(self, ensemble: Tensor, student: Tensor, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """The generator's objective."""
        terms = self.beta_adv * transferability(ensemble, student, self.tau) + self.beta_info * equilibrium(ensemble)
        return fidelity(ensemble, y) + terms + self.beta_div * diversity(x, z)

    def by_loss(self, model: Classifier, x: Tensor, z: Tensor, y: Tensor, u: Tensor, ensemble: Tensor) -> Tensor:
        """From one difference of the batch's loss for each direction, as the authors' code has it."""
        with torch.no_grad(), exact():
            points = [x, *(x + self.eps * direction for direction in u)]
            losses = torch.stack(
                [self.loss(e, model(point), point, z, y) for e, point in zip(ensemble, points, strict=True)]
            )
        return loss_estimate(u, losses[1:] - losses[0], self.eps, self.direction) / len(x)

    def by_logits(self, model: Classifier, x: Tensor, z: Tensor, y: Tensor, u: Tensor, ensemble: Tensor) -> Tensor:
        """Exact but for the clients' part: their logits' differences, contracted with the loss's own derivative."""
        seen, images = ensemble[0].clone().requires_grad_(), x.detach().requires_grad_()
        value = self.loss(seen, model(images), images, z, y)
        cotangent, direct = torch.autograd.grad(value, (seen, images))
        return direct + directional(u, ensemble[1:], ensemble[0], cotangent, self.eps, self.direction)

    def learn(self, model: Classifier, x: Tensor, ensemble: Tensor, steps: int) -> None:
        """Full-batch steps towards the clients' joint opinion."""
        trainer = Trainer.of(model, adam(self.lr, cosine=True))
        for step in range(steps):
            trainer.step(partial(distillation, model, self.tau), x, ensemble)
            trainer.anneal((step + 1) / steps)

    def distil(self, client: Oracle, ensemble: Tensor) -> None:
        (x,) = client.batch
        self.learn(client.model.train(self.statistics == "batch"), x, ensemble, self.local_steps)
        client.batch = []
