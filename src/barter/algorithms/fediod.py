"""FedIOD: Gong et al., "Federated Learning via Input-Output Collaborative Distillation", AAAI 2024 (arXiv:2312.14478).

No weights are exchanged. Clients with any architectures train once, locally. Each client also has a
discriminator, which never leaves it and distinguishes real patches from generated ones.

One iteration, of which a round has several:

1. The server generates images. Clients upload their logits on them, and their discriminators take a
   step.
2. The server computes the gradient of the generator's loss with respect to the logits. Clients
   return its gradient with respect to the images, and that of their discriminator.
3. The server's model learns from the clients' joint logits.
4. The generator takes a step. Its images should look real to all clients, each client should be
   certain of them, all classes should occur, and clients should agree while the server's model does
   not yet.

Differences from the paper:

- The authors' code has all networks in one place. Here they are where the paper has them: images,
  logits and gradients cross. With these gradients the generator's step is exactly the one that it
  would take in one place.
- The steps of discriminators, generator and server's model are one iteration with two calls. To
  save a third call, the images that the model learns from are generated before the generator's
  step, in the code after it.
- The discriminators' gradients are those after their step, and in full precision.
- In joint logits a client is weighted by its images of a class, in all other terms by its number of
  images. Agreement is measured as in the code by KL(mean ‖ client), without its clamps; that is
  optional there.
- Generator and discriminators continue from round to round, the latter with their optimizers. The
  optimizers of the generator and of the model are new in each round, and learning rates are
  constant.
- The generator is the one that other methods here use, whose images are normalised and not limited
  by a sigmoid.
- Medical images, segmentation, and the noise of the paper's privacy study are left out.
- `epochs`, `iterations`: the code trains 500 local epochs and 200 rounds, each a pass over the
  smallest client's images, with 20 clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.compute.precision import full_precision
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, Floats
from barter.core.images import Augment, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import Decoder, PatchDiscriminator
from barter.ops.distill import tempered_kl
from barter.ops.ensemble import class_shares, mean_predictions
from barter.ops.fit import Trainer, adam, fit, sgd
from barter.ops.modules import copy_state, restore_module
from barter.ops.synthesis import (
    Artist,
    collapse_remarks,
    generate_from_codes,
    images_for_display,
    server_generator,
    store_generator,
)

__all__ = [
    "Curator",
    "DiscriminatorClient",
    "FedIOD",
    "discrimination",
    "generator_logit_loss",
    "realism",
]

# Logits on batches of images.
ClientLogits: TypeAlias = Annotated[Tensor, Floats("batches", "samples", "classes")]
# A gradient with respect to images.
Slope: TypeAlias = Annotated[Tensor, Floats("samples", "channels", "height", "width")]


class Curator(Artist):
    """A server that stores the class counts of clients that have trained."""

    counts: dict[int, Tensor] = {}  # of each client: number of images of each class


class DiscriminatorClient(Client):
    """A client with a discriminator."""

    discriminator: State = {}
    moments: list[State] = []  # state of the discriminator's optimizer
    batch: list[Tensor] = []  # the images whose gradient will be asked for: none, or one batch


def _patch_loss(logits: Tensor, real: float) -> Tensor:
    """Return binary cross entropy, summed over patches, averaged over images.

    Args:
        logits: The discriminator's output for each patch.
        real: The target of all patches, 1 for real and 0 for generated.
    """
    target = torch.full_like(logits, real).float()
    total = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="sum")
    return total / len(logits)


def discrimination(
    discriminator: PatchDiscriminator, spec: Spec, pixels: Tensor, generated: Tensor
) -> Tensor:
    """Return the mean of the discriminator's loss on generated and on real images.

    Each is the binary cross entropy summed over patches and averaged over images.

    Args:
        discriminator: The discriminator to train.
        spec: The format of the images.
        pixels: Real images as bytes, which are not augmented.
        generated: Generated images, as network input.
    """
    on_generated = _patch_loss(discriminator(generated), 0.0)
    on_real = _patch_loss(discriminator(prepare_batch(pixels, spec, Augment())), 1.0)
    return (on_generated + on_real) / 2


def realism(discriminator: PatchDiscriminator, x: Tensor) -> Tensor:
    """Return the generator's adversarial loss, low if images are taken for real.

    It is the binary cross entropy of the discriminator's logits with the target 1, summed over the
    patches of an image and averaged over images. Gradients reach the discriminator's parameters
    too.

    Args:
        discriminator: The discriminator.
        x: Generated images.
    """
    return _patch_loss(discriminator(x), 1.0)


def imitation(generator: Decoder, spec: Spec, z: Tensor, slope: Tensor) -> Tensor:
    """Return a surrogate loss whose gradient by the generated images is `slope`.

    Args:
        generator: The generator to train.
        spec: The format of the images.
        z: The noise from which images are generated.
        slope: The gradient, of the images' shape.
    """
    return (generate_from_codes(generator, z, spec).float() * slope).sum()


def student_loss(model: Classifier, temperature: float, x: Tensor, joint_logits: Tensor) -> Tensor:
    """Return T² KL(joint prediction ‖ model) on a batch of images, at temperature T."""
    return tempered_kl(temperature, model(x).float(), joint_logits)


def generator_logit_loss(
    client_logits: Tensor,
    known: Tensor,
    shares: Tensor,
    sizes: Tensor,
    temperature: float,
    weights: Sequence[float],
) -> Tensor:
    """Return the part of the generator's loss that depends on logits.

    It is low if the server's model is far from the clients, each client is certain of each image
    and predicts all classes equally often, and clients agree.

    Args:
        client_logits: The clients' logits (clients, images, classes).
        known: The logits of the server's model (images, classes).
        shares: The weight of each client for each class (clients, classes), in the joint logits
            that the server's model is compared with.
        sizes: The weight of each client (clients,), for certainty and frequency of classes.
        temperature: The temperature of distillation.
        weights: The weights of these four terms, in this order.
    """
    adv, align, balance, agree = weights
    log_p = client_logits.log_softmax(2)
    p = log_p.exp()
    entropy = -(p * log_p).sum(2).mean(1)
    class_frequencies = p.mean(1)
    imbalance = (class_frequencies * (class_frequencies + 1e-12).log2()).sum(1)
    mean = p.mean(0, keepdim=True)
    divergence = (mean * ((mean + 1e-12).log() - log_p)).sum(2).mean()
    distance = tempered_kl(temperature, known, mean_predictions(list(client_logits), shares))
    per_client = sizes * (align * entropy + balance * imbalance)
    return per_client.sum() + agree * divergence - adv * distance


@dataclass(frozen=True, kw_only=True)
class FedIOD(Algorithm[Curator, DiscriminatorClient]):
    """Distil clients into the server's model by generated images and gradients."""

    primary = "server"
    aggregates = ("logits",)
    sizes = ("samples",)
    crosses = {
        "learn": Crossing(up="the number of images of each class"),
        # The names of these two methods are part of their random streams.
        "judge": Crossing(down="generated images", up="logits on them"),
        "criticise": Crossing(
            down="gradients of the generator's loss by logits",
            up="gradients by images",
        ),
    }
    once = frozenset({"learn"})
    presets = {"paper": {"epochs": 500, "batch_size": 256, "lr": 0.0025, "generator_lr": 1e-4}}

    # the server's network: a name of the zoo, or package.module:function; none: the first client's
    student: str | None = None
    fraction: Fraction = 1.0  # fraction of clients sampled per round
    epochs: Count = 10  # local epochs, once; 500 in the authors' code
    batch_size: Count = 32  # private images per step; 256 in the authors' code
    lr: Positive = 0.01  # learning rate of the clients' SGD; 0.0025 in the authors' code
    momentum: Momentum = 0.9  # momentum of all SGD
    # iterations per round: a step of discriminators and generator, and global_steps of the model
    iterations: Count = 10
    global_steps: Count = 5  # steps of the server's model in an iteration
    samples: Count = 64  # generated images per step
    noise: Count = 100  # width of the noise
    discriminator_width: Count = 128  # channels of the discriminators' first layer
    # learning rate of generator and discriminators, with Adam; 1e-4 in the authors' code
    generator_lr: Positive = 1e-3
    global_lr: Positive = 5e-3  # learning rate of the server's model, with SGD
    global_weight_decay: NonNegative = 3e-5  # weight decay of that SGD
    temperature: Positive = 1.0  # of distillation, whose loss is multiplied by temperature²
    w_gan: NonNegative = 1.0  # weight of images looking real
    w_adv: NonNegative = 1.0  # weight of the server's model differing from the clients
    w_align: NonNegative = 1.0  # weight of each client being certain
    w_balance: NonNegative = 10.0  # weight of all classes occurring
    w_agree: NonNegative = 1.0  # weight of clients agreeing

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("own", self.student)

    def round(self, server: Curator, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        new = active.only(k for k in active if k not in server.counts).run(self.learn)
        server.counts = {**server.counts, **new}
        active = active.only(server.counts)
        generator = server_generator(server, self.noise)
        generator_trainer = Trainer.of(generator, adam(self.generator_lr, beta1=0.5))
        recipe = sgd(self.global_lr, self.momentum, self.global_weight_decay)
        model_trainer = Trainer.of(server.model, recipe)
        for _ in server.track("distil", range(self.iterations)):
            z, batches = self.draw(server, generator)
            answers = active.run(self.judge, batches)
            gradient = self.image_gradient(server, active, batches[0], answers)
            self.study(server, model_trainer, batches[1:], answers)
            generator_trainer.step(partial(imitation, generator, server.spec), z, gradient)
        store_generator(server, generator, self.codes(server))

    def learn(self, client: DiscriminatorClient) -> Annotated[Tensor, Counts("classes")]:
        """Train the client's network; return its numbers of images by class (classes,)."""
        fit(
            client,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum),
        )
        return client.data.class_counts()

    def codes(self, party: Curator | DiscriminatorClient) -> Tensor:
        """Sample the noise of a batch of images (samples, noise), on the party's device."""
        return torch.randn(self.samples, self.noise, device=party.device)

    @torch.no_grad()
    def draw(self, server: Curator, generator: Decoder) -> tuple[Tensor, Tensor]:
        """Generate the images of an iteration, without gradients.

        Returns:
            The noise of the generator's step (samples, noise), and batches of images (1 +
            global_steps, samples, channels, height, width): first those of this noise, then those
            that the server's model learns from.
        """
        noises = [self.codes(server) for _ in range(1 + self.global_steps)]
        batches = [generate_from_codes(generator, codes, server.spec).float() for codes in noises]
        return noises[0], torch.stack(batches)

    def judge(
        self,
        client: DiscriminatorClient,
        batches: Annotated[Tensor, Floats("batches", "samples", ...)],
    ) -> ClientLogits:
        """Train the client's discriminator on the first batch; return logits on all.

        Args:
            client: The client; it stores the first batch for `criticise`.
            batches: Generated images (batches, samples, channels, height, width).

        Returns:
            Logits (batches, samples, classes).
        """
        data = client.data
        discriminator = self.discriminator(client)
        trainer = Trainer.of(discriminator.train(), adam(self.generator_lr, beta1=0.5))
        trainer.recall(client.moments)
        chosen = torch.randint(len(data), (len(batches[0]),), device=client.device)
        trainer.step(
            partial(discrimination, discriminator, data.spec), data.pixels[chosen], batches[0]
        )
        client.discriminator = copy_state(discriminator)
        client.moments = trainer.moments()
        client.batch = [batches[0].clone()]
        client.model.eval()
        with torch.no_grad(), full_precision():
            return torch.stack([client.model(batch) for batch in batches])

    def discriminator(self, client: DiscriminatorClient) -> PatchDiscriminator:
        """Return the client's discriminator with its last step's weights, or a new one."""
        new = PatchDiscriminator(client.data.spec, self.discriminator_width)
        return restore_module(client, "discriminator", new, client.discriminator)

    def image_gradient(
        self, server: Curator, active: Clients, x: Tensor, answers: Replies[Tensor]
    ) -> Tensor:
        """Return the gradient of the generator's loss with respect to its images.

        Calls `criticise` at every client that answered. Each backpropagates through its network
        and its discriminator and discards its stored batch. The server adds the gradient through
        its own model.

        Args:
            server: The server with its model.
            active: The clients of this round.
            x: The images of the generator's step.
            answers: Each client's logits (batches, samples, classes); only batch 0, on `x`, is
                used.

        Returns:
            A tensor like `x`.
        """
        logits = torch.stack([answer[0] for answer in answers.values()]).requires_grad_()
        counts = torch.stack([server.counts[k] for k in answers])
        sizes = counts.sum(1) / counts.sum()
        images = x.clone().requires_grad_()
        weights = (self.w_adv, self.w_align, self.w_balance, self.w_agree)
        model_logits = server.model.eval()(images)
        shares = class_shares(counts)
        value = generator_logit_loss(logits, model_logits, shares, sizes, self.temperature, weights)
        by_logits, through_model = torch.autograd.grad(value, (logits, images))
        requests = {
            k: (gradient, float(size))
            for k, gradient, size in zip(answers, by_logits, sizes, strict=True)
        }
        through_clients = active.only(answers).scatter(self.criticise, requests)
        return through_model + torch.stack(list(through_clients.values())).sum(0)

    def criticise(self, client: DiscriminatorClient, asked: tuple[Tensor, float]) -> Slope:
        """Return the gradient of the generator's loss by the images of the last `judge`.

        Args:
            client: The client, which has stored the images.
            asked: The gradient of the server's terms by the client's logits, and the weight of the
                client, by which its discriminator's term is multiplied.
        """
        by_logits, size = asked
        x = client.batch[0].requires_grad_()
        discriminator = self.discriminator(client).train()
        with full_precision():
            server_terms = (by_logits * client.model.eval()(x)).sum()
            value = server_terms + self.w_gan * size * realism(discriminator, x)
        (gradient,) = torch.autograd.grad(value, x)
        client.batch = []
        return gradient

    def study(
        self, server: Curator, trainer: Trainer, batches: Tensor, answers: Replies[Tensor]
    ) -> None:
        """Train the server's model on the clients' joint logits, a step for each batch.

        Clients are weighted by their share of each class's images. The last loss is reported as
        `global_loss`.

        Args:
            server: The server, whose model is trained in place.
            trainer: The optimizer of its model.
            batches: Batches of images, without the first one of `draw`.
            answers: Each client's logits on all batches of `draw`; those of the first are ignored.
        """
        shares = class_shares(torch.stack([server.counts[k] for k in answers]))
        model = server.model.train()
        for step, x in enumerate(batches, start=1):
            joint_logits = mean_predictions([answer[step] for answer in answers.values()], shares)
            loss = trainer.step(partial(student_loss, model, self.temperature), x, joint_logits)
        server.report["global_loss"] = float(loss)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        return collapse_remarks(rounds, "a higher w_gan or w_adv may help")

    def creations(
        self, party: Curator | DiscriminatorClient, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        return images_for_display(party, self.codes(party), None, wanted)
