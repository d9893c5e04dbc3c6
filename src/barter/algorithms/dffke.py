"""DFFKE: "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange", anonymous submission
under review, Algorithm 1.

Clients with different networks and different data teach each other through synthetic images that
represent each client's data. No weights are averaged and no public data is needed. One round
(Algorithm 1):

1. Clients train on their private images (Eq. 9). They upload their weights, and embeddings and
   labels of a share of their images.
2. The server trains docking layers that map all embeddings into one space (Eqs. 10 and 11), and a
   decoder that turns these codes into images (Eq. 12).
3. Every client predicts logits for the synthetic images of its own data and uploads them.
4. Every client learns from the other clients' logits on the other clients' synthetic images
   (Eqs. 13 and 14).

Differences from the paper, where it is silent or contradicts itself:

- `direction`: Eqs. 13 and 14 print KL(student ‖ teacher), Eqs. 6 to 8 KL(teacher ‖ student). Eq. 8
  defines the objective and the authors' code follows it, so the default is "teacher"; "student" is
  the printed form.
- `code_dim`: docking layers map h_k to h = 512, the only width that gives the decoder 4.4 million
  parameters. They are kept over rounds; the global head of Eq. 11 is new in each round.
- The decoder generates 32 x 32 pixels, which are resized for larger inputs.
- `share`: the paper's equations use the embeddings of all images, but the 14.7 MB that it stores
  per round are those of 15 %, which preset "paper" has.
- The paper does not say whether the decoder continues from round to round (`warm_decoder`), and
  writes the losses of decoder and exchange as sums over clients (compare `mixed`). Preset "paper"
  follows the authors' early code: a new decoder in each round, and batches of one client.

Differences from the paper by default (preset "paper" is the paper; preset "code" adds what the
authors' early code does in addition, and shares all embeddings; docs/results/dffke-ablations.md has the
effect of each field):

- `whiten`: codes are whitened. Eq. 11 rewards only the separation of classes, so the decoder
  generated one image per class.
- `standardised`, off by default as in the paper: embeddings of all clients have the same typical
  size when they are docked. It helps if one network's features are far larger than the others'.
- `reveal`: how much of its images a client offers, for clients that may not show them; the paper
  has "images", and "nothing" with noise in place of embeddings (Table 4). With crops of photographs
  in their place, clients upload logits alone.
- `parts`: clients also upload embeddings of parts of each image. A network averages positions away,
  so the decoder could not know them either.
- `mixed`: batches hold images of all clients, because training on one client's batch after another
  undoes the previous step. They hold private images too, because normalisation layers would
  otherwise see these with other statistics in training than afterwards.
- `augmented`: students see augmented transfer images; otherwise they memorise patterns.
- `balanced`: networks do not learn the local class prior. Clients add it to their logits for images
  of their own distribution, so that learning from others costs nothing there. They do not add it
  where they teach: others would learn which classes go with which client's images.
- `warm_decoder`, `cosine`: the decoder continues from the last round's, and learning rates decay.
- `later_epochs`: local training ends with the first exchange. The embedding of a network that has
  learned from others contains more of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.answers import WORD, Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Floats, Labels, Room, Weights, When, Within
from barter.core.errors import ConfigError
from barter.core.evaluation import add_offset, predict, record_before_exchange
from barter.core.images import Augment, Images, Spec, augment_images, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State, nbytes
from barter.core.record import Round
from barter.core.robust import Aggregate
from barter.core.seeds import stream_seed
from barter.models.generators import decoder_side, resize_images
from barter.ops.distill import tempered_kl
from barter.ops.docking import largest_ratio, typical_size, unify
from barter.ops.embedding_models import (
    ClassGaussians,
    count_directions,
    fit_class_gaussians,
    mix_embeddings,
    noise_embeddings,
    sample_embeddings,
    sample_labels_and_noise,
)
from barter.ops.ensemble import public_images
from barter.ops.fit import Subject, adam, alternate, epoch_length, fit, join_subjects
from barter.ops.inversion import Discrepancy, Schedule, Terms, Viewer, fit_decoder
from barter.ops.photographs import prepare_photographs
from barter.ops.shares import log_class_prior
from barter.ops.transfer import (
    Entry,
    Lesson,
    check_lesson,
    collect_lessons,
    decode_images,
    distribute_lessons,
    entry_images,
    logits_to_half,
    newest_entries,
    photograph_entry,
    prepare_lesson,
    public_entry,
    statistics_entry,
    to_half,
    transfer_images,
)
from barter.ops.trust import clients_with_consistent_labels, confirmed_teachers
from barter.ops.views import count_views, embed_all_views, parts_per_side

__all__ = ["DFFKE", "DFFKEClient", "DFFKEServer"]

# Teachers are nearly certain of what photographs show; the other classes of their answers teach too.
PHOTOGRAPH_TEMPERATURE = 3.0
# A run says if one client's embeddings are more than this many times as large as another's. A factor
# of 1.5 was harmless, 32 was not.
LARGE_RATIO = 4.0
DOCKING_WEIGHT_DECAY = 1e-3  # weight decay of the docking layers' Adam, as in the authors' code

Tensors: TypeAlias = dict[int, Tensor]  # one tensor per client


class Offer(TypedDict):
    """A client's upload after local training."""

    # the number of images that it offers, n
    examples: Annotated[int, Within(1, "examples", "n")]
    weights: NotRequired[Annotated[State, Weights(half="describes"), When("inverts")]]
    # of each view of each image, or of mixtures of images: the whole image first, then its parts
    embeddings: NotRequired[
        Annotated[Tensor, Floats("n", "views", "features", rare_peaks=True), When("embeds")]
    ]
    labels: NotRequired[Annotated[Tensor, Labels("n"), When("embeds")]]
    # a model of the embeddings of each class, from which the server samples
    gaussians: NotRequired[Annotated[ClassGaussians, When("describes")]]


class Delivery(TypedDict):
    """Transfer data of this round and of those the client missed; its docking layer."""

    entries: list[Entry]
    docking: State


class DFFKEServer(Server):
    """The data-free module: docking layers, decoder, and the buffer of transfer data."""

    docking: dict[int, State] = {}
    decoder: State = {}  # the last round's decoder, if the next one continues from it
    buffer: list[Entry] = []
    held: dict[int, int] = {}  # for each client, the last round whose entry it was sent


class DFFKEClient(Client):
    """A client that is both teacher and student."""

    buffer: list[Entry] = []
    docking: State = {}
    exchanges: int = 0  # number of exchanges that the client took part in
    # for each remembered round, the indices of the images that the client offered; key 0 is the
    # current round until its number is known
    offered: dict[int, Tensor] = {}


def augment_and_resize(spec: Spec, augment: Augment, images: Tensor) -> Tensor:
    """Augment transfer images in their own size; resize them to the networks' input."""
    return resize_images(augment_images(images, augment), spec)


def review_loss(
    model: Classifier, features: Tensor, labels: Tensor, log_prior: Tensor | None = None
) -> Tensor:
    """Return the mean cross entropy on private images, from their features.

    Args:
        model: The network, of which only the head is used.
        features: The features of the images (N, feature_dim).
        labels: Their classes (N,).
        log_prior: The client's log class prior (classes,), added to the logits; None adds nothing.
    """
    return F.cross_entropy(add_offset(model.logits(features), log_prior), labels)


PAPER_FIELDS: dict[str, object] = {
    "memory": None,
    "share": 0.15,
    "decoder_epochs": 6,
    "exchange_epochs": 4,
    # without what the authors' code adds
    "local_review": False,
    # without barter's additions
    "max_epochs": 100,
    "later_epochs": None,
    "parts": 0,
    "whiten": 0.0,
    "decoder_steps": 0,
    "decoder_batch": None,
    "warm_decoder": False,
    "exchange_steps": 0,
    "mixed": False,
    "augmented": False,
    "cosine": False,
    "balanced": False,
    "temperature": 1.0,
    "transfer": "decoder",
    # in place of embeddings
    "noise": 1.0,
}
CODE = {"share": 1.0, "local_review": True, "embedding_loss": True, "logit_loss": True}


@dataclass(frozen=True, kw_only=True)
class DFFKE(Algorithm[DFFKEServer, DFFKEClient]):
    """Data-free federated knowledge exchange among clients, on synthetic images."""

    server_model = ServerModel("copies")
    crosses = {
        "learn": Crossing(
            up="weights, except with public images or photographs; what `reveal` allows of a share "
            "of the images: by default embeddings of each image and of its parts, and labels",
        ),
        "train": Crossing(),
        "teach": Crossing(
            down="synthetic images of all clients' data, or what they are decoded from, or made from",
            up="logits on those of the client's own data, or on its share of the others",
        ),
        "exchange": Crossing(down="the other clients' logits"),
    }
    tells = {
        "learn.examples": "nothing",
        "learn.embeddings": "row of the network",
        "learn.labels": "label",
        "teach.round": "nothing",
        "teach.index": "nothing",
    }
    presets = {"paper": PAPER_FIELDS, "code": {**PAPER_FIELDS, **CODE}}
    sizes = ("code_dim", "directions", "lesson_bytes", "rank", "views")
    former_names = {"participation": "fraction", "embeddings": "reveal"}
    retired = {"docking_weight_decay": DOCKING_WEIGHT_DECAY}

    # -- The paper's fields, with its symbols and the tables that vary them

    fraction: Fraction = 1.0  # ρ: fraction of clients sampled per round (Table 3)
    # π: share of clients that ever exchange; the others only train locally (Table 6)
    collaboration: Fraction = 1.0
    # R: past rounds kept for review (Table 5); none is no limit, as elsewhere in the paper
    memory: Whole | None = 5
    # F of L_md: a term of the decoder's loss with another client as the student (Table 8)
    discrepancy: Discrepancy = "none"
    # τ: local training ends when an epoch's training accuracy reaches it (Table 9)
    tau: Fraction = 0.98
    # share of its images whose embeddings a client uploads; 1 by the paper's equations, 0.15 by its
    # byte counts
    share: Fraction = 0.6
    code_dim: Count = 512  # h: width of the unified embedding space
    # T_Tran: full-batch steps per client for docking layers and global head
    docking_epochs: Count = 100
    # T_Dec: epochs over the largest client's embeddings; in the paper 3 for CIFAR-10, 6 for
    # CIFAR-100
    decoder_epochs: Count = 8
    # T_FKE: epochs over the synthetic images; the paper has 2 for CIFAR-10, 4 for CIFAR-100
    exchange_epochs: Count = 1
    # KL(teacher ‖ student) as in Eqs. 6 to 8, or the reverse as in Eqs. 13 and 14
    direction: Literal["teacher", "student"] = "teacher"
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    batch_size: Count = 100  # B: images per step

    # -- From the authors' code; preset "code" has all of them

    weight_decay: NonNegative = 1e-5  # weight decay of the clients' Adam
    local_review: bool = True  # train on a private batch too in every exchange step
    embedding_loss: bool = False  # MSE of translated embeddings in the exchange
    logit_loss: bool = False  # KL of logits in the decoder's loss

    # -- Additions of barter; preset "paper" is without them

    max_epochs: Count = 30  # largest number of local epochs; the paper has no limit
    # the same limit after a client's first exchange, as `local_review` continues to train on
    # private images; none is max_epochs (paper)
    later_epochs: Whole | None = 0
    # N: embeddings also of N x N parts of an image, each at least 8 pixels wide; 0 in the paper
    parts: Whole = 4
    # equalise the variance of codes in all directions where it exceeds this share of the mean
    # variance; 0 in the paper
    whiten: NonNegative = 0.1
    # divide each client's embeddings by their typical size before they are docked, so that networks
    # with large features do not spoil the codes of others; not in the paper
    standardised: bool = False
    # smallest number of decoder steps, for small data sets; not in the paper
    decoder_steps: Whole = 70
    # mean number of codes per client in a decoder step; none is batch_size, as in the paper
    decoder_batch: Count | None = 50
    # the decoder continues from the last round's; not stated in the paper, new in each round in the
    # authors' early code
    warm_decoder: bool = True
    # smallest number of exchange steps, for small data sets; not in the paper
    exchange_steps: Whole = 60
    # batches mix codes of all clients, or images of all peers and private images; in the authors'
    # early code, every batch is of one client
    mixed: bool = True
    # students see transfer images shifted and mirrored, like private images; not in the paper
    augmented: bool = True
    # learning rates of clients and decoder decay within each phase; constant in the paper
    cosine: bool = True
    # add the log class prior to logits in the cross entropy, so that networks do not learn the
    # local class frequencies; not in the paper
    balanced: bool = True
    # in the exchange, logits are divided by it; none is 3 with photographs, otherwise 1 as in the
    # paper
    temperature: Positive | None = None
    # number of peers that a client learns from, sampled in each round; none is all
    peers: Count | None = None
    # transfer data: images that the server decodes, or decoder and codes with which clients decode
    # them (paper); with reveal="statistics" always the decoder
    transfer: Literal["images", "decoder"] = "images"

    # -- How much of its images a client reveals

    # what a client offers of its images, from most to least. images: embeddings of single images
    # (E_k of the paper), whose decoded images are near-copies. mixtures: combinations of a few
    # images of a class. statistics: mean and covariance of each class, from which everybody
    # samples. nothing: no embedding and no statistic, see `substitute`
    reveal: Literal["images", "mixtures", "statistics", "nothing"] = "images"
    # M: images of one class that reveal="mixtures" combines
    mixture: Count = 3
    # principal components of features in which reveal="statistics" describes embeddings
    rank: Count = 48
    # images of a class per direction of its covariance that reveal="statistics" uploads; with few
    # images per direction, directions are nearly those of single images
    compression: Positive = 8.0
    # what takes the place of embeddings with reveal="nothing": noise (Table 4), public data
    # (Section 3.2), or photographs: random crops of the two that ship with scikit-learn, which every
    # party makes from a seed; with these two, no weights leave either
    substitute: Literal["noise", "public", "photographs"] = "noise"
    # standard deviation of this noise; a large one makes the images differ; not given in the paper
    noise: Positive = 30.0

    @classmethod
    def upgrade(cls, fields: Mapping[str, object]) -> dict[str, object]:
        """Translate `embeddings` and `transfer = "public"` of older versions to `reveal`.

        Embeddings of "noise" become reveal="nothing" unless `reveal` is given; other values of the
        field are dropped. Public transfer images become reveal="nothing", substitute="public".
        """
        kept = {name: value for name, value in fields.items() if name != "embeddings"}
        upgraded = super().upgrade(kept)
        if fields.get("embeddings") == "noise":
            upgraded.setdefault("reveal", "nothing")
        if upgraded.get("transfer") == "public":
            upgraded |= {"reveal": "nothing", "substitute": "public", "transfer": "images"}
        return upgraded

    def __post_init__(self) -> None:
        if str(self.transfer) == "public":
            raise ConfigError(
                "transfer='public': public data are reveal='nothing' with substitute='public' now"
            )
        super().__post_init__()
        if not self.inverts and self.embedding_loss:
            raise ConfigError(
                "embedding_loss=True: it needs docking layers, which "
                f"substitute={self.substitute!r} does not use"
            )
        if self.standardised and self.embedding_loss:
            raise ConfigError(
                "embedding_loss=True: with standardised=True, docking layers are of divided "
                "features, which clients do not have"
            )
        if self.mixture < 2:
            raise ConfigError(
                "mixture=1: a mixture of one image is the image itself; reveal='images' says so"
            )
        if self.parts == 1:
            raise ConfigError(
                "parts=1: one part is the whole image; 2 cuts an image into four parts, 0 into none"
            )

    @property
    def needs_public_data(self) -> bool:
        return self.reveal == "nothing" and self.substitute == "public"

    @property
    def aggregates(self) -> tuple[Aggregate, ...]:  # type: ignore[override]
        # Without the clients' networks the server cannot confirm what a teacher says.
        return ("sets",) if self.inverts else ()

    @property
    def inverts(self) -> bool:
        """Return whether the server decodes embeddings to images.

        It uses the clients' networks for that. Noise in place of embeddings is decoded too; public
        images and photographs are not.
        """
        return self.reveal != "nothing" or self.substitute == "noise"

    @property
    def crops_photographs(self) -> bool:
        """Return whether transfer images are crops of photographs."""
        return self.reveal == "nothing" and self.substitute == "photographs"

    @property
    def exchange_temperature(self) -> float:
        """Return the temperature of the exchange, `temperature` or its default."""
        if self.temperature is not None:
            return self.temperature
        return PHOTOGRAPH_TEMPERATURE if self.crops_photographs else 1.0

    @property
    def large_targets_do_harm(self) -> bool:
        """Return whether a teacher's far too large logits would give a student large gradients.

        In KL(teacher ‖ student) they only enter a softmax; KL(student ‖ teacher) grows with them.
        """
        return self.direction == "student"

    @property
    def embeds(self) -> bool:
        """Return whether clients upload embeddings, of single images or of mixtures."""
        return self.reveal in ("images", "mixtures")

    @property
    def describes(self) -> bool:
        """Return whether clients upload statistics of their embeddings."""
        return self.reveal == "statistics"

    def views(self, known: Known) -> int:
        """Return the number of views of an image: the whole image and its parts."""
        return count_views(parts_per_side(self.parts, known.spec))

    def directions(self, known: Known) -> int:
        """Return the number of directions in a client's statistics (reveal="statistics")."""
        n = self.offer_size(known.examples)
        return count_directions(n, known.spec.classes, self.compression)

    def offer_size(self, examples: int) -> int:
        """Return how many of its `examples` images a client offers.

        It is share * examples, rounded up, at least 2, and at most all.
        """
        return min(max(2, math.ceil(self.share * examples)), examples)

    def lesson_bytes(self, known: Known) -> int:
        """Return the largest size in bytes of a client's lesson, its answer of `teach`.

        A lesson has logits, and with `embedding_loss` docked embeddings, for the n images that the
        client offered in this round, and for up to n images of the past rounds that it remembers.
        """
        n = self.offer_size(known.examples)
        numbers = known.spec.classes + self.embedding_loss * self.code_dim
        rounds = 1 + (n if self.memory is None else min(n, self.memory))
        return 2 * n * (4 * numbers + 8) + rounds * WORD

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        remarks = super().remarks(rounds)
        ratio = max((record.server.get("embedding_ratio", 0.0) for record in rounds), default=0.0)
        if ratio > LARGE_RATIO and not self.standardised:
            # With embedding_loss there is no such option.
            advice = "" if self.embedding_loss else ": try algorithm.standardised=true"
            remarks.append(
                f"one client's embeddings were up to {ratio:.0f} times as large as another's, which "
                f"can spoil all synthetic images{advice}"
            )
        return remarks

    def round(self, server: DFFKEServer, clients: Clients, t: int) -> None:
        if self.crops_photographs:
            prepare_photographs(server.spec, server.device)
        federation = clients.only(clients[: max(1, round(self.collaboration * len(clients)))])
        clients.only(set(clients) - set(federation)).run(self.train)
        participants = federation.sample(self.fraction)
        offers = self.select_offers(server, participants.run(self.learn))  # Eq. 9
        if len(offers) < 2:
            return
        entry = self.make_transfer_data(server, offers, t)  # Eqs. 10-12
        entries = [*server.buffer, entry]
        deliveries = self.deliver(server, entry)
        answers = participants.only(offers).scatter(self.teach, deliveries)
        lessons = answers.map(partial(check_lesson, entries))
        server.held |= dict.fromkeys(lessons, t)
        if len(lessons) < 2:
            return
        teachers = self.select_teachers(server, entry, offers, lessons)
        received = distribute_lessons(lessons, self.peers, teachers)
        participants.only(received).scatter(self.exchange, received)  # Eqs. 13-14

    def train(self, client: DFFKEClient) -> None:
        """Train on private images until the training accuracy reaches τ (Eq. 9).

        Runs at most `max_epochs`, or `later_epochs` (if set) after the first exchange. With
        `balanced`, the log class prior is added to the logits. Reports the number of epochs and,
        unless the limit is 0, the metrics before the exchange.
        """
        epochs = self.max_epochs
        if client.exchanges and self.later_epochs is not None:
            epochs = self.later_epochs
        home = self.local_offset(client)
        fitted = fit(
            client,
            epochs=epochs,
            goal=self.tau,
            batch_size=self.batch_size,
            recipe=adam(self.lr, self.weight_decay, cosine=self.cosine),
            by_class=home,
        )
        client.report["epochs"] = fitted.epochs
        if epochs:
            record_before_exchange(client, home)

    def local_offset(self, client: DFFKEClient) -> Tensor | None:
        return log_class_prior(client.data) if self.balanced else None

    def learn(self, client: DFFKEClient) -> Offer:
        """Train locally and return what the server makes transfer data from.

        That is the number of offered images, the weights if the server decodes images (`inverts`),
        and what `reveal` asks for: embeddings and labels of random images, mixtures of these, or
        their statistics. The indices of these images are stored in `client.offered`.

        Raises:
            ConfigError: If statistics are asked for, and no class has five offered images.
        """
        self.train(client)
        data = client.data
        examples = self.offer_size(len(data))
        offer: Offer = {"examples": examples}
        if self.inverts:
            weights = client.model.state_dict()
            offer["weights"] = to_half(weights) if self.describes else weights
        if not (self.embeds or self.describes):
            return offer
        index = torch.randperm(len(data), device=client.device)[:examples]
        client.offered[0] = index
        e = embed_all_views(client.model, data, index, parts_per_side(self.parts, data.spec))
        labels = data.labels[index]
        if self.describes:
            offer["gaussians"] = fit_class_gaussians(
                e, labels, data.spec.classes, self.rank, self.compression
            )
            return offer
        if self.reveal == "mixtures":
            e = mix_embeddings(e, labels, self.mixture)
        offer["embeddings"] = e
        offer["labels"] = labels
        return offer

    def make_transfer_data(self, server: DFFKEServer, offers: Replies[Offer], t: int) -> Entry:
        """Make the transfer data of a round from the clients' offers (Eqs. 10-12).

        The entry holds decoded images in half precision, or what clients decode them from, or
        indices of public images, or the seed of crops of photographs. With inversion, the server's
        docking layers, decoder and report are updated.
        """
        if not self.inverts:
            sizes = {k: offer["examples"] for k, offer in offers.items()}
            if self.crops_photographs:
                return photograph_entry(t, sizes, int(torch.randint(2**31, ())), server.device)
            return public_entry(t, sizes, public_images(server), server.device)
        models = {k: server.replica(k, offer["weights"]) for k, offer in offers.items()}
        # From this seed, clients repeat the server's samples of the statistics.
        seed = int(torch.randint(2**31, ())) if self.describes else 0
        e, y = self.collect_embeddings(server, models, offers, seed)
        # Of whole images, which docking layers are trained on.
        typical = {k: typical_size(views[:, 0]) for k, views in e.items()}
        server.report["embedding_ratio"] = largest_ratio(typical.values())
        recipe = adam(self.lr, DOCKING_WEIGHT_DECAY)
        z, codes, docking = unify(
            server,
            e,
            y,
            server.docking,
            self.code_dim,
            self.docking_epochs,
            recipe,
            self.whiten,
            scales={k: size or 1.0 for k, size in typical.items()} if self.standardised else None,
        )
        server.docking |= docking
        viewers = {k: Viewer(models[k], z[k]) for k in offers}
        decoder = self.train_decoder(server, viewers, codes, e)
        if self.describes:
            gaussians = {k: offer["gaussians"] for k, offer in offers.items()}
            return statistics_entry(t, codes, decoder, gaussians, z, seed)
        if self.transfer == "decoder":
            return {"round": t, "codes": codes, "decoder": decoder}
        images = {k: decode_images(decoder, server.spec, code).half() for k, code in codes.items()}
        return {"round": t, "codes": images, "decoder": {}}

    def collect_embeddings(
        self,
        server: DFFKEServer,
        models: Mapping[int, Classifier],
        offers: Replies[Offer],
        seed: int,
    ) -> tuple[Tensors, Tensors]:
        """Return the embeddings to decode and their labels, by client.

        Embeddings have the axes (images, views, features). They are those that clients uploaded,
        samples of the uploaded statistics, or noise with random labels. Only samples of statistics
        use `seed`.
        """
        if self.embeds:
            e = {k: offer["embeddings"] for k, offer in offers.items()}
            return e, {k: offer["labels"] for k, offer in offers.items()}
        if self.describes:
            e = {}
            y = {}
            for k, offer in offers.items():
                model = offer["gaussians"]
                y[k], noise = sample_labels_and_noise(
                    model, offer["examples"], stream_seed(seed, k)
                )
                e[k] = sample_embeddings(model, y[k], noise)
            return e, y
        views = count_views(parts_per_side(self.parts, server.spec))
        shapes = {
            k: (offer["examples"], views, models[k].feature_dim) for k, offer in offers.items()
        }
        return noise_embeddings(shapes, self.noise, server.spec.classes, server.device)

    def train_decoder(
        self, server: DFFKEServer, viewers: dict[int, Viewer], codes: Tensors, e: Tensors
    ) -> State:
        """Train the decoder Dec and return its state (Eq. 12).

        It turns each image's code into an image that the client's network maps back to this code.
        Training starts from `server.decoder`, or anew if that is empty; with `warm_decoder` the
        result is stored there.

        Args:
            server: The server, which reports the loss of the last epoch as `decoder_loss`.
            viewers: Each client's network and docking layer.
            codes: Each client's codes (images, views, code_dim).
            e: The embeddings that the codes were computed from.
        """
        schedule = Schedule(
            self.decoder_epochs,
            self.decoder_steps,
            self.decoder_batch or self.batch_size,
            self.mixed,
        )
        recipe = adam(self.lr, cosine=self.cosine)
        terms = Terms(self.logit_loss, self.discrepancy)
        decoder, loss = fit_decoder(
            server, server.decoder, viewers, codes, e, recipe, schedule, terms
        )
        server.report["decoder_loss"] = loss
        server.decoder = decoder if self.warm_decoder else {}
        return decoder

    def deliver(self, server: DFFKEServer, entry: Entry) -> dict[int, Delivery]:
        """Add this round's entry to the server's buffer; return participants' deliveries.

        Participants are the clients that the entry has codes of. Each is sent the entries of rounds
        that it missed, as far as the buffer still held them, then this one; and its docking layer,
        which is empty without `embedding_loss`. `server.held` is not changed.
        """
        missed = {
            k: [old for old in server.buffer if old["round"] > server.held.get(k, 0)]
            for k in entry["codes"]
        }
        docking = server.docking if self.embedding_loss else {}
        server.buffer = newest_entries([*server.buffer, entry], self.memory)
        server.report["buffer_bytes"] = nbytes(server.buffer)
        return {
            k: {"entries": [*old, entry], "docking": docking.get(k, {})}
            for k, old in missed.items()
        }

    def teach(
        self, client: DFFKEClient, delivery: Delivery
    ) -> Annotated[Lesson, Room("lesson_bytes")]:
        """Return the client's logits Ŷ_k on its new and earlier transfer images.

        Older images are a random sample B_k^t; their number is at most that of the new images. The
        delivered entries are added to the client's buffer, and its docking layer is replaced.
        """
        room = None if self.memory is None else self.memory + 1  # R past rounds and this one
        client.buffer = newest_entries(client.buffer + delivery["entries"], room)
        client.docking = delivery["docking"]
        if 0 in client.offered:
            client.offered[client.buffer[-1]["round"]] = client.offered.pop(0)
        return prepare_lesson(
            client.buffer,
            client.id,
            partial(transfer_images, client),
            partial(self.predict_targets, client),
        )

    def predict_targets(self, client: DFFKEClient, images: Tensor) -> dict[str, Tensor]:
        """Return the client's `logits` and docked `embeddings` of images.

        There are embeddings with `embedding_loss` only. The images are resized to the network's
        input, and the model is left in evaluation mode. The logits are in half precision if clients
        upload statistics.
        """
        model = client.model.eval()
        every = torch.arange(len(images), device=client.device)
        features = predict(
            model.features, lambda part: resize_images(images[part], client.data.spec), every
        )
        logits = model.logits(features).detach()
        answer = {"logits": logits_to_half(logits) if self.describes else logits}
        if self.embedding_loss:
            answer["embeddings"] = F.linear(features, **client.docking)
        return answer

    def exchange(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> None:
        """Learn from peers' logits on new and earlier transfer images (Eqs. 13 and 14).

        With `local_review`, private images are learned from too. The client must have been
        delivered the lessons' entries by `teach`; entries beyond `memory` are dropped afterwards.

        Args:
            client: The client, whose model is trained in place.
            lessons: The lessons of the peers to learn from, by client.
        """
        subjects = self._subjects(client, lessons)
        codes = client.buffer[-1]["codes"]
        if self.mixed:
            epoch_images = sum(len(codes[i]) for i in lessons)
            groups = [subjects]
        else:
            epoch_images = max(map(len, codes.values()))
            groups = [[subject] for subject in subjects]
        steps = max(
            self.exchange_steps, self.exchange_epochs * epoch_length(epoch_images, self.batch_size)
        )
        # Subjects that share a batch have fewer images each in a step, hence more steps.
        steps *= len(subjects) // len(groups)
        courses = [join_subjects(client.model, group, self.batch_size) for group in groups]
        alternate(client, courses, steps, adam(self.lr, self.weight_decay, cosine=self.cosine))
        client.exchanges += 1
        client.buffer = newest_entries(client.buffer, self.memory)
        remembered = [entry["round"] for entry in client.buffer]
        client.offered = {t: client.offered[t] for t in remembered if t in client.offered}
        client.report["buffer_bytes"] = nbytes(client.buffer)

    def _subjects(self, client: DFFKEClient, lessons: dict[int, Lesson]) -> list[Subject]:
        """Return a client's subjects in an exchange: private images, then peers' lessons.

        Private images are left out without `local_review`.
        """
        data = client.data
        model = client.model
        home = self.local_offset(client)
        subjects = []
        if self.local_review:
            subjects.append(
                Subject(
                    [data.pixels, data.labels],
                    partial(prepare_batch, spec=data.spec, augment=data.augment),
                    partial(review_loss, model),
                    () if home is None else (home,),
                )
            )
        show = partial(augment_and_resize, data.spec, self.augment(data))
        loss = partial(self.exchange_loss, model)
        docking = tuple(client.docking.values())
        for rows in collect_lessons(
            client.buffer, lessons, partial(transfer_images, client), mixed=self.mixed
        ):
            subjects.append(Subject(rows, show, loss, docking))
        return subjects

    def augment(self, data: Images) -> Augment:
        """Return the client's training augmentation, scaled to transfer images' width.

        Without `augmented` it changes nothing.
        """
        width = data.spec.width if self.needs_public_data else decoder_side(data.spec)
        return data.augment.rescale(data.side, width) if self.augmented else Augment()

    def exchange_loss(
        self, model: Classifier, features: Tensor, target: Tensor, *docked: Tensor
    ) -> Tensor:
        """Return the divergence from a peer's logits on its images (Eqs. 13 and 14).

        It is KL(peer ‖ student) if `direction` is "teacher", otherwise KL(student ‖ peer), of logits
        divided by the temperature and times its square. With `embedding_loss` the mean squared error
        of docked embeddings is added.

        Args:
            model: The student, of which only the head is used.
            features: Its features of a batch of the peer's images.
            target: The peer's logits.
            *docked: With `embedding_loss`, the peer's docked embeddings, and weight and bias of the
                student's docking layer.
        """
        student = model.logits(features)
        teacher, learner = target, student
        if self.direction == "student":
            teacher, learner = student, target
        loss = tempered_kl(self.exchange_temperature, learner, teacher)
        if self.embedding_loss:
            embeddings, weight, bias = docked
            loss = loss + F.mse_loss(F.linear(features, weight, bias), embeddings)
        return loss

    def select_offers(self, server: DFFKEServer, offers: Replies[Offer]) -> Replies[Offer]:
        """With a defence, leave out offers whose labels contradict their embeddings.

        Without embeddings in the offers, all stay. See `clients_with_consistent_labels`.
        """
        if not self.embeds:
            return offers
        chosen = clients_with_consistent_labels(
            server,
            weights={k: offer["weights"] for k, offer in offers.items()},
            embeddings={k: offer["embeddings"] for k, offer in offers.items()},
            labels={k: offer["labels"] for k, offer in offers.items()},
        )
        return offers.only(chosen)

    def select_teachers(
        self,
        server: DFFKEServer,
        entry: Entry,
        offers: Mapping[int, Offer],
        lessons: Mapping[int, Lesson],
    ) -> list[int]:
        """Return the clients to learn from: all, or with a defence those others confirm.

        If the server has no networks of clients to confirm with, it is all. See
        `confirmed_teachers`.
        """
        if not self.inverts:
            return list(lessons)
        logits = {}
        for k, lesson in lessons.items():
            (newest,) = [targets for targets in lesson if targets["round"] == entry["round"]]
            logits[k] = newest["logits"].float()

        def images(k: int) -> Tensor:
            decoded = entry_images(entry, k, entry["codes"][k], server.spec)
            return resize_images(decoded, server.spec)

        weights = {k: offers[k]["weights"] for k in lessons}
        return confirmed_teachers(server, weights, logits, images)

    def gallery(
        self, client: DFFKEClient, t: int, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        entry = next((entry for entry in client.buffer if entry["round"] == t), None)
        if self.reveal != "images" or entry is None or t not in client.offered:
            return None
        chosen = wanted(client.offered[t])
        codes = entry["codes"][client.id][chosen]
        return client.offered[t][chosen], transfer_images(client, entry, client.id, codes)

    def transfer_images(self, client: DFFKEClient, t: int) -> tuple[Tensor, Tensor] | None:
        entry = next((entry for entry in client.buffer if entry["round"] == t), None)
        if entry is None or t not in client.offered:
            return None
        codes = entry["codes"][client.id]
        return client.offered[t], transfer_images(client, entry, client.id, codes)
