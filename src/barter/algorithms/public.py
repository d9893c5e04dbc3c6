"""Distillation on public data: the base of FedMD, DS-FL and MHAT.

Clients predict on public images, the server combines the predictions into one target for each
image, and all clients learn from the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

from torch import Tensor
from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm, Crossing
from barter.core.clients import Clients, Replies
from barter.core.contracts import Content, Floats, Places
from barter.core.evaluation import predict, record_before_exchange
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.ops.ensemble import (
    distil,
    mean_predictions,
    public_images,
    sample_index,
    soft_loss,
)
from barter.ops.fit import Recipe, adam, epoch_length, fit

__all__ = ["Answer", "PublicDistillation"]

S = TypeVar("S", bound=Server, default=Server)
C = TypeVar("C", bound=Client, default=Client)


class Answer(TypedDict):
    """A client's predictions on public images."""

    said: Annotated[Tensor, Floats("images", "classes")]  # the client's predictions


@dataclass(frozen=True, kw_only=True)
class PublicDistillation(Algorithm[S, C]):
    """Base of methods whose clients learn from joint predictions on public images."""

    aggregates = ("logits",)
    crosses = {
        "answer": Crossing(
            down="which public images",
            up="predictions on them",
        ),
        "learn": Crossing(down="which public images, and the targets for them"),
    }
    retired = {"weighting": "clients"}
    loss = staticmethod(soft_loss)  # of logits and targets

    fraction: Fraction = 1.0  # fraction of clients sampled per round
    samples: Count | None = 1000  # public images per round, sampled anew each time; none: all
    epochs: Count = 1  # passes over private data per round
    batch_size: Count = 32  # private images per step
    lr: Positive = 1e-3  # learning rate, on private and on public images
    distil_epochs: Count = 1  # passes over the round's public images
    distil_batch: Count = 128  # public images per step

    @property
    def needs_public_data(self) -> bool:
        return True

    @property
    def recipe(self) -> Recipe:
        """Return the optimizer of all networks and its settings."""
        return adam(self.lr)

    def round(self, server: S, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        places = sample_index(public_images(server), self.samples)
        answers = active.run(self.answer, places)
        targets = self.compute_targets(server, places, self.mean_prediction(answers))
        active.only(answers).run(self.learn, places, targets)

    def answer(self, client: C, places: Annotated[Tensor, Places("images")]) -> Answer:
        """Train on the client's own data, then predict on public images.

        The metrics before the exchange are reported.

        Args:
            client: The client.
            places: The indices of the round's public images.

        Returns:
            Predictions (images, classes) in the order of `places`, see `to_predictions`.
        """
        self.train(client)
        record_before_exchange(client)
        logits = predict(client.model.eval(), public_images(client).batch, places)
        return {"said": self.to_predictions(logits)}

    def train(self, client: C) -> None:
        """Train the client's network on its own data before it predicts."""
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=self.recipe)

    def to_predictions(self, logits: Tensor) -> Tensor:
        """Return the predictions that are uploaded: by default, probabilities."""
        return logits.softmax(1)

    def mean_prediction(self, answers: Replies[Answer]) -> Tensor:
        """Return the unweighted mean of clients' predictions, or their robust aggregate."""
        return mean_predictions([answer["said"] for answer in answers.values()])

    def compute_targets(self, server: S, places: Tensor, mean: Tensor) -> Tensor:
        """Return the targets that clients learn from: by default, the mean prediction.

        Subclasses may train the server's model here.

        Args:
            server: The server.
            places: Indices of the round's public images.
            mean: The clients' mean prediction, a row per place.

        Returns:
            Targets with a row per place.
        """
        return mean

    def learn(
        self, client: C, places: Tensor, target: Annotated[Tensor, Content("logits")]
    ) -> None:
        """Train the client's network on the round's public images and their targets."""
        self.distil_public(
            client.model, public_images(client), places, [target], self.loss, client.track
        )

    def distil_public(
        self,
        model: Classifier,
        images: Images,
        places: Tensor,
        targets: Sequence[Tensor],
        loss: Callable[..., Tensor],
        track: Callable[[Sequence[int]], Iterator[int]],
    ) -> None:
        """Train a model on the round's public images, for `distil_epochs` passes.

        Args:
            model: The model to train in place.
            images: The public images.
            places: The indices of the round's images.
            targets: Tensors with a row for each of the round's images.
            loss: A loss of logits and a batch of each target.
            track: Wraps the range of steps and reports progress.
        """
        distil(
            model,
            images,
            places,
            targets,
            loss,
            batch_size=self.distil_batch,
            recipe=self.recipe,
            steps=self.distil_epochs * epoch_length(len(places), self.distil_batch),
            track=track,
        )
