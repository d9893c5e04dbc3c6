"""DFRD: Luo et al., "DFRD: Data-Free Robustness Distillation for Heterogeneous Federated Learning", NeurIPS 2023
(arXiv:2309.13546).

The server trains a generator of images on which the clients' models agree with a label and its own model does not yet,
and lets its model learn from theirs on them. A slow copy of the generator keeps what earlier rounds knew. As
fine-tuning, the server's model is first averaged from the clients' as another method does it; as a data-free method it
learns from generated images alone, and clients may have any networks.

Where the paper is silent or at odds with itself:

- KL(a, b) of Eqs. 3 and 7 is read as its authors' code has it: the first is the input of PyTorch's function, the second
  its target. So the generator moves away from KL(global ‖ ensemble), and the global model towards the ensemble.
- Eq. 4 has norms, with which the exponential underflows; the mean squares of the code are used.
- The embeddings' excess length is in the code only; it keeps `mul` from growing them.
- Next round's clients start from the distilled model, as in Figure 1; the code's homogeneous case forgets it again.
- Both generators draw with their batch's own statistics.
- Where no image satisfies the rule, transferability is zero, not 0/0; a class that nobody saw is never drawn.

Preset "paper" is the published code but for that. It is made for 200 rounds: its generator has 20 small steps in each,
and at temperature 10 its global model hardly moves. The default is preset "sound": more and larger steps of the
generator, distillation times the temperature squared, images in the data's range, optimizers that last for a round, a
slow generator that begins as a copy, statistics of the clients' data. With the temperature squared the paper's rate
undoes a good average, so fine-tuning has a quarter of it (benchmarks/README.md).

And images should look to the clients' networks like their own, by the statistics of batch normalisation, as DENSE has
it. The paper takes a client's word for its classes on any image; one that has only bags and dresses sees a bag in every
shoe, so the generator may draw shoes for bags, and the global model learns that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from barter.algorithms.partial import PartialTraining, Update
from barter.compute import lanes
from barter.core.clients import Clients, Replies
from barter.core.evaluation import accuracy
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.core.record import Round
from barter.models.generators import Merge, MergeGenerator
from barter.ops.average import average
from barter.ops.distill import kl, kl_each
from barter.ops.fit import adam, sgd
from barter.ops.submodel import Extraction, Places
from barter.ops.synthesis import (
    Ensemble,
    Output,
    Player,
    Rule,
    assembled,
    collapsed,
    diversity,
    duel,
    fidelity,
    label_weights,
    shown,
    useful,
    variety,
)

__all__ = ["DFRD", "Distiller"]

EXTRACTION: Mapping[str, Extraction] = {
    "heterofl": "static",
    "feddropout": "random",
    "fedrolex": "rolling",
}


class Distiller(Server):
    """A generator and the slow copy of it; what the server's model was before it was fine-tuned."""

    generator: State = {}
    slow: State = {}
    averaged: State = {}


def transferability(
    ensemble: Tensor, student: Tensor, chosen: Tensor, temperature: float, over: str
) -> Tensor:
    """L_tran (Eq. 3): minus KL(student ‖ ensemble) on the chosen images, over the batch or over their number.

    Zero where none is chosen.
    """
    divergence = kl_each(student / temperature, ensemble / temperature)
    size = chosen.sum().clamp_min(1.0) if over == "chosen" else len(chosen)
    return -(chosen * divergence).sum() / size


def excess(names: Tensor, gamma: float) -> Tensor:
    """How far the embeddings of labels are beyond γ √width, on average."""
    beyond: Tensor = names.norm(dim=1) - gamma * names.shape[1] ** 0.5
    return beyond.clamp_min(0).mean()


def moved(slow: State, now: State, momentum: float) -> State:
    """λ w̃ + (1 - λ) w (Eq. 6); counters are those of now."""
    return {
        at: momentum * slow[at] + (1 - momentum) * w if w.is_floating_point() else w.clone()
        for at, w in now.items()
    }


@contextmanager
def as_averaged(server: Distiller) -> Iterator[None]:
    """The server's model as it was before it was fine-tuned."""
    tuned = isolate(dict(server.model.state_dict()))
    server.model.load_state_dict(server.averaged)
    yield
    server.model.load_state_dict(tuned)


@dataclass(frozen=True, kw_only=True)
class DFRD(PartialTraining[Distiller]):
    """The server's model learns from the clients' on generated images, after averaging or instead of it."""

    global_model = True
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

    # how models are averaged first
    base: Literal["fedrolex", "feddropout", "heterofl", "fedavg", "none"] = "fedrolex"
    masked_loss: bool = False  # logits of classes a client lacks count as zero in its loss; teachers should know better
    # I: times that generator and global model are trained in turn; 10 in the paper
    iterations: Count = 20
    generator_steps: Count = 5  # I_g: steps of the generator in each; 2 in the paper
    global_steps: Count = 5  # I_d: steps of the global model in each
    samples: Count = 64  # B: generated images per step
    noise: Count = 64  # d: width of the noise
    merge: Merge = "mul"  # o(z, y): how noise and label become one
    # Adam's learning rate of the generator, first momentum 0.5; 2e-4 in the paper
    generator_lr: Positive = 2e-3
    # SGD's rate of the global model; none: 0.01 (paper) alone, else a quarter of it
    global_lr: Positive | None = None
    global_weight_decay: NonNegative = 1e-4  # of that SGD
    # one optimizer for all iterations of a round; a new one for each in the paper
    lasting_optimizers: bool = True
    temperature: Positive = 10.0  # of distillation and transferability
    square_temperature: bool = True  # distillation counts temperature² times; once in the paper
    rule: Rule = "student-wrong"  # images wanted: ensemble right and student wrong (◇), all (△), or both differ (▽)
    # the mean over all images (Eq. 3), or over those wanted (code)
    tran_mean: Literal["batch", "chosen"] = "batch"
    beta_tran: NonNegative = 1.0  # β_tran: weight of transferability
    beta_div: NonNegative = 1.0  # β_div: weight of diversity
    # weight of strangeness: images should look to clients like their own; 0 in the paper
    beta_bn: NonNegative = 1.0
    # weight of the embeddings' excess length; only in the authors' code
    beta_ey: NonNegative = 0.25
    gamma: Positive = 1.0  # γ: embeddings longer than γ √d are in excess
    alpha: NonNegative = 0.5  # α: weight of the slow generator's images
    slow_momentum: Fraction = 0.5  # λ: how slow the slow generator is
    # from the first generator, or from (1 - λ) of it as published
    slow_start: Literal["copy", "scaled"] = "copy"
    smoothing: NonNegative = 0.0  # added to each count in τ; 1 in the authors' code
    output: Output = "matched"  # range of generated images: the data's, or -1 to 1 as in the paper
    # statistics of the global model while it distils
    student_norm: Literal["kept", "trained"] = "kept"

    @property
    def one_architecture(self) -> bool:
        return self.base != "none"

    @property
    def extraction(self) -> Extraction:
        return EXTRACTION.get(self.base, "static")

    def budget(self, client: int, clients: int) -> float:
        return super().budget(client, clients) if self.base in EXTRACTION else 1.0

    @property
    def tells_counts(self) -> bool:
        return True

    def averaged(
        self, server: Distiller, updates: Replies[Update], where: Mapping[int, Places]
    ) -> State:
        if self.base != "fedavg":
            return super().averaged(server, updates, where)
        return average(updates.each(lambda _, update: update["weights"]))

    def round(self, server: Distiller, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        if self.base == "none":
            updates = active.scatter(self.train, {k: {} for k in active})
        else:
            updates = self.exchange(server, active, t)  # Eq. 1
        ensemble = assembled(server, {k: update["weights"] for k, update in updates.items()})
        tau, p = label_weights(
            torch.stack([u["counts"] for u in updates.values()]).float(), self.smoothing
        )
        server.averaged = isolate(dict(server.model.state_dict())) if self.one_architecture else {}
        generator, slow = self.recalled(server)
        self.play(server, generator, slow, ensemble, tau, p)  # Eqs. 2 to 5 and 7
        self.remember(server, generator)  # Eq. 6
        self.judge(server, generator, ensemble, tau, p)

    def recalled(self, server: Distiller) -> tuple[MergeGenerator, MergeGenerator | None]:
        """The generator and its slow copy; in the first round there is none."""
        generator, slow = (
            lanes.keep(name, MergeGenerator(server.spec, self.noise, self.merge).to(server.device))
            for name in ("generator", "slow generator")
        )
        if not server.generator:
            return generator, None
        generator.load_state_dict(server.generator)
        slow.load_state_dict(server.slow)
        return generator, slow if self.alpha else None

    def play(
        self,
        server: Distiller,
        generator: MergeGenerator,
        slow: MergeGenerator | None,
        ensemble: Ensemble,
        tau: Tensor,
        p: Tensor,
    ) -> None:
        """Generator and global model in turn: one looks for images that teach the other something."""
        model, spec = server.model, server.spec
        improve = partial(self.generator_loss, generator, ensemble, model, spec)
        learn = partial(self.global_loss, generator, slow, ensemble, model, spec)

        def draw() -> list[Tensor]:
            z = torch.randn(self.samples, self.noise, device=server.device)
            y = torch.multinomial(p, self.samples, replacement=True)
            return [z, y, tau[:, y]]

        def draw_twice() -> list[Tensor]:
            return [*draw(), *(draw() if slow is not None else ())]

        rate = self.global_lr or (0.01 if self.base == "none" else 0.0025)
        recipe = sgd(rate, weight_decay=self.global_weight_decay)
        artist = Player(
            generator, adam(self.generator_lr, beta1=0.5), improve, draw, self.generator_steps
        )
        student = Player(model, recipe, learn, draw_twice, self.global_steps)
        training, lasting = (
            self.student_norm == "trained" or self.base == "none",
            self.lasting_optimizers,
        )
        duel(server, artist, student, self.iterations, training=training, lasting=lasting)

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
        """L_gen (Eq. 5), the embeddings' excess, and (ours) how strange images look to the clients."""
        h = generator.merged(z, y)
        s = shown(generator.drawn(h), spec, self.output)
        e, strangeness = (
            ensemble.inspected(s, weights) if self.beta_bn else (ensemble(s, weights).float(), 0.0)
        )
        with torch.no_grad():
            f = model(s).float()
        chosen = useful(e.detach(), f, y, self.rule)
        loss = fidelity(e, y) + self.beta_tran * transferability(
            e, f, chosen, self.temperature, self.tran_mean
        )
        loss = loss + self.beta_div * diversity(s, h) + self.beta_bn * strangeness
        return (
            loss
            if generator.names is None
            else loss + self.beta_ey * excess(generator.names(y), self.gamma)
        )

    def global_loss(
        self,
        generator: MergeGenerator,
        slow: MergeGenerator | None,
        ensemble: Ensemble,
        model: Classifier,
        spec: Spec,
        z: Tensor,
        y: Tensor,
        weights: Tensor,
        *again: Tensor,
    ) -> Tensor:
        """L_md (Eq. 7): KL(ensemble ‖ global model) on images of the generator and, drawn anew, of its slow copy."""

        def divergence(source: MergeGenerator, z: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            with torch.no_grad():
                s = shown(source(z, y), spec, self.output)
                e = ensemble(s, weights).float()
            return kl(e / self.temperature, model(s).float() / self.temperature)

        loss = divergence(generator, z, y, weights)
        if slow is not None:
            loss = loss + self.alpha * divergence(slow, *again)
        return loss * self.temperature**2 if self.square_temperature else loss

    def remember(self, server: Distiller, generator: MergeGenerator) -> None:
        """The generator, and its slow copy moved towards it."""
        now = isolate(dict(generator.state_dict()))
        first = (
            now if self.slow_start == "copy" else {at: torch.zeros_like(w) for at, w in now.items()}
        )
        server.generator, server.slow = now, moved(server.slow or first, now, self.slow_momentum)

    @torch.no_grad()
    def judge(
        self,
        server: Distiller,
        generator: MergeGenerator,
        ensemble: Ensemble,
        tau: Tensor,
        p: Tensor,
    ) -> None:
        """Report how images vary and how they look to the clients, and how often the model says as they do."""
        x, y = self.made(server, generator, p)
        opinion, strangeness = ensemble.inspected(x, tau[:, y])
        seen = opinion.argmax(1)
        server.report |= variety(x, y)
        server.report["strangeness"] = float(strangeness)
        server.report["recognised"] = float((seen == y).float().mean())
        server.report["agreement"] = (server.model.eval()(x).argmax(1) == seen).float().mean()
        if server.averaged:
            with as_averaged(server):
                server.report["agreement_before"] = (
                    (server.model(x).argmax(1) == seen).float().mean()
                )

    @torch.no_grad()
    def made(
        self, server: Distiller, generator: MergeGenerator, p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Images of classes that are drawn so often, and their labels."""
        z = torch.randn(self.samples, self.noise, device=server.device)
        y = torch.multinomial(p, self.samples, replacement=True)
        return shown(generator.train()(z, y), server.spec, self.output), y

    def creations(
        self, party: Distiller | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Distiller):
            return None
        generator, _ = self.recalled(party)
        x, y = self.made(party, generator, torch.ones(party.spec.classes, device=party.device))
        chosen = wanted(y)
        return y[chosen], x[chosen]

    def evaluate_server(self, server: Distiller, test: Images) -> dict[str, float]:
        said = super().evaluate_server(server, test)
        if server.averaged:
            with as_averaged(server):
                said["averaged"] = accuracy(server.model, test)
        return said

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        told = collapsed(rounds, "a higher beta_div may help")
        worse = sum(r.server.get("global", 1.0) < r.server.get("averaged", 0.0) for r in rounds)
        if 2 * worse > len(rounds):
            told.append(
                f"fine-tuning lowered the server's accuracy in {worse} of {len(rounds)} rounds: "
                "lower global_lr, or raise beta_bn"
            )
        return told
