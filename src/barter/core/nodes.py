"""The two kinds of party: clients, which live where their data lives, and the server."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from barter.compute import lanes
from barter.core.images import Images, Spec
from barter.core.metrics import Evaluation
from barter.core.model import Classifier
from barter.core.payload import Payload, State, isolate, leaves, nbytes

__all__ = ["Client", "Monitor", "Node", "Server", "Silence"]

RELEASED = "released"  # of a client's memory: the account of what it has told

T = TypeVar("T")


class Monitor(Protocol):
    """Whoever watches a run: told of each phase, and of how far it has come."""

    def phase(self, name: str, total: float) -> AbstractContextManager[object]: ...

    def advance(self, amount: float) -> None: ...


class Silence:
    """The monitor of a run that nobody watches."""

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return nullcontext()

    def advance(self, amount: float) -> None:
        pass


class Node:
    """A party: its model, its device, and what it remembers from round to round.

    What a subclass annotates is its memory: payload trees that start from their class default, and that a checkpoint
    holds together with the model's weights.
    """

    def __init__(
        self, model: Classifier | None, device: torch.device, public: Images | None = None
    ) -> None:
        self.model_or_none, self.device, self.public = model, device, public
        self.architecture = "server"  # nodes of one name have the same network
        self.monitor: Monitor = Silence()
        self.evaluation = Evaluation()  # which tests are run, and what they measure
        self.tested = True  # whether tests are due in this round
        self.report: dict[str, float] = {}  # plain numbers for the round's record
        for name in self.remembered():
            if not hasattr(type(self), name):
                raise TypeError(
                    f"{type(self).__name__}.{name} needs a default: what a node remembers at the start"
                )
            setattr(self, name, copy.deepcopy(getattr(type(self), name)))

    @contextmanager
    def seated(self) -> Iterator[None]:
        """On a lane, and for a turn, this node's model is the one that the lane keeps for its architecture.

        So the graphs of a lane serve all clients of an architecture, however many there are.
        """
        own = self.model_or_none
        if own is None or lanes.current() is None:
            yield
            return
        seat = lanes.kept(("model", self.architecture), lambda: copy.deepcopy(own).to(self.device))
        lanes.take_over(seat, own)
        self.model_or_none = seat
        try:
            yield
        finally:
            lanes.take_over(own, seat)
            self.model_or_none = own

    @property
    def model(self) -> Classifier:
        """The party's own model."""
        if self.model_or_none is None:
            raise AttributeError(
                "this party has no model: the clients do not share one architecture"
            )
        return self.model_or_none

    @classmethod
    def remembered(cls) -> list[str]:
        """The names of what this kind of node remembers between rounds."""
        kinds = [
            k
            for k in reversed(cls.__mro__)
            if issubclass(k, Node) and k not in (Node, Client, Server)
        ]
        return [name for kind in kinds for name in inspect.get_annotations(kind)]

    def memory(self) -> dict[str, Payload]:
        """What a checkpoint keeps of this node, as it is now: whoever wants to keep it isolates it."""
        kept: dict[str, Payload] = {name: getattr(self, name) for name in self.remembered()}
        if self.model_or_none is not None:
            kept["model"] = dict(self.model.state_dict())
        return kept

    def holdings(self) -> list[Any]:
        """All that this node remembers beside its model, leaf by leaf."""
        return [leaf for name in self.remembered() for _, leaf in leaves(getattr(self, name), name)]

    def move(self, device: torch.device) -> None:
        """Put all that this node holds where it is to be: on the run's device, or in the host's memory."""
        if self.model_or_none is not None:
            self.model_or_none.to(device)
        for name in self.remembered():
            setattr(self, name, isolate(getattr(self, name), device))

    def footprint(self) -> int:
        """Bytes that this node holds."""
        model = 0 if self.model_or_none is None else lanes.footprint(self.model_or_none)
        return model + nbytes(self.holdings())

    def recall(self, memory: Mapping[str, Payload]) -> None:
        """Take up where `memory` was taken; everything goes where the model is, be it the device or a parking place."""
        place = self.device
        if self.model_or_none is not None:
            self.model.load_state_dict(memory["model"])
            place = next((p.device for p in self.model.parameters()), place)
        for name in self.remembered():
            setattr(self, name, isolate(memory[name], place))


class Client(Node):
    """A party with private data and, for measuring only, its test sets.

    >>> from barter import Client, Experiment, Local
    >>> client: Client = Experiment(Local(), clients=2).engine.clients[0]
    >>> client.id, client.architecture, len(client.data), client.data.spec.classes
    (0, 'small-cnn', 700, 10)
    >>> class Counting(Client):
    ...     asked: int = 0
    >>> Counting.remembered()
    ['asked']
    """

    def __init__(
        self,
        id: int,
        model: Classifier,
        device: torch.device,
        data: Images,
        tests: Mapping[str, Images],
        public: Images | None = None,
        architecture: str | None = None,
    ) -> None:
        super().__init__(model, device, public)
        self.id, self.data, self.tests = id, data, tests
        self.architecture = architecture or f"client {id}"
        self.released: dict[str, int] = {}  # how often each protected part of its answers has left

    def memory(self) -> dict[str, Payload]:
        return super().memory() | ({RELEASED: dict(self.released)} if self.released else {})

    def recall(self, memory: Mapping[str, Payload]) -> None:
        super().recall(memory)
        self.released = dict(memory.get(RELEASED, {}))

    def track(self, steps: Sequence[T]) -> Iterator[T]:
        """The steps one by one, seen by whoever watches the run as parts of this client's work."""
        for step in steps:
            yield step
            self.monitor.advance(1 / len(steps))


class Server(Node):
    """The coordinator. It knows the task and how each client's network is built, and holds no data.

    >>> from barter import Experiment, FedAvg, Server
    >>> server: Server = Experiment(FedAvg(), clients=2, models="small-mlp").server
    >>> server.spec.classes, server.model.feature_dim, sorted(server.memory())
    (10, 256, ['model'])
    """

    def __init__(
        self,
        spec: Spec,
        architectures: Mapping[int, Callable[[], Classifier]],
        model: Classifier | None,
        device: torch.device,
        public: Images | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(model, device, public)
        self.spec, self.architectures = spec, architectures
        self.names = dict(
            names or {}
        )  # of clients' architectures: those of one name have the same network

    def replica(self, client: int, weights: State) -> Classifier:
        """A frozen copy of a client's model, from the weights it sent."""
        model = lanes.kept(
            ("replica", client), lambda: self.architectures[client]().to(self.device)
        )
        model.load_state_dict(weights)
        return model.eval().requires_grad_(False)

    def track(self, name: str, steps: Sequence[T]) -> Iterator[T]:
        """The steps one by one, timed and shown as a phase of the round."""
        with self.monitor.phase(name, len(steps)):
            for step in steps:
                yield step
                self.monitor.advance(1)


def as_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """A report as JSON can hold it."""
    return {name: float(value) for name, value in report.items()}
