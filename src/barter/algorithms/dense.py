"""DENSE: Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1 (arXiv:2112.12371).

Clients with any networks train once and hand in their models. The server draws images that the models together are sure
of, that look inside of them like the data they were trained on (statistics of batch normalisation), and about which its
own model is of another opinion; and lets its model learn the models' mean opinion of all images drawn so far.

- One round is all that the method needs. In further rounds the server goes on drawing and learning; nobody is asked
  again but clients that have not handed in a model yet: those that failed, or were not in the sample.
- Each batch of images has a generator of its own, trained together with the batch's noise and then forgotten; of all
  its steps the batch with the least loss is kept. All as in the authors' code.
- Gradients of the third term flow through both opinions, as in the code; its student normalises by its batch there and
  by its own statistics here. Images are kept as bytes, as the code's files are, the newest `pool` of them.
- The code shows the models images that are cropped and mirrored. Here they are shown as they are: the server does not
  know which changes leave a label what it is.
- Labels are drawn evenly from the classes that somebody has; in the code from all. So clients say what they have.
- The optimizer of the server's model is new in each pass over the images.
- The defaults have fewer steps, images and local epochs than the authors' code; preset "paper" has its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.record import Round
from barter.models.generators import Decoder
from barter.ops.condense import quantised
from barter.ops.distill import kl_each, tempered
from barter.ops.ensemble import class_shares, consensus, distil
from barter.ops.fit import Trainer, adam, epoch_length, fit, sgd
from barter.ops.statistics import compared
from barter.ops.synthesis import (
    Ensemble,
    Teacher,
    assembled,
    collapsed,
    fidelity,
    painted,
    useful,
    variety,
)

__all__ = ["DENSE", "Archive", "Sketch", "sketch_loss"]


class Archive(Server):
    """The models that were handed in, and the images that were drawn."""

    teachers: dict[int, Teacher] = {}
    pixels: list[Tensor] = []  # of all that are kept, as bytes
    labels: list[Tensor] = []  # what they were drawn for


class Sketch(nn.Module):
    """A batch of images: a generator, and the noise it draws from."""

    def __init__(self, spec: Spec, noise: int, samples: int) -> None:
        super().__init__()
        self.spec, self.decoder = spec, Decoder(noise, spec)
        self.z = nn.Parameter(torch.randn(samples, noise))

    def forward(self) -> Tensor:
        return painted(self.decoder, self.z, self.spec)


def sketch_loss(
    sketch: Sketch,
    ensemble: Ensemble,
    model: Classifier,
    lam_bn: float,
    lam_adv: float,
    y: Tensor,
    shares: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cross entropy, λ1 times the distances of statistics, and λ2 times minus the divergence where model and ensemble
    see different classes; and the images."""
    x = sketch()
    with compared(ensemble) as distances:
        said = consensus(list(ensemble.said(x).float()), shares)
    known = model(x).float()
    apart = useful(said, known, y, "differ") * kl_each(said, known)
    return fidelity(said, y) + lam_bn * sum(distances) - lam_adv * apart.mean(), x


@dataclass(frozen=True, kw_only=True)
class DENSE(Algorithm[Archive]):
    """Models are handed in once; the server's learns from them on images that it draws."""

    primary = "server"
    global_model = True
    replicas = True
    crosses = {"learn": "up: the client's weights, how many images of each class"}
    presets = {
        "paper": {
            "epochs": 100,
            "batch_size": 128,
            "passes": 200,
            "generator_steps": 30,
            "samples": 256,
            "distil_batch": 256,
            "pool": 51_200,
        }
    }

    # the server's network: of the zoo, or package.module:function; none: the first client's
    student: str | None = None
    fraction: Fraction = 1.0  # share of clients per round that may hand in their models
    epochs: Count = 10  # E: local epochs; 100 in the authors' code
    batch_size: Count = 32  # private images per step; 128 in the authors' code
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    momentum: NonNegative = 0.9  # of all SGD
    passes: Count = 5  # T: times per round that a batch is drawn and all images are learned from; 200 in the paper
    generator_steps: Count = 10  # T_G: steps of each batch's generator; 30 in the paper
    samples: Count = 64  # b: images of a batch; 256 in the authors' code
    noise: Count = 256  # width of the noise
    # η_G: Adam's learning rate of generator and noise, first momentum 0.5
    generator_lr: Positive = 1e-3
    lam_bn: NonNegative = 1.0  # λ1: how much statistics count
    # λ2: how much it counts that the server's model is of another opinion
    lam_adv: NonNegative = 1.0
    temperature: Positive = 20.0  # of distillation, whose loss counts temperature² times
    distil_batch: Count = 64  # drawn images per step of the server's model
    distil_lr: Positive = 0.01  # η_S: learning rate of that SGD
    pool: Count = 8192  # images that are kept, the newest
    # clients count alike, or by their images of a class (ours)
    weighting: Literal["clients", "classes"] = "clients"

    @property
    def server_network(self) -> str | None:
        return self.student

    def round(self, server: Archive, clients: Clients, t: int) -> None:
        new = [k for k in clients.sample(self.fraction) if k not in server.teachers]
        server.teachers = {**server.teachers, **clients.only(new).run(self.learn)}
        ensemble = assembled(
            server, {k: update["weights"] for k, update in server.teachers.items()}
        )
        counts = torch.stack([update["counts"] for update in server.teachers.values()])
        shares = class_shares(counts if self.weighting == "classes" else torch.ones_like(counts))
        for _ in server.track("distil", range(self.passes)):
            self.draw(server, ensemble, shares, counts.sum(0).nonzero().flatten())
            self.distil(server, ensemble, shares)
        images = self.images(server)
        newest = torch.arange(len(images), device=server.device)[-self.samples * self.passes :]
        server.report |= variety(images.batch(newest), images.labels[newest])

    def learn(self, client: Client) -> Teacher:
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum),
        )
        return {"weights": client.model.state_dict(), "counts": client.data.class_counts()}

    def draw(self, server: Archive, ensemble: Ensemble, shares: Tensor, held: Tensor) -> None:
        """A batch of images more."""
        model, new = (
            server.model.eval().requires_grad_(False),
            Sketch(server.spec, self.noise, self.samples),
        )
        sketch = lanes.keep("sketch", new.to(server.device)).train()
        y = held[torch.randint(len(held), (self.samples,), device=server.device)]
        loss = partial(sketch_loss, sketch, ensemble, model, self.lam_bn, self.lam_adv)
        trainer = Trainer.of(sketch, adam(self.generator_lr, beta1=0.5))
        best, least = (torch.full((), value, device=server.device) for value in (0.0, torch.inf))
        for _ in range(self.generator_steps):
            value, x = trainer.step(loss, y, shares)
            best, least = torch.where(value < least, x, best), torch.minimum(value, least)
        model.requires_grad_(True)
        server.report["generator_loss"] = float(least)
        pixels, labels = [*server.pixels, quantised(best, server.spec)], [*server.labels, y]
        server.pixels, server.labels = (
            [torch.cat(pixels)[-self.pool :]],
            [torch.cat(labels)[-self.pool :]],
        )

    def images(self, server: Archive) -> Images:
        """All that are kept."""
        return Images(server.pixels[0], server.labels[0], server.spec)

    def distil(self, server: Archive, ensemble: Ensemble, shares: Tensor) -> None:
        """A pass of the server's model over all images."""
        images = self.images(server)
        places = torch.arange(len(images), device=server.device)
        said = predict(lambda x: consensus(list(ensemble.said(x)), shares), images.batch, places)
        distil(
            server.model,
            images,
            places,
            [said],
            partial(tempered, self.temperature),
            batch_size=self.distil_batch,
            recipe=sgd(self.distil_lr, self.momentum),
            steps=epoch_length(len(images), self.distil_batch),
        )

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapsed(rounds, "a higher lam_adv, or passes of fewer generator_steps, may help")

    def creations(
        self, party: Archive | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Archive) or not party.pixels:
            return None
        images = self.images(party)
        chosen = wanted(images.labels)
        return images.labels[chosen], images.batch(chosen)
