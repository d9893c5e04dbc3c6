"""DFFKE: "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange", anonymous submission
under review, Algorithm 1.

Clients with different networks and different data teach each other. The server learns to turn embeddings back into
images that stand for each client's data; every client labels its own with its own network, and learns from the labels
that the others gave to theirs. No weights are averaged and no public data is needed.

Where the paper is silent or at odds with itself:

- Eqs. 13 and 14 print KL(student ‖ teacher), Eqs. 6 to 8 KL(teacher ‖ student). Eq. 8 defines the objective and the
  authors' code does it, so `direction` is "teacher"; "student" is the printed form.
- Docking layers map h_k to h = 512, the only width that gives the decoder of 4.4 million parameters. They are kept
  over rounds; the global head of Eq. 11 is new in each.
- The decoder draws 32 x 32 pixels; larger inputs are resized from there.
- The paper does not say how many embeddings are shared. Its 14.7 MB per round and 47.34 GB in all come out for 15%.
- Eq. 13 is a sum over peers: one Adam step for each, then one for each on the memory (Eq. 14).
- A model-discrepancy loss needs a student (Eq. 4): another client, drawn anew in each step.
- The buffer is synchronised: a client that missed rounds is sent their codes and decoders when it comes back.

Preset "paper" is the paper; preset "code" adds what the authors' early code does besides and shares all embeddings.
The default is the paper with two changes, measured on digits and Fashion-MNIST (benchmarks/README.md): a floor of
`decoder_steps`, for six passes over few embeddings leave the decoder untrained, and `local_review`, without which
clients forget what they know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core import lanes
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.errors import ConfigError
from barter.core.evaluation import evaluate, predict
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State, isolate, nbytes
from barter.models.generators import Decoder, resized
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam, classification, epoch_length, fit, index_batches

__all__ = ["DFFKE", "Hub", "Trader"]


Tensors: TypeAlias = Mapping[int, Tensor]  # one for each client
Docks: TypeAlias = dict[int, nn.Linear]


class Offer(TypedDict):
    """What a client shows the server after local training."""

    examples: int
    weights: NotRequired[State]
    embeddings: NotRequired[Tensor]
    labels: NotRequired[Tensor]


class Entry(TypedDict):
    """The transfer data of one round: what every client's images are made from, and the decoder that makes them."""

    round: int
    codes: dict[int, Tensor]  # embeddings for the decoder or, without one, places in the public data set
    decoder: State


class Delivery(TypedDict):
    """What a client needs to make this round's transfer data, and that of rounds it missed."""

    entries: list[Entry]
    docking: NotRequired[State]


class Targets(TypedDict):
    """A teacher's word on its own transfer data of a round, or on a part of them."""

    round: int
    index: NotRequired[Tensor]
    logits: Tensor
    embeddings: NotRequired[Tensor]


class Lesson(TypedDict):
    """What a client teaches in a round: this round's data, and a review of earlier rounds'."""

    fresh: Targets
    memory: list[Targets]


class Hub(Server):
    """The data-free module."""

    docking: dict[int, State] = {}
    buffer: list[Entry] = []
    held: dict[int, int] = {}  # the last round whose entry a client was sent


class Trader(Client):
    """A client that is teacher and student at once."""

    buffer: list[Entry] = []
    docking: State = {}


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """A client's term of Eq. 11."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def discrepancy(choice: str, teacher: Tensor, student: Tensor) -> Tensor:
    """F of the model-discrepancy loss (Eq. 4 and Table 8); KL is scaled by 0.1, for it diverges otherwise."""
    if choice == "kl":
        return 0.1 * kl(teacher, student)
    gap = teacher.softmax(1) - student.softmax(1)
    return gap.abs().mean() if choice == "mae" else gap.square().mean()


def sample(items: list[int], size: int) -> list[int]:
    """So many of the items at random, all if there are no more."""
    return [items[i] for i in torch.randperm(len(items))[:size].tolist()]


@dataclass(frozen=True, kw_only=True)
class DFFKE(Algorithm[Hub, Trader]):
    """Data-free federated knowledge exchange."""

    replicas = True
    crosses = {
        "learn": "up: weights, embeddings of a share of the images and their labels",
        "train": "nothing",
        "teach": "down: decoder, translated embeddings of all clients; up: logits on the client's own synthetic images",
        "exchange": "down: the other clients' logits",
    }
    presets = {
        "paper": {"decoder_steps": 0, "local_review": False},
        "code": {
            "decoder_steps": 0,
            "share": 1.0,
            "local_review": True,
            "embedding_loss": True,
            "logit_loss": True,
        },
    }

    participation: Fraction = 1.0  # ρ: share of clients per round
    collaboration: Fraction = 1.0  # π: share of clients that ever exchange; the rest train alone
    tau: Fraction = 0.98  # τ: local training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 100  # or after so many epochs; the paper has no such limit
    share: Fraction = 0.15  # share of a client's embeddings that it offers; inferred from the paper's byte counts
    code_dim: Count = 512  # h: width of the unified embedding space
    docking_epochs: Count = 100  # T_Tran: full-batch steps per client for docking layers and global head
    decoder_epochs: Count = 6  # T_Dec: passes over the largest offer; the paper has 3 for CIFAR-10, 6 for CIFAR-100
    decoder_steps: Whole = 100  # but at least so many steps per client, for small data sets; not in the paper
    exchange_epochs: Count = 4  # T_FKE: passes over the largest synthetic set; the paper has 2 for CIFAR-10
    peers: Count | None = None  # peers a client learns from in an iteration, drawn anew in each; none is all
    memory: Whole | None = None  # R: past rounds kept for review; none is no limit
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    batch_size: Count = 100  # B: images per step
    weight_decay: NonNegative = 1e-5  # of the clients' Adam
    docking_weight_decay: NonNegative = 1e-3  # of the docking layers' Adam
    embeddings: Literal["real", "noise"] = "real"  # E_k: of private images, or noise that tells nothing
    transfer: Literal["decoder", "public"] = "decoder"  # transfer images: drawn by the decoder, or public data
    direction: Literal["teacher", "student"] = "teacher"  # KL(teacher ‖ student) or the reverse
    discrepancy: Literal["none", "kl", "mae", "mse"] = "none"  # F of L_md in the decoder's loss
    local_review: bool = True  # a step on a private batch in every exchange iteration (authors' code)
    embedding_loss: bool = False  # MSE of translated embeddings in the exchange (authors' code)
    logit_loss: bool = False  # KL of logits in the decoder's loss (authors' code)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer == "public" and self.embedding_loss:
            raise ConfigError("embedding_loss=True: it needs docking layers, which transfer='public' does without")

    @property
    def needs_public_data(self) -> bool:
        return self.transfer == "public"

    def round(self, server: Hub, clients: Clients, t: int) -> None:
        federation = clients.only(clients[: max(1, round(self.collaboration * len(clients)))])
        clients.only(set(clients) - set(federation)).run(self.train)
        traders = federation.sample(self.participation)
        offers = traders.run(self.learn)  # Eq. 9
        if len(offers) < 2:
            return
        codes, decoder = self.make_transfer_data(server, offers)  # Eqs. 10-12
        deliveries = self.deliver(server, {"round": t, "codes": codes, "decoder": decoder})
        lessons = traders.only(offers).scatter(self.teach, deliveries)
        server.held |= dict.fromkeys(lessons, t)
        if len(lessons) < 2:
            return
        others = {k: {i: lessons[i] for i in lessons if i != k} for k in lessons}
        traders.only(lessons).scatter(self.exchange, others)  # Eqs. 13-14

    def train(self, client: Trader) -> None:
        recipe = adam(self.lr, self.weight_decay)
        fitted = fit(client, epochs=self.max_epochs, goal=self.tau, batch_size=self.batch_size, recipe=recipe)
        client.report["epochs"] = fitted.epochs
        client.report |= {f"before_{name}": value for name, value in evaluate(client).items()}

    def learn(self, client: Trader) -> Offer:
        self.train(client)
        examples = max(2, math.ceil(self.share * len(client.data)))
        if self.transfer == "public":
            return {"examples": examples}
        weights = client.model.state_dict()
        if self.embeddings == "noise":
            return {"examples": examples, "weights": weights}
        index = torch.randperm(len(client.data), device=client.device)[:examples]
        e = predict(client.model.eval().features, client.data.batch, index)
        return {"examples": len(index), "weights": weights, "embeddings": e, "labels": client.data.labels[index]}

    def make_transfer_data(self, server: Hub, offers: Replies[Offer]) -> tuple[dict[int, Tensor], State]:
        if self.transfer == "public":
            assert server.public is not None
            size, device = len(server.public), server.device
            return {k: torch.randint(size, (o["examples"],), device=device) for k, o in offers.items()}, {}
        models = {k: server.replica(k, offer["weights"]) for k, offer in offers.items()}
        embeddings, labels = self.collect(server, offers, models)
        z, codes = self.unify(server, embeddings, labels)
        return codes, self.train_decoder(server, models, z, embeddings, codes)

    def collect(
        self, server: Hub, offers: Replies[Offer], models: Mapping[int, Classifier]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Every client's embeddings and their labels, or noise of the same shape in their place."""
        if self.embeddings == "real":
            return {k: o["embeddings"] for k, o in offers.items()}, {k: o["labels"] for k, o in offers.items()}
        size = {k: offer["examples"] for k, offer in offers.items()}
        noise = {k: torch.randn(n, models[k].feature_dim, device=server.device) for k, n in size.items()}
        return noise, {k: torch.randint(server.spec.classes, (n,), device=server.device) for k, n in size.items()}

    def unify(self, server: Hub, embeddings: Tensors, labels: Tensors) -> tuple[Docks, dict[int, Tensor]]:
        """Docking layers z_k that bring all embeddings into one space (Eqs. 10 and 11)."""
        new = {k: nn.Linear(e.shape[1], self.code_dim).to(server.device) for k, e in embeddings.items()}
        z = {k: lanes.keep(("docking", k), layer) for k, layer in new.items()}
        for k in z.keys() & server.docking.keys():
            z[k].load_state_dict(server.docking[k])
        head = lanes.keep("global head", nn.Linear(self.code_dim, server.spec.classes).to(server.device))
        trainer = Trainer.of([*z.values(), head], adam(self.lr, self.docking_weight_decay))
        for _ in server.track("unify", range(self.docking_epochs)):
            for k, z_k in z.items():
                trainer.step(partial(docking_loss, head, z_k), embeddings[k], labels[k])
        server.docking |= isolate({k: layer.state_dict() for k, layer in z.items()})
        return z, {k: layer.requires_grad_(False)(embeddings[k]) for k, layer in z.items()}

    def train_decoder(
        self,
        server: Hub,
        models: Mapping[int, Classifier],
        z: Mapping[int, nn.Linear],
        embeddings: Tensors,
        codes: Tensors,
    ) -> State:
        """The decoder Dec, which makes of each code an image that its client's encoder maps back to it (Eq. 12)."""
        decoder = lanes.keep("decoder", Decoder(self.code_dim, server.spec).to(server.device))
        trainer = Trainer.of(decoder, adam(self.lr))
        batches = {k: index_batches(len(e), self.batch_size, e.device) for k, e in codes.items()}
        longest = max(epoch_length(len(e), self.batch_size) for e in codes.values())
        total = torch.zeros((), device=server.device)
        steps = range(max(self.decoder_steps, self.decoder_epochs * longest))
        for step in server.track("decoder", steps):
            for k in codes:
                index = next(batches[k])
                other = k if self.discrepancy == "none" else sample([i for i in models if i != k], 1)[0]
                loss = partial(self.decoder_loss, decoder, server.spec, models[k], z[k], models[other])
                value = trainer.step(loss, codes[k][index], embeddings[k][index])
                total += value if step >= len(steps) - longest else 0
        server.report["decoder_loss"] = float(total) / (longest * len(codes))
        return isolate(decoder.state_dict())

    def decoder_loss(
        self, decoder: Decoder, spec: Spec, model: Classifier, z: nn.Linear, other: Classifier, code: Tensor, e: Tensor
    ) -> Tensor:
        """Eq. 12 for a batch of one client's codes, with what the ablations and the authors' code add to it."""
        x = resized(decoder(code), spec)
        features = model.features(x)
        loss = F.mse_loss(z(features), code)
        if self.logit_loss:
            loss = loss + kl(model.logits(e), model.logits(features))
        if self.discrepancy != "none":
            loss = loss - discrepancy(self.discrepancy, model.logits(features), other(x))
        return loss

    def deliver(self, server: Hub, entry: Entry) -> dict[int, Delivery]:
        """This round's entry for every participant, with those that the buffer still holds and it has missed."""
        deliveries: dict[int, Delivery] = {}
        for k in entry["codes"]:
            missed = [old for old in server.buffer if old["round"] > server.held.get(k, 0)]
            deliveries[k] = {"entries": [*missed, entry]}
            if self.embedding_loss:
                deliveries[k]["docking"] = server.docking[k]
        server.buffer = self.remember([*server.buffer, entry], self.memory)
        server.report["buffer_bytes"] = nbytes(server.buffer)
        return deliveries

    def remember(self, entries: list[Entry], limit: int | None) -> list[Entry]:
        """The last entries, each round once, at most `limit` of them."""
        kept = list({entry["round"]: entry for entry in entries}.values())
        return kept if limit is None else kept[max(0, len(kept) - limit) :]

    def teach(self, client: Trader, delivery: Delivery) -> Lesson:
        room = None if self.memory is None else self.memory + 1  # R past rounds and this one
        client.buffer = self.remember(client.buffer + delivery["entries"], room)
        client.docking = delivery.get("docking", {})
        *past, now = client.buffer
        reviewed = self.review(client, past, len(now["codes"][client.id]))
        fresh, *memory = self.label(client, [(now, None), *reviewed])
        return {"fresh": fresh, "memory": memory}

    def review(self, client: Trader, past: list[Entry], size: int) -> Iterator[tuple[Entry, Tensor]]:
        """B_k^t: a random part of the client's own past transfer data, as much as there is fresh."""
        own = [entry for entry in past if client.id in entry["codes"]]
        ends = torch.tensor([len(entry["codes"][client.id]) for entry in own], dtype=torch.long).cumsum(0)
        chosen = torch.randperm(int(ends[-1]) if own else 0)[:size].sort().values
        for entry, end in zip(own, ends.tolist(), strict=True):
            start = end - len(entry["codes"][client.id])
            part = chosen[(chosen >= start) & (chosen < end)] - start
            if len(part):
                yield entry, part.to(client.device)

    def label(self, client: Trader, parts: list[tuple[Entry, Tensor | None]]) -> list[Targets]:
        """The client's own logits Ŷ_k on its transfer images, before it learns from others."""
        drawn, model = [self.draw(client, e, {client.id: i})[client.id] for e, i in parts], client.model.eval()
        images, every = torch.cat(drawn), torch.arange(sum(map(len, drawn)), device=client.device)
        features = predict(model.features, lambda part: resized(images[part], client.data.spec), every)
        ends = [len(part) for part in drawn]
        logits, seen = (torch.split(x, ends) for x in (model.logits(features).detach(), features))
        told: list[Targets] = [{"round": e["round"], "logits": y} for (e, _), y in zip(parts, logits, strict=True)]
        for targets, (_, index), f in zip(told, parts, seen, strict=True):
            if index is not None:
                targets["index"] = index
            if self.embedding_loss:
                targets["embeddings"] = F.linear(f, client.docking["weight"], client.docking["bias"])
        return told

    def draw(self, client: Trader, entry: Entry, wanted: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """The transfer images of some clients in one round, or parts of them, made anew from the buffer in one go."""
        every = {i: entry["codes"][i] if index is None else entry["codes"][i][index] for i, index in wanted.items()}
        codes = torch.cat(list(every.values()))
        if entry["decoder"]:
            decoder = Decoder.restored(entry["decoder"], client.data.spec)
            images = predict(decoder, lambda part: codes[part], torch.arange(len(codes), device=client.device))
        else:
            assert client.public is not None
            images = client.public.batch(codes)
        return dict(zip(every, torch.split(images, [len(part) for part in every.values()]), strict=True))

    def exchange(self, client: Trader, lessons: dict[int, Lesson]) -> None:
        """Learn from other clients, on their data of this round and on what they taught before (Eqs. 13 and 14)."""
        wanted: dict[int, dict[int, Tensor | None]] = {entry["round"]: {} for entry in client.buffer}
        for i, lesson in lessons.items():
            for part in [lesson["fresh"], *lesson["memory"]]:
                wanted[part["round"]][i] = part.get("index")
        drawn = {e["round"]: self.draw(client, e, wanted[e["round"]]) for e in client.buffer if wanted[e["round"]]}
        data, size, others = client.data, self.batch_size, sorted(lessons)
        fresh = {i: self.source(drawn, i, [lesson["fresh"]]) for i, lesson in lessons.items()}
        memory = {i: self.source(drawn, i, lesson["memory"]) for i, lesson in lessons.items() if lesson["memory"]}
        private = index_batches(len(data), size, client.device)
        trainer = Trainer.of(client.model.train(), adam(self.lr, self.weight_decay))
        own = partial(classification, client.model, data.spec, data.augment)
        peer = partial(self.exchange_loss, client.model, data.spec)
        longest = max(epoch_length(len(codes), size) for codes in client.buffer[-1]["codes"].values())
        for _ in client.track(range(self.exchange_epochs * longest)):
            if self.local_review:
                index = next(private)
                trainer.step(own, data.pixels[index], data.labels[index])
            chosen = others if self.peers is None else sample(others, self.peers)
            for batches in [*(fresh[i] for i in chosen), *(memory[i] for i in chosen if i in memory)]:
                trainer.step(peer, *next(batches), *client.docking.values())
        client.buffer = self.remember(client.buffer, self.memory)
        client.report["buffer_bytes"] = nbytes(client.buffer)

    def source(
        self, drawn: Mapping[int, Mapping[int, Tensor]], peer: int, taught: list[Targets]
    ) -> Iterator[list[Tensor]]:
        """Batches, for ever, of the images a peer taught on and of what it said of them."""
        names: list[Literal["logits", "embeddings"]] = ["logits", "embeddings"] if self.embedding_loss else ["logits"]
        images = torch.cat([drawn[part["round"]][peer] for part in taught])
        tensors = [images, *(torch.cat([part[name] for part in taught]) for name in names)]
        for index in index_batches(len(images), self.batch_size, images.device):
            yield [tensor[index] for tensor in tensors]

    def exchange_loss(self, model: Classifier, spec: Spec, images: Tensor, target: Tensor, *docked: Tensor) -> Tensor:
        """The divergence from a peer's predictions on a batch of its images (a term of Eqs. 13 and 14)."""
        features = model.features(resized(images, spec))
        student = model.logits(features)
        loss = kl(target, student) if self.direction == "teacher" else kl(student, target)
        if self.embedding_loss:
            embeddings, weight, bias = docked
            loss = loss + F.mse_loss(F.linear(features, weight, bias), embeddings)
        return loss
