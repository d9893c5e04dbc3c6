"""Distillation on public data: what FedMD, DS-FL and MHAT have in common.

Clients say what they make of some public images, the server makes one answer of theirs, and everybody learns from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import torch
from torch import Tensor
from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, Floats, Places, When
from barter.core.evaluation import note_before, predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.ops.ensemble import class_shares, consensus, distil, drawn, public_images, soft_loss
from barter.ops.fit import Recipe, adam, epoch_length, fit

__all__ = ["Answer", "PublicDistillation"]

S = TypeVar("S", bound=Server, default=Server)
C = TypeVar("C", bound=Client, default=Client)


class Answer(TypedDict):
    """What a client makes of public images."""

    said: Annotated[Tensor, Floats("images", "classes")]
    counts: Annotated[
        Tensor, Counts("classes"), When("by_class")
    ]  # how many images of each class it has


@dataclass(frozen=True, kw_only=True)
class PublicDistillation(Algorithm[S, C]):
    """Predictions on public images go up, one answer comes down."""

    crosses = {
        "answer": "down: which public images; up: predictions on them, classes' counts where they are asked for",
        "learn": "down: which public images, and everybody's answer",
    }
    loss = staticmethod(soft_loss)  # of logits and the answer

    fraction: Fraction = 1.0  # share of clients per round
    samples: Count | None = 1000  # public images per round, drawn anew in each; none is all
    epochs: Count = 1  # passes over private data per round
    batch_size: Count = 32  # private images per step
    lr: Positive = 1e-3  # learning rate, on private and on public images
    distil_epochs: Count = 1  # passes over the round's public images
    distil_batch: Count = 128  # public images per step
    # clients count alike, or by their images of a class (ours)
    weighting: Literal["clients", "classes"] = "clients"

    @property
    def needs_public_data(self) -> bool:
        return True

    @property
    def recipe(self) -> Recipe:
        """The optimizer of all networks."""
        return adam(self.lr)

    def round(self, server: S, clients: Clients, t: int) -> None:
        active, places = clients.sample(self.fraction), drawn(public_images(server), self.samples)
        answers = active.run(self.answer, places)
        active.only(answers).run(
            self.learn, places, self.decided(server, places, self.joint(answers))
        )

    @property
    def by_class(self) -> bool:
        """Whether clients count by their images of a class, and say how many these are."""
        return self.weighting == "classes"

    def answer(self, client: C, places: Annotated[Tensor, Places("images")]) -> Answer:
        """What the client says, after training on its own data."""
        self.train(client)
        note_before(client)
        logits = predict(client.model.eval(), public_images(client).batch, places)
        none = torch.zeros(0, dtype=torch.long, device=client.device)
        return {
            "said": self.said(logits),
            "counts": client.data.class_counts() if self.by_class else none,
        }

    def train(self, client: C) -> None:
        """What a client does before it answers."""
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=self.recipe)

    def said(self, logits: Tensor) -> Tensor:
        """What of its logits a client says."""
        return logits.softmax(1)

    def joint(self, answers: Replies[Answer]) -> Tensor:
        """The mean of the clients' answers."""
        if not self.by_class:
            return consensus([answer["said"] for answer in answers.values()])
        counts = torch.stack([answer["counts"] for answer in answers.values()])
        return consensus([answer["said"] for answer in answers.values()], class_shares(counts))

    def decided(self, server: S, places: Tensor, mean: Tensor) -> Tensor:
        """What the server makes of the mean."""
        return mean

    def learn(self, client: C, places: Tensor, target: Tensor) -> None:
        self.taught(client.model, public_images(client), places, [target], self.loss, client.track)

    def taught(
        self,
        model: Classifier,
        images: Images,
        places: Tensor,
        targets: Sequence[Tensor],
        loss: Callable[..., Tensor],
        track: Callable[[Sequence[int]], Iterator[int]],
    ) -> None:
        """Have a model learn from answers to the round's images."""
        size, recipe = self.distil_batch, self.recipe
        steps = self.distil_epochs * epoch_length(len(places), size)
        distil(
            model,
            images,
            places,
            targets,
            loss,
            batch_size=size,
            recipe=recipe,
            steps=steps,
            track=track,
        )
