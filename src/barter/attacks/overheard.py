"""Record what clients upload in one round, with the ground truth.

Only the experimenter has the ground truth.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from barter.attacks.extraction import extract_model, find_predictions
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import Payload, State, isolate, leaves
from barter.core.wire import Direction, Wire
from barter.core.wire_codec import WireCodec
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.models.generators import resize_images
from barter.privacy.guard import Guard
from barter.privacy.parts import take_part

__all__ = [
    "RecordingWire",
    "Upload",
    "clients_of",
    "collect_uploads",
    "guard_of",
    "record_wire",
    "split_test",
]


MIN_TEST_IMAGES = 20  # minimum number of test images


class RecordingWire(Wire):
    """A wire that records the arguments and answers of each client, by method."""

    def __init__(self, may_be_infinite: frozenset[str], codec: WireCodec | None) -> None:
        super().__init__(may_be_infinite, codec)
        self.answers: dict[int, dict[str, Payload]] = {}
        self.sent: dict[int, dict[str, Payload]] = {}  # arguments

    def deliver(self, received: Any, method: str, client: int, direction: Direction) -> Any:
        if method != Algorithm.evaluate.__name__:
            record = self.answers if direction == "up" else self.sent
            record.setdefault(client, {})[method] = isolate(received)
        return received

    def add(self, other: RecordingWire, methods: Collection[str]) -> None:
        """Add what another wire has recorded of some methods; its records replace this wire's."""
        for own, others in ((self.answers, other.answers), (self.sent, other.sent)):
            for client, record in others.items():
                chosen = {method: record[method] for method in methods if method in record}
                if chosen:
                    own[client] = {**own.get(client, {}), **chosen}


@dataclass(frozen=True)
class Upload:
    """One client's upload in a round, with the ground truth.

    What the client did not upload is None.
    """

    answers: dict[str, Payload]  # all answers, by method
    # network with the uploaded weights, or one extracted from predictions on public images
    network: Classifier | None
    learnt: bool  # whether the network was extracted
    # name of the part, METHOD.KEY, and rows that belong to single images, such as embeddings
    rows: tuple[str, Tensor] | None
    labels: tuple[str, Tensor] | None  # name of the part, and a label per row
    places: Tensor | None  # ground truth: index of each row's image among the client's images
    images: Tensor | None  # normalised images that the server decoded from the rows
    # normalised images that the client uploaded, synthesised from many of its own
    given: Tensor | None

    @property
    def source(self) -> str:
        """Return the origin of the network: "weights", or that it was learnt."""
        return "network learnt from predictions" if self.learnt else "weights"


def clients_of(experiment: Experiment) -> dict[int, Client]:
    """Return all clients by id, of a run whose clients are in this process."""
    assert isinstance(experiment.engine, LocalEngine)
    return dict(experiment.engine.clients)


def guard_of(experiment: Experiment) -> Guard:
    """Return the guard that protects the clients' answers."""
    assert isinstance(experiment.engine, LocalEngine)
    assert experiment.engine.guard is not None
    return experiment.engine.guard


def record_wire(experiment: Experiment) -> RecordingWire:
    """Replace an experiment's wire by one that records from now on; return the new wire."""
    wire = RecordingWire(experiment.algorithm.may_be_infinite, experiment.engine.wire.codec)
    experiment.engine.wire = wire
    return wire


def collect_uploads(
    experiment: Experiment, earlier: RecordingWire | None = None
) -> dict[int, Upload]:
    """Run one more round and return what each client uploaded in it.

    The experiment is then one round further, and its wire is replaced by one that records. Clients
    that uploaded nothing are left out.

    Args:
        experiment: The experiment.
        earlier: A record of earlier rounds, from which answers to methods that a client is asked
            only once in a run are taken (`Algorithm.once`); None if there are no such methods.
    """
    wire = record_wire(experiment)
    experiment.step()
    if earlier is not None:
        wire.add(earlier, experiment.algorithm.once)
    clients = clients_of(experiment)
    return {
        k: _interpret_upload(experiment, clients[k], answers, wire.sent.get(k, {}))
        for k, answers in sorted(wire.answers.items())
    }


def _interpret_upload(
    experiment: Experiment, client: Client, answers: dict[str, Payload], sent: dict[str, Payload]
) -> Upload:
    """Interpret what one client uploaded.

    Args:
        experiment: The attacked run.
        client: The client.
        answers: Its answers by method.
        sent: The arguments of each method.
    """
    data = client.data
    network = _network(client, answers)
    learnt = False
    if network is None and client.public is not None:
        predicted = find_predictions(answers, sent, data.spec.classes)
        if predicted is not None:
            index, logits = predicted
            with seeds.scope(experiment.config.seed, "extraction", client.id):
                network = extract_model(client.model, client.public, index, logits)
            learnt = True
    gallery = experiment.algorithm.gallery(
        client, experiment.round, lambda places: torch.arange(len(places))
    )
    places = None
    images = None
    if gallery is not None:
        places = gallery[0]
        images = resize_images(gallery[1], data.spec)
    given = _find_images(answers, data.spec)
    if places is None and given is not None:
        # Uploaded images are synthesised from all private ones, so any of these may be compared.
        seed = seeds.stream_seed(experiment.config.seed, "places", client.id)
        places = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    tells = type(experiment.algorithm).tells
    return Upload(
        answers=answers,
        network=network,
        learnt=learnt,
        rows=_part(tells, answers, "row", "row of the network"),
        labels=_part(tells, answers, "label"),
        places=places,
        images=images,
        given=given,
    )


def _network(client: Client, answers: dict[str, Payload]) -> Classifier | None:
    """Return a network with the first weights that a client uploaded, or None.

    The weights must be those of the client's whole network.
    """
    state = next(iter(_states(answers, client.model.state_dict())), None)
    if state is None:
        return None
    network = copy.deepcopy(client.model)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def _find_images(answers: dict[str, Payload], spec: Spec) -> Tensor | None:
    """Return the answers' byte images as a batch of network input; None without any.

    Every uint8 tensor (images, channels, height, width) with the spec's channels counts as images,
    which are normalised and resized to the spec's size.
    """
    tensors = [leaf for _, leaf in leaves(answers) if isinstance(leaf, Tensor)]
    images = [x for x in tensors if x.dtype == torch.uint8 and x.ndim == 4]
    found = [x for x in images if x.shape[1] == spec.channels and len(x)]
    if not found:
        return None
    return torch.cat([prepare_batch(x, spec, Augment()) for x in found])


def _states(tree: Payload, like: State) -> Iterator[State]:
    """Yield every state of a network in a tree, found by its names and shapes."""
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
    """Return name and tensor of the first part that is declared as one of the kinds.

    Args:
        tells: The algorithm's declaration, part -> kind.
        answers: The client's answers, by method.
        kinds: The kinds.
    """
    for name, kind in tells.items():
        if kind not in kinds:
            continue
        method, _, key = name.partition(".")
        values = take_part(answers[method], key) if method in answers else []
        if len(values) == 1 and isinstance(values[0], Tensor):
            return name, values[0]
    return None


def split_test(experiment: Experiment) -> tuple[Images, Images]:
    """Split the global test images at random into two halves, fixed by the seed.

    Returns:
        Images that the attacker owns, then images of no client, for membership inference.

    Raises:
        ConfigError: If there are fewer than `MIN_TEST_IMAGES` test images.
    """
    every = experiment.task.global_test
    if len(every) < MIN_TEST_IMAGES:
        raise ConfigError(
            f"there are {len(every)} test images: an attacker needs {MIN_TEST_IMAGES}, half of them as its own"
        )
    generator = torch.Generator().manual_seed(experiment.config.seed)
    first, second = torch.randperm(len(every), generator=generator).tensor_split(2)
    return (
        Images(every.pixels[first], every.labels[first], every.spec),
        Images(every.pixels[second], every.labels[second], every.spec),
    )
