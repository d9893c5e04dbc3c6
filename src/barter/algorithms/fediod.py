"""FedIOD: Gong et al., "Federated Learning via Input-Output Collaborative Distillation", AAAI 2024 (arXiv:2312.14478).

No weights travel. Clients with any networks train once, by themselves. Then the server draws images and clients say
what they see in them; from that the server's model learns. Each client also has a discriminator, which never leaves it
and tells real patches from drawn ones. From all clients' slopes the generator learns to draw images that look real
to everybody, that each client is sure of, that are of all classes, on which clients agree and the server's model does
not yet.

- The authors' code has all networks in one place. Here they are where the paper has them: what crosses are images,
  logits and slopes. With slopes, the generator's step is exactly the one it would take in one place.
- The discriminators' step, the generator's and the server's model's are one iteration, with two calls: to save a third,
  the images that the model learns from are drawn before the generator's step, in the code after it.
- The slopes are those of the discriminators as they are after their step, and in full precision.
- A client counts by its images of a class in what is said together, and by its images in all other terms. What clients
  agree on is measured as in the code by KL(mean ‖ client), without its clamps; that is optional there.
- Generator and discriminators go on from round to round, the latter with their optimizers. The generator's optimizer
  and the model's are new in each, and no rate falls.
- The generator is that of the other methods here, whose images are normalised and not squeezed by a sigmoid. Medical
  images, segmentation, and the noise of the paper's privacy study are left out.
- The code trains 500 local epochs and 200 rounds, each a pass over the smallest client's images; 20 clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.compute import lanes
from barter.compute.precision import exact
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, Floats
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.core.record import Round
from barter.models.generators import Decoder, PatchDiscriminator
from barter.ops.distill import tempered
from barter.ops.ensemble import class_shares, consensus
from barter.ops.fit import Trainer, adam, fit, sgd
from barter.ops.synthesis import Artist, collapsed, exhibited, painted, painter, put_away

__all__ = ["Curator", "FedIOD", "Judge", "discrimination", "realism", "wishes"]

Said: TypeAlias = Annotated[Tensor, Floats("batches", "samples", "classes")]  # logits
Slope: TypeAlias = Annotated[Tensor, Floats("samples", "channels", "height", "width")]  # by images


class Curator(Artist):
    """A server that knows how many images of each class those clients have who have trained."""

    counts: dict[int, Tensor] = {}


class Judge(Client):
    """A client with a discriminator, and the moments of its optimizer."""

    discriminator: State = {}
    moments: list[State] = []
    batch: list[Tensor] = []  # the images it was last asked about


def _found(judged: Tensor, real: float) -> Tensor:
    """Binary cross entropy, summed over the parts of an image, mean over images."""
    wanted = torch.full_like(judged, real)
    return F.binary_cross_entropy_with_logits(
        judged.float(), wanted.float(), reduction="sum"
    ) / len(judged)


def discrimination(judge: PatchDiscriminator, spec: Spec, pixels: Tensor, drawn: Tensor) -> Tensor:
    """How badly real patches are told from drawn ones."""
    return (_found(judge(drawn), 0.0) + _found(judge(prepared(pixels, spec, Augment())), 1.0)) / 2


def realism(judge: PatchDiscriminator, x: Tensor) -> Tensor:
    """How much drawn patches look drawn."""
    return _found(judge(x), 1.0)


def imitation(generator: Decoder, spec: Spec, z: Tensor, slope: Tensor) -> Tensor:
    """What has the slope, with respect to the images of this noise."""
    return (painted(generator, z, spec).float() * slope).sum()


def learning(model: Classifier, temperature: float, x: Tensor, said: Tensor) -> Tensor:
    """How far the model is from what the clients say."""
    return tempered(temperature, model(x).float(), said)


def wishes(
    said: Tensor,
    known: Tensor,
    shares: Tensor,
    sizes: Tensor,
    temperature: float,
    weights: Sequence[float],
) -> Tensor:
    """What the generator wants of clients' logits (clients, images, classes) and the model's: that the model is far
    from them, that each client is sure, of all classes alike, and that they agree, with these weights."""
    adv, align, balance, agree = weights
    log_p = said.log_softmax(2)
    p = log_p.exp()
    unsure = -(p * log_p).sum(2).mean(1)
    shown = p.mean(1)
    uneven = (shown * (shown + 1e-12).log2()).sum(1)
    mean = p.mean(0, keepdim=True)
    apart = (mean * ((mean + 1e-12).log() - log_p)).sum(2).mean()
    far = tempered(temperature, known, consensus(list(said), shares))
    return (sizes * (align * unsure + balance * uneven)).sum() + agree * apart - adv * far


@dataclass(frozen=True, kw_only=True)
class FedIOD(Algorithm[Curator, Judge]):
    """Images go down, logits and slopes come up: the server's model learns from clients that show no weights."""

    primary = "server"
    global_model = True
    crosses = {
        "learn": "up: how many images of each class",
        "judge": "down: drawn images; up: logits on them",
        "criticise": "down: slopes of the server's wishes by logits; up: slopes by images",
    }
    presets = {"paper": {"epochs": 500, "batch_size": 256, "lr": 0.0025, "generator_lr": 1e-4}}

    # the server's network: of the zoo, or package.module:function; none: the first client's
    student: str | None = None
    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 10  # local epochs, once; 500 in the authors' code
    batch_size: Count = 32  # private images per step; 256 in the authors' code
    lr: Positive = 0.01  # learning rate of the clients' SGD; 0.0025 in the authors' code
    momentum: NonNegative = 0.9  # of all SGD
    # per round, each a step of discriminators and generator and some of the model
    iterations: Count = 10
    global_steps: Count = 5  # steps of the server's model in each
    samples: Count = 64  # drawn images per step
    noise: Count = 100  # width of the noise
    discriminator_width: Count = 128  # channels of the discriminators' first layer
    # Adam's learning rate of generator and discriminators; 1e-4 in the authors' code
    generator_lr: Positive = 1e-3
    global_lr: Positive = 5e-3  # learning rate of the server's model
    global_weight_decay: NonNegative = 3e-5  # of that SGD
    temperature: Positive = 1.0  # of distillation, whose loss counts temperature² times
    w_gan: NonNegative = 1.0  # how much it counts that images look real
    w_adv: NonNegative = 1.0  # that the server's model differs from the clients
    w_align: NonNegative = 1.0  # that each client is sure
    w_balance: NonNegative = 10.0  # that all classes are drawn
    w_agree: NonNegative = 1.0  # that clients agree

    @property
    def server_network(self) -> str | None:
        return self.student

    def round(self, server: Curator, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        new = active.only(k for k in active if k not in server.counts).run(self.learn)
        server.counts = {**server.counts, **new}
        generator, active = painter(server, self.noise), active.only(server.counts)
        drawing = Trainer.of(generator, adam(self.generator_lr, beta1=0.5))
        recipe = sgd(self.global_lr, self.momentum, self.global_weight_decay)
        studying = Trainer.of(server.model, recipe)
        for _ in server.track("distil", range(self.iterations)):
            z, x = self.draw(server, generator)
            answers = active.run(self.judge, x)
            slope = self.slope(server, active, x[0], answers)
            self.study(server, studying, x[1:], answers)
            drawing.step(partial(imitation, generator, server.spec), z, slope)
        put_away(server, generator, self.codes(server))

    def learn(self, client: Judge) -> Annotated[Tensor, Counts("classes")]:
        """How many images of each class the client has, after training on them."""
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum),
        )
        return client.data.class_counts()

    def codes(self, party: Curator | Judge) -> Tensor:
        """What images can be drawn from."""
        return torch.randn(self.samples, self.noise, device=party.device)

    @torch.no_grad()
    def draw(self, server: Curator, generator: Decoder) -> tuple[Tensor, Tensor]:
        """The noise of the generator's step, and batches of images: its own, and those that the model learns from."""
        z = [self.codes(server) for _ in range(1 + self.global_steps)]
        return z[0], torch.stack([painted(generator, codes, server.spec).float() for codes in z])

    def judge(
        self, client: Judge, batches: Annotated[Tensor, Floats("batches", "samples", ...)]
    ) -> Said:
        """What the client sees in the images; its discriminator learns from the first of the batches."""
        judge, data = self.discriminator(client), client.data
        trainer = Trainer.of(judge.train(), adam(self.generator_lr, beta1=0.5))
        trainer.recall(client.moments)
        chosen = torch.randint(len(data), (len(batches[0]),), device=client.device)
        trainer.step(partial(discrimination, judge, data.spec), data.pixels[chosen], batches[0])
        client.discriminator, client.moments = isolate(dict(judge.state_dict())), trainer.moments()
        client.batch = [batches[0].clone()]
        client.model.eval()
        with torch.no_grad(), exact():
            return torch.stack([client.model(batch) for batch in batches])

    def discriminator(self, client: Judge) -> PatchDiscriminator:
        """The client's, as it left it."""
        new = PatchDiscriminator(client.data.spec, self.discriminator_width)
        judge = lanes.keep("discriminator", new.to(client.device))
        if client.discriminator:
            judge.load_state_dict(client.discriminator)
        return judge

    def slope(
        self, server: Curator, active: Clients, x: Tensor, answers: Replies[Tensor]
    ) -> Tensor:
        """Of the generator's loss, with respect to its images: the model's part, and every client's."""
        said = torch.stack([answer[0] for answer in answers.values()]).requires_grad_()
        counts = torch.stack([server.counts[k] for k in answers])
        sizes = counts.sum(1) / counts.sum()
        images, weights = (
            x.clone().requires_grad_(),
            (self.w_adv, self.w_align, self.w_balance, self.w_agree),
        )
        known = server.model.eval()(images)
        value = wishes(said, known, class_shares(counts), sizes, self.temperature, weights)
        by_logits, own = torch.autograd.grad(value, (said, images))
        theirs = {
            k: (part, float(size)) for k, part, size in zip(answers, by_logits, sizes, strict=True)
        }
        slopes = active.only(answers).scatter(self.criticise, theirs)
        return own + torch.stack(list(slopes.values())).sum(0)

    def criticise(self, client: Judge, asked: tuple[Tensor, float]) -> Slope:
        """The slope, by the images that were judged, of what the server wants of logits and of how real they look."""
        by_logits, size = asked
        x, judge = client.batch[0].requires_grad_(), self.discriminator(client).train()
        with exact():
            value = (by_logits * client.model.eval()(x)).sum() + self.w_gan * size * realism(
                judge, x
            )
        (slope,) = torch.autograd.grad(value, x)
        client.batch = []
        return slope

    def study(
        self, server: Curator, trainer: Trainer, batches: Tensor, answers: Replies[Tensor]
    ) -> None:
        """Steps of the server's model towards what the clients say together."""
        shares = class_shares(torch.stack([server.counts[k] for k in answers]))
        model = server.model.train()
        for step, x in enumerate(batches, start=1):
            said = consensus([answer[step] for answer in answers.values()], shares)
            loss = trainer.step(partial(learning, model, self.temperature), x, said)
        server.report["global_loss"] = float(loss)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapsed(rounds, "a higher w_gan or w_adv may help")

    def creations(
        self, party: Curator | Judge, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        return exhibited(party, self.codes(party), None, wanted)
