"""What a server hears in one round of a run, and the truth behind it, which only the experimenter knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from barter.attacks.extraction import extracted, predictions
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import Payload, State, isolate, leaves
from barter.core.wire import Direction, Wire
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.models.generators import resized
from barter.privacy.guard import Guard
from barter.privacy.parts import take

__all__ = ["Ear", "Told", "clients_of", "guard_of", "overheard", "split_test"]


LEAST = 20  # test images


class Ear(Wire):
    """A wire with somebody who listens: what each client was asked and answered, method by method."""

    def __init__(self, may_be_infinite: frozenset[str]) -> None:
        super().__init__(may_be_infinite)
        self.heard: dict[int, dict[str, Payload]] = {}
        self.sent: dict[int, dict[str, Payload]] = {}  # what came with the question

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device)
        if method != Algorithm.evaluate.__name__:
            book = self.heard if direction == "up" else self.sent
            book.setdefault(client, {})[method] = isolate(arrived)
        return arrived


@dataclass(frozen=True)
class Told:
    """What one client told in a round: its network, rows of single images, their labels; none where it told none."""

    answers: dict[str, Payload]  # all of it, by method
    # with the weights that it told, or that learnt from what it said of public images
    network: Classifier | None
    learnt: bool  # whether it is the latter
    # the part's name, METHOD.KEY, and a row for each of some images
    rows: tuple[str, Tensor] | None
    labels: tuple[str, Tensor] | None  # the same, and a label for each
    places: Tensor | None  # the truth: which of the client's images those are
    images: Tensor | None  # what the server drew of each of them, as networks see images
    # images that the client itself gave away, made of many of its own, as networks see them
    given: Tensor | None

    @property
    def source(self) -> str:
        """Where the network comes from."""
        return "network learnt from predictions" if self.learnt else "weights"


def clients_of(experiment: Experiment) -> dict[int, Client]:
    """All clients of a run in this process."""
    assert isinstance(experiment.engine, LocalEngine)
    return dict(experiment.engine.clients)


def guard_of(experiment: Experiment) -> Guard:
    """Who stands at the clients' doors."""
    assert isinstance(experiment.engine, LocalEngine)
    assert experiment.engine.guard is not None
    return experiment.engine.guard


def overheard(experiment: Experiment) -> dict[int, Told]:
    """One more round, and what each client told in it."""
    experiment.engine.wire = ear = Ear(experiment.algorithm.may_be_infinite)
    experiment.step()
    clients = clients_of(experiment)
    return {
        k: _told(experiment, clients[k], answers, ear.sent.get(k, {}))
        for k, answers in sorted(ear.heard.items())
    }


def _told(
    experiment: Experiment, client: Client, answers: dict[str, Payload], sent: dict[str, Payload]
) -> Told:
    network, learnt, data = _network(client, answers), False, client.data
    if network is None and client.public is not None:
        said = predictions(answers, sent, data.spec.classes)
        if said is not None:
            with seeds.scope(experiment.config.seed, "extraction", client.id):
                network, learnt = extracted(client.model, client.public, *said), True
    gallery = experiment.algorithm.gallery(
        client, experiment.round, lambda places: torch.arange(len(places))
    )
    places, images = (
        (None, None) if gallery is None else (gallery[0], resized(gallery[1], data.spec))
    )
    given = _given(answers, data.spec)
    if places is None and given is not None:  # they are of all
        draw = torch.Generator().manual_seed(
            seeds.stream_seed(experiment.config.seed, "places", client.id)
        )
        places = torch.randperm(len(data), generator=draw)
    part = partial(_part, type(experiment.algorithm).tells, answers)
    rows, labels = part("row", "row of the network"), part("label")
    return Told(answers, network, learnt, rows, labels, places, images, given)


def _network(client: Client, answers: dict[str, Payload]) -> Classifier | None:
    state = next(iter(_states(answers, client.model.state_dict())), None)
    if state is None:
        return None
    network = copy.deepcopy(client.model)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def _given(answers: dict[str, Payload], spec: Spec) -> Tensor | None:
    """All images among the answers, which are bytes as private ones are."""
    tensors = [
        x
        for _, x in leaves(answers)
        if isinstance(x, Tensor) and x.dtype == torch.uint8 and x.ndim == 4
    ]
    found = [x for x in tensors if x.shape[1] == spec.channels and len(x)]
    return prepared(torch.cat(found), spec, Augment()) if found else None


def _states(tree: Payload, like: State) -> Iterator[State]:
    """Every state of this network in a tree."""
    if isinstance(tree, dict):
        if tree.keys() == like.keys() and all(
            tree[name].shape == value.shape for name, value in like.items()
        ):
            yield tree
        for value in tree.values():
            yield from _states(value, like)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _states(value, like)


def _part(
    tells: Mapping[str, str], answers: dict[str, Payload], *kinds: str
) -> tuple[str, Tensor] | None:
    """The first part of this kind, as the method says of its answers."""
    for name in (name for name, kind in tells.items() if kind in kinds):
        method, _, key = name.partition(".")
        values = take(answers[method], key) if method in answers else []
        if len(values) == 1 and isinstance(values[0], Tensor):
            return name, values[0]
    return None


def split_test(experiment: Experiment) -> tuple[Images, Images]:
    """Two halves of the test images: what an attacker has of the same kind, and images that are no client's."""
    every = experiment.task.global_test
    if len(every) < LEAST:
        raise ConfigError(
            f"there are {len(every)} test images: an attacker needs {LEAST}, half of them as its own"
        )
    order = torch.randperm(
        len(every), generator=torch.Generator().manual_seed(experiment.config.seed)
    )
    return tuple(  # type: ignore[return-value]
        Images(every.pixels[half], every.labels[half], every.spec) for half in order.tensor_split(2)
    )
