"""Partial training: what HeteroFL, Federated Dropout, FedRolex and, on top of them, DFRD have in common.

Every client trains as much of the server's network as it can afford, some of the channels of each layer, and the server
averages each weight over the clients that had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor
from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm
from barter.core.answers import Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, When
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State
from barter.models.width import narrowed, scaled, without_running_statistics
from barter.ops.fit import epoch_length, fit, sgd
from barter.ops.statistics import renew
from barter.ops.submodel import (
    Extraction,
    Places,
    budget,
    combined,
    extracted,
    head_of,
    places,
    verify,
)

__all__ = ["PartialTraining", "Update"]

Norm: TypeAlias = Literal["afterwards", "batch", "running"]
S = TypeVar("S", bound=Server, default=Server)


class Update(TypedDict):
    """What a client sends back."""

    weights: State
    counts: Annotated[
        Tensor, Counts("classes", most="seen"), When("tells_counts")
    ]  # images that it trained on


@dataclass(frozen=True, kw_only=True)
class PartialTraining(Algorithm[S, Client]):
    """Each client trains a part of the network, as wide as it can afford."""

    primary = "server"
    replicas = True
    crosses = {
        "train": "down: the weights of the client's channels; up: the same, trained, and how often each class came up",
    }

    fraction: Fraction = 1.0  # share of clients per round
    rho: Whole = 2  # ρ: how fast budgets fall, R_i = (1/2)^min(σ, ⌊ρ i / N⌋); DFRD studies 5, 10 and 40 for 10 clients
    sigma: Whole = 4  # σ: the smallest budget is (1/2)^σ
    epochs: Count = 5  # local epochs
    steps: Count | None = None  # local steps instead; none means whole epochs
    batch_size: Count = 10  # images per step
    lr: Positive = 0.02  # η: learning rate of the clients' SGD; HeteroFL has 0.1, DFRD 0.01
    momentum: NonNegative = 0.9  # of the clients' SGD; DFRD has none
    weight_decay: NonNegative = 5e-4  # of the clients' SGD; DFRD has none
    norm: Norm = "afterwards"  # statistics: a pass over own data after training, each batch's (DFRD), running (FedAvg)
    scaler: bool = True  # hidden outputs are divided by the client's rate in training
    masked_loss: bool = True  # logits of classes that a client lacks count as zero in its loss
    own_rows: bool = True  # the head's row of a class is averaged over the clients that have it
    # every client counts alike, or by its images
    weighting: Literal["clients", "examples"] = "clients"

    @property
    def one_architecture(self) -> bool:
        return True

    @property
    def extraction(self) -> Extraction:
        """How channels are chosen."""
        raise NotImplementedError

    def budget(self, client: int, clients: int) -> float:
        return budget(client, clients, self.rho, self.sigma)

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        if share < 1:
            part = narrowed(network, share)
            verify(network, part, spec)
            network = scaled(part, share) if self.scaler else part
        return without_running_statistics(network) if self.norm == "batch" else network

    def round(self, server: S, clients: Clients, t: int) -> None:
        self.exchange(server, clients.sample(self.fraction), t)

    def exchange(self, server: S, active: Clients, t: int) -> Replies[Update]:
        """Every client trains its part of the server's model, and the server averages them."""
        where = self.choose(server, active, t)
        w = server.model.state_dict()
        updates = active.scatter(self.train, {k: extracted(w, where[k]) for k in active})
        server.model.load_state_dict(self.averaged(server, updates, where))
        return updates

    def choose(self, server: S, active: Clients, t: int) -> dict[int, Places]:
        """Which channels each client gets in this round."""
        w = server.model.state_dict()
        return {
            k: places(w, server.architectures[k]().state_dict(), self.extraction, t) for k in active
        }

    def train(self, client: Client, w: State) -> Update:
        """The client's model after training on its own data, from these weights if there are any; what it saw."""
        if w:
            client.model.load_state_dict(w)
        counts = torch.zeros(client.data.spec.classes, dtype=torch.long, device=client.device)
        fit(
            client,
            epochs=1 if self.steps else self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
            recipe=sgd(self.lr, self.momentum, self.weight_decay),
            by_class=(client.data.class_counts() > 0).float() if self.masked_loss else None,
            adjust=torch.mul,  # a class that the client has no image of counts as zero
            seen=counts,
        )
        if self.norm == "afterwards":
            renew(client.model, client.data, self.batch_size)
        return {
            "weights": client.model.state_dict(),
            "counts": counts if self.tells_counts else counts[:0],
        }

    @property
    def tells_counts(self) -> bool:
        """Whether the server needs to know how often each class came up."""
        return self.own_rows

    def seen(self, known: Known) -> int:
        """How many images a client trains on, one as often as it sees it."""
        steps = self.steps or self.epochs * epoch_length(known.examples, self.batch_size)
        return steps * self.batch_size

    def averaged(self, server: S, updates: Replies[Update], where: Mapping[int, Places]) -> State:
        """The server's weights, each the mean over the clients that trained it (Eq. 1 of DFRD)."""
        weights = {
            k: float(updates.num_examples[k]) if self.weighting == "examples" else 1.0
            for k in updates
        }
        return combined(
            server.model.state_dict(),
            {k: update["weights"] for k, update in updates.items()},
            where,
            weights,
            {k: update["counts"] for k, update in updates.items()} if self.own_rows else None,
            head_of(server.model),
        )
