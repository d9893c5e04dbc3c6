"""Partial training: base of HeteroFL, Federated Dropout, FedRolex and DFRD.

Every client trains a submodel of the server's network that it can afford: some of the channels of
each layer. The server averages each weight over the clients that had it. One round:

1. The server selects channels for each client and sends it their weights.
2. Clients train these weights on their own images and upload them.
3. The server averages each weight over the clients that trained it.
4. With `norm = "global"`, clients measure normalisation statistics of the averaged network.

Training does not update running statistics. HeteroFL's code computes them afterwards, by a pass of
all clients' training images through the averaged network. With `norm = "global"` images stay at
their clients and the averaged network is sent to them: each client passes its own images through
it, and the server takes the mean of the statistics, weighted by batches. The result is that of one
pass over all clients' batches. For this, clients must be able to run the full network, though not
to train it; with `norm = "afterwards"` no client runs more than its submodel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor
from typing_extensions import TypeVar

from barter.compute import lanes
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.answers import Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Counts, When
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Momentum, NonNegative, Positive, Whole
from barter.core.payload import State
from barter.core.robust import Aggregate
from barter.models.width import (
    narrow_network,
    scale_activations,
    widen_network,
    without_running_statistics,
)
from barter.ops.fit import effective_batch_size, epoch_length, fit, sgd
from barter.ops.statistics import (
    Statistics,
    combine_statistics,
    read_statistics,
    renew_batches,
    renew_statistics,
    replace_statistics,
    running_means,
)
from barter.ops.submodel import (
    Extraction,
    SubmodelIndices,
    average_submodels,
    extract_submodel,
    head_names,
    submodel_indices,
    verify_submodel,
    width_budget,
)

__all__ = ["PartialTraining", "SubmodelUpdate"]

Norm: TypeAlias = Literal["global", "afterwards", "batch", "running"]
S = TypeVar("S", bound=Server, default=Server)


class SubmodelUpdate(TypedDict):
    """A client's upload: trained weights, and numbers of training images by class."""

    weights: State
    # an image counts once for every time that the client trained on it
    counts: Annotated[Tensor, Counts("classes", most="seen"), When("uploads_counts")]


@dataclass(frozen=True, kw_only=True)
class PartialTraining(Algorithm[S, Client]):
    """Each client trains a submodel of the network, as wide as it can afford."""

    primary = "server"
    sizes = ("normalised", "seen")
    aggregates: ClassVar[tuple[Aggregate, ...]] = ("states",)
    crosses = {
        "train": Crossing(
            down="the weights of the client's channels",
            up="the trained weights, and how many images of each class they were trained on",
        ),
        "measure": Crossing(
            down="the averaged weights at full width",
            up="mean and variance of every normalised channel",
        ),
    }

    # -- Submodels and local training

    fraction: Fraction = 1.0  # share of clients per round
    # ρ: how fast budgets fall over clients, R_i = (1/2)^min(σ, ⌊ρ i / N⌋); DFRD studies 5, 10 and
    # 40 for 10 clients
    rho: Whole = 2
    sigma: Whole = 4  # σ: the smallest budget is (1/2)^σ
    epochs: Count = 5  # local epochs
    steps: Count | None = None  # number of local steps; none is whole epochs
    batch_size: Count = 10  # images per step
    lr: Positive = 0.02  # η: learning rate of the clients' SGD; HeteroFL has 0.1, DFRD 0.01
    momentum: Momentum = 0.9  # momentum of the clients' SGD; 0 in DFRD
    weight_decay: NonNegative = 5e-4  # weight decay of the clients' SGD; 0 in DFRD
    # normalisation statistics: of all clients' data in the averaged network, of own data in the own
    # submodel (afterwards), of each batch (DFRD), or running ones (FedAvg)
    norm: Norm = "global"
    scaler: bool = True  # hidden outputs are divided by the client's rate in training
    masked_loss: bool = True  # logits of classes that a client lacks count as zero in its loss
    own_rows: bool = True  # the head's row of a class is averaged over the clients that have it
    # weight of a client in averages: equal, or its number of images
    weighting: Literal["clients", "examples"] = "clients"

    @property
    def server_model(self) -> ServerModel:
        return ServerModel("shared")

    @property
    def extraction(self) -> Extraction:
        """Return the rule by which channels are selected."""
        raise NotImplementedError

    def budget(self, client: int, clients: int) -> float:
        return width_budget(client, clients, self.rho, self.sigma)

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        if share < 1:
            part = narrow_network(network, share)
            verify_submodel(network, part, spec)
            network = scale_activations(part, share) if self.scaler else part
        return without_running_statistics(network) if self.norm == "batch" else network

    def round(self, server: S, clients: Clients, t: int) -> None:
        self.exchange(server, clients.sample(self.fraction), t)

    def exchange(self, server: S, active: Clients, t: int) -> Replies[SubmodelUpdate]:
        """Have every client train its submodel; load the average into the server's model.

        With `norm` "global", these clients then measure its normalisation statistics.

        Args:
            server: The server.
            active: The clients that train.
            t: The round, by which channels are selected.

        Returns:
            The clients' updates.
        """
        where = self.choose(server, active, t)
        w = server.model.state_dict()
        submodels = {k: extract_submodel(w, where[k]) for k in active}
        updates = active.scatter(self.train, submodels)
        averaged = self.average_updates(server, updates, where)
        if self.norm == "global" and running_means(averaged):
            averaged = self.measure_statistics(active.only(updates), averaged)
        server.model.load_state_dict(averaged)
        return updates

    def measure_statistics(self, active: Clients, w: State) -> State:
        """Replace running statistics of averaged weights by those that clients measure.

        Args:
            active: The clients, which measure statistics of their images under these weights.
            w: The averaged weights of the full network.

        Returns:
            The weights with the clients' statistics, weighted by their numbers of batches.
        """
        statistics = active.run(self.measure, w)
        batches = [renew_batches(n, self.batch_size) for n in statistics.num_examples.values()]
        return replace_statistics(w, combine_statistics(list(statistics.values()), batches))

    def measure(self, client: Client, w: State) -> Statistics:
        """Return batch-norm statistics of the client's images in the full network.

        Args:
            client: The client, whose own model is not changed.
            w: The weights of the full network.
        """
        full_network = lanes.lane_module("whole network", lambda: widen_network(client.model))
        full_network.load_state_dict(w)
        renew_statistics(full_network, client.data, self.batch_size)
        return read_statistics(full_network.state_dict())

    def normalised(self, known: Known) -> int:
        """Return the number of the server network's channels with running statistics."""
        return sum(known.server[name][0].numel() for name in running_means(known.server))

    def choose(self, server: S, active: Clients, t: int) -> dict[int, SubmodelIndices]:
        """Return the channels of the server's model that each client trains in round t.

        See `submodel_indices`.
        """
        w = server.model.state_dict()
        chosen = {}
        for k in active:
            submodel = server.architectures[k]().state_dict()
            chosen[k] = submodel_indices(w, submodel, self.extraction, t)
        return chosen

    def train(self, client: Client, w: State) -> SubmodelUpdate:
        """Train the client's model on its data, from `w` or, if empty, its own weights.

        Returns:
            The trained weights, and how often images of each class were trained on (empty unless
            `uploads_counts`).
        """
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
            adjust=torch.mul,  # The mask is multiplied: logits of absent classes become zero.
            seen=counts,
        )
        if self.norm in ("global", "afterwards"):
            renew_statistics(client.model, client.data, self.batch_size)
        return {
            "weights": client.model.state_dict(),
            "counts": counts if self.uploads_counts else counts[:0],
        }

    @property
    def uploads_counts(self) -> bool:
        """Return whether clients upload how many images of each class they trained on."""
        return self.own_rows

    def seen(self, known: Known) -> int:
        """Return how many images a client trains on, counting an image once per use."""
        steps = self.steps or self.epochs * epoch_length(known.examples, self.batch_size)
        return steps * effective_batch_size(known.examples, self.batch_size)

    def average_updates(
        self, server: S, updates: Replies[SubmodelUpdate], where: Mapping[int, SubmodelIndices]
    ) -> State:
        """Return the server's weights, each averaged over the clients that trained it.

        This is Eq. 1 of DFRD. Clients are weighted by `weighting`. With `own_rows`, the head's row
        of a class is averaged over the clients that trained on images of the class. Weights that no
        client trained keep their values. The server's model is not changed.

        Args:
            server: The server.
            updates: The clients' updates.
            where: The channels that each client trained, see `choose`.
        """
        by_examples = self.weighting == "examples"
        weights = {k: float(updates.num_examples[k]) if by_examples else 1.0 for k in updates}
        submodels = {k: update["weights"] for k, update in updates.items()}
        counts = {k: update["counts"] for k, update in updates.items()}
        return average_submodels(
            server.model.state_dict(),
            submodels,
            where,
            weights,
            counts if self.own_rows else None,
            head_names(server.model),
        )
