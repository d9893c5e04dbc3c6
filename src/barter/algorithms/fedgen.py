"""FedGen: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1
(arXiv:2105.10056).

Clients share their heads. The server averages them, and trains a generator of features which the clients' heads
together name rightly. With it clients see classes that they have no images of: their heads learn from generated
features of all classes, and their networks to answer to an image as they do to generated features of its class.

- The paper's clients share whole networks, or in one variant the last layers; here the head, as in HtFLlib, so that
  the rest may differ.
- All clients start with one head, the first client's, as in HtFLlib; the paper's start from one network.
- `global` and `local` are of networks after local training, with the heads they trained; `shared_global` and
  `shared_local` are with the averaged head put on, as HtFLlib measures.
- HtFLlib does not keep the generator that it trained, so that its clients see an untrained one in every round; and it
  has neither diversity nor the second of the clients' terms. Here all of them are the paper's.
- The noise is uniform, as in the code; the paper says Gaussian. Diversity is that of the code, with means instead of
  norms. The code's adversarial term has the weight 0 there and is not here.
- A client counts by its images of a class in what the generator learns of it. Labels are drawn evenly from the classes
  that somebody has; the code counts a class from two images on.
- The generator's Adam is new in each round, its rate and weight decay stay; in the code they go on, and the rate falls
  by 2 % a round. The clients' weights fall without end, in the code to no less than 0.0001.
- Width of noise and hidden layer, rate and steps of the generator are HtFLlib's (paper: 32, 256, 3e-4, 50 for MNIST),
  and so is local training (paper: 20 steps with 32 images).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.compute import lanes
from barter.core.clients import Clients
from barter.core.contracts import Counts
from barter.core.images import Augment, Spec, prepared
from barter.core.model import Classifier
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.models.generators import LatentGenerator
from barter.ops.average import Average, average
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam
from barter.ops.heads import Head, head_state
from barter.ops.synthesis import diversity, fidelity_by_label, label_weights

__all__ = ["FedGen", "Source", "Update", "generator_loss", "loss"]


class Source(HeadServer):
    """A head, and a generator of features."""

    generator: State = {}
    known: list[int] = []  # the classes that it was trained for


class Update(TypedDict):
    """What a client sends back."""

    head: Head
    counts: Annotated[Tensor, Counts("classes")]  # images of each class


def generator_loss(
    generator: LatentGenerator,
    eta: float,
    noise: Tensor,
    y: Tensor,
    shares: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Every head should name the features for what they were made for, as far as it knows the class; and diversity."""
    z = generator(noise, y)
    logits = (torch.einsum("bd,kcd->kbc", z, weight) + bias[:, None]).float()
    return fidelity_by_label(logits, y, shares) + eta * diversity(z.float(), noise, norm=1)


def loss(
    model: Classifier,
    generator: LatentGenerator,
    spec: Spec,
    augment: Augment,
    alpha: float,
    beta: float,
    pixels: Tensor,
    labels: Tensor,
    known: Tensor,
    strength: Tensor,
) -> Tensor:
    """Cross entropy on images and on features of all classes; and the divergence from answers to features of theirs."""
    logits = model(prepared(pixels, spec, augment))
    y = known[torch.randint(len(known), labels.shape, device=labels.device)]
    made, same = (
        model.logits(generator(generator.noise(len(y), y.device), of)) for of in (y, labels)
    )
    extra = alpha * F.cross_entropy(made, y) + beta * kl(same.detach(), logits)
    return F.cross_entropy(logits, labels) + strength * extra


@dataclass(frozen=True, kw_only=True)
class FedGen(SharedHead[Source]):
    """Heads go up, their mean and a generator of features come down."""

    crosses = {
        "learn": "down: the first head, the generator, the classes it knows; up: the head, how many "
        "images of each class",
        "receive": "down: the averaged head",
    }

    alpha: NonNegative = 10.0  # α: how much the cross entropy on generated features counts
    beta: NonNegative = 10.0  # β: how much the divergence from answers to generated features counts
    decay: Fraction = 0.98  # of both, from round to round
    eta: NonNegative = 1.0  # η: how much diversity counts
    noise: Count = 512  # d_n: width of the noise
    hidden: Count = 512  # width of the generator's hidden layer
    generator_steps: Count = 100  # of the generator in a round
    generator_lr: Positive = 5e-3  # Adam's learning rate of the generator
    generator_weight_decay: NonNegative = 1e-2  # of that Adam
    samples: Count = 32  # generated features per step of the generator
    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    def round(self, server: Source, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        head, strength = self.missing_head(server, active), self.decay ** (t - 1)
        updates = active.run(self.learn, head, server.generator, server.known, strength)
        heads = updates.each(lambda _, update: update["head"])
        self.improve(server, heads, torch.stack([update["counts"] for update in updates.values()]))
        self.share_head(server, clients, average(heads, by=self.average))

    def learn(
        self, client: HeadClient, head: State, generator: State, known: list[int], strength: float
    ) -> Update:
        data, device = client.data, client.device
        self.put_head_on(client, head)
        if generator and (self.alpha or self.beta):
            made = LatentGenerator.restored(generator, data.spec.classes)
            whole = partial(
                loss, client.model, made, data.spec, data.augment, self.alpha, self.beta
            )
            self.train(
                client,
                whole,
                (torch.tensor(known, device=device), torch.tensor(strength, device=device)),
            )
        else:
            self.train(client)
        return {"head": head_state(client.model), "counts": data.class_counts()}

    def improve(self, server: Source, heads: dict[int, State], counts: Tensor) -> None:
        """Train the generator on heads, each of them for the classes it knows."""
        new = LatentGenerator(server.spec.classes, self.features, self.noise, self.hidden).to(
            server.device
        )
        generator = lanes.keep("latent", new).train()
        if server.generator:
            generator.load_state_dict(server.generator)
        weight, bias = (
            torch.stack([head[at] for head in heads.values()]) for at in ("weight", "bias")
        )
        shares, p = label_weights(counts.float(), 0.0)
        held = p.nonzero().flatten()
        trainer = Trainer.of(generator, adam(self.generator_lr, self.generator_weight_decay))
        total = torch.zeros((), device=server.device)
        for _ in server.track("generator", range(self.generator_steps)):
            y = held[torch.randint(len(held), (self.samples,), device=server.device)]
            noise = generator.noise(self.samples, server.device)
            total += trainer.step(
                partial(generator_loss, generator, self.eta), noise, y, shares[:, y], weight, bias
            )
        server.report["generator_loss"] = float(total) / self.generator_steps
        server.generator = isolate(dict(generator.state_dict()))
        server.known = sorted({*server.known, *held.tolist()})
