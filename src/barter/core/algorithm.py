"""What an algorithm is: a frozen dataclass of hyperparameters with a `round` that reads like the paper's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, get_args

from torch import Tensor
from typing_extensions import TypeVar

from barter.core.clients import Clients
from barter.core.errors import ConfigError
from barter.core.evaluation import evaluate, score
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import build, check, did_you_mean
from barter.core.payload import State
from barter.core.record import Primary, Round

__all__ = ["Algorithm", "Tells"]

# Nothing of it; its own label, its own row, or the row that the client's network makes of it; what is not named, all.
Tells: TypeAlias = Literal["nothing", "label", "row", "row of the network"]
S = TypeVar("S", bound=Server, default=Server)
C = TypeVar("C", bound=Client, default=Client)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Generic[S, C]):
    """A federated method. Subclass `Algorithm[MyServer, MyClient]` where a party remembers more than its model.

    >>> from dataclasses import dataclass
    >>> from barter import Algorithm, Client, Clients, Experiment, Server
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Census(Algorithm):
    ...     crosses = {"count": "down: nothing; up: how many images the client has"}
    ...     def round(self, server: Server, clients: Clients, t: int) -> None:
    ...         server.report["images"] = sum(clients.run(self.count).values())
    ...     def count(self, client: Client) -> int:
    ...         return len(client.data)
    >>> Experiment(Census(), clients=3).step().server
    {'images': 1433.0}
    """

    crosses: ClassVar[Mapping[str, str]]  # remote method -> what goes down and what comes up
    # METHOD.KEY of an answer -> what a private image can change of it
    tells: ClassVar[Mapping[str, Tells]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}  # named sets of hyperparameters
    # whose accuracy is the headline: of the server's model, or the mean over the clients' models
    primary: ClassVar[Primary] = "clients"
    # whether the server has a model beside theirs; see server_network
    global_model: ClassVar[bool] = False
    # whether the server has no model even though all have one architecture
    personal: ClassVar[bool] = False
    # whether the server builds the clients' networks and fills in their weights
    replicas: ClassVar[bool] = False
    # methods whose payloads may hold NaN or infinity
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check(self)

    @property
    def one_architecture(self) -> bool:
        """Whether all clients must have the same network."""
        return False

    @property
    def feature_width(self) -> int | None:
        """The width that all clients' features must have; none: any. Networks with another are pooled to it."""
        return None

    @property
    def server_network(self) -> str | None:
        """The name of the server's own network, of which clients may get copies; none: it is the first client's."""
        return None

    @property
    def needs_public_data(self) -> bool:
        """Whether all parties must have a public data set."""
        return False

    def budget(self, client: int, clients: int) -> float:
        """The share of its network's width that a client of so many can afford."""
        return 1.0

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        """The network, which may be changed, as a party with this share of its width has it; the server has all."""
        return network

    def outgoing(self, network: Classifier) -> State:
        """Those of a network's weights that may leave a client under their names."""
        return network.state_dict()

    def setup(self, server: S, clients: Clients) -> None:
        """Once, before the first round."""

    def round(self, server: S, clients: Clients, t: int) -> None:
        """One communication round, t = 1, 2, ..."""
        raise NotImplementedError

    def evaluate(self, client: C) -> dict[str, float]:
        """What the round's record says of a client: its accuracies, and what it noted itself."""
        report, client.report = client.report, {}
        found = evaluate(client, self.at_home(client))
        if "local" in found:
            found["local_images"] = len(client.tests["local"])  # to weigh clients by test images
        return {**found, **as_numbers(report)}

    def at_home(self, client: C) -> Tensor | None:
        """What a client adds to its logits for images like its own, a number for each class; nothing if its network
        says it all."""
        return None

    def evaluate_server(self, server: S, test: Images) -> dict[str, float]:
        """What the round's record says of the server's model."""
        if server.model_or_none is None:
            return {}
        return score(server.model, test, "global", server.evaluation)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        """What somebody who sees accuracies alone should know of a run: no exchange ever took place, images are alike.

        Clauses without a full stop, each with the way out. Of every method: that nothing but a number came down.
        """
        ways = [
            what
            for what in self.crosses.values()
            if "down: " in what and "down: nothing" not in what
        ]
        came = [
            n
            for r in rounds
            for client in r.clients.values()
            if (n := client.get("bytes_down")) is not None
        ]
        if not ways or not came or max(came) > 8:
            return []
        way_out = "some methods have an answer from the second round on, and it takes two clients"
        return [f"nothing of others ever came to a client, so clients learned alone: {way_out}"]

    def gallery(
        self, client: C, t: int, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """What round t made of some of a client's images, for the experimenter's eyes: their places, and the pictures.

        Given the places of all that there are, `wanted` says which of them to show. Nothing for a round that made none
        or is not remembered.
        """
        return None

    def creations(
        self, party: S | C, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """What a party made of no single private image, as it is after the last round: labels, and the pictures.

        For the experimenter's eyes. Given the labels of all that there are, `wanted` says which of them to show.
        """
        return None

    @classmethod
    def preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """The algorithm with a named set of hyperparameters, some of them overridden."""
        if name not in cls.presets:
            raise ConfigError(
                f"unknown preset {name!r} of {cls.__name__}: {did_you_mean(name, cls.presets)}"
            )
        return build(cls, {**cls.presets[name], **(overrides or {})}, "algorithm.")

    @classmethod
    def parties(cls) -> tuple[type[Server], type[Client]]:
        """The kinds of server and client this algorithm was written for."""
        bases = [base for kind in cls.__mro__ for base in getattr(kind, "__orig_bases__", ())]
        args = [
            getattr(arg, "__default__", arg) for base in bases for arg in get_args(base)
        ]  # a variable's default
        found = [arg for arg in args if isinstance(arg, type)]
        server = next((kind for kind in found if issubclass(kind, Server)), Server)
        client = next((kind for kind in found if issubclass(kind, Client)), Client)
        return server, client

    @classmethod
    def citation(cls) -> str:
        """The first paragraph of the file the algorithm stands in."""
        module = inspect.getmodule(cls)
        return (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
