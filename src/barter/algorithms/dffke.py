"""DFFKE: "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange", anonymous submission
under review, Algorithm 1.

Clients with different networks and different data teach each other. The server learns to turn embeddings back into
images that stand for each client's data; every client labels its own with its own network, and learns from the labels
that the others gave to theirs. No weights are averaged and no public data is needed.

Where the paper is silent or at odds with itself:

- Eqs. 13 and 14 print KL(student ‖ teacher), Eqs. 6 to 8 KL(teacher ‖ student). Eq. 8 defines the objective and the
  authors' code does it, so `direction` is "teacher"; "student" is the printed form.
- Docking layers map h_k to h = 512, the only width that gives the decoder of 4.4 million parameters. They are kept
  over rounds; the global head of Eq. 11 is new in each. The decoder draws 32 x 32 pixels, resized for larger inputs.
- The paper does not say how many embeddings are shared. Its 14.7 MB per round and 47.34 GB in all come out for 15%.

Preset "paper" is the paper; "code" adds what the authors' early code does besides, and shares all embeddings. What the
default changes is ours, each change a field. Eq. 11 rewards nothing but classes, so the decoder drew one picture of
each: codes are whitened. A network averages away where things are, so the decoder could not know either: embeddings of
parts tell (`parts`). Batches hold images of all clients (`mixed`), for one's after the other's undo each other; private
ones too, for normalisation would otherwise see them by other statistics in training than afterwards.
Students see transfer images moved (`augmented`), or they learn patterns by heart. Networks do not learn what is
frequent at home (`balanced`): clients add it where they judge images of their own kind, so that what they hear of
others costs nothing there, but not where they teach: others would learn which classes go with whose images. The decoder
goes on from the last round's, and learning rates fall. Local training ends with the first exchange: a network that
learned from others shows more of an image in its embedding.
benchmarks/README.md has what each brings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.algorithm import Algorithm
from barter.core.answers import WORD, Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Floats, Labels, Room, When, Within
from barter.core.errors import ConfigError
from barter.core.evaluation import adjusted, note_before, predict
from barter.core.images import Augment, Images, Spec, augmented, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State, nbytes
from barter.models.generators import drawn_side, resized
from barter.ops.distill import kl
from barter.ops.docking import unify
from barter.ops.fit import Subject, adam, alternate, epoch_length, fit, joint
from barter.ops.inversion import Discrepancy, Schedule, Terms, Viewer, fit_decoder
from barter.ops.shares import log_shares
from barter.ops.transfer import Entry, Lesson, depicted, draw, heard, lesson, newest, sound, taught
from barter.ops.views import cut, embeddings, number

__all__ = ["DFFKE", "Hub", "Trader"]

Tensors: TypeAlias = dict[int, Tensor]  # one for each client


class Offer(TypedDict):
    """What a client shows the server after local training."""

    examples: Annotated[int, Within(1, "examples", "n")]
    weights: NotRequired[Annotated[State, When("inverts")]]
    embeddings: NotRequired[
        Annotated[Tensor, Floats("n", "views", "features"), When("embeds")]
    ]  # of images' views
    labels: NotRequired[Annotated[Tensor, Labels("n"), When("embeds")]]


class Delivery(TypedDict):
    """What a client needs to make this round's transfer data, and that of rounds it missed."""

    entries: list[Entry]
    docking: State


class Hub(Server):
    """The data-free module."""

    docking: dict[int, State] = {}
    decoder: State = {}  # the last round's, if the next goes on from it
    buffer: list[Entry] = []
    held: dict[int, int] = {}  # the last round whose entry a client was sent


class Trader(Client):
    """A client that is teacher and student at once."""

    buffer: list[Entry] = []
    docking: State = {}
    exchanges: int = 0  # how many it took part in
    # which of its images it offered in each round it remembers; 0 is the one begun
    offered: dict[int, Tensor] = {}


def shown(spec: Spec, augment: Augment, images: Tensor) -> Tensor:
    """Transfer images as networks see them in training."""
    return resized(augmented(images, augment), spec)


def review_loss(
    model: Classifier, features: Tensor, labels: Tensor, home: Tensor | None = None
) -> Tensor:
    """The cross entropy of private images, told how frequent classes are at home."""
    return F.cross_entropy(adjusted(model.logits(features), home), labels)


PAPER: dict[str, object] = {
    **{"max_epochs": 100, "later_epochs": None, "share": 0.15, "parts": 0, "whiten": 0.0},
    **{
        "decoder_epochs": 6,
        "decoder_steps": 0,
        "decoder_batch": None,
        "warm_decoder": False,
        "cosine": False,
    },
    **{"exchange_epochs": 4, "exchange_steps": 0, "mixed": False, "augmented": False},
    **{
        "balanced": False,
        "memory": None,
        "transfer": "decoder",
        "local_review": False,
        "noise": 1.0,
    },
}
CODE = {"share": 1.0, "local_review": True, "embedding_loss": True, "logit_loss": True}


@dataclass(frozen=True, kw_only=True)
class DFFKE(Algorithm[Hub, Trader]):
    """Data-free federated knowledge exchange."""

    replicas = True
    crosses = {
        "learn": "up: weights, embeddings of a share of the images and of their parts, labels",
        "train": "nothing",
        "teach": "down: synthetic images of all clients' data; up: logits on those of the client's own",
        "exchange": "down: the other clients' logits",
    }
    tells = {
        **{
            "learn.examples": "nothing",
            "learn.embeddings": "row of the network",
            "learn.labels": "label",
        },
        **{"teach.round": "nothing", "teach.index": "nothing"},
    }
    presets = {"paper": PAPER, "code": {**PAPER, **CODE}}

    participation: Fraction = 1.0  # ρ: share of clients per round
    collaboration: Fraction = 1.0  # π: share of clients that ever exchange; the rest train alone
    tau: Fraction = 0.98  # τ: local training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 30  # or after so many epochs; the paper has no such limit
    # the same once it has exchanged, for `local_review` goes on; none as before (paper)
    later_epochs: Whole | None = 0
    share: Fraction = 0.6  # share of a client's embeddings that it offers; the paper's byte counts come out for 0.15
    # and of so many by so many parts of an image, of 8 pixels or more; the paper has none
    parts: Whole = 4
    code_dim: Count = 512  # h: width of the unified embedding space
    # T_Tran: full-batch steps per client for docking layers and global head
    docking_epochs: Count = 100
    # codes vary alike where they vary by more than this share of the mean; 0 in the paper
    whiten: NonNegative = 0.1
    # T_Dec: passes over the largest offer; the paper has 3 for CIFAR-10, 6 for CIFAR-100
    decoder_epochs: Count = 8
    decoder_steps: Whole = 70  # but at least so many steps, for small data sets; not in the paper
    # codes per client in a step, on average; none is batch_size, as in the paper
    decoder_batch: Count | None = 50
    # the decoder goes on from the last round's; the paper has a new one in each
    warm_decoder: bool = True
    # T_FKE: passes over the synthetic set; the paper has 2 for CIFAR-10, 4 for CIFAR-100
    exchange_epochs: Count = 1
    exchange_steps: Whole = 60  # but at least so many steps, for small data sets; not in the paper
    # batches hold codes of all clients, images of all peers and private ones; in the paper one's
    # after the other's
    mixed: bool = True
    # students see transfer images shifted and mirrored, as private ones; not in the paper
    augmented: bool = True
    cosine: bool = True  # learning rates of clients and decoder fall within each phase; the paper's are constant
    balanced: bool = True  # cross entropy is told how frequent classes are at home, so networks need not learn it; ours
    # peers a client learns from in a round, drawn anew in each; none is all
    peers: Count | None = None
    memory: Whole | None = 5  # R: past rounds kept for review; none is no limit, as in the paper
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    batch_size: Count = 100  # B: images per step
    weight_decay: NonNegative = 1e-5  # of the clients' Adam
    docking_weight_decay: NonNegative = 1e-3  # of the docking layers' Adam
    # E_k: of private images, or noise that tells nothing
    embeddings: Literal["real", "noise"] = "real"
    noise: Positive = 30.0  # deviation of such noise: from afar images come out unlike each other; the paper gives none
    # what stands for data: images that the server draws, the decoder and codes from which clients
    # draw them (paper), or public data
    transfer: Literal["images", "decoder", "public"] = "images"
    direction: Literal["teacher", "student"] = "teacher"  # KL(teacher ‖ student) or the reverse
    # F of L_md in the decoder's loss, for which another client is the student
    discrepancy: Discrepancy = "none"
    # a step on a private batch in every exchange iteration (authors' code)
    local_review: bool = True
    embedding_loss: bool = False  # MSE of translated embeddings in the exchange (authors' code)
    logit_loss: bool = False  # KL of logits in the decoder's loss (authors' code)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer == "public" and self.embedding_loss:
            raise ConfigError(
                "embedding_loss=True: it needs docking layers, which transfer='public' does without"
            )
        if self.parts == 1:
            raise ConfigError(
                "parts=1: one part is the whole; 2 cuts an image into four, 0 into none"
            )

    @property
    def needs_public_data(self) -> bool:
        return self.transfer == "public"

    @property
    def inverts(self) -> bool:
        """Whether the server makes images of embeddings, by means of the clients' networks."""
        return self.transfer != "public"

    @property
    def embeds(self) -> bool:
        """Whether clients say what their networks make of private images."""
        return self.inverts and self.embeddings == "real"

    def views(self, known: Known) -> int:
        """Of each image."""
        return number(cut(self.parts, known.spec))

    def offered(self, examples: int) -> int:
        """How many of its images a client offers."""
        return min(max(2, math.ceil(self.share * examples)), examples)

    def lesson_bytes(self, known: Known) -> int:
        """Of a word on all images that a client offered, and on as many before, of as many rounds as it remembers."""
        n, numbers = (
            self.offered(known.examples),
            known.spec.classes + self.embedding_loss * self.code_dim,
        )
        rounds = 1 + (n if self.memory is None else min(n, self.memory))
        return 2 * n * (4 * numbers + 8) + rounds * WORD

    def round(self, server: Hub, clients: Clients, t: int) -> None:
        federation = clients.only(clients[: max(1, round(self.collaboration * len(clients)))])
        clients.only(set(clients) - set(federation)).run(self.train)
        traders = federation.sample(self.participation)
        offers = traders.run(self.learn)  # Eq. 9
        if len(offers) < 2:
            return
        codes, decoder = self.make_transfer_data(server, offers)  # Eqs. 10-12
        entry: Entry = {"round": t, "codes": codes, "decoder": decoder}
        known = [*server.buffer, entry]
        lessons = (
            traders.only(offers)
            .scatter(self.teach, self.deliver(server, entry))
            .each(partial(sound, known))
        )
        server.held |= dict.fromkeys(lessons, t)
        if len(lessons) < 2:
            return
        traders.only(lessons).scatter(self.exchange, heard(lessons, self.peers))  # Eqs. 13-14

    def train(self, client: Trader) -> None:
        recipe = adam(self.lr, self.weight_decay, cosine=self.cosine)
        epochs = (
            self.later_epochs
            if client.exchanges and self.later_epochs is not None
            else self.max_epochs
        )
        home = self.at_home(client)
        fitted = fit(
            client,
            epochs=epochs,
            goal=self.tau,
            batch_size=self.batch_size,
            recipe=recipe,
            by_class=home,
        )
        client.report["epochs"] = fitted.epochs
        if epochs:
            note_before(client, home)

    def at_home(self, client: Trader) -> Tensor | None:
        return log_shares(client.data) if self.balanced else None

    def learn(self, client: Trader) -> Offer:
        self.train(client)
        data, examples = client.data, self.offered(len(client.data))
        offer: Offer = {"examples": examples}
        if self.inverts:
            offer["weights"] = client.model.state_dict()
        if self.embeds:
            client.offered[0] = index = torch.randperm(len(data), device=client.device)[:examples]
            offer["embeddings"] = embeddings(client.model, data, index, cut(self.parts, data.spec))
            offer["labels"] = data.labels[index]
        return offer

    def make_transfer_data(
        self, server: Hub, offers: Replies[Offer]
    ) -> tuple[dict[int, Tensor], State]:
        """Embeddings in one space (Eqs. 10 and 11), and the decoder that makes images of them; or these images."""
        size, device = {k: offer["examples"] for k, offer in offers.items()}, server.device
        if self.transfer == "public":
            assert server.public is not None
            return {
                k: torch.randint(len(server.public), (n,), device=device) for k, n in size.items()
            }, {}
        models = {k: server.replica(k, offer["weights"]) for k, offer in offers.items()}
        if self.embeddings == "real":
            e, y = (
                {k: o["embeddings"] for k, o in offers.items()},
                {k: o["labels"] for k, o in offers.items()},
            )
        else:
            views = number(cut(self.parts, server.spec))
            e = {
                k: self.noise * torch.randn(n, views, models[k].feature_dim, device=device)
                for k, n in size.items()
            }
            y = {
                k: torch.randint(server.spec.classes, (n,), device=device) for k, n in size.items()
            }
        recipe = adam(self.lr, self.docking_weight_decay)
        z, codes, docking = unify(
            server, e, y, server.docking, self.code_dim, self.docking_epochs, recipe, self.whiten
        )
        server.docking |= docking
        decoder = self.train_decoder(server, {k: Viewer(models[k], z[k]) for k in offers}, codes, e)
        if self.transfer == "decoder":
            return codes, decoder
        return {k: depicted(decoder, server.spec, code).half() for k, code in codes.items()}, {}

    def train_decoder(
        self, server: Hub, viewers: dict[int, Viewer], codes: Tensors, e: Tensors
    ) -> State:
        """The decoder Dec, which makes of each code an image that its client's encoder maps back to it (Eq. 12)."""
        schedule = Schedule(
            self.decoder_epochs,
            self.decoder_steps,
            self.decoder_batch or self.batch_size,
            self.mixed,
        )
        recipe, terms = adam(self.lr, cosine=self.cosine), Terms(self.logit_loss, self.discrepancy)
        decoder, loss = fit_decoder(
            server, server.decoder, viewers, codes, e, recipe, schedule, terms
        )
        server.report["decoder_loss"], server.decoder = loss, decoder if self.warm_decoder else {}
        return decoder

    def deliver(self, server: Hub, entry: Entry) -> dict[int, Delivery]:
        """This round's entry for every participant, with those that the buffer still holds and it has missed."""
        missed = {
            k: [old for old in server.buffer if old["round"] > server.held.get(k, 0)]
            for k in entry["codes"]
        }
        docking = server.docking if self.embedding_loss else {}
        server.buffer = newest([*server.buffer, entry], self.memory)
        server.report["buffer_bytes"] = nbytes(server.buffer)
        return {
            k: {"entries": [*old, entry], "docking": docking.get(k, {})}
            for k, old in missed.items()
        }

    def teach(self, client: Trader, delivery: Delivery) -> Annotated[Lesson, Room("lesson_bytes")]:
        """The client's own logits Ŷ_k on its transfer images of this round, and on a sample of those before, B_k^t."""
        room = None if self.memory is None else self.memory + 1  # R past rounds and this one
        client.buffer = newest(client.buffer + delivery["entries"], room)
        client.docking = delivery["docking"]
        if 0 in client.offered:
            client.offered[client.buffer[-1]["round"]] = client.offered.pop(0)
        return lesson(client.buffer, client.id, partial(draw, client), partial(self.say, client))

    def say(self, client: Trader, images: Tensor) -> dict[str, Tensor]:
        """The client's word on these images: its logits, and its translated embeddings where they are asked for."""
        model, everything = client.model.eval(), torch.arange(len(images), device=client.device)
        features = predict(
            model.features, lambda part: resized(images[part], client.data.spec), everything
        )
        translated = (
            {"embeddings": F.linear(features, **client.docking)} if self.embedding_loss else {}
        )
        return {"logits": model.logits(features).detach(), **translated}

    def exchange(self, client: Trader, lessons: dict[int, Lesson]) -> None:
        """Learn from other clients, on their data of this round and on what they taught before (Eqs. 13 and 14)."""
        data, model, home = client.data, client.model, self.at_home(client)
        heard = taught(client.buffer, lessons, partial(draw, client), mixed=self.mixed)
        show, judge = (
            partial(shown, data.spec, self.augment(data)),
            partial(self.exchange_loss, model),
        )
        subjects = [Subject(rows, show, judge, tuple(client.docking.values())) for rows in heard]
        if self.local_review:
            show, judge = (
                partial(prepared, spec=data.spec, augment=data.augment),
                partial(review_loss, model),
            )
            subjects.insert(
                0, Subject([data.pixels, data.labels], show, judge, () if home is None else (home,))
            )
        made = client.buffer[-1]["codes"]
        longest = sum(len(made[i]) for i in lessons) if self.mixed else max(map(len, made.values()))
        steps = max(
            self.exchange_steps, self.exchange_epochs * epoch_length(longest, self.batch_size)
        )
        groups = [subjects] if self.mixed else [[subject] for subject in subjects]
        courses = [joint(model, together, self.batch_size) for together in groups]
        steps *= len(subjects) // len(courses)  # a batch holds less of each
        alternate(client, courses, steps, adam(self.lr, self.weight_decay, cosine=self.cosine))
        client.exchanges += 1
        client.buffer = newest(client.buffer, self.memory)
        client.offered = {
            e["round"]: client.offered[e["round"]]
            for e in client.buffer
            if e["round"] in client.offered
        }
        client.report["buffer_bytes"] = nbytes(client.buffer)

    def augment(self, data: Images) -> Augment:
        """How a client is used to see images in training, at the width of transfer images."""
        width = data.spec.width if self.transfer == "public" else drawn_side(data.spec)
        return data.augment.resized(data.side, width) if self.augmented else Augment()

    def exchange_loss(
        self, model: Classifier, features: Tensor, target: Tensor, *docked: Tensor
    ) -> Tensor:
        """The divergence from a peer's predictions on a batch of its images (a term of Eqs. 13 and 14)."""
        student = model.logits(features)
        loss = kl(target, student) if self.direction == "teacher" else kl(student, target)
        if self.embedding_loss:
            embeddings, weight, bias = docked
            loss = loss + F.mse_loss(F.linear(features, weight, bias), embeddings)
        return loss

    def gallery(
        self, client: Trader, t: int, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        entry = next((entry for entry in client.buffer if entry["round"] == t), None)
        if entry is None or t not in client.offered:
            return None
        chosen = wanted(client.offered[t])
        return client.offered[t][chosen], draw(client, entry, entry["codes"][client.id][chosen])
