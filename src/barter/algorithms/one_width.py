"""Bases of methods that compare clients' features, or share a head on them.

Networks may differ, except for the width of their features. Features of another width are pooled to
it, and the network gets a new head, as in HtFLlib. Local training is HtFLlib's too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.evaluation import tests_due
from barter.core.images import Spec
from barter.core.metrics import measure
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import Payload, State, isolate
from barter.core.record import Round
from barter.ops.fit import Optimizer, Recipe, cross_entropy, fit_by, recipe_by_name
from barter.ops.heads import head_state, linear_head, load_head, logits_by_heads
from barter.ops.modules import copy_state

__all__ = ["HeadClient", "HeadServer", "OneWidth", "SharedHead"]


class HeadServer(Server):
    """A server that holds a shared head instead of a model."""

    head: State = {}  # the shared head; empty while clients have their own
    holders: list[int] = []  # clients that have received the current head

    def recall(self, memory: Mapping[str, Payload]) -> None:
        # Checkpoints of older versions have no holders: every client is sent the head again.
        super().recall({"holders": [], **memory})


class HeadClient(Client):
    """A client that stores the shared head next to its own network."""

    head: State = {}  # the shared head, as last received

    def recall(self, memory: Mapping[str, Payload]) -> None:
        # Checkpoints of older versions have no head.
        super().recall({"head": {}, **memory})


S = TypeVar("S", bound=Server, default=Server)
H = TypeVar("H", bound=HeadServer, default=HeadServer)
C = TypeVar("C", bound=Client, default=Client)
K = TypeVar("K", bound=HeadClient, default=HeadClient)


@dataclass(frozen=True, kw_only=True)
class OneWidth(Algorithm[S, C]):
    """Base of methods in which all clients' features have one width."""

    features: Count = 512  # width of all clients' features
    fraction: Fraction = 1.0  # C: fraction of clients sampled per round
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 10  # B: images per step
    # the clients' optimizer; DFFKE's comparison uses adam with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate

    @property
    def feature_width(self) -> int:
        return self.features

    def recipe(self) -> Recipe:
        """Return the optimizer of the clients and its settings."""
        return recipe_by_name(self.optimizer, self.lr)

    def train(
        self,
        client: C,
        loss: Callable[..., Any] | None = None,
        extras: Sequence[Tensor] | Iterator[Sequence[Tensor]] = (),
        also: Sequence[nn.Module] = (),
    ) -> None:
        """Train the client's network on its own data.

        Args:
            client: The client that trains.
            loss: A loss as `fit_by` takes it; None is cross entropy, without `extras`.
            extras: Tensors that the loss gets in every step, or an iterator with one sequence of
                tensors for each step.
            also: Further modules to train.
        """
        fit_by(
            client,
            loss or partial(cross_entropy, client.model),
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=self.recipe(),
            extras=extras,
            also=also,
        )


@dataclass(frozen=True, kw_only=True)
class SharedHead(OneWidth[H, K]):
    """Base of methods in which the clients also share the head on their features.

    1. Before the first round the server takes the first client's untrained head, as HtFLlib does.
    2. In a round, clients put on the shared head and train.
    3. The server computes a new shared head, and all clients receive it.

    After the round a client's network has the head that it trained itself: `global` and `local` in
    the record. `shared_global` and `shared_local` are the same network with the new shared head.
    """

    deferrable = frozenset({"receive"})

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        # Raises if the head is not linear. Networks of another width get a new, linear head.
        if network.feature_dim == self.features:
            linear_head(network)
        return network

    def setup(self, server: H, clients: Clients) -> None:
        """Set `server.head`, the head that all clients start from.

        It is the first client's untrained head, or a new linear layer if the server cannot build
        the clients' networks. Heads of different architectures are initialised differently, and the
        average of heads that were trained from different initial weights is worth little. Networks
        taken over from another run keep their heads: then nothing is set.
        """
        if not server.fresh:
            return
        if server.architectures:
            first = server.architectures[min(server.architectures)]()
            server.head = isolate(head_state(first.to(server.device)))
        else:
            # Sites with networks of their own, which the server cannot build.
            head = nn.Linear(self.features, server.spec.classes).to(server.device)
            server.head = copy_state(head)

    def missing_head(self, server: H, active: Clients) -> State:
        """Return the shared head if one of these clients lacks it, else an empty state."""
        return {} if set(active) <= set(server.holders) else server.head

    def put_head_on(self, client: K, head: State) -> None:
        """Put the shared head on the client's network, in place.

        A client that never received one keeps its own.

        Args:
            client: The client.
            head: The shared head; empty for the one that the client has received.
        """
        client.head = head or client.head
        load_head(client.model, client.head)

    def share_head(self, server: H, clients: Clients, head: State) -> None:
        """Make this the shared head and send it to all clients.

        `server.holders` then lists the clients that received it.
        """
        server.head = head
        server.holders = list(clients.run(self.receive, head))

    def receive(self, client: K, head: State) -> None:
        """Store the shared head at the client; its network keeps the head it trained."""
        client.head = head

    def evaluate(self, client: K) -> dict[str, float]:
        """Evaluate the client's network with its own head and with the shared one.

        Metrics with the shared head are named shared_METRIC; a client that never received one has
        none. The client's report is included, then cleared.
        """
        if not client.head:
            return super().evaluate(client)
        report = client.report
        client.report = {}
        own: dict[str, float] = {}
        shared: dict[str, float] = {}
        metrics = client.evaluation.metrics
        for name, data in tests_due(client).items():
            by_own, by_shared = logits_by_heads(client.model, client.head, data)
            own |= measure(name, by_own, data.labels, metrics)
            shared |= measure(f"shared_{name}", by_shared, data.labels, metrics)
        if "local" in own:
            own["local_images"] = len(client.tests["local"])
        return {**own, **shared, **as_numbers(report)}

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if not rounds or any(r.round > 1 for r in rounds):
            return []
        return [
            "only one round was run, in which training was local only: the shared head is used "
            "from the second round on, and shared_global is measured with it"
        ]
