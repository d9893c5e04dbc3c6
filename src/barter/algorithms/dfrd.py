"""DFRD: Luo et al., "DFRD: Data-Free Robustness Distillation for Heterogeneous Federated Learning", NeurIPS 2023
(arXiv:2309.13546).

The server trains a generator of images on which the clients' models agree with a label and its own
model does not yet, and distils the clients' models into its own on these images. As fine-tuning,
the server's model is first averaged from the clients' models by another method (`base`); as a
data-free method (`base = "none"`) it learns from generated images only, and clients may have any
networks. One round:

1. Clients train on their images and upload weights and the number of images of each class.
2. The server averages the weights (Eq. 1), unless `base = "none"`.
3. The server trains generator and global model in turn (Eqs. 2 to 5 and 7). The global model learns
   from the ensemble of the clients' models, weighted by how many images of the label they have, on
   images of the generator and of a slow copy, which preserves the knowledge of earlier rounds.
4. The slow copy moves towards the generator (Eq. 6).

Differences from the paper, where it is silent or contradicts itself:

- KL(a, b) of Eqs. 3 and 7 is read as in the authors' code: a is the input of PyTorch's function, b
  its target. So the generator maximises KL(global ‖ ensemble), and the global model learns towards
  the ensemble.
- Eq. 4 has norms, with which the exponential underflows; the mean squares of the code are used.
- `beta_ey`: the penalty on the embeddings' excess length is in the code only; it keeps
  `merge = "mul"` from increasing them.
- The clients of the next round start from the distilled model, as in Figure 1; in the code's
  homogeneous case it is discarded.
- Both generators normalise by the statistics of their batch.
- If no image satisfies the rule, transferability is zero, not 0/0; labels that no client has seen
  are never sampled.
- τ is computed from class counts as they are; the code adds 1 to each.

Differences from the paper by default (preset "paper" is the published code except for the points
above, "sound" is the default). The paper's values are intended for 200 rounds: the generator has 20
small steps in each, and at temperature 10 the global model hardly changes. So:

- `iterations`, `generator_steps`, `generator_lr`: more and larger steps of the generator.
- `square_temperature`: the distillation loss is multiplied by the squared temperature.
- `global_lr`: with this factor the paper's rate destroys a good average, so fine-tuning has a
  quarter of it (docs/background/dfrd.md).
- `output`: generated images have the range of the data.
- `lasting_optimizers`: optimizers last for a round.
- `slow_start`: the slow generator starts as a copy.
- `norm`: normalisation uses statistics of the clients' data.
- `beta_bn`: images are to match the statistics of batch normalisation in the clients' networks, as
  in DENSE. The paper trusts a client's prediction of its own classes on any image. A client that
  has only bags and dresses predicts a bag for every shoe, so the generator may generate shoes for
  the label bag, which the global model learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from barter.algorithms.partial import PartialTraining, SubmodelUpdate
from barter.core.algorithm import ServerModel
from barter.core.clients import Clients, Replies
from barter.core.evaluation import accuracy
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State
from barter.core.record import Round
from barter.models.generators import Merge, MergeGenerator
from barter.ops.average import average
from barter.ops.distill import kl, kl_each
from barter.ops.fit import adam, sgd
from barter.ops.modules import copy_state, restore_module, stack_field
from barter.ops.submodel import Extraction, SubmodelIndices
from barter.ops.synthesis import (
    Ensemble,
    Output,
    Player,
    Rule,
    build_ensemble,
    collapse_remarks,
    diversity,
    fidelity,
    label_weights,
    to_network_input,
    train_alternately,
    usefulness,
    variety,
)

__all__ = ["DFRD", "Distiller"]

EXTRACTION: Mapping[str, Extraction] = {
    "heterofl": "static",
    "feddropout": "random",
    "fedrolex": "rolling",
}


class Codes(NamedTuple):
    """Inputs of the generator for a batch, and each client's weight for each image."""

    z: Tensor  # noise
    y: Tensor  # labels
    weights: Tensor  # (clients, images)


class Distiller(Server):
    """A server with a generator, its slow copy, and the average before fine-tuning."""

    generator: State = {}
    slow: State = {}
    averaged: State = {}  # empty if models are not averaged


def transferability_loss(
    ensemble: Tensor, student: Tensor, chosen: Tensor, temperature: float, over: str
) -> Tensor:
    """Return L_tran (Eq. 3): minus KL(student ‖ ensemble) on the chosen images.

    The sum is divided by the number of chosen images if `over` is "chosen", else by the size of the
    batch. It is zero if no image is chosen.

    Args:
        ensemble: The ensemble's logits (images, classes).
        student: The server's model's logits (images, classes).
        chosen: 1 for chosen images, otherwise 0 (images,), see `usefulness`.
        temperature: Both logits are divided by it.
        over: "chosen" or "batch".
    """
    divergence = kl_each(student / temperature, ensemble / temperature)
    size = chosen.sum().clamp_min(1.0) if over == "chosen" else len(chosen)
    return -(chosen * divergence).sum() / size


def embedding_excess(names: Tensor, gamma: float) -> Tensor:
    """Return the mean of max(0, length - γ √width) over label embeddings.

    `names` are the embeddings (labels, width).
    """
    beyond: Tensor = names.norm(dim=1) - gamma * names.shape[1] ** 0.5
    return beyond.clamp_min(0).mean()


def moving_average(slow: State, now: State, momentum: float) -> State:
    """Return λ w̃ + (1 - λ) w (Eq. 6): λ is `momentum`, w̃ `slow` and w `now`.

    Integer buffers are copied from `now`.
    """
    return {
        name: momentum * slow[name] + (1 - momentum) * w if w.is_floating_point() else w.clone()
        for name, w in now.items()
    }


@contextmanager
def use_average(server: Distiller) -> Iterator[None]:
    """Give the server's model the averaged weights, before fine-tuning, in the block.

    It has the fine-tuned ones again after it, also if the block raises. There must be averaged
    weights (`server.averaged`).
    """
    tuned = copy_state(server.model)
    server.model.load_state_dict(server.averaged)
    try:
        yield
    finally:
        server.model.load_state_dict(tuned)


@dataclass(frozen=True, kw_only=True)
class DFRD(PartialTraining[Distiller]):
    """Distil clients' models into the server's on generated images.

    `base` says whether and how the clients' models are averaged before.
    """

    aggregates = ("states", "logits")
    retired = {"smoothing": 0.0, "student_norm": "kept"}
    presets = {
        "paper": {
            "rho": 5,
            "iterations": 10,
            "generator_steps": 2,
            "generator_lr": 2e-4,
            "global_lr": 0.01,
            "steps": 20,
            "batch_size": 64,
            "lr": 0.01,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "norm": "batch",
            "lasting_optimizers": False,
            "output": "tanh",
            "tran_mean": "chosen",
            "slow_start": "scaled",
            "beta_bn": 0.0,
            "square_temperature": False,
        },
        "sound": {},
    }

    # logits of classes that a client lacks count as zero in its loss; off, as clients then become
    # better teachers
    masked_loss: bool = False

    # -- The paper's fields

    # method that averages the clients' models before distillation, or none
    base: Literal["fedrolex", "feddropout", "heterofl", "fedavg", "none"] = "fedrolex"
    # I: alternations of generator and global model per round; 10 in the paper
    iterations: Count = 20
    generator_steps: Count = 5  # I_g: steps of the generator per alternation; 2 in the paper
    global_steps: Count = 5  # I_d: steps of the global model per alternation
    samples: Count = 64  # B: generated images per step
    noise: Count = 64  # d: width of the noise
    merge: Merge = "mul"  # o(z, y): how noise and label are combined
    # Adam's learning rate of the generator, with β1 = 0.5; 2e-4 in the paper
    generator_lr: Positive = 2e-3
    # SGD's learning rate of the global model; none is 0.01 (paper) if base is "none", else a
    # quarter of it
    global_lr: Positive | None = None
    global_weight_decay: NonNegative = 1e-4  # weight decay of the global model's SGD
    temperature: Positive = 10.0  # temperature of distillation and transferability
    # images that transferability rewards: ensemble right and student wrong (◇), all (△), or those
    # on which they differ (▽)
    rule: Rule = "student-wrong"
    beta_tran: NonNegative = 1.0  # β_tran: weight of transferability
    beta_div: NonNegative = 1.0  # β_div: weight of diversity
    alpha: NonNegative = 0.5  # α: weight of the slow generator's images
    slow_momentum: Fraction = 0.5  # λ: momentum of the slow generator

    # -- From the authors' code

    # weight of the label embeddings' excess length; only in the authors' code
    beta_ey: NonNegative = 0.25
    gamma: Positive = 1.0  # γ: label embeddings longer than γ √d are penalised
    # transferability is the mean over all images (Eq. 3), or over those that the rule selects
    # (authors' code)
    tran_mean: Literal["batch", "chosen"] = "batch"
    # the slow generator starts as a copy of the first generator, or as (1 - λ) of it (paper)
    slow_start: Literal["copy", "scaled"] = "copy"

    # -- Additions of barter; preset "paper" is without them

    # one optimizer for all alternations of a round; a new one for each in the paper
    lasting_optimizers: bool = True
    # multiply the distillation loss by temperature²; not in the paper
    square_temperature: bool = True
    # weight of the distance from the clients' batch normalisation statistics; 0 in the paper
    beta_bn: NonNegative = 1.0
    output: Output = "matched"  # range of generated images: the data's, or -1 to 1 as in the paper

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("own" if self.base == "none" else "shared")

    @property
    def extraction(self) -> Extraction:
        return EXTRACTION.get(self.base, "static")

    def budget(self, client: int, clients: int) -> float:
        return super().budget(client, clients) if self.base in EXTRACTION else 1.0

    @property
    def uploads_counts(self) -> bool:
        return True

    def average_updates(
        self,
        server: Distiller,
        updates: Replies[SubmodelUpdate],
        where: Mapping[int, SubmodelIndices],
    ) -> State:
        if self.base != "fedavg":
            return super().average_updates(server, updates, where)
        weights = updates.map(lambda _, update: update["weights"])
        return average(weights, since=server.model.state_dict())

    def round(self, server: Distiller, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        if self.base == "none":
            updates = active.scatter(self.train, {k: {} for k in active})
        else:
            updates = self.exchange(server, active, t)  # Eq. 1
        ensemble = build_ensemble(server, {k: update["weights"] for k, update in updates.items()})
        counts = stack_field(updates, "counts").float()
        tau, p = label_weights(counts)
        server.averaged = copy_state(server.model) if self.base != "none" else {}
        generator, slow = self.load_generators(server)
        self.play(server, generator, slow, ensemble, tau, p)  # Eqs. 2 to 5 and 7
        self.remember(server, generator)  # Eq. 6
        self.report_quality(server, generator, ensemble, tau, p)

    def load_generators(self, server: Distiller) -> tuple[MergeGenerator, MergeGenerator | None]:
        """Return the generator and its slow copy as the last round left them.

        In the first round the generator is a new one and the slow copy is None; it is also None if
        its weight α is zero.
        """

        def restore(name: str, state: State) -> MergeGenerator:
            new = MergeGenerator(server.spec, self.noise, self.merge)
            return restore_module(server, name, new, state)

        generator = restore("generator", server.generator)
        slow = restore("slow generator", server.slow)
        return generator, slow if server.generator and self.alpha else None

    def play(
        self,
        server: Distiller,
        generator: MergeGenerator,
        slow: MergeGenerator | None,
        ensemble: Ensemble,
        tau: Tensor,
        p: Tensor,
    ) -> None:
        """Train generator and global model in turn (Eqs. 2 to 5 and 7).

        The generator learns to generate images from which the global model can learn.

        Args:
            server: The server, whose model is trained in place.
            generator: The generator, trained in place.
            slow: The slow copy of the generator, whose images the global model learns from too, or
                None; it is not trained.
            ensemble: The clients' models.
            tau: Each client's weight for each label (clients, classes).
            p: Probability of each label (classes,).
        """
        model = server.model
        spec = server.spec

        def sample() -> Codes:
            z = torch.randn(self.samples, self.noise, device=server.device)
            y = torch.multinomial(p, self.samples, replacement=True)
            return Codes(z, y, tau[:, y])

        def sample_for_both() -> tuple[Codes, Codes | None]:
            return sample(), None if slow is None else sample()

        rate = self.global_lr or (0.01 if self.base == "none" else 0.0025)
        artist = Player(
            generator,
            adam(self.generator_lr, beta1=0.5),
            partial(self.generator_loss, generator, ensemble, model, spec),
            sample,
            self.generator_steps,
        )
        student = Player(
            model,
            sgd(rate, weight_decay=self.global_weight_decay),
            partial(self.global_loss, generator, slow, ensemble, model, spec),
            sample_for_both,
            self.global_steps,
        )
        train_alternately(
            server,
            artist,
            student,
            self.iterations,
            # An averaged model keeps the normalisation statistics of the clients' images.
            training=self.base == "none",
            lasting=self.lasting_optimizers,
        )

    def generator_loss(
        self,
        generator: MergeGenerator,
        ensemble: Ensemble,
        model: Classifier,
        spec: Spec,
        z: Tensor,
        y: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return L_gen (Eq. 5) plus two terms: embeddings' excess, batch statistics.

        The distance from the models' batch statistics is not in the paper; see `beta_bn`. No
        gradients flow through the global model.

        Args:
            generator: The generator to train.
            ensemble: The clients' models.
            model: The global model.
            spec: The format of the images.
            z: The noise (images, noise).
            y: The labels for which images are generated.
            weights: The weight of each client for each image (clients, images).
        """
        h = generator.merge_inputs(z, y)
        s = to_network_input(generator.generate(h), spec, self.output)
        strangeness: Tensor | float = 0.0
        if self.beta_bn:
            e, strangeness = ensemble.logits_and_distance(s, weights)
        else:
            e = ensemble(s, weights).float()
        with torch.no_grad():
            f = model(s).float()
        chosen = usefulness(e.detach(), f, y, self.rule)
        transfer = transferability_loss(e, f, chosen, self.temperature, self.tran_mean)
        loss = fidelity(e, y) + self.beta_tran * transfer
        loss = loss + self.beta_div * diversity(s, h) + self.beta_bn * strangeness
        if generator.names is None:
            return loss
        return loss + self.beta_ey * embedding_excess(generator.names(y), self.gamma)

    def global_loss(
        self,
        generator: MergeGenerator,
        slow: MergeGenerator | None,
        ensemble: Ensemble,
        model: Classifier,
        spec: Spec,
        codes: Codes,
        slow_codes: Codes | None,
    ) -> Tensor:
        """Return L_md (Eq. 7): KL(ensemble ‖ global model) on generated images.

        It is the divergence on images of the generator (from `codes`), plus α times that on images
        of its slow copy (from `slow_codes`) if there is one; with `square_temperature` times the
        squared temperature. Gradients flow through the global model only.
        """

        def divergence(source: MergeGenerator, codes: Codes) -> Tensor:
            with torch.no_grad():
                s = to_network_input(source(codes.z, codes.y), spec, self.output)
                e = ensemble(s, codes.weights).float()
            return kl(e / self.temperature, model(s).float() / self.temperature)

        loss = divergence(generator, codes)
        if slow is not None and slow_codes is not None:
            loss = loss + self.alpha * divergence(slow, slow_codes)
        return loss * self.temperature**2 if self.square_temperature else loss

    def remember(self, server: Distiller, generator: MergeGenerator) -> None:
        """Store the generator and move its slow copy towards it (Eq. 6).

        The first slow copy is the generator itself if `slow_start` is "copy", otherwise 1 - λ times
        its weights.
        """
        now = copy_state(generator)
        if server.slow:
            slow = server.slow
        elif self.slow_start == "copy":
            slow = now
        else:
            slow = {name: torch.zeros_like(w) for name, w in now.items()}
        server.generator = now
        server.slow = moving_average(slow, now, self.slow_momentum)

    @torch.no_grad()
    def report_quality(
        self,
        server: Distiller,
        generator: MergeGenerator,
        ensemble: Ensemble,
        tau: Tensor,
        p: Tensor,
    ) -> None:
        """Report a generated batch's quality, and agreement with the ensemble.

        These are the images' variety (see `variety`), their distance from the clients' batch
        statistics (`strangeness`), how often the ensemble predicts the label (`recognised`), and
        how often the server's model predicts the same class as the ensemble (`agreement`; before
        fine-tuning `agreement_before`, if models are averaged).
        """
        x, y = self.generate_batch(server, generator, p)
        logits, strangeness = ensemble.logits_and_distance(x, tau[:, y])
        predicted = logits.argmax(1)
        server.report |= variety(x, y)
        server.report["strangeness"] = float(strangeness)
        server.report["recognised"] = float((predicted == y).float().mean())
        agreement = (server.model.eval()(x).argmax(1) == predicted).float().mean()
        server.report["agreement"] = agreement
        if server.averaged:
            with use_average(server):
                agreement_before = (server.model(x).argmax(1) == predicted).float().mean()
            server.report["agreement_before"] = agreement_before

    @torch.no_grad()
    def generate_batch(
        self, server: Distiller, generator: MergeGenerator, p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Generate `samples` images with labels sampled in proportion to `p` (classes,).

        Returns:
            Images as network input, and labels.
        """
        z = torch.randn(self.samples, self.noise, device=server.device)
        y = torch.multinomial(p, self.samples, replacement=True)
        return to_network_input(generator.train()(z, y), server.spec, self.output), y

    def creations(
        self, party: Distiller | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Distiller):
            return None
        generator, _ = self.load_generators(party)
        x, y = self.generate_batch(
            party, generator, torch.ones(party.spec.classes, device=party.device)
        )
        chosen = wanted(y)
        return y[chosen], x[chosen]

    def evaluate_server(self, server: Distiller, test: Images) -> dict[str, float]:
        scores = super().evaluate_server(server, test)
        if server.averaged:
            with use_average(server):
                scores["averaged"] = accuracy(server.model, test)
        return scores

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        remarks = collapse_remarks(rounds, "a higher beta_div may help")
        worse = sum(r.server.get("global", 1.0) < r.server.get("averaged", 0.0) for r in rounds)
        if 2 * worse > len(rounds):
            remarks.append(
                f"fine-tuning lowered the server's accuracy in {worse} of {len(rounds)} rounds: "
                "lower global_lr, or raise beta_bn"
            )
        return remarks
