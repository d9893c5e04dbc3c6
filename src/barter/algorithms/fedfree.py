"""FedFree: Du et al., "FedFree: Breaking Knowledge-sharing Barriers through Layer-wise Alignment in Heterogeneous
Federated Learning", NeurIPS 2025, Algorithm 1.

Clients with different networks share single layers. Each uploads the few that its training changed most; the server
lets the layers of a network of its own imitate them on Gaussian noise, and gives each client back the one layer that
seems to hold more than the client's. No data, real or synthetic, is needed, and no whole model travels.

Where the paper is silent or at odds with itself:

- A layer is a convolution or a linear layer, weight and bias together: biases of normalisation start at zero, and
  Eq. 2 would divide by it. Grouped convolutions have no counterpart at the server and stay at home.
- "Type and approximate depth": the layer of the same type at the nearest relative depth among its kind; where it is the
  only one, as a head is, in the whole network. Any layer of the type may come back.
- The server's network never sees an image. It is the paper's CNN for 32 x 32 images, whatever the task's size.
- Noise: 64 samples; for convolutions 8 x 8 pixels without borders (what leaves on one side comes in on the other). Of
  layers that differ in size the first outputs are compared; inputs, edges of kernels and biases that a client's layer
  lacks count as zero.
- Eq. 3 is a sum over outputs and a mean over samples and positions. In expectation one step is then a moving average,
  w <- (1 - 2 α) w + 2 α mean(w_i): that is `transfer = "analytic"`.
- Eq. 7 fills what the received layer does not cover with zeros, the sentence behind it keeps it, Algorithm 1 speaks of
  adapters. `fill = "zero"` copies flattened weights as the equation does, `fill = "retain"` copies along each axis.
- Local epochs are 5 in the text and 30 in Table A2. The order of Tsallis' entropy is not given.

Preset "paper" is the text with the equations, "tableA2" has that table's epochs. A layer of another network, or of
another depth, means nothing in its new place and destroys what was there (benchmarks/README.md). So by default, preset
"sound", layers are exchanged among clients of one architecture, which start from the same weights, and only for those
in the same place; the server's is the mean of those uploaded, in which an output counts as much as training changed it;
of a head a client takes the outputs of classes that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.algorithm import Algorithm
from barter.core.answers import WORD, Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Floats, Room, When, Within
from barter.core.errors import ConfigError, PayloadError
from barter.core.evaluation import note_before
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.record import Round
from barter.models.small import fedfree_cnn
from barter.ops.fit import fit, sgd

__all__ = ["Bridge", "FedFree"]

LARGEST = 64  # pixels along a side of a kernel
TINY = 1e-12  # keeps Eq. 2 finite for a layer that starts at zero
AS_PUBLISHED = {
    "match": "depth",
    "outputs": "all",
    "server_lr": 0.01,
    "transfer": "sampled",
    "fill": "zero",
}
Kind: TypeAlias = Literal["conv", "linear"]
Entropy: TypeAlias = Literal["shannon", "tsallis", "collision"]


class Layer(TypedDict):
    """A convolution or a linear layer by itself."""

    name: str
    kind: Kind
    depth: Annotated[
        float, Within(0, 1)
    ]  # 0 for the first of its kind in its network, 1 for the last
    weight: Annotated[Tensor, Floats("outputs", ...)]
    bias: NotRequired[Annotated[Tensor, Floats("outputs")]]
    credit: NotRequired[
        Annotated[Tensor, Floats("outputs"), When("credited")]
    ]  # how much training changed each output


class Bridge(Server):
    """The server's layers: those of its network, or one for each place in each of the clients' networks."""

    layers: dict[str, Layer] = {}


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a network that can be shared, in their order."""
    found: list[Layer] = []
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    kinds: list[tuple[Kind, type[nn.Module]]] = [("conv", nn.Conv2d), ("linear", nn.Linear)]
    for kind, type_ in kinds:
        same = {
            n: m
            for n, m in modules.items()
            if isinstance(m, type_) and getattr(m, "groups", 1) == 1
        }
        for name, module in same.items():
            places = list(same if len(same) > 1 else modules)
            layer: Layer = {
                "name": name,
                "kind": kind,
                "depth": places.index(name) / max(1, len(places) - 1),
                "weight": module.weight.detach().clone(),
            }
            if module.bias is not None:
                layer["bias"] = module.bias.detach().clone()
            found.append(layer)
    return found


def outline(layer: Layer) -> tuple[Kind, torch.Size, bool]:
    """What layers in one place have in common."""
    return layer["kind"], layer["weight"].shape, "bias" in layer


def parameters(layer: Layer) -> Tensor:
    """Weight and bias end to end."""
    parts = [layer["weight"], layer["bias"]] if "bias" in layer else [layer["weight"]]
    return torch.cat([part.flatten() for part in parts])


def change(before: Layer, after: Layer) -> Tensor:
    """How much training changed a layer, relative to what it was (Eq. 2)."""
    old, new = parameters(before), parameters(after)
    return (new - old).square().sum() / (old.square().sum() + TINY)


def credits(before: Layer, after: Layer) -> Tensor:
    """How much training changed each output of a layer."""
    return (after["weight"] - before["weight"]).flatten(1).square().sum(1)


def counterpart(layer: Layer, others: Mapping[str, Layer]) -> str | None:
    """Which of the others is of the same kind, at the nearest relative depth."""
    same = [at for at, other in others.items() if other["kind"] == layer["kind"]]
    return same[round(layer["depth"] * (len(same) - 1))] if same else None


def entropy(weight: Tensor, kind: Entropy, bins: int, order: float) -> float:
    """H of a layer's weights, sorted into bins between their extremes; in nats."""
    counts = torch.histc(weight.flatten().float(), bins).double()
    p = counts[counts > 0] / counts.sum()
    if kind == "shannon":
        return float(-(p * p.log()).sum())
    if kind == "tsallis":
        return float((1 - p.pow(order).sum()) / (order - 1))
    return float(-p.square().sum().log())


def fitted(weight: Tensor, shape: torch.Size, onto: Tensor | None = None) -> Tensor:
    """The weight in another shape: first outputs and inputs, centre of the kernel, over zeros or over `onto`."""
    target = torch.zeros(shape, device=weight.device) if onto is None else onto.clone()
    take, put = [], []
    for axis, (have, want) in enumerate(zip(weight.shape, shape, strict=True)):
        size = min(have, want)
        start = (0, 0) if axis < 2 else ((have - size) // 2, (want - size) // 2)
        take.append(slice(start[0], start[0] + size))
        put.append(slice(start[1], start[1] + size))
    target[tuple(put)] = weight[tuple(take)]
    return target


def respond(weight: Tensor, bias: Tensor | None, noise: Tensor) -> Tensor:
    """A layer's answer to noise of at least its number of inputs: (samples or positions, outputs)."""
    x = noise[:, : weight.shape[1]]
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    sides = [(size // 2, (size - 1) // 2) for size in reversed(weight.shape[2:])]
    answer = F.conv2d(
        F.pad(x, [pad for side in sides for pad in side], mode="circular"), weight, bias
    )
    return answer.movedim(1, -1).flatten(0, -2)


@dataclass(frozen=True, kw_only=True)
class FedFree(Algorithm[Bridge, Client]):
    """Single layers travel: up those that changed most, down the one that seems to hold more."""

    crosses = {
        "learn": "up: the weights of the k layers that training changed most, and how much it changed each output",
        "receive": "down: the weights of one of the server's layers, or nothing",
    }
    presets = {
        "paper": AS_PUBLISHED,
        "tableA2": {**AS_PUBLISHED, "epochs": 30},
        "sound": {},
    }

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 5  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    layers: Count = 2  # k: critical layers that a client uploads
    # whose layers correspond: the same of one architecture, or as published
    match: Literal["place", "depth"] = "place"
    # which count and are taken: as far as trained, or all alike (paper)
    outputs: Literal["trained", "all"] = "trained"
    # α: learning rate of the server's layers; at 0.5 they are the mean, 0.01 in the paper
    server_lr: Positive = 0.5
    steps: Count = 1  # gradient steps of a global layer per round; the paper's Eqs. 4 and 5 are one
    # on Gaussian noise (paper), or in closed form
    transfer: Literal["sampled", "analytic"] = "analytic"
    samples: Count = 64  # samples of noise per step; not in the paper
    side: Count = 8  # height and width of noise for convolutions; not in the paper
    bins: Count = 256  # bins of the histogram behind the entropy
    entropy: Entropy = "shannon"  # H of Eq. 6
    tsallis_order: Positive = 1.5  # q of Tsallis' entropy, not 1; not in the paper
    # what the received layer does not cover: zero (Eq. 7), or as it was
    fill: Literal["zero", "retain"] = "retain"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tsallis_order == 1:
            raise ConfigError(
                "tsallis_order=1: there Tsallis' entropy is Shannon's; set entropy to shannon"
            )

    @property
    def credited(self) -> bool:
        """Whether clients say how much training changed each output."""
        return self.outputs == "trained"

    def largest(self, known: Known) -> int | None:
        """Bytes of the k largest layers of a client's network: weights, for each output a bias and a credit, words."""
        layers = [
            shape.numel() + 2 * shape[0] for shape, _ in known.weights.values() if len(shape) > 1
        ]
        return sum(4 * size + 3 * WORD for size in sorted(layers)[-self.layers :]) or None

    def setup(self, server: Bridge, clients: Clients) -> None:
        if self.match == "depth":
            network = fedfree_cnn(replace(server.spec, height=32, width=32)).to(server.device)
            server.layers = {layer["name"]: layer for layer in layers_of(network)}

    def round(self, server: Bridge, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        uploads = active.run(self.learn).each(partial(self.sound, server))  # Eq. 2
        self.share(server, uploads)  # Eqs. 3-5
        gifts = self.align(server, uploads)  # Eq. 6
        active.scatter(self.receive, {k: gifts.get(k, []) for k in active})  # Eq. 7
        server.report["gifts"] = len(gifts)

    def learn(self, client: Client) -> Annotated[list[Layer], Room("largest")]:
        before = layers_of(client.model)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        note_before(client)
        after = layers_of(client.model)
        if self.credited:
            for old, new in zip(before, after, strict=True):
                new["credit"] = credits(old, new)
        changes = torch.stack([change(old, new) for old, new in zip(before, after, strict=True)])
        critical = changes.argsort(descending=True, stable=True)[: self.layers].tolist()
        client.report["given"] = len(critical)
        return [after[at] for at in critical]

    def sound(self, server: Bridge, k: int, uploaded: list[Layer]) -> list[Layer]:
        """The layers, if the client's network has them; if they are layers at all, where the server cannot build it."""
        built = layers_of(server.architectures[k]()) if k in server.architectures else uploaded
        known = {layer["name"]: outline(layer) for layer in built}
        for layer in uploaded:
            kind, shape, _ = outline(layer)
            axes, kernel = 4 if kind == "conv" else 2, max(shape[2:], default=0)
            if known.get(layer["name"]) != outline(layer) or len(shape) != axes or kernel > LARGEST:
                raise PayloadError(
                    f"{layer['name']} is no such layer of its network: {kind} {tuple(shape)}"
                )
        if (
            len({layer["name"] for layer in uploaded}) < len(uploaded)
            or len(uploaded) > self.layers
        ):
            raise PayloadError(
                f"{len(uploaded)} layers, asked for were {self.layers} different ones"
            )
        return uploaded

    def share(self, server: Bridge, uploads: Replies[list[Layer]]) -> None:
        """Every layer of the server's imitates the uploaded layers that correspond to it."""
        teachers: dict[str, list[Layer]] = {}
        for k, uploaded in uploads.items():
            for layer in uploaded:
                at = self.place(server, k, layer)
                if at is not None:
                    teachers.setdefault(at, []).append(layer)
        for at, imitated in teachers.items():
            for _ in range(self.steps):
                server.layers[at] = self.imitate(server.layers.get(at, imitated[0]), imitated)

    def place(self, server: Bridge, k: int, layer: Layer) -> str | None:
        """Which of the server's layers corresponds to this one of client k."""
        return (
            f"{server.names[k]}/{layer['name']}"
            if self.match == "place"
            else counterpart(layer, server.layers)
        )

    def imitate(self, g: Layer, teachers: Sequence[Layer]) -> Layer:
        """One step down the gradient of Eq. 3."""
        w = g["weight"].clone().requires_grad_()
        b = g.get("bias", torch.zeros(len(w), device=w.device)).clone().requires_grad_()
        if self.transfer == "analytic":
            gaps = [self.expected(w, b, layer) for layer in teachers]
        else:
            inputs = max(w.shape[1], *(layer["weight"].shape[1] for layer in teachers))
            kernels = [size for layer in (g, *teachers) for size in layer["weight"].shape[2:]]
            sides = [max(self.side, *kernels)] * 2 if kernels else []
            noise = torch.randn(self.samples, inputs, *sides, device=w.device)
            gaps = [self.discrepancy(w, b, layer, noise) for layer in teachers]
        losses = [
            (part[: len(gap)] * gap).sum()
            for part, gap in zip(self.parts(teachers), gaps, strict=True)
        ]
        slopes = torch.autograd.grad(torch.stack(losses).sum(), (w, b))
        weight, bias = (
            part.detach() - self.server_lr * slope
            for part, slope in zip((w, b), slopes, strict=True)
        )
        return {
            "name": g["name"],
            "kind": g["kind"],
            "depth": g["depth"],
            "weight": weight,
            "bias": bias,
        }

    def parts(self, teachers: Sequence[Layer]) -> list[Tensor]:
        """How much each teacher's opinion of each output counts, together 1: alike, or as training changed it."""
        credit = [
            layer.get("credit", layer["weight"].new_ones(len(layer["weight"])))
            for layer in teachers
        ]
        if self.outputs == "all":
            return [torch.ones_like(c) / len(teachers) for c in credit]
        total = torch.stack([fitted(c, torch.Size([max(map(len, credit))])) for c in credit]).sum(0)
        return [c / (total[: len(c)] + TINY) for c in credit]

    def discrepancy(self, w: Tensor, b: Tensor, layer: Layer, noise: Tensor) -> Tensor:
        """A term of Eq. 3: how differently two layers answer to the same noise, by output."""
        outputs = min(len(w), len(layer["weight"]))
        taught = respond(layer["weight"], layer.get("bias"), noise)[:, :outputs]
        return (respond(w, b, noise)[:, :outputs] - taught).square().mean(0)

    def expected(self, w: Tensor, b: Tensor, layer: Layer) -> Tensor:
        """The same in expectation over noise."""
        outputs = min(len(w), len(layer["weight"]))
        shape = torch.Size(
            [
                outputs,
                *(max(a, c) for a, c in zip(w.shape[1:], layer["weight"].shape[1:], strict=True)),
            ]
        )
        taught = layer.get("bias", torch.zeros(outputs, device=w.device))[:outputs]
        gap = fitted(w[:outputs], shape) - fitted(layer["weight"][:outputs], shape)
        return gap.flatten(1).square().sum(1) + (b[:outputs] - taught).square()

    def align(self, server: Bridge, uploads: Replies[list[Layer]]) -> dict[int, list[Layer]]:
        """For each client the global layer with the largest positive knowledge gain over one that it uploaded."""
        gifts: dict[int, list[Layer]] = {}
        for k, uploaded in uploads.items():
            best = 0.0
            for layer in uploaded:
                for g in self.candidates(server, k, layer):
                    gain = self.gain(layer["weight"], g["weight"])
                    if gain > best:
                        best, gifts[k] = gain, [{**g, "name": layer["name"]}]
        return gifts

    def candidates(self, server: Bridge, k: int, layer: Layer) -> list[Layer]:
        """The layers that may take the place of this one: the one that corresponds, or as published all of its kind."""
        if self.match == "place":
            return [server.layers[f"{server.names[k]}/{layer['name']}"]]
        return [g for g in server.layers.values() if g["kind"] == layer["kind"]]

    def gain(self, theta: Tensor, g: Tensor) -> float:
        """KGE of Eq. 6."""
        local, shared = (
            entropy(w, self.entropy, self.bins, self.tsallis_order) for w in (theta, g)
        )
        return shared - local

    def receive(self, client: Client, gifts: list[Layer]) -> None:
        """The received layer, if there is one, takes the place of the client's own, as far as it goes (Eq. 7)."""
        client.report["taken"] = len(gifts)
        for g in gifts:
            layer = client.model.get_submodule(g["name"])
            taken = slice(None) if self.outputs == "all" else self.trained(client, layer)
            for place, received in ((layer.weight, g["weight"]), (layer.bias, g["bias"])):
                if isinstance(place, Tensor):
                    place.data[taken] = self.projected(received, place.detach())[taken]

    def trained(self, client: Client, layer: nn.Module) -> Tensor | slice:
        """The outputs of a layer that the client's data shape: of a head those of its classes."""
        return (
            client.data.class_counts() > 0
            if layer is getattr(client.model, "head", None)
            else slice(None)
        )

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if not rounds or any(r.server.get("gifts") for r in rounds):
            return []
        why = "layers go to clients of the same architecture only; fedproto and dffke need no such"
        if self.match == "depth":
            why = "none of the server's had more entropy than the clients'; set server_lr higher"
        return [f"no layer was exchanged in {len(rounds)} rounds, so clients learned alone: {why}"]

    def projected(self, received: Tensor, place: Tensor) -> Tensor:
        if self.fill == "retain":
            return fitted(received, place.shape, place)
        flat, size = (
            torch.zeros(place.numel(), device=place.device),
            min(received.numel(), place.numel()),
        )
        flat[:size] = received.flatten()[:size]
        return flat.view(place.shape)
