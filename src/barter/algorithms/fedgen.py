"""FedGen: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1
(arXiv:2105.10056).

Clients share their heads, and a generator of features lets them learn about classes of which they
have no images.

One round:

1. Sampled clients train with the averaged head and the generator. Their heads learn from generated
   features of all classes, and their networks learn to predict for an image what they predict for
   generated features of its class. They upload the head and their class counts.
2. The server trains the generator: the clients' heads together should recognise the class for which
   features were generated.
3. The server averages the heads, and all clients receive the average.

Differences from the paper:

- The paper's clients share whole networks or, in one variant, the last layers. Here they share the
  head, as in HtFLlib, so that the rest may differ.
- All clients start with one head, the first client's, as in HtFLlib; the paper's start from one
  network.
- HtFLlib does not keep the generator that it trained, so that its clients see an untrained one in
  every round; it has neither diversity nor the second of the clients' terms. Here all of them are
  as in the paper.
- The noise is uniform, as in the code; the paper says Gaussian. Diversity is as in the code, with
  means instead of norms. The code's adversarial term has weight 0 there and is left out.
- In the generator's loss a client is weighted by its number of images of the class. Labels are
  sampled uniformly from the classes that some client has; the code requires two images of a class.
- `generator_lr`, `generator_weight_decay`: the generator's Adam is new in each round and its
  learning rate constant; in the code Adam continues, and the rate falls by 2 % a round.
- `decay`: the clients' weights α and β decay without limit, in the code to no less than 0.0001.
- `noise`, `hidden`, `generator_lr`, `generator_steps`: HtFLlib's values (paper: 32, 256, 3e-4, 50
  for MNIST). Local training is HtFLlib's too (paper: 20 steps with 32 images).

`global` and `local` are accuracies of networks after local training, with the heads they trained;
`shared_global` and `shared_local` are with the averaged head, as HtFLlib measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.one_width import HeadClient, HeadServer, SharedHead
from barter.core.algorithm import Crossing
from barter.core.clients import Clients
from barter.core.contracts import Counts
from barter.core.model import Classifier
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.models.generators import LatentGenerator
from barter.ops.average import Average, average
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam
from barter.ops.heads import Head, head_state
from barter.ops.modules import copy_state, restore_module, stack_field
from barter.ops.synthesis import diversity, fidelity_by_label, label_weights

__all__ = ["FedGen", "GeneratorServer", "HeadUpdate", "fedgen_loss", "generator_loss"]


class GeneratorServer(HeadServer):
    """A server with a shared head and a generator of features."""

    generator: State = {}
    known: list[int] = []  # the classes that the generator was trained for


class HeadUpdate(TypedDict):
    """The upload of a client."""

    head: Head
    counts: Annotated[Tensor, Counts("classes")]  # number of images of each class


def generator_loss(
    generator: LatentGenerator,
    eta: float,
    noise: Tensor,
    y: Tensor,
    shares: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Return the generator's loss: the heads' cross entropy plus η diversity.

    Args:
        generator: The generator to train.
        eta: η, the weight of diversity.
        noise: The noise from which feature vectors are generated (vectors, noise).
        y: The classes for which they are generated (vectors,).
        shares: The weight of each client for each feature vector (clients, vectors).
        weight: The weights of all heads (clients, classes, width).
        bias: The biases of all heads (clients, classes).
    """
    z = generator(noise, y)
    logits = (torch.einsum("bd,kcd->kbc", z, weight) + bias[:, None]).float()
    return fidelity_by_label(logits, y, shares) + eta * diversity(z.float(), noise, norm=1)


def fedgen_loss(
    model: Classifier,
    generator: LatentGenerator,
    alpha: float,
    beta: float,
    x: Tensor,
    labels: Tensor,
    known: Tensor,
    strength: Tensor,
) -> Tensor:
    """Return a client's loss on images and on generated features.

    It is the cross entropy on the images plus strength * (α * cross entropy on generated features +
    β * KL(prediction for generated features ‖ prediction for the image)).

    Args:
        model: The client's network.
        generator: The generator of features.
        alpha: α, the weight of the cross entropy on generated features of random known classes.
        beta: β, the weight of the divergence between the predictions for an image and for generated
            features of its class, which are constant in it.
        x: Images.
        labels: Their classes.
        known: The classes that the generator was trained for.
        strength: The factor of both terms in this round.
    """
    logits = model(x)
    y = known[torch.randint(len(known), labels.shape, device=labels.device)]
    noise = generator.noise(len(y), y.device)
    logits_for_y = model.logits(generator(noise, y))
    noise = generator.noise(len(y), y.device)
    logits_for_labels = model.logits(generator(noise, labels))
    on_all_classes = F.cross_entropy(logits_for_y, y)
    on_own_classes = kl(logits_for_labels.detach(), logits)
    extra = alpha * on_all_classes + beta * on_own_classes
    return F.cross_entropy(logits, labels) + strength * extra


@dataclass(frozen=True, kw_only=True)
class FedGen(SharedHead[GeneratorServer]):
    """Average the heads, and train a generator of features for all clients."""

    aggregates = ("states",)
    crosses = {
        "learn": Crossing(
            down="the initial head, the generator, the classes it was trained for",
            up="the head, the number of images of each class",
        ),
        "receive": Crossing(down="the averaged head"),
    }

    alpha: NonNegative = 10.0  # α: weight of the cross entropy on generated features
    beta: NonNegative = 10.0  # β: weight of the divergence from predictions for generated features
    decay: Fraction = 0.98  # factor of α and β from round to round
    eta: NonNegative = 1.0  # η: weight of the diversity of generated features
    noise: Count = 512  # d_n: width of the noise
    hidden: Count = 512  # width of the generator's hidden layer
    generator_steps: Count = 100  # steps of the generator in a round
    generator_lr: Positive = 5e-3  # Adam's learning rate of the generator
    generator_weight_decay: NonNegative = 1e-2  # weight decay of that Adam
    samples: Count = 32  # generated features per step of the generator
    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    def round(self, server: GeneratorServer, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        head = self.missing_head(server, active)
        strength = self.decay ** (t - 1)
        updates = active.run(self.learn, head, server.generator, server.known, strength)
        heads = updates.map(lambda _, update: update["head"])
        counts = stack_field(updates, "counts")
        self.improve(server, heads, counts)
        self.share_head(server, clients, average(heads, by=self.average))

    def learn(
        self, client: HeadClient, head: State, generator: State, known: list[int], strength: float
    ) -> HeadUpdate:
        """Train with the shared head and the generator; return the head and class counts.

        Args:
            client: The client that trains.
            head: The shared head; empty if the client has received it.
            generator: The generator's weights; empty in the first round.
            known: The classes that the generator was trained for.
            strength: The factor of α and β in this round.
        """
        data = client.data
        device = client.device
        self.put_head_on(client, head)
        if generator and (self.alpha or self.beta):
            source = LatentGenerator.from_state(generator, data.spec.classes)
            client_loss = partial(fedgen_loss, client.model, source, self.alpha, self.beta)
            known_classes = torch.tensor(known, device=device)
            factor = torch.tensor(strength, device=device)
            self.train(client, client_loss, (known_classes, factor))
        else:
            self.train(client)
        return {"head": head_state(client.model), "counts": data.class_counts()}

    def improve(self, server: GeneratorServer, heads: dict[int, State], counts: Tensor) -> None:
        """Train the generator with the clients' heads, weighted by their class counts.

        Args:
            server: The server, which stores the trained generator and adds the clients' classes to
                `server.known`.
            heads: The heads of the clients, which are not changed.
            counts: The number of images of each client and class (clients, classes), in the order
                of `heads`.
        """
        new = LatentGenerator(server.spec.classes, self.features, self.noise, self.hidden)
        generator = restore_module(server, "latent", new, server.generator).train()
        weight = stack_field(heads, "weight")
        bias = stack_field(heads, "bias")
        shares, frequencies = label_weights(counts.float())
        classes = frequencies.nonzero().flatten()
        trainer = Trainer.of(generator, adam(self.generator_lr, self.generator_weight_decay))
        total = torch.zeros((), device=server.device)
        for _ in server.track("generator", range(self.generator_steps)):
            y = classes[torch.randint(len(classes), (self.samples,), device=server.device)]
            noise = generator.noise(self.samples, server.device)
            step_loss = partial(generator_loss, generator, self.eta)
            total += trainer.step(step_loss, noise, y, shares[:, y], weight, bias)
        server.report["generator_loss"] = float(total) / self.generator_steps
        server.generator = copy_state(generator)
        server.known = sorted({*server.known, *classes.tolist()})
