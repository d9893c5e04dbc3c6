"""The two kinds of party: clients, which hold private data, and the server."""

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

# Key in a client's memory under which it counts the releases of protected parts.
RELEASED = "released"

DEFAULT_EVALUATION = Evaluation()

T = TypeVar("T")


class Monitor(Protocol):
    """Observer of a run's progress, notified of phases and of work done in them."""

    def phase(self, name: str, total: float) -> AbstractContextManager[object]: ...

    def advance(self, amount: float) -> None: ...


class Silence:
    """Monitor that ignores all progress."""

    def phase(self, name: str, total: float) -> AbstractContextManager[object]:
        return nullcontext()

    def advance(self, amount: float) -> None:
        pass


class Node:
    """A party with its model, its device and its memory from round to round.

    The attributes that a subclass annotates are its memory. They are payload trees that start from
    their class default, and a checkpoint stores them together with the model's weights.
    """

    def __init__(
        self, model: Classifier | None, device: torch.device, public: Images | None = None
    ) -> None:
        self.model_or_none = model
        self.device = device
        self.public = public
        self.architecture = "server"  # Nodes with the same name have the same architecture.
        self.monitor: Monitor = Silence()
        self.evaluation = DEFAULT_EVALUATION  # The test sets to use and the metrics to compute.
        self.tested = True  # True if the node is evaluated in this round.
        self.report: dict[str, float] = {}  # Numbers for the round's record.
        for name in self.memory_names():
            if not hasattr(type(self), name):
                raise TypeError(
                    f"{type(self).__name__}.{name} needs a default, its value before round 1"
                )
            setattr(self, name, copy.deepcopy(getattr(type(self), name)))

    @contextmanager
    def use_lane_module(self) -> Iterator[None]:
        """Use the current lane's module as this node's model inside the block.

        A lane is a CUDA stream (`compute/lanes.py`) with one module for each architecture. The
        node's weights, `requires_grad` and modes are copied into it before the block and back after
        it, also if the block raises. So the CUDA graphs of a lane serve all clients of an
        architecture, whatever their number. Without a lane or a model nothing changes.
        """
        own = self.model_or_none
        if own is None or lanes.current_lane() is None:
            yield
            return
        seat = lanes.lane_module(
            ("model", self.architecture), lambda: copy.deepcopy(own).to(self.device)
        )
        lanes.take_over(seat, own)
        self.model_or_none = seat
        try:
            yield
        finally:
            lanes.take_over(own, seat)
            self.model_or_none = own

    @property
    def model(self) -> Classifier:
        """Return the party's model.

        Raises:
            AttributeError: If the party has none.
        """
        if self.model_or_none is None:
            raise AttributeError(
                "this party has no model: the clients do not share one architecture"
            )
        return self.model_or_none

    @classmethod
    def memory_names(cls) -> list[str]:
        """Return the names of attributes that a client or server keeps between rounds.

        They are the attributes that an algorithm annotates in its subclasses of Client and Server,
        base classes first. The model is not among them; `memory` adds it.
        """
        names: list[str] = []
        for kind in reversed(cls.__mro__):
            if issubclass(kind, Node) and kind not in (Node, Client, Server):
                names += inspect.get_annotations(kind)
        return names

    def memory(self) -> dict[str, Payload]:
        """Return the current state that a checkpoint stores of this node.

        It maps each of `memory_names` to its value and "model" to the weights, if there is a model.
        A client that has released protected parts adds "released", its counts of them.

        The tensors are those in use: a caller that keeps the result must `isolate` it.
        """
        state: dict[str, Payload] = {name: getattr(self, name) for name in self.memory_names()}
        weights = self.weights()
        if weights is not None:
            state["model"] = weights
        return state

    def weights(self) -> State | None:
        """Return the weights of the node's model, not copied; None if it has no model."""
        return None if self.model_or_none is None else dict(self.model.state_dict())

    def holdings(self) -> list[Any]:
        """Return the tensors and plain values in this node's memory, without the model."""
        return [
            leaf for name in self.memory_names() for _, leaf in leaves(getattr(self, name), name)
        ]

    def move(self, device: torch.device) -> None:
        """Move this node's model and memory to a device; images and `device` stay."""
        if self.model_or_none is not None:
            self.model_or_none.to(device)
        for name in self.memory_names():
            setattr(self, name, isolate(getattr(self, name), device))

    def model_bytes(self) -> int:
        """Return the size of the node's model in bytes; 0 without a model."""
        return 0 if self.model_or_none is None else lanes.footprint(self.model_or_none)

    def footprint(self) -> int:
        """Return the size of the node's model and memory in bytes; images do not count."""
        return self.model_bytes() + nbytes(self.holdings())

    def recall(self, memory: Mapping[str, Payload]) -> None:
        """Restore the state that `memory` returned.

        Tensors are copied to the model's current device, which is the CPU while a client waits
        outside of GPU memory; without a model to the node's `device`.

        Raises:
            KeyError: If an attribute or the model is missing in the memory.
            RuntimeError: If the weights are of another architecture.
        """
        device = self.device
        if self.model_or_none is not None:
            self.model.load_state_dict(memory["model"])
            device = next((p.device for p in self.model.parameters()), device)
        for name in self.memory_names():
            setattr(self, name, isolate(memory[name], device))


class Client(Node):
    """A party with private data and, for evaluation only, its test sets.

    >>> from barter import Client, Experiment, Local
    >>> client: Client = Experiment(Local(), clients=2).engine.clients[0]
    >>> client.id, client.architecture, len(client.data), client.data.spec.classes
    (0, 'small-cnn', 700, 10)
    >>> class Counting(Client):
    ...     asked: int = 0
    >>> Counting.memory_names()
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
        self.id = id
        self.data = data
        self.tests = tests
        self.architecture = architecture or f"client {id}"
        # Protected part of the client's answers -> number of releases.
        self.released: dict[str, int] = {}

    def memory(self) -> dict[str, Payload]:
        state = super().memory()
        if self.released:
            state[RELEASED] = dict(self.released)
        return state

    def recall(self, memory: Mapping[str, Payload]) -> None:
        super().recall(memory)
        self.released = dict(memory.get(RELEASED, {}))

    def track(self, steps: Sequence[T]) -> Iterator[T]:
        """Yield the steps one by one and report each as progress of this client's work.

        All steps together are one unit of work, whatever their number.
        """
        for step in steps:
            yield step
            self.monitor.advance(1 / len(steps))


class Server(Node):
    """The coordinator, which builds clients' networks and holds no data.

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
        self.spec = spec
        self.architectures = architectures  # Client -> function that builds its network.
        # True if clients start from the weights that `architectures` builds; False in a run with
        # `start`.
        self.fresh = True
        # Client -> architecture; clients with the same name have the same architecture.
        self.names = dict(names or {})

    def replica(self, client: int, weights: State) -> Classifier:
        """Return a frozen copy of a client's model with the weights it uploaded.

        It is in evaluation mode, on the server's device. On a lane (clients in this process, on a
        GPU) the next call for the same client returns the same module with other weights.

        Args:
            client: The client's id.
            weights: The complete state of its network.

        Raises:
            RuntimeError: If the weights are not those of the client's architecture.
        """
        model = lanes.lane_module(
            ("replica", client), lambda: self.architectures[client]().to(self.device)
        )
        model.load_state_dict(weights)
        return model.eval().requires_grad_(False)

    def track(self, name: str, steps: Sequence[T]) -> Iterator[T]:
        """Yield the steps one by one, timed and reported as a phase of the round.

        Args:
            name: The phase; its time is recorded under this name.
            steps: The steps, each of which counts 1.
        """
        with self.monitor.phase(name, len(steps)):
            for step in steps:
                yield step
                self.monitor.advance(1)


def as_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """Convert a report's values, numbers or one-number tensors, to floats for JSON."""
    return {name: float(value) for name, value in report.items()}
