"""Clients whose network and memory exist only while they are needed.

A run may have thousands of clients of which ten take part in a round. `LazyClient` builds its
network when it is first used. `ClientStates` puts clients to rest after a round: what has changed
goes to a store, and a client that was never trained needs none, since it starts from the initial
network of its architecture. A resting client is restored when one of its attributes is read, so
callers need not know whether it rests.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from barter.compute import lanes
from barter.core.images import Images, SharedImages
from barter.core.model import Classifier
from barter.core.nodes import RELEASED, Client
from barter.core.payload import Payload, State, leaves

__all__ = ["ClientStates", "LazyClient", "StateStore", "lazy_class"]

MODEL = "model_or_none"


class StateStore(Protocol):
    """A place for the states of clients that do not take part."""

    def write(self, client: int, state: Payload) -> None:
        """Store the state of a client; it replaces an earlier one."""

    def read(self, client: int) -> Payload | None:
        """Return the state of a client; None if none was stored."""


class StoredAttribute:
    """An attribute of a `LazyClient`; reading it restores a resting client.

    Args:
        name: The attribute's name.
        default: Its value before round 1, as the class defines it.
    """

    def __init__(self, name: str, default: Any) -> None:
        self.name = name
        self.default = default

    def __get__(self, client: LazyClient | None, kind: type | None = None) -> Any:
        return self.default if client is None else client.fetch(self.name)

    def __set__(self, client: LazyClient, value: Any) -> None:
        client.assign(self.name, value)


class LazyClient(Client):
    """Client whose network is built on first use, and which can be put to rest.

    Use `lazy_class` to make a subclass of an algorithm's own client class.
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
        # The values of stored attributes; None while the client rests.
        self._values: dict[str, Any] | None = {}
        self._initial = model  # Shared by all clients of the architecture; never modified.
        # Training modes and `requires_grad` of the network, if the client rests and had one.
        self._flags: tuple[list[bool], list[bool]] | None = None
        self.states: ClientStates | None = None
        super().__init__(id, model, device, data, tests, public, architecture)
        del self._values[MODEL]

    def join(self, states: ClientStates) -> None:
        """Drop the client's values and put it to rest, as `states` decides from now on.

        The next use restores it from the store of `states`, or to its initial state.
        """
        self.states = states
        self._values = None

    @property
    def is_resting(self) -> bool:
        """Return whether the client's state is in the store only, or is the initial one."""
        return self._values is None

    @property
    def has_network(self) -> bool:
        """Return whether the client has a network of its own in memory."""
        return self._values is not None and MODEL in self._values

    def fetch(self, name: str) -> Any:
        """Return the value of a stored attribute; restores a resting client.

        The network, "model_or_none", is built if the client has none in memory.
        """
        values = self._wake()
        if name == MODEL and MODEL not in values:
            values[MODEL] = self._build()
        return values[name]

    def assign(self, name: str, value: Any) -> None:
        """Set the value of a stored attribute; restores a resting client."""
        self._wake()[name] = value

    def _wake(self) -> dict[str, Any]:
        """Return the values of stored attributes, restored from the store if necessary."""
        if self.states is not None:
            self.states.note(self)
        if self._values is None:
            self._values = self._defaults()
            stored = None if self.states is None else self.states.store.read(self.id)
            if stored is not None:
                super().recall(stored)
        return self._values

    def _defaults(self) -> dict[str, Any]:
        """Return the values of stored attributes, except the network, before round 1."""
        kind = type(self)
        values = {name: copy.deepcopy(getattr(kind, name)) for name in self.memory_names()}
        return {**values, RELEASED: {}}

    def _build(self) -> Classifier:
        """Return a new initial network with the modes that the client's network last had."""
        network = copy.deepcopy(self._initial)
        if self._flags is not None:
            modes, trained = self._flags
            for part, training in zip(network.modules(), modes, strict=True):
                part.training = training
            for parameter, requires_grad in zip(network.parameters(), trained, strict=True):
                parameter.requires_grad_(requires_grad)
        return network

    def weights(self) -> State | None:
        if self.has_network:
            return super().weights()
        return dict(self._initial.state_dict())

    def memory(self) -> dict[str, Payload]:
        """Return the client's state; that of a resting client is read and not restored."""
        if not self.is_resting:
            return super().memory()
        stored = None if self.states is None else self.states.store.read(self.id)
        return self.initial_memory() if stored is None else dict(stored)

    def initial_memory(self) -> dict[str, Payload]:
        """Return the client's state before round 1: defaults and initial model weights.

        The weights are not copied. What was released is not part of it.
        """
        state = self._defaults()
        del state[RELEASED]
        return {**state, "model": dict(self._initial.state_dict())}

    def recall(self, memory: Mapping[str, Payload]) -> None:
        if self._values is None:
            self._values = self._defaults()  # All of it is replaced, so it need not be read.
        super().recall(memory)

    def holdings(self) -> list[Any]:
        return [] if self.is_resting else super().holdings()

    def model_bytes(self) -> int:
        return lanes.footprint(self._initial)

    def footprint(self) -> int:
        return 0 if self.is_resting else super().footprint()

    def rest(self) -> None:
        """Drop network, memory and gathered images; the store must have the state."""
        if self.has_network:
            network = self.model
            modes = [part.training for part in network.modules()]
            self._flags = modes, [p.requires_grad for p in network.parameters()]
        self._values = None
        for images in (self.data, *self.tests.values()):
            if isinstance(images, SharedImages):
                images.release()


_lazy_classes: dict[type[Client], type[LazyClient]] = {}


def lazy_class(kind: type[Client]) -> type[LazyClient]:
    """Return a subclass of a client class whose instances are lazy.

    >>> from barter import Client
    >>> from barter.core.client_states import lazy_class
    >>> class Counting(Client):
    ...     asked: int = 0
    >>> lazy_class(Counting).memory_names()
    ['asked']
    """
    if kind in _lazy_classes:
        return _lazy_classes[kind]
    attributes: dict[str, Any] = {
        name: StoredAttribute(name, getattr(kind, name))
        for name in kind.memory_names()
        if hasattr(kind, name)  # Otherwise the client's constructor asks for a default.
    }
    attributes |= {name: StoredAttribute(name, None) for name in (MODEL, RELEASED)}
    attributes |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    _lazy_classes[kind] = type(kind.__name__, (LazyClient, kind), attributes)
    return _lazy_classes[kind]


class ClientStates:
    """Puts clients to rest after a round, or earlier if they take too much memory.

    Args:
        clients: All clients of the run by id.
        store: Where the states of resting clients are.
        limit: Bytes of networks and memory that clients may take during a round.
    """

    def __init__(self, clients: Mapping[int, Client], store: StateStore, limit: int) -> None:
        self.store = store
        self.limit = limit
        # Clients in memory, the least recently used first.
        self.awake: OrderedDict[int, LazyClient] = OrderedDict()
        self._sizes: dict[int, int] = {}  # Client in memory -> bytes, when last measured.
        self.on_rest: Callable[[int], None] = lambda client: None  # Called with its id.
        self._at_work: set[int] = set()
        # Clients that ran a method that may have changed them.
        self._changed: set[int] = set()
        for client in clients.values():
            if isinstance(client, LazyClient):
                client.join(self)

    def note(self, client: LazyClient) -> None:
        """Mark a client as in memory and as the most recently used one."""
        self.awake[client.id] = client
        self.awake.move_to_end(client.id)

    @contextmanager
    def using(self, client: Client, *, changes: bool) -> Iterator[None]:
        """Keep a client in memory in the block; then put others to rest if room is short.

        Args:
            client: The client.
            changes: True if the state is to be written when the client is put to rest. With False
                it is compared with the stored one first, and written only if it differs.
        """
        self._at_work.add(client.id)
        if changes:
            self._changed.add(client.id)
        try:
            yield
        finally:
            self._at_work.discard(client.id)
            self.make_room(client)

    def make_room(self, last: Client) -> None:
        """Put clients to rest, least recently used first, while they exceed the limit.

        Clients inside of a `using` block stay in memory.

        Args:
            last: The client that was used last, whose size is measured anew; those of the others
                are as last measured.
        """
        self._sizes[last.id] = last.footprint()
        total = sum(self._sizes.values())
        idle = [k for k in self.awake if k not in self._at_work] if total > self.limit else []
        for k in idle:
            if total <= self.limit:
                break
            total -= self._sizes.get(k, 0)
            self.rest(self.awake[k])

    def rest_all(self) -> None:
        """Put all clients to rest, whatever the limit."""
        for client in list(self.awake.values()):
            self.rest(client)

    def rest(self, client: LazyClient) -> None:
        """Put a client to rest and call `on_rest`; write its state if it has changed."""
        if not client.is_resting:
            state = client.memory()
            if client.id in self._changed or not self._is_stored(client, state):
                self.store.write(client.id, state)
            client.rest()
            self.on_rest(client.id)
        self._changed.discard(client.id)
        self._sizes.pop(client.id, None)
        self.awake.pop(client.id, None)

    def _is_stored(self, client: LazyClient, state: Payload) -> bool:
        """Return whether a state is the stored one or, if there is none, the initial one."""
        stored = self.store.read(client.id)
        return _is_same(client.initial_memory() if stored is None else stored, state)


def _is_same(one: Payload, other: Payload) -> bool:
    """Return whether two payloads have the same leaf paths and bitwise equal values.

    Lists equal tuples, and empty containers each other: they have the same leaves.
    """
    first = dict(leaves(one))
    second = dict(leaves(other))
    if first.keys() != second.keys():
        return False
    for path, value in first.items():
        counterpart = second[path]
        if isinstance(value, Tensor) != isinstance(counterpart, Tensor):
            return False
        if not isinstance(value, Tensor):
            if type(value) is not type(counterpart) or repr(value) != repr(counterpart):
                return False
        elif value.dtype != counterpart.dtype or value.shape != counterpart.shape:
            return False
        else:
            pair = [
                t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                for t in (value, counterpart)
            ]
            if not torch.equal(*pair):
                return False
    return True
