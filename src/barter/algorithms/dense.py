"""DENSE: Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1 (arXiv:2112.12371).

One-shot: clients with any architectures train once and upload their models.

The server then repeats, `passes` times:

1. It optimises a batch of synthetic images and their generator. The clients' ensemble should be
   certain of the images' labels, the images should match the batch normalisation statistics of the
   clients' models (λ1), and the server's model should disagree with the ensemble (λ2).
2. Its own model learns the mean prediction of the clients' models on all images so far.

Differences from the paper:

- The method needs a single round. In further rounds the server continues with both steps. Only
  clients that have not uploaded a model yet, because they failed or were not sampled, are asked for
  one.
- Gradients of the third term flow through both predictions, as in the authors' code. There the
  student normalises by its batch in this term; here by its running statistics.
- `pool`: images are stored as bytes, as in the code's files; the newest `pool` of them are kept.
- The code crops and mirrors the images that it shows to the models. Here they are not augmented:
  the server does not know which changes preserve a label.
- Labels are sampled uniformly from the classes that some client has, so clients upload class
  counts; the code samples from all classes.
- The optimizer of the server's model is new in each pass over the images.
- The defaults have fewer steps, images and local epochs than the authors' commands; preset "paper"
  has their numbers.

As in the code, each batch of images has its own generator, which is trained together with the
batch's noise and then discarded; the batch with the lowest loss of all steps is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from barter.compute import lanes
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive
from barter.core.record import Round
from barter.models.generators import Decoder
from barter.ops.condense import quantise_images
from barter.ops.distill import kl_each, tempered_kl
from barter.ops.ensemble import class_shares, distil, mean_predictions
from barter.ops.fit import Trainer, adam, epoch_length, fit, sgd
from barter.ops.modules import stack_field
from barter.ops.statistics import compare_statistics
from barter.ops.synthesis import (
    Ensemble,
    Teacher,
    build_ensemble,
    collapse_remarks,
    fidelity,
    generate_from_codes,
    usefulness,
    variety,
)

__all__ = ["DENSE", "Archive", "Sketch", "sketch_loss"]


class Archive(Server):
    """A server that stores the uploaded models and the synthetic images."""

    teachers: dict[int, Teacher] = {}
    pixels: list[Tensor] = []  # synthetic images as bytes: empty, or one tensor
    labels: list[Tensor] = []  # the labels for which they were generated


class Sketch(nn.Module):
    """A batch of synthetic images: a generator and its noise, both trained.

    Args:
        spec: The format of the images.
        noise: Width of the noise.
        samples: Images in the batch.
    """

    def __init__(self, spec: Spec, noise: int, samples: int) -> None:
        super().__init__()
        self.spec = spec
        self.decoder = Decoder(noise, spec)
        self.z = nn.Parameter(torch.randn(samples, noise))

    def forward(self) -> Tensor:
        return generate_from_codes(self.decoder, self.z, self.spec)


def sketch_loss(
    sketch: Sketch,
    ensemble: Ensemble,
    model: Classifier,
    lam_bn: float,
    lam_adv: float,
    y: Tensor,
    shares: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch of synthetic images, and the images.

    The loss is the ensemble's cross entropy, plus λ1 times the distances of normalisation
    statistics, summed over all layers of all clients' models, minus λ2 times KL(ensemble ‖ model).
    The divergence is averaged over all images and counts 0 where both predict the same class.

    Args:
        sketch: The generator and its noise.
        ensemble: The clients' models.
        model: The server's model.
        lam_bn: λ1.
        lam_adv: λ2.
        y: The labels for which images are generated.
        shares: The weight of each client for each class (clients, classes).
    """
    x = sketch()
    with compare_statistics(ensemble) as distances:
        teacher = mean_predictions(list(ensemble.logits_by_model(x).float()), shares)
    student = model(x).float()
    divergence = usefulness(teacher, student, y, "differ") * kl_each(teacher, student)
    return fidelity(teacher, y) + lam_bn * sum(distances) - lam_adv * divergence.mean(), x


@dataclass(frozen=True, kw_only=True)
class DENSE(Algorithm[Archive]):
    """Clients upload models once; the server distils them on synthetic images."""

    primary = "server"
    aggregates = ("logits",)
    retired = {"weighting": "clients"}
    crosses = {"learn": Crossing(up="the client's weights, the number of images of each class")}
    once = frozenset({"learn"})
    presets = {
        "paper": {
            "epochs": 400,
            "batch_size": 128,
            "passes": 200,
            "generator_steps": 30,
            "samples": 256,
            "distil_batch": 256,
            "distil_lr": 0.005,
            "pool": 51_200,
        }
    }

    # the server's network: a name of the zoo, or package.module:function; none: the first client's
    student: str | None = None
    fraction: Fraction = 1.0  # fraction of clients sampled per round; those without an upload train
    epochs: Count = 10  # E: local epochs; 400 in the authors' commands
    batch_size: Count = 32  # private images per step; 128 in the authors' code
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    momentum: Momentum = 0.9  # momentum of all SGD
    # T: repetitions per round of generating a batch and learning from all images; 200 in the paper
    passes: Count = 5
    generator_steps: Count = 10  # T_G: steps of each batch's generator; 30 in the paper
    samples: Count = 64  # b: images per generated batch; 256 in the authors' code
    noise: Count = 256  # width of the noise
    # η_G: learning rate of generator and noise, with Adam of β1 = 0.5
    generator_lr: Positive = 1e-3
    lam_bn: NonNegative = 1.0  # λ1: weight of the normalisation statistics
    lam_adv: NonNegative = 1.0  # λ2: weight of the disagreement of the server's model
    temperature: Positive = 20.0  # of distillation, whose loss is multiplied by temperature²
    distil_batch: Count = 64  # synthetic images per step of the server's model
    distil_lr: Positive = 0.01  # η_S: learning rate of that SGD; 0.005 in the authors' commands
    pool: Count = 8192  # number of synthetic images that are kept, the newest

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("own", self.student)

    def round(self, server: Archive, clients: Clients, t: int) -> None:
        new = clients.sample(self.fraction).run_missing(self.learn, server.teachers)
        server.teachers = {**server.teachers, **new}
        weights = {k: teacher["weights"] for k, teacher in server.teachers.items()}
        ensemble = build_ensemble(server, weights)
        counts = stack_field(server.teachers, "counts")
        shares = class_shares(torch.ones_like(counts))  # All models count alike.
        classes = counts.sum(0).nonzero().flatten()
        for _ in server.track("distil", range(self.passes)):
            self.draw(server, ensemble, shares, classes)
            self.distil(server, ensemble, shares)
        images = self.images(server)
        newest = torch.arange(len(images), device=server.device)[-self.samples * self.passes :]
        server.report |= variety(images.batch(newest), images.labels[newest])

    def learn(self, client: Client) -> Teacher:
        """Train the client's network and return its weights and class counts."""
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum),
        )
        return {"weights": client.model.state_dict(), "counts": client.data.class_counts()}

    def draw(self, server: Archive, ensemble: Ensemble, shares: Tensor, classes: Tensor) -> None:
        """Generate `samples` synthetic images and store them with labels at the server.

        Labels are sampled uniformly from `classes`. Of all steps of the generator, the images with
        the lowest loss are stored; beyond `pool` images, the oldest are dropped.

        Args:
            server: The server, which stores the images and reports their loss; its model is not
                trained.
            ensemble: The clients' models.
            shares: The weight of each client for each class (clients, classes).
            classes: The classes for which images are generated.
        """
        model = server.model.eval().requires_grad_(False)
        new = Sketch(server.spec, self.noise, self.samples)
        sketch = lanes.keep("sketch", new.to(server.device)).train()
        y = classes[torch.randint(len(classes), (self.samples,), device=server.device)]
        loss = partial(sketch_loss, sketch, ensemble, model, self.lam_bn, self.lam_adv)
        trainer = Trainer.of(sketch, adam(self.generator_lr, beta1=0.5))
        best_images = torch.full((), 0.0, device=server.device)
        least_loss = torch.full((), torch.inf, device=server.device)
        for _ in range(self.generator_steps):
            value, x = trainer.step(loss, y, shares)
            best_images = torch.where(value < least_loss, x, best_images)
            least_loss = torch.minimum(value, least_loss)
        model.requires_grad_(True)
        server.report["generator_loss"] = float(least_loss)
        pixels = torch.cat([*server.pixels, quantise_images(best_images, server.spec)])
        labels = torch.cat([*server.labels, y])
        server.pixels = [pixels[-self.pool :]]
        server.labels = [labels[-self.pool :]]

    def images(self, server: Archive) -> Images:
        """Return all stored synthetic images, oldest first; there must be some."""
        return Images(server.pixels[0], server.labels[0], server.spec)

    def distil(self, server: Archive, ensemble: Ensemble, shares: Tensor) -> None:
        """Distil the ensemble into the server's model in one pass over stored images.

        The targets are the mean of the clients' logits, weighted by `shares` (clients, classes).
        The loss is `tempered_kl`, and the images are not augmented.
        """
        images = self.images(server)
        index = torch.arange(len(images), device=server.device)

        def joint_logits(x: Tensor) -> Tensor:
            return mean_predictions(list(ensemble.logits_by_model(x)), shares)

        targets = predict(joint_logits, images.batch, index)
        distil(
            server.model,
            images,
            index,
            [targets],
            partial(tempered_kl, self.temperature),
            batch_size=self.distil_batch,
            recipe=sgd(self.distil_lr, self.momentum),
            steps=epoch_length(len(images), self.distil_batch),
        )

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapse_remarks(
            rounds, "a higher lam_adv, or passes of fewer generator_steps, may help"
        )

    def creations(
        self, party: Archive | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Archive) or not party.pixels:
            return None
        images = self.images(party)
        chosen = wanted(images.labels)
        return images.labels[chosen], images.batch(chosen)
