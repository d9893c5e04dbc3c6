"""Find out why DFFKE's accuracy falls after many rounds with skewed classes.

    python -m benchmarks.paper_tables --suite benchmarks/suites/exchange-drift.toml --data DIR \\
        --measure benchmarks.exchange_drift:measure_exchange --out results.jsonl

After every round, three questions are asked about what clients have learned from their peers. The
answers need every client's private images, so they exist in a simulation only.

- Do clients memorise decoded images? Then their accuracy rises on images of their peers that were
  decoded in this round ("peers-decoded") and on the private images that these were decoded from
  ("peers-natural"), while accuracy on test images falls.
- Do decoded images move away from natural ones? Then "peers-decoded" rises and both others fall.
  "likeness" is the mean correlation of a decoded image's pixels with those of its private image;
  it ignores brightness and contrast. "teachers" is the clients' accuracy on decoded images of
  their own data.
- Do clients infer the class from whether an image is natural or decoded? Nearly all natural images
  that a client trains on are of its own classes, and decoded ones are of all classes. Its own
  classes are those of which it has more images than of the average class. "own-natural" is the
  share of natural test images of other classes that it classifies as one of its own, "own-decoded"
  the same share of its peers' decoded images.

"renormalised" is the accuracy on test images with batch-norm statistics of private images. All
columns are between 0 and 1 (likeness: -1 and 1), means over clients. Columns about decoded images
need `reveal = "images"`: other decoded images do not belong to one private image.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.dffke import DFFKE, DFFKEClient, DFFKEServer, Offer
from barter.attacks.overheard import clients_of
from barter.core.algorithm import Algorithm
from barter.core.clients import Replies
from barter.core.errors import ConfigError
from barter.core.evaluation import predict
from barter.core.model import Classifier
from barter.core.params import Count, Fraction
from barter.core.payload import State, isolate
from barter.core.record import Round
from barter.experiment import Experiment
from barter.models.generators import resize_images
from barter.ops.fit import Subject
from barter.ops.modules import copy_state
from barter.ops.statistics import renew_statistics
from barter.ops.transfer import Entry, Lesson

PER_CLIENT = 200  # images of each client that its peers are tested on
COLUMNS = (
    "peers-natural",
    "peers-decoded",
    "teachers",
    "own-natural",
    "own-decoded",
    "renormalised",
)


@dataclass(frozen=True, kw_only=True)
class AnnealedExchange(DFFKE):
    """DFFKE whose learning rate in the exchange falls from round to round."""

    decay: Fraction = 0.9  # factor of the learning rate after each of a client's exchanges

    def exchange(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> None:
        """Learn from peers' logits with the learning rate of the client's next exchange."""
        slower = replace(self, lr=self.lr * self.decay**client.exchanges)
        super(AnnealedExchange, slower).exchange(client, lessons)


@dataclass(frozen=True, kw_only=True)
class AveragedExchange(DFFKE):
    """DFFKE in which an exchange moves a client's network only a part of the way.

    After it, the weights are a weighted mean of the client's own weights before and after the
    exchange. The first exchange is left out: it follows local training, which knows nothing of
    peers.
    """

    keep: Fraction = 0.5  # weight of the network before the exchange

    def exchange(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> None:
        """Learn from peers' logits, then move back towards the network before the exchange."""
        before = copy_state(client.model)
        super().exchange(client, lessons)
        if client.exchanges == 1:
            return
        after = client.model.state_dict()
        client.model.load_state_dict(
            {
                name: w.lerp(before[name], self.keep) if w.is_floating_point() else w
                for name, w in after.items()
            }
        )


@dataclass(frozen=True, kw_only=True)
class SettlingDecoder(DFFKE):
    """DFFKE whose server trains docking layers and decoder at a rate that falls by the round.

    The number of their steps stays the same. The head that docking layers are trained with is new
    in each round and hardly trained in late ones.
    """

    decay: Fraction = 0.8  # factor of their learning rate after each round

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warm_decoder:
            raise ConfigError(
                "SettlingDecoder hardly trains in late rounds: it needs warm_decoder=true"
            )

    def make_transfer_data(self, server: DFFKEServer, offers: Replies[Offer], t: int) -> Entry:
        """Make the round's transfer data with the server's learning rate of that round."""
        slower = replace(self, lr=self.lr * self.decay ** (t - 1))
        return super(SettlingDecoder, slower).make_transfer_data(server, offers, t)


@dataclass(frozen=True, kw_only=True)
class SettlingAverage(SettlingDecoder, AveragedExchange):
    """DFFKE with both: a decoder that settles, and networks averaged around an exchange."""


class FrozenClient(DFFKEClient):
    """A client that keeps an earlier version of its network."""

    earlier: State = {}  # empty until it is frozen


@dataclass(frozen=True, kw_only=True)
class FrozenExchange(DFFKE, Algorithm[DFFKEServer, FrozenClient]):
    """DFFKE whose server keeps decoding images through networks of an early round.

    Clients learn on, and so do docking layers and decoder. But what a client offers is always of
    its network after its first few exchanges, so that decoded images do not follow what clients
    have learned since.
    """

    after: Count = 5  # exchanges after which a client's network is kept for decoding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.later_epochs != 0:
            raise ConfigError("FrozenExchange trains no earlier network: it needs later_epochs=0")

    def learn(self, client: FrozenClient) -> Offer:  # type: ignore[override]
        """Return what the server decodes, of the earlier network if there is one."""
        if not client.earlier:
            return super().learn(client)
        now = copy_state(client.model)
        client.model.load_state_dict(client.earlier)
        # The offered weights share memory with the model, so they are copied before it changes.
        offer = isolate(super().learn(client))
        client.model.load_state_dict(now)
        return offer

    def exchange(self, client: FrozenClient, lessons: dict[int, Lesson]) -> None:  # type: ignore[override]
        """Learn from peers' logits, and keep the network after the given number of exchanges."""
        super().exchange(client, lessons)
        if client.exchanges == self.after:
            client.earlier = copy_state(client.model)


@dataclass(frozen=True, kw_only=True)
class BridgedExchange(DFFKE):
    """DFFKE whose students see blends of a natural and a decoded image, with one's target.

    Every image has a part of both kinds, so that a student cannot tell from the kind of an image
    which classes to expect. The image whose target is learned has the larger part.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.local_review and self.mixed):
            raise ConfigError(
                "BridgedExchange blends private images with those of all peers: it needs "
                "local_review=true and mixed=true"
            )

    def _subjects(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> list[Subject]:
        private, *lent = super()._subjects(client, lessons)
        newest = lent[0]  # decoded in this round, by all teachers
        return [
            replace(private, show=partial(show_bridged, private.show, newest.show, newest.rows[0])),
            *(
                replace(
                    subject,
                    show=partial(show_bridged, subject.show, private.show, private.rows[0]),
                )
                for subject in lent
            ),
        ]


def show_bridged(
    show: Callable[[Tensor], Tensor],
    show_other: Callable[[Tensor], Tensor],
    others: Tensor,
    images: Tensor,
) -> Tensor:
    """Return a network's inputs for images, blended with images of the other kind."""
    shown = show(images)
    chosen = torch.randint(len(others), (len(images),), device=others.device)
    weights = 1 - torch.rand(len(images), device=shown.device) * 0.5
    weights = weights.view(-1, *[1] * (shown.ndim - 1))
    return weights * shown + (1 - weights) * show_other(others[chosen])


@torch.no_grad()
def measure_exchange(experiment: Experiment, record: Round) -> dict[str, float]:
    """Return the columns described above, after a round.

    Clients that keep no images (memory=0) are left out as owners of images. Columns of which no
    client has a value are missing.
    """
    test = experiment.test
    assert test is not None
    every = torch.arange(len(test), device=test.labels.device)
    offers = decode_offers(experiment)
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    columns["likeness"] = [offer.likeness for offer in offers.values()]
    for k, client in clients_of(experiment).items():
        model = client.model.eval()
        counts = client.data.class_counts()
        own = counts > counts.float().mean()
        logits = predict(model, test.batch, every)
        if not own[test.labels].all():
            columns["own-natural"].append(share_of_own(logits, test.labels, own))
        renewed = deepcopy(model)
        renew_statistics(renewed, client.data, 100)
        logits = predict(renewed, test.batch, every)
        columns["renormalised"].append(accuracy(logits, test.labels))
        if k in offers:
            logits = classify(model, offers[k].decoded)
            columns["teachers"].append(accuracy(logits, offers[k].labels))
        peers = [offer for i, offer in offers.items() if i != k]
        if peers:
            labels = torch.cat([offer.labels for offer in peers])
            natural = classify(model, torch.cat([offer.natural for offer in peers]))
            decoded = classify(model, torch.cat([offer.decoded for offer in peers]))
            columns["peers-natural"].append(accuracy(natural, labels))
            columns["peers-decoded"].append(accuracy(decoded, labels))
            if not own[labels].all():
                columns["own-decoded"].append(share_of_own(decoded, labels, own))
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


@dataclass(frozen=True)
class DecodedOffer:
    """Some of the images that a client offered in the last round, natural and decoded."""

    natural: Tensor
    decoded: Tensor
    labels: Tensor
    likeness: float  # mean correlation of the pixels of a decoded and its natural image


def decode_offers(experiment: Experiment) -> dict[int, DecodedOffer]:
    """Return offered images of each client that still has them in its memory.

    There are none if a decoded image does not belong to one private image, see `reveal`.
    """
    algorithm = experiment.algorithm
    assert isinstance(algorithm, DFFKE)
    if algorithm.reveal != "images":
        return {}
    offers = {}
    for k, client in clients_of(experiment).items():
        assert isinstance(client, DFFKEClient)
        made = algorithm.transfer_images(client, experiment.round)
        if made is None:
            continue
        offered, images = made
        offered, images = offered[:PER_CLIENT], images[:PER_CLIENT].float()
        natural = client.data.batch(offered)
        small = F.interpolate(natural, images.shape[-2:], mode="area")
        offers[k] = DecodedOffer(
            natural,
            resize_images(images, client.data.spec),
            client.data.labels[offered],
            correlate(small, images),
        )
    return offers


def share_of_own(logits: Tensor, labels: Tensor, own: Tensor) -> float:
    """Return the share of images of other classes that are taken for one of the own classes.

    There must be images of other classes.
    """
    others = ~own[labels]
    return float(own[logits.argmax(1)[others]].double().mean())


def classify(model: Classifier, inputs: Tensor) -> Tensor:
    """Return a model's logits of images that are already inputs of a network."""
    return predict(model, inputs.__getitem__, torch.arange(len(inputs), device=inputs.device))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of logits whose largest is that of the label."""
    return float((logits.argmax(1) == labels).double().mean())


def correlate(images: Tensor, others: Tensor) -> float:
    """Return the mean correlation of the pixels of each image with those of another."""
    rows = [x.flatten(1).double() for x in (images, others)]
    centred = [x - x.mean(1, keepdim=True) for x in rows]
    return float(F.cosine_similarity(centred[0], centred[1], dim=1).mean())
