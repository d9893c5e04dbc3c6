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
from collections.abc import Mapping, Sequence
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
from barter.core.images import Augment, Spec, augmented
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State, isolate, nbytes
from barter.models.generators import Decoder, resized
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam, classification, epoch_length, fit, index_batches
from barter.ops.statistics import gaps, renew
from barter.ops.transfer import Entry, Page, batches, drawn, newest, review

__all__ = ["DFFKE", "Hub", "Trader"]


Tensors: TypeAlias = Mapping[int, Tensor]  # one for each client


class Offer(TypedDict):
    """What a client shows the server after local training."""

    examples: int
    weights: NotRequired[State]
    embeddings: NotRequired[Tensor]
    labels: NotRequired[Tensor]


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


Lesson: TypeAlias = list[Targets]  # on this round's data, then on a review of earlier rounds'


class Hub(Server):
    """The data-free module."""

    docking: dict[int, State] = {}
    decoder: State = {}
    buffer: list[Entry] = []
    held: dict[int, int] = {}  # the last round whose entry a client was sent


class Trader(Client):
    """A client that is teacher and student at once."""

    buffer: list[Entry] = []
    docking: State = {}
    student: State = {}  # its weights after the last exchange


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """A client's term of Eq. 11."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def discrepancy(choice: str, teacher: Tensor, student: Tensor) -> Tensor:
    """F of the model-discrepancy loss (Eq. 4 and Table 8); KL is scaled by 0.1, for it diverges otherwise."""
    if choice == "kl":
        return 0.1 * kl(teacher, student)
    gap = teacher.softmax(1) - student.softmax(1)
    return gap.abs().mean() if choice == "mae" else gap.square().mean()


def sample(items: Sequence[int], size: int | None) -> list[int]:
    """So many of the items at random, all if there are no more or none is said."""
    return sorted(items[i] for i in torch.randperm(len(items))[:size].tolist())


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
        "paper": {
            "share": 0.15,
            "decoder_epochs": 6,
            "decoder_steps": 0,
            "exchange_epochs": 4,
            "exchange_steps": 0,
            "mixed": False,
            "statistics": 0.0,
            "warm_decoder": False,
            "jitter": False,
            "jitter_decoder": False,
            "cosine": False,
            "renewed": False,
            "kept": False,
            "local_review": False,
        },
    }
    presets["code"] = presets["paper"] | {
        "share": 1.0,
        "local_review": True,
        "embedding_loss": True,
        "logit_loss": True,
    }

    participation: Fraction = 1.0  # ρ: share of clients per round
    collaboration: Fraction = 1.0  # π: share of clients that ever exchange; the rest train alone
    tau: Fraction = 0.98  # τ: local training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 100  # or after so many epochs; the paper has no such limit
    share: Fraction = 0.6  # share of a client's embeddings that it offers; 0.15 can be inferred from the paper's bytes
    code_dim: Count = 512  # h: width of the unified embedding space
    docking_epochs: Count = 100  # T_Tran: full-batch steps per client for docking layers and global head
    decoder_epochs: Count = 2  # T_Dec: passes over the largest offer; the paper has 3 for CIFAR-10, 6 for CIFAR-100
    decoder_steps: Whole = 100  # but at least so many steps per client, for small data sets; not in the paper
    exchange_epochs: Count = 1  # T_FKE: passes over the largest synthetic set; the paper has 2 for CIFAR-10
    exchange_steps: Whole = 100
    mixed: bool = True
    statistics: NonNegative = 0.1
    warm_decoder: bool = True
    jitter: bool = True
    jitter_decoder: bool = False
    cosine: bool = True
    renewed: bool = True
    kept: bool = True
    temperature: Positive = 1.0
    peers: Count | None = None  # peers a client learns from in a round, drawn anew in each; none is all
    memory: Whole | None = None  # R: past rounds kept for review; none is no limit
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    batch_size: Count = 100  # B: images per step
    exchange_batch: Count = 100
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
        others = {k: sample([i for i in lessons if i != k], self.peers) for k in lessons}
        heard = {k: {i: lessons[i] for i in chosen} for k, chosen in others.items()}
        traders.only(lessons).scatter(self.exchange, heard)  # Eqs. 13-14

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

    def unify(
        self, server: Hub, embeddings: Tensors, labels: Tensors
    ) -> tuple[dict[int, nn.Linear], dict[int, Tensor]]:
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
        if self.warm_decoder and server.decoder:
            decoder.load_state_dict(server.decoder)
        trainer = Trainer.of(decoder.train(), adam(self.lr, cosine=self.cosine))
        total = sum(map(len, codes.values()))
        if self.mixed:  # everybody in every batch, by the size of its offer
            size = {k: round(self.batch_size * len(codes) * len(e) / total) for k, e in codes.items()}
            groups = [tuple(codes)]
        else:
            size, groups = dict.fromkeys(codes, self.batch_size), [(k,) for k in codes]
        sources = {k: batches([[codes[k], embeddings[k]]], size[k]) for k in codes}
        longest = max(epoch_length(len(e), size[k]) for k, e in codes.items())
        loss_sum, ids = torch.zeros((), device=server.device), list(codes)
        steps = range(max(self.decoder_steps, self.decoder_epochs * longest))
        for step in server.track("decoder", steps):
            for group in groups:
                shift = 0 if self.discrepancy == "none" else int(torch.randint(1, len(ids), ()))
                others = [ids[(ids.index(k) + shift) % len(ids)] for k in group]
                seen = tuple((models[k], z[k], models[i]) for k, i in zip(group, others, strict=True))
                loss = partial(self.decoder_loss, decoder, server.spec, seen)
                _, fidelity = trainer.step(loss, *(part for k in group for part in next(sources[k])))
                loss_sum += fidelity if step >= len(steps) - longest else 0
            trainer.anneal((step + 1) / len(steps))
        server.report["decoder_loss"] = float(loss_sum) / (longest * len(groups))
        server.decoder = isolate(decoder.state_dict())
        return server.decoder

    def decoder_loss(
        self,
        decoder: Decoder,
        spec: Spec,
        clients: tuple[tuple[Classifier, nn.Linear, Classifier], ...],
        *batch: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Eq. 12 for a batch of some clients' codes, with what the ablations and the authors' code add to it."""
        codes, embeddings = batch[::2], batch[1::2]
        drawn = decoder(torch.cat(codes))
        if self.jitter_decoder:
            drawn = augmented(drawn, Augment(drawn.shape[-1] // 8, flip=True))
        images = torch.split(resized(drawn, spec), [len(code) for code in codes])
        losses, distances = [], []
        for (model, z, other), x, code, e in zip(clients, images, codes, embeddings, strict=True):
            with gaps(model if self.statistics else nn.Identity()) as found:
                features = model.features(x)
            loss = F.mse_loss(z(features), code)
            distances.append(loss.detach())
            if found:
                loss = loss + self.statistics * torch.stack(found).mean()
            if self.logit_loss:
                loss = loss + kl(model.logits(e), model.logits(features))
            if self.discrepancy != "none":
                loss = loss - discrepancy(self.discrepancy, model.logits(features), other(x))
            losses.append(loss * len(code))
        return torch.stack(losses).sum() / len(drawn), torch.stack(distances).mean()

    def deliver(self, server: Hub, entry: Entry) -> dict[int, Delivery]:
        """This round's entry for every participant, with those that the buffer still holds and it has missed."""
        deliveries: dict[int, Delivery] = {}
        for k in entry["codes"]:
            missed = [old for old in server.buffer if old["round"] > server.held.get(k, 0)]
            deliveries[k] = {"entries": [*missed, entry]}
            if self.embedding_loss:
                deliveries[k]["docking"] = server.docking[k]
        server.buffer = newest([*server.buffer, entry], self.memory)
        server.report["buffer_bytes"] = nbytes(server.buffer)
        return deliveries

    def teach(self, client: Trader, delivery: Delivery) -> Lesson:
        """The client's own logits Ŷ_k on its transfer images, of now and of a sample of the past, B_k^t."""
        room = None if self.memory is None else self.memory + 1  # R past rounds and this one
        client.buffer = newest(client.buffer + delivery["entries"], room)
        client.docking = delivery.get("docking", {})
        *past, now = client.buffer
        pages: list[Page] = [(now["round"], client.id, None)]
        pages += review(past, client.id, len(now["codes"][client.id]))
        images = drawn(client.buffer, pages, partial(self.draw, client))
        sizes, every, model = [len(x) for x in images], torch.cat(images), client.model.eval()
        index = torch.arange(len(every), device=client.device)
        features = predict(model.features, lambda part: resized(every[part], client.data.spec), index)
        lesson: Lesson = []
        for (t, _, part), f in zip(pages, torch.split(features, sizes), strict=True):
            targets: Targets = {"round": t, "logits": model.logits(f).detach()}
            if part is not None:
                targets["index"] = part
            if self.embedding_loss:
                targets["embeddings"] = F.linear(f, client.docking["weight"], client.docking["bias"])
            lesson.append(targets)
        return lesson

    def draw(self, client: Trader, entry: Entry, codes: Tensor) -> Tensor:
        """The transfer images that these codes of a round stand for."""
        if not entry["decoder"]:
            assert client.public is not None
            return client.public.batch(codes)
        decoder = Decoder.restored(entry["decoder"], client.data.spec)
        return predict(decoder, lambda part: codes[part], torch.arange(len(codes), device=client.device))

    def exchange(self, client: Trader, lessons: dict[int, Lesson]) -> None:
        """Learn from other clients, on their data of this round and on what they taught before (Eqs. 13 and 14)."""
        taught = [(i, targets) for i, lesson in lessons.items() for targets in lesson]
        pages = [(targets["round"], i, targets.get("index")) for i, targets in taught]
        images = drawn(client.buffer, pages, partial(self.draw, client))
        now, data, rows = client.buffer[-1], client.data, dict[tuple[bool, int], list[list[Tensor]]]()
        for (i, targets), x in zip(taught, images, strict=True):
            names: list[Literal["logits", "embeddings"]] = ["logits", "embeddings"] if self.embedding_loss else ["logits"]
            key = targets["round"] != now["round"], 0 if self.mixed else i
            rows.setdefault(key, []).append([x, *(targets[name] for name in names)])
        sources = [batches(rows[key], self.exchange_batch) for key in sorted(rows)]
        fresh = [len(now["codes"][i]) for i in lessons] if self.mixed else map(len, now["codes"].values())
        longest = epoch_length(sum(fresh) if self.mixed else max(fresh), self.exchange_batch)
        if self.kept and client.student:
            client.model.load_state_dict(client.student)
        trainer = Trainer.of(client.model.train(), adam(self.lr, self.weight_decay, cosine=self.cosine))
        own = partial(classification, client.model, data.spec, data.augment)
        peer = partial(self.exchange_loss, client.model, data.spec, data.augment if self.jitter else Augment())
        private = index_batches(len(data), self.exchange_batch, client.device)
        steps = range(max(self.exchange_steps, self.exchange_epochs * longest))
        for step in client.track(steps):
            if self.local_review:
                index = next(private)
                trainer.step(own, data.pixels[index], data.labels[index])
            for source in sources:
                trainer.step(peer, *next(source), *client.docking.values())
            trainer.anneal((step + 1) / len(steps))
        if self.renewed:
            renew(client.model, data, self.batch_size)
        if self.kept:
            client.student = isolate(dict(client.model.state_dict()))
        client.buffer = newest(client.buffer, self.memory)
        client.report["buffer_bytes"] = nbytes(client.buffer)

    def exchange_loss(
        self, model: Classifier, spec: Spec, augment: Augment, images: Tensor, target: Tensor, *docked: Tensor
    ) -> Tensor:
        """The divergence from a peer's predictions on a batch of its images (a term of Eqs. 13 and 14)."""
        features = model.features(resized(augmented(images, augment), spec))
        student, T = model.logits(features), self.temperature
        teacher, pupil = target / T, student / T
        loss = T**2 * (kl(teacher, pupil) if self.direction == "teacher" else kl(pupil, teacher))
        if self.embedding_loss:
            embeddings, weight, bias = docked
            loss = loss + F.mse_loss(F.linear(features, weight, bias), embeddings)
        return loss
