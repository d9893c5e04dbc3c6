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
- A model-discrepancy loss needs a student (Eq. 4): another client, drawn anew in each step.
- The buffer is synchronised: a client that missed rounds is sent their codes and decoders when it comes back.

Preset "paper" is the paper; preset "code" adds what the authors' early code does besides and shares all embeddings.
What the default changes is ours, each change a field that says so. Eq. 11 rewards nothing but classes, so the decoder
drew one picture of each class: codes are whitened (`whiten`). Batches hold images of all clients (`mixed`), for one
client's after the other's undo each other, and a decoder trained on those is not the one that draws. The decoder goes
on from the last round's (`warm_decoder`), the exchange from the last one's weights (`continued`), learning rates fall
(`cosine`), BatchNorm's statistics are renewed on private data (`renewed`). benchmarks/README.md has what each brings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from barter.core.images import Augment, Images, Spec, augmented
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, NonNegative, Positive, Whole
from barter.core.payload import State, isolate, nbytes
from barter.models.generators import Decoder, resized
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam, classification, epoch_length, fit, index_batches
from barter.ops.inversion import Discrepancy, Viewer, inversion_loss
from barter.ops.statistics import renew, whiten
from barter.ops.transfer import Entry, Lesson, batches, lesson, newest, taught

__all__ = ["DFFKE", "Hub", "Trader"]

Tensors: TypeAlias = Mapping[int, Tensor]  # one for each client
Docks: TypeAlias = dict[int, nn.Linear]


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
    exchanges: int = 0  # how many it took part in
    learned: State = {}  # its weights after the last one
    offered: dict[int, Tensor] = {}  # which of its images it offered in each round it remembers; 0 is the one begun


def docking_loss(head: nn.Linear, z_k: nn.Linear, embeddings: Tensor, labels: Tensor) -> Tensor:
    """A client's term of Eq. 11."""
    return F.cross_entropy(head(z_k(embeddings)), labels)


def sample(items: Sequence[int], size: int | None) -> list[int]:
    """So many of the items at random, all if there are no more or nobody says how many."""
    return list(items) if size is None else sorted(items[i] for i in torch.randperm(len(items))[:size].tolist())


PAPER: dict[str, object] = {
    **{"max_epochs": 100, "later_epochs": None, "share": 0.15, "whiten": 0.0, "mixed": False, "cosine": False},
    **{"decoder_epochs": 6, "decoder_steps": 0, "decoder_batch": None, "warm_decoder": False},
    **{"exchange_epochs": 4, "exchange_steps": 0, "exchange_batch": None, "augmented": False, "local_review": False},
    **{"renewed": False, "continued": False},
}
CODE = {"share": 1.0, "local_review": True, "embedding_loss": True, "logit_loss": True}


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
    presets = {"paper": PAPER, "code": {**PAPER, **CODE}}

    participation: Fraction = 1.0  # ρ: share of clients per round
    collaboration: Fraction = 1.0  # π: share of clients that ever exchange; the rest train alone
    tau: Fraction = 0.98  # τ: local training ends when an epoch's training accuracy reaches it
    max_epochs: Count = 30  # or after so many epochs; the paper has no such limit
    later_epochs: Count | None = 6  # or after so many once it has exchanged: more would undo it; none as before (paper)
    share: Fraction = 0.6  # share of a client's embeddings that it offers; the paper's byte counts come out for 0.15
    code_dim: Count = 512  # h: width of the unified embedding space
    docking_epochs: Count = 100  # T_Tran: full-batch steps per client for docking layers and global head
    whiten: NonNegative = 0.1  # codes vary alike where they vary by more than this share of the mean; 0 in the paper
    decoder_epochs: Count = 8  # T_Dec: passes over the largest offer; the paper has 3 for CIFAR-10, 6 for CIFAR-100
    decoder_steps: Whole = 70  # but at least so many steps, for small data sets; not in the paper
    decoder_batch: Count | None = 50  # codes per client in a step, on average; none is batch_size, as in the paper
    warm_decoder: bool = True  # the decoder goes on from the last round's; the paper has a new one in each
    statistics: NonNegative = 0.0  # weight of the gap to BatchNorm's statistics in the decoder's loss; not in the paper
    exchange_epochs: Count = 1  # T_FKE: passes over the synthetic set; the paper has 2 for CIFAR-10, 4 for CIFAR-100
    exchange_steps: Whole = 30  # but at least so many steps, for small data sets; not in the paper
    exchange_batch: Count | None = 250  # images per step of the exchange; none is batch_size, as in the paper
    mixed: bool = True  # batches hold codes of all clients, images of all peers; in the paper one's after the other's
    augmented: bool = True  # students see transfer images shifted and flipped at random; not in the paper
    cosine: bool = True  # learning rates of clients and decoder fall within each phase; the paper's are constant
    renewed: bool = True  # after the exchange, BatchNorm's statistics are those of private data; not in the paper
    continued: bool = True  # the exchange goes on from the last one's weights; in the paper from the locally trained
    peers: Count | None = None  # peers a client learns from in a round, drawn anew in each; none is all
    memory: Whole | None = None  # R: past rounds kept for review; none is no limit
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    batch_size: Count = 100  # B: images per step
    weight_decay: NonNegative = 1e-5  # of the clients' Adam
    docking_weight_decay: NonNegative = 1e-3  # of the docking layers' Adam
    embeddings: Literal["real", "noise"] = "real"  # E_k: of private images, or noise that tells nothing
    transfer: Literal["decoder", "public"] = "decoder"  # transfer images: drawn by the decoder, or public data
    direction: Literal["teacher", "student"] = "teacher"  # KL(teacher ‖ student) or the reverse
    discrepancy: Discrepancy = "none"  # F of L_md in the decoder's loss
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
        peers = {k: sample([i for i in lessons if i != k], self.peers) for k in lessons}
        heard = {k: {i: lessons[i] for i in chosen} for k, chosen in peers.items()}
        traders.only(lessons).scatter(self.exchange, heard)  # Eqs. 13-14

    def train(self, client: Trader) -> None:
        recipe = adam(self.lr, self.weight_decay, cosine=self.cosine)
        epochs = (client.exchanges and self.later_epochs) or self.max_epochs
        fitted = fit(client, epochs=epochs, goal=self.tau, batch_size=self.batch_size, recipe=recipe)
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
        client.offered[0] = index = torch.randperm(len(client.data), device=client.device)[:examples]
        e = predict(client.model.eval().features, client.data.batch, index)
        return {"examples": len(index), "weights": weights, "embeddings": e, "labels": client.data.labels[index]}

    def make_transfer_data(self, server: Hub, offers: Replies[Offer]) -> tuple[dict[int, Tensor], State]:
        size, device = {k: offer["examples"] for k, offer in offers.items()}, server.device
        if self.transfer == "public":
            assert server.public is not None
            return {k: torch.randint(len(server.public), (n,), device=device) for k, n in size.items()}, {}
        models = {k: server.replica(k, offer["weights"]) for k, offer in offers.items()}
        if self.embeddings == "real":
            e, y = {k: o["embeddings"] for k, o in offers.items()}, {k: o["labels"] for k, o in offers.items()}
        else:
            e = {k: torch.randn(n, models[k].feature_dim, device=device) for k, n in size.items()}
            y = {k: torch.randint(server.spec.classes, (n,), device=device) for k, n in size.items()}
        z, codes = self.unify(server, e, y)
        return codes, self.train_decoder(server, models, z, e, codes)

    def unify(self, server: Hub, embeddings: Tensors, labels: Tensors) -> tuple[Docks, dict[int, Tensor]]:
        """Docking layers z_k that bring all embeddings into one space (Eqs. 10 and 11), and what they make of them."""
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
        codes = {k: layer.requires_grad_(False)(embeddings[k]) for k, layer in z.items()}
        if self.whiten:
            # Eq. 11 asks for classes alone. Left so, a decoder draws one picture of each, whatever the image was.
            whiten(z.values(), torch.cat(list(codes.values())), self.whiten)
            codes = {k: layer(embeddings[k]) for k, layer in z.items()}
        return z, codes

    def train_decoder(
        self, server: Hub, models: Mapping[int, Classifier], z: Docks, embeddings: Tensors, codes: Tensors
    ) -> State:
        """The decoder Dec, which makes of each code an image that its client's encoder maps back to it (Eq. 12)."""
        decoder = lanes.keep("decoder", Decoder(self.code_dim, server.spec).to(server.device))
        if self.warm_decoder and server.decoder:
            decoder.load_state_dict(server.decoder)
        trainer = Trainer.of(decoder, adam(self.lr, cosine=self.cosine))
        ids, mean = list(codes), sum(map(len, codes.values())) / len(codes)
        batch = self.decoder_batch or self.batch_size
        size = {k: round(batch * len(codes[k]) / mean) if self.mixed else batch for k in ids}
        source = {k: batches([[codes[k], embeddings[k]]], size[k]) for k in ids}
        longest = max(epoch_length(len(codes[k]), size[k]) for k in ids)
        groups, total = [ids] if self.mixed else [[k] for k in ids], torch.zeros((), device=server.device)
        steps = range(max(self.decoder_steps, self.decoder_epochs * longest))
        for step in server.track("decoder", steps):
            for group in groups:
                shift = 0 if self.discrepancy == "none" else int(torch.randint(1, len(ids), ()))
                viewers = tuple(Viewer(models[k], z[k], models[ids[(ids.index(k) + shift) % len(ids)]]) for k in group)
                loss = partial(self.decoder_loss, decoder, server.spec, viewers)
                _, fidelity = trainer.step(loss, *(part for k in group for part in next(source[k])))
                total += fidelity if step >= len(steps) - longest else 0
            trainer.anneal((step + 1) / len(steps))
        server.report["decoder_loss"] = float(total) / (longest * len(groups))
        state = isolate(dict(decoder.state_dict()))
        server.decoder = state if self.warm_decoder else {}
        return state

    def decoder_loss(
        self, decoder: Decoder, spec: Spec, viewers: tuple[Viewer, ...], *batch: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Eq. 12 for codes and embeddings of some clients, with what ablations and the authors' code add; and bare."""
        codes, embeddings = batch[::2], batch[1::2]
        images = torch.split(resized(decoder(torch.cat(codes)), spec), [len(code) for code in codes])
        options = self.statistics, self.logit_loss, self.discrepancy
        return inversion_loss(viewers, images, codes, embeddings, *options)

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
        """The client's own logits Ŷ_k on its transfer images of this round, and on a sample of those before, B_k^t."""
        room = None if self.memory is None else self.memory + 1  # R past rounds and this one
        client.buffer = newest(client.buffer + delivery["entries"], room)
        client.docking = delivery.get("docking", {})
        if 0 in client.offered:
            client.offered[client.buffer[-1]["round"]] = client.offered.pop(0)
        return lesson(client.buffer, client.id, partial(self.draw, client), partial(self.say, client))

    def say(self, client: Trader, images: Tensor) -> dict[str, Tensor]:
        """The client's word on these images: its logits, and its translated embeddings where they are asked for."""
        index, model = torch.arange(len(images), device=client.device), client.model.eval()
        features = predict(model.features, lambda part: resized(images[part], client.data.spec), index)
        translated = {"embeddings": F.linear(features, **client.docking)} if self.embedding_loss else {}
        return {"logits": model.logits(features).detach(), **translated}

    def draw(self, client: Trader, entry: Entry, codes: Tensor) -> Tensor:
        """The transfer images that these codes of a round stand for."""
        if not entry["decoder"]:
            assert client.public is not None
            return client.public.batch(codes)
        decoder = Decoder.restored(entry["decoder"], client.data.spec)
        return predict(decoder, lambda part: codes[part], torch.arange(len(codes), device=client.device))

    def exchange(self, client: Trader, lessons: dict[int, Lesson]) -> None:
        """Learn from other clients, on their data of this round and on what they taught before (Eqs. 13 and 14)."""
        batch = self.exchange_batch or self.batch_size
        sources = taught(client.buffer, lessons, partial(self.draw, client), batch, mixed=self.mixed)
        sizes = {i: len(codes) for i, codes in client.buffer[-1]["codes"].items()}
        longest = sum(sizes[i] for i in lessons) if self.mixed else max(sizes.values())
        if self.continued and client.learned:
            client.model.load_state_dict(client.learned)
        self.study(client, sources, batch, self.exchange_epochs * epoch_length(longest, batch))
        if self.renewed:
            renew(client.model, client.data, self.batch_size)
        if self.continued:
            client.learned = isolate(dict(client.model.state_dict()))
        client.exchanges += 1
        client.buffer = newest(client.buffer, self.memory)
        client.offered = {e["round"]: client.offered[e["round"]] for e in client.buffer if e["round"] in client.offered}
        client.report["buffer_bytes"] = nbytes(client.buffer)

    def study(self, client: Trader, sources: Sequence[Iterator[list[Tensor]]], batch: int, iterations: int) -> None:
        """In every iteration one step on private data, and one on a batch of each source."""
        data, model = client.data, client.model.train()
        trainer = Trainer.of(model, adam(self.lr, self.weight_decay, cosine=self.cosine))
        own = partial(classification, model, data.spec, data.augment)
        peer = partial(self.exchange_loss, model, data.spec, self.augment(data) if self.augmented else Augment())
        private = index_batches(len(data), batch, client.device)
        steps = range(max(self.exchange_steps, iterations))
        for step in client.track(steps):
            if self.local_review:
                index = next(private)
                trainer.step(own, data.pixels[index], data.labels[index])
            for source in sources:
                trainer.step(peer, *next(source), *client.docking.values())
            trainer.anneal((step + 1) / len(steps))

    def augment(self, data: Images) -> Augment:
        """The changes that private images undergo in training, for images of the size that they are drawn in."""
        drawn = min(32, data.spec.width) if self.transfer == "decoder" else data.spec.width
        return replace(data.augment, crop=data.augment.crop * drawn // data.pixels.shape[-1])

    def exchange_loss(
        self, model: Classifier, spec: Spec, augment: Augment, images: Tensor, target: Tensor, *docked: Tensor
    ) -> Tensor:
        """The divergence from a peer's predictions on a batch of its images (a term of Eqs. 13 and 14)."""
        features = model.features(resized(augmented(images, augment), spec))
        student = model.logits(features)
        loss = kl(target, student) if self.direction == "teacher" else kl(student, target)
        if self.embedding_loss:
            embeddings, weight, bias = docked
            loss = loss + F.mse_loss(F.linear(features, weight, bias), embeddings)
        return loss

    def gallery(self, client: Trader, t: int, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
        entry = next((entry for entry in client.buffer if entry["round"] == t), None)
        if entry is None or t not in client.offered:
            return None
        chosen = wanted(client.offered[t])
        return client.offered[t][chosen], self.draw(client, entry, entry["codes"][client.id][chosen])
