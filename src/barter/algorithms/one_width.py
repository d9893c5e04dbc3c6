"""Features of one width: what methods have in common that compare clients' features, or the weights behind them.

Networks may differ, but for the width of their features; those with another are pooled to it, and get a new head, as in
HtFLlib. Local training is HtFLlib's too.
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
from barter.ops.fit import Optimizer, Recipe, by_name, classification, fit_by
from barter.ops.heads import head_state, linear_head, logits_by_heads, put_on

__all__ = ["HeadClient", "HeadServer", "OneWidth", "SharedHead"]


class HeadServer(Server):
    """A server whose model is a head."""

    head: State = {}  # the shared head; empty while clients have their own
    holders: list[int] = []  # clients that have received it as it is now

    def recall(self, memory: Mapping[str, Payload]) -> None:
        # Checkpoints of older versions do not name holders: every client is sent the head again.
        super().recall({"holders": [], **memory})


class HeadClient(Client):
    """A client that keeps the shared head beside its own network."""

    head: State = {}  # as last received

    def recall(self, memory: Mapping[str, Payload]) -> None:
        super().recall({"head": {}, **memory})  # older versions kept none


S = TypeVar("S", bound=Server, default=Server)
H = TypeVar("H", bound=HeadServer, default=HeadServer)
C = TypeVar("C", bound=Client, default=Client)
K = TypeVar("K", bound=HeadClient, default=HeadClient)


@dataclass(frozen=True, kw_only=True)
class OneWidth(Algorithm[S, C]):
    """All clients' features have one width."""

    features: Count = 512  # width of all clients' features
    fraction: Fraction = 1.0  # C: share of clients per round
    epochs: Count = 1  # E: local epochs
    batch_size: Count = 10  # B: images per step
    # of clients; adam where DFFKE compares, with lr 0.001 and batches of 100
    optimizer: Optimizer = "sgd"
    lr: Positive = 0.01  # η: learning rate

    @property
    def feature_width(self) -> int:
        return self.features

    def recipe(self) -> Recipe:
        """How clients are trained."""
        return by_name(self.optimizer, self.lr)

    def train(
        self,
        client: C,
        loss: Callable[..., Any] | None = None,
        beside: Sequence[Tensor] | Iterator[Sequence[Tensor]] = (),
        also: Sequence[nn.Module] = (),
    ) -> None:
        """Local training: by cross entropy, or by a loss as `fit_by` takes it."""
        plain = partial(classification, client.model, client.data.spec, client.data.augment)
        fit_by(
            client,
            loss or plain,
            epochs=self.epochs,
            batch_size=self.batch_size,
            recipe=self.recipe(),
            beside=beside,
            also=also,
        )


@dataclass(frozen=True, kw_only=True)
class SharedHead(OneWidth[H, K]):
    """And the head behind them is everybody's.

    1. Before the first round the server takes the first client's untrained head, as HtFLlib does.
    2. Clients put the shared head on and train.
    3. The server makes a new shared head, and all clients receive it.

    After the round a client's network has the head that it trained itself: `global` and `local` in
    the record. `shared_global` and `shared_local` are the same network with the new shared head.
    """

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        if network.feature_dim == self.features:  # others get a new head
            linear_head(network)
        return network

    def setup(self, server: H, clients: Clients) -> None:
        """Choose the head that all clients start from.

        Heads of different architectures are drawn apart, and the average of heads that were trained
        from different starts is worth little. Networks of another run keep the heads they come with.
        """
        if not server.fresh:
            return
        if server.architectures:
            first = server.architectures[min(server.architectures)]()
            server.head = isolate(head_state(first.to(server.device)))
        else:  # sites with networks of their own, which the server cannot build
            head = nn.Linear(self.features, server.spec.classes).to(server.device)
            server.head = isolate(dict(head.state_dict()))

    def missing_head(self, server: H, active: Clients) -> State:
        """Return the shared head if one of these clients lacks it; otherwise, an empty state."""
        return {} if set(active) <= set(server.holders) else server.head

    def put_head_on(self, client: K, head: State) -> None:
        """Give the client's network the shared head: this one, or the one that it has received."""
        client.head = head or client.head
        put_on(client.model, client.head)

    def share_head(self, server: H, clients: Clients, head: State) -> None:
        """Make this the shared head and send it to all clients."""
        server.head = head
        server.holders = list(clients.run(self.receive, head))

    def receive(self, client: K, head: State) -> None:
        client.head = head

    def evaluate(self, client: K) -> dict[str, float]:
        """Judge the client's network with its own head, and with the shared one."""
        if not client.head:
            return super().evaluate(client)
        report, client.report = client.report, {}
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
        way_out = "the shared head is put on from the second round on, and shared_global has it on"
        return [f"one round is done, in which clients learned alone: {way_out}"]
