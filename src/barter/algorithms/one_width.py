"""Features of one width: what methods have in common that compare clients' features, or the weights behind them.

Networks may differ, but for the width of their features; those with another are pooled to it, and get a new head, as in
HtFLlib. Local training is HtFLlib's too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from typing_extensions import TypeVar

from barter.core.algorithm import Algorithm
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.fit import Optimizer, Recipe, by_name, classification, fit_by
from barter.ops.heads import linear_head

__all__ = ["HeadServer", "OneWidth", "SharedHead"]


class HeadServer(Server):
    """A server whose model is a head."""

    head: State = {}  # everybody's; the clients' own before the first round


S = TypeVar("S", bound=Server, default=Server)
H = TypeVar("H", bound=HeadServer, default=HeadServer)
C = TypeVar("C", bound=Client, default=Client)


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
class SharedHead(OneWidth[H, C]):
    """And the head behind them is everybody's."""

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        if network.feature_dim == self.features:  # others get a new head
            linear_head(network)
        return network
