"""What a server hears in one round of a run, and the truth behind it, which only the experimenter knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import Payload, State, isolate
from barter.core.wire import Direction, Wire
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.models.generators import resized
from barter.privacy.guard import Guard
from barter.privacy.parts import take

__all__ = ["Ear", "Told", "clients_of", "guard_of", "overheard", "split_test"]


LEAST = 20  # test images


class Ear(Wire):
    """A wire with somebody who listens: what each client answered, method by method."""

    def __init__(self, may_be_infinite: frozenset[str]) -> None:
        super().__init__(may_be_infinite)
        self.heard: dict[int, dict[str, Payload]] = {}

    def carry(
        self, tree: Any, method: str, client: int, direction: Direction, device: torch.device | None = None
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device)
        if direction == "up" and method != Algorithm.evaluate.__name__:
            self.heard.setdefault(client, {})[method] = isolate(arrived)
        return arrived


@dataclass(frozen=True)
class Told:
    """What one client told in a round: its network, rows of single images, their labels; none where it told none."""

    answers: dict[str, Payload]  # all of it, by method
    network: Classifier | None  # with the weights that it told
    rows: tuple[str, Tensor] | None  # the part's name, METHOD.KEY, and a row for each of some images
    labels: tuple[str, Tensor] | None  # the same, and a label for each
    places: Tensor | None  # the truth: which of the client's images those are
    images: Tensor | None  # what the server drew of each of them, as networks see images


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
    return {k: _told(experiment, clients[k], answers) for k, answers in sorted(ear.heard.items())}


def _told(experiment: Experiment, client: Client, answers: dict[str, Payload]) -> Told:
    kind, network = type(experiment.algorithm), None
    state = next(iter(_states(answers, client.model.state_dict())), None)
    if state is not None:
        network = copy.deepcopy(client.model)
        network.load_state_dict(state)
        network.eval().requires_grad_(False)
    gallery = experiment.algorithm.gallery(client, experiment.round, lambda places: torch.arange(len(places)))
    places, images = (None, None) if gallery is None else (gallery[0], resized(gallery[1], client.data.spec))
    part = partial(_part, kind.tells, answers)
    return Told(answers, network, part("row", "row of the network"), part("label"), places, images)


def _states(tree: Payload, like: State) -> Iterator[State]:
    """Every state of this network in a tree."""
    if isinstance(tree, dict):
        if tree.keys() == like.keys() and all(tree[name].shape == value.shape for name, value in like.items()):
            yield tree
        for value in tree.values():
            yield from _states(value, like)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _states(value, like)


def _part(tells: Mapping[str, str], answers: dict[str, Payload], *kinds: str) -> tuple[str, Tensor] | None:
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
        raise ConfigError(f"there are {len(every)} test images: an attacker needs {LEAST}, half of them as its own")
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(experiment.config.seed))
    return tuple(  # type: ignore[return-value]
        Images(every.pixels[half], every.labels[half], every.spec) for half in order.tensor_split(2)
    )
