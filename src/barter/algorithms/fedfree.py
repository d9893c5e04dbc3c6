"""FedFree: Du et al., "FedFree: Breaking Knowledge-sharing Barriers through Layer-wise Alignment in Heterogeneous
Federated Learning", NeurIPS 2025, Algorithm 1.

Clients with different networks exchange single layers. No data, real or synthetic, is needed, and
no full model is sent. One round (Algorithm 1):

1. Clients train on their images and upload the k layers that training changed most (Eq. 2).
2. The server trains the layers of its own network to imitate the uploaded ones on Gaussian noise
   (Eqs. 3-5).
3. The server sends each client the one of these layers with the largest knowledge gain over a layer
   that the client uploaded (Eq. 6).
4. The client puts it in place of its own layer (Eq. 7).

Differences from the paper, where it is silent or contradicts itself:

- A layer is a convolution or a linear layer, with weight and bias: biases of normalisation layers
  start at zero, by which Eq. 2 would divide. Grouped convolutions have no counterpart at the server
  and are not exchanged.
- "Type and approximate depth" is read as the layer of the same type at the nearest relative depth
  among layers of its type; for the only layer of its type, such as a head, in the full network. Any
  layer of the type may be sent back.
- The server's network never sees an image. It is the paper's CNN for 32 x 32 images, whatever the
  size of the task's images.
- `samples`, `side`: noise has 64 samples; for convolutions it has 8 x 8 pixels with circular
  padding. Of layers that differ in size the first outputs are compared; inputs, edges of kernels
  and biases that a client's layer lacks count as zero.
- `transfer`: Eq. 3 is a sum over outputs and a mean over samples and positions. In expectation, one
  step is then a moving average, w <- (1 - 2 α) w + 2 α mean(w_i): this is `"analytic"`.
- `fill`: Eq. 7 fills what the received layer does not cover with zeros, the sentence after it
  keeps it, and Algorithm 1 mentions adapters. `"zero"` copies flattened weights as the equation
  does, `"retain"` copies along each axis.
- `epochs`: 5 in the text and 30 in Table A2.
- `tsallis_order`: the order of Tsallis' entropy is not given.

Differences from the paper by default (preset "paper" is the text with the equations, "tableA2" has
that table's epochs, and "sound" is the default). A layer of another network, or of another depth,
is meaningless in its new place and destroys the layer that was there (docs/results/systems.md). So:

- `match`: layers are exchanged among clients of one architecture, which start from the same
  weights, and only between the same places.
- `server_lr`, `transfer`: the server's layer is the mean of those uploaded.
- `outputs`: in this mean, outputs are weighted by how much training changed them; of a head, a
  client takes the outputs of classes that it has.
- `fill`: what the received layer does not cover is kept.
- `offset`: a received head keeps the client's mean logits. The mean of heads that were trained with
  other class frequencies gives rare classes too much weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.algorithm import Algorithm, Crossing
from barter.core.answers import WORD, Known
from barter.core.clients import Clients, Replies
from barter.core.contracts import Content, Floats, Room, When, Within
from barter.core.errors import ConfigError, PayloadError
from barter.core.evaluation import record_before_exchange
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.record import Round
from barter.models.small import fedfree_cnn
from barter.ops.fit import fit, sgd
from barter.ops.prototypes import features_of

__all__ = ["Bridge", "FedFree"]

MAX_KERNEL_SIDE = 64  # largest accepted side of a kernel in pixels
MIN_NORM = 1e-12  # Keeps Eq. 2 finite for a layer that starts at zero.
AS_PUBLISHED = {
    "match": "depth",
    "outputs": "all",
    "server_lr": 0.01,
    "transfer": "sampled",
    "fill": "zero",
    "offset": "received",
}
# Loss of accuracy by the exchange that a run's remarks mention.
NOTABLE_LOSS = 0.05

Kind: TypeAlias = Literal["conv", "linear"]
Entropy: TypeAlias = Literal["shannon", "tsallis", "collision"]


class Layer(TypedDict):
    """Parameters of a convolution or linear layer, and its place in the network."""

    name: str
    kind: Kind
    # 0 for the first of its kind in its network, 1 for the last
    depth: Annotated[float, Within(0, 1)]
    weight: Annotated[Tensor, Floats("rows", ...), Content("weights")]
    bias: NotRequired[Annotated[Tensor, Floats("rows")]]
    # how much training changed each output
    credit: NotRequired[Annotated[Tensor, Floats("rows"), When("credited")]]


class Bridge(Server):
    """A server with the layers of its network, or of the clients' architectures."""

    layers: dict[str, Layer] = {}


def layers_of(model: nn.Module) -> list[Layer]:
    """Return copies of a network's exchangeable layers.

    Convolutions come before linear layers; those of one kind are in the network's order. Grouped
    convolutions are left out. No layer has a credit.
    """
    layers: list[Layer] = []
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    kinds: list[tuple[Kind, type[nn.Module]]] = [("conv", nn.Conv2d), ("linear", nn.Linear)]
    for kind, type_ in kinds:
        same_kind = {
            name: module
            for name, module in modules.items()
            if isinstance(module, type_) and getattr(module, "groups", 1) == 1
        }
        # The depth of the only layer of its kind is that among all layers.
        order = list(same_kind if len(same_kind) > 1 else modules)
        for name, module in same_kind.items():
            layer: Layer = {
                "name": name,
                "kind": kind,
                "depth": order.index(name) / max(1, len(order) - 1),
                "weight": module.weight.detach().clone(),
            }
            if module.bias is not None:
                layer["bias"] = module.bias.detach().clone()
            layers.append(layer)
    return layers


def layer_signature(layer: Layer) -> tuple[Kind, torch.Size, bool]:
    """Return a layer's kind, the shape of its weight, and whether it has a bias."""
    return layer["kind"], layer["weight"].shape, "bias" in layer


def flat_parameters(layer: Layer) -> Tensor:
    """Return weight and bias as one flat tensor."""
    parts = [layer["weight"], layer["bias"]] if "bias" in layer else [layer["weight"]]
    return torch.cat([part.flatten() for part in parts])


def relative_change(before: Layer, after: Layer) -> Tensor:
    """Return a layer's squared change, divided by its squared norm before (Eq. 2).

    Weight and bias are taken together.
    """
    old = flat_parameters(before)
    new = flat_parameters(after)
    return (new - old).square().sum() / (old.square().sum() + MIN_NORM)


def output_changes(before: Layer, after: Layer) -> Tensor:
    """Return each output's squared change of weights, without its bias (outputs,)."""
    return (after["weight"] - before["weight"]).flatten(1).square().sum(1)


def counterpart(layer: Layer, others: Mapping[str, Layer]) -> str | None:
    """Return the name of the layer of the same kind at the nearest relative depth.

    Args:
        layer: The layer.
        others: The layers to choose from, by name, those of a kind in their network's order.

    Returns:
        The name, or None if none of `others` is of this kind.
    """
    same_kind = [name for name, other in others.items() if other["kind"] == layer["kind"]]
    return same_kind[round(layer["depth"] * (len(same_kind) - 1))] if same_kind else None


def weight_entropy(weight: Tensor, kind: Entropy, bins: int, order: float) -> float:
    """Return the entropy H of the histogram of a layer's weights.

    Args:
        weight: The weights.
        kind: The entropy: Shannon's or the collision entropy, both in nats, or Tsallis'.
        bins: Number of bins between the smallest and the largest weight.
        order: The order of Tsallis' entropy, not 1; the others ignore it.
    """
    counts = torch.histc(weight.flatten().float(), bins).double()
    p = counts[counts > 0] / counts.sum()
    if kind == "shannon":
        return float(-(p * p.log()).sum())
    if kind == "tsallis":
        return float((1 - p.pow(order).sum()) / (order - 1))
    return float(-p.square().sum().log())


def resize_weight(weight: Tensor, shape: torch.Size, onto: Tensor | None = None) -> Tensor:
    """Return a weight or bias, cropped or extended to another shape of as many axes.

    The first outputs and inputs and the centre of the kernel are copied; the rest is zero, or taken
    from `onto`, which has the new shape. Neither tensor is changed.
    """
    target = torch.zeros(shape, device=weight.device) if onto is None else onto.clone()
    sources: list[slice] = []
    targets: list[slice] = []
    for axis, (have, want) in enumerate(zip(weight.shape, shape, strict=True)):
        size = min(have, want)
        is_kernel = axis >= 2
        source_start = (have - size) // 2 if is_kernel else 0
        target_start = (want - size) // 2 if is_kernel else 0
        sources.append(slice(source_start, source_start + size))
        targets.append(slice(target_start, target_start + size))
    target[tuple(targets)] = weight[tuple(sources)]
    return target


def layer_outputs(weight: Tensor, bias: Tensor | None, noise: Tensor) -> Tensor:
    """Return a layer's outputs for noise: (samples, outputs).

    A convolution, with circular padding, has a row for each position of each sample.

    Args:
        weight: The layer's weight.
        bias: Its bias, or None.
        noise: Inputs (samples, channels), or (samples, channels, height, width) for a convolution,
            with at least as many channels as the layer has inputs; further ones are ignored.
    """
    x = noise[:, : weight.shape[1]]
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    padding: list[int] = []
    for size in reversed(weight.shape[2:]):  # F.pad starts with the last axis.
        padding += [size // 2, (size - 1) // 2]
    outputs = F.conv2d(F.pad(x, padding, mode="circular"), weight, bias)
    return outputs.movedim(1, -1).flatten(0, -2)


def is_head(client: Client, layer: nn.Module) -> bool:
    """Return whether a layer is the one that computes the logits of a client's network."""
    return layer is getattr(client.model, "head", None)


def describe_loss(record: Round) -> list[str]:
    """Return a remark if received layers lowered the mean local test by `NOTABLE_LOSS` or more."""
    before = record.values("before_local")
    after = record.values("local", before)
    if not after:
        return []
    mean_before = sum(before[k] for k in after) / len(after)
    mean_after = sum(after.values()) / len(after)
    if mean_before - mean_after < NOTABLE_LOSS:
        return []
    return [
        f"in round {record.round}, received layers lowered the clients' accuracy on local tests from "
        f"{mean_before:.1%} to {mean_after:.1%}"
    ]


@dataclass(frozen=True, kw_only=True)
class FedFree(Algorithm[Bridge, Client]):
    """Clients upload the layers that training changed most; each receives one layer."""

    sizes = ("largest",)
    crosses = {
        "learn": Crossing(
            up="the weights of the k layers that training changed most, and how much it "
            "changed each output",
        ),
        "receive": Crossing(down="the weights of one of the server's layers, or nothing"),
    }
    presets = {
        "paper": AS_PUBLISHED,
        "tableA2": {**AS_PUBLISHED, "epochs": 30},
        "sound": {},
    }
    retired = {"steps": 1}

    # -- The paper's fields

    fraction: Fraction = 1.0  # share of clients per round
    epochs: Count = 5  # E: local epochs
    batch_size: Count = 10  # B: images per step
    lr: Positive = 0.01  # η: learning rate of the clients' SGD
    layers: Count = 2  # k: critical layers that a client uploads
    # α: learning rate of the server's layers; 0.5 gives the mean of those uploaded; 0.01 in the
    # paper
    server_lr: Positive = 0.5
    samples: Count = 64  # samples of noise per step; not given in the paper
    side: Count = 8  # height and width of noise for convolutions; not given in the paper
    entropy: Entropy = "shannon"  # H: the entropy in Eq. 6
    tsallis_order: Positive = 1.5  # q: order of Tsallis' entropy, not 1; not given in the paper
    bins: Count = 256  # bins of the histogram that the entropy is computed from

    # -- Additions of barter; preset "paper" is without them

    # layers that correspond: those in the same place of one architecture, or those of the same
    # type and relative depth in any network (paper)
    match: Literal["place", "depth"] = "place"
    # outputs of a layer: weighted by how much they were trained, and received for own classes, or
    # all equally (paper)
    outputs: Literal["trained", "all"] = "trained"
    # Eq. 3 on samples of Gaussian noise (paper), or its expectation in closed form
    transfer: Literal["sampled", "analytic"] = "analytic"
    # weights that the received layer does not cover: set to zero (Eq. 7), or keep them
    fill: Literal["zero", "retain"] = "retain"
    # biases of a received head: chosen such that the mean logits of the client's images stay as
    # they are, or as received (paper)
    offset: Literal["own", "received"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tsallis_order == 1:
            raise ConfigError(
                "tsallis_order=1: Tsallis' entropy of order 1 is Shannon's; set entropy to shannon"
            )

    @property
    def credited(self) -> bool:
        """Return whether clients upload how much training changed each output."""
        return self.outputs == "trained"

    def largest(self, known: Known) -> int | None:
        """Return the largest size in bytes of a client's upload, its k largest layers.

        A layer has its weights, a bias and a credit for each output, and three strings or numbers.
        None means that the network is not known.
        """
        sizes = [
            shape.numel() + 2 * shape[0] for shape, _ in known.weights.values() if len(shape) > 1
        ]
        return sum(4 * size + 3 * WORD for size in sorted(sizes)[-self.layers :]) or None

    def setup(self, server: Bridge, clients: Clients) -> None:
        if self.match == "depth":
            network = fedfree_cnn(replace(server.spec, height=32, width=32)).to(server.device)
            server.layers = {layer["name"]: layer for layer in layers_of(network)}

    def round(self, server: Bridge, clients: Clients, t: int) -> None:
        active = clients.sample(self.fraction)
        uploads = active.run(self.learn).map(partial(self.check_upload, server))  # Eq. 2
        self.share(server, uploads)  # Eqs. 3-5
        gifts = self.align(server, uploads)  # Eq. 6
        active.scatter(self.receive, {k: gifts.get(k, []) for k in active})  # Eq. 7
        server.report["gifts"] = len(gifts)

    def learn(self, client: Client) -> Annotated[list[Layer], Room("largest")]:
        """Train locally and return the k layers that training changed most (Eq. 2).

        The change is relative (`relative_change`), the largest first. With `outputs` "trained",
        layers have a credit: how much training changed each output. The metrics before the exchange
        are reported.
        """
        before = layers_of(client.model)
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        record_before_exchange(client)
        after = layers_of(client.model)
        if self.credited:
            for old, new in zip(before, after, strict=True):
                new["credit"] = output_changes(old, new)
        changes = torch.stack(
            [relative_change(old, new) for old, new in zip(before, after, strict=True)]
        )
        critical = changes.argsort(descending=True, stable=True)[: self.layers].tolist()
        client.report["given"] = len(critical)
        return [after[position] for position in critical]

    def check_upload(self, server: Bridge, k: int, uploaded: list[Layer]) -> list[Layer]:
        """Check that client `k`'s network has the uploaded layers, and return them.

        If the server cannot build the network, only the number of axes, the kernels' size, and
        number and names of the layers are checked.

        Raises:
            PayloadError: A layer is not one of the network's, is uploaded twice, or there are more
                than `self.layers` layers.
        """
        expected = layers_of(server.architectures[k]()) if k in server.architectures else uploaded
        outlines = {layer["name"]: layer_signature(layer) for layer in expected}
        for layer in uploaded:
            kind, shape, _ = layer_signature(layer)
            axes = 4 if kind == "conv" else 2
            kernel = max(shape[2:], default=0)
            same = outlines.get(layer["name"]) == layer_signature(layer)
            if not same or len(shape) != axes or kernel > MAX_KERNEL_SIDE:
                raise PayloadError(
                    f"{layer['name']} is not a layer of the client's network: {kind} {tuple(shape)}"
                )
        names = {layer["name"] for layer in uploaded}
        if len(names) < len(uploaded) or len(uploaded) > self.layers:
            raise PayloadError(
                f"{len(uploaded)} layers, expected at most {self.layers} different ones"
            )
        return uploaded

    def share(self, server: Bridge, uploads: Replies[list[Layer]]) -> None:
        """Train each of the server's layers to imitate the corresponding uploaded layers.

        `server.layers` is updated. Layers to which no upload corresponds stay as they are; with
        `match` "place", a layer that the server lacks starts as the first uploaded one.
        """
        teachers: dict[str, list[Layer]] = {}
        for k, uploaded in uploads.items():
            for layer in uploaded:
                name = self.matching_layer(server, k, layer)
                if name is not None:
                    teachers.setdefault(name, []).append(layer)
        for name, imitated in teachers.items():
            server.layers[name] = self.imitate(server.layers.get(name, imitated[0]), imitated)

    def matching_layer(self, server: Bridge, k: int, layer: Layer) -> str | None:
        """Return the name of the server's layer that corresponds to a layer of client k.

        With `match` "place" it is ARCHITECTURE/LAYER, which the server may not have yet; otherwise
        the `counterpart`, or None without one.
        """
        if self.match == "place":
            return f"{server.names[k]}/{layer['name']}"
        return counterpart(layer, server.layers)

    def imitate(self, g: Layer, teachers: Sequence[Layer]) -> Layer:
        """Return layer `g` after one gradient step of rate `server_lr` on Eq. 3.

        Args:
            g: The server's layer, which is not changed; a missing bias counts as zero.
            teachers: The clients' layers whose outputs it is to reproduce, weighted by
                `teacher_weights`.

        Returns:
            The new layer, always with a bias.
        """
        w = g["weight"].clone().requires_grad_()
        b = g.get("bias", torch.zeros(len(w), device=w.device)).clone().requires_grad_()
        if self.transfer == "analytic":
            gaps = [self.expected_discrepancy(w, b, layer) for layer in teachers]
        else:
            inputs = max(w.shape[1], *(layer["weight"].shape[1] for layer in teachers))
            kernels = [size for layer in (g, *teachers) for size in layer["weight"].shape[2:]]
            sides = [max(self.side, *kernels)] * 2 if kernels else []
            noise = torch.randn(self.samples, inputs, *sides, device=w.device)
            gaps = [self.discrepancy(w, b, layer, noise) for layer in teachers]
        losses = [
            (weight[: len(gap)] * gap).sum()
            for weight, gap in zip(self.teacher_weights(teachers), gaps, strict=True)
        ]
        w_gradient, b_gradient = torch.autograd.grad(torch.stack(losses).sum(), (w, b))
        return {
            "name": g["name"],
            "kind": g["kind"],
            "depth": g["depth"],
            "weight": w.detach() - self.server_lr * w_gradient,
            "bias": b.detach() - self.server_lr * b_gradient,
        }

    def teacher_weights(self, teachers: Sequence[Layer]) -> list[Tensor]:
        """Return each teacher's weight for each of its outputs.

        Teachers may differ in width. With `outputs` "all" a weight is 1 / number of teachers.
        Otherwise it is proportional to how much training changed the output, with a sum of 1 over
        the teachers that have the output. Outputs that no training changed have weights of 0. The
        change is a layer's "credit"; a layer without it counts as 1 for every output.
        """
        credit = [
            layer.get("credit", layer["weight"].new_ones(len(layer["weight"])))
            for layer in teachers
        ]
        if self.outputs == "all":
            return [torch.ones_like(c) / len(teachers) for c in credit]
        most_outputs = torch.Size([max(map(len, credit))])
        total = torch.stack([resize_weight(c, most_outputs) for c in credit]).sum(0)
        return [c / (total[: len(c)] + MIN_NORM) for c in credit]

    def discrepancy(self, w: Tensor, b: Tensor, layer: Layer, noise: Tensor) -> Tensor:
        """Return the mean squared difference of two layers' outputs on noise (Eq. 3).

        The mean is over samples and positions.

        Args:
            w: Weights of the first layer.
            b: Bias of the first layer.
            layer: The second layer.
            noise: Inputs of both layers, as wide as the wider one, see `layer_outputs`.

        Returns:
            One value per output that both layers have.
        """
        outputs = min(len(w), len(layer["weight"]))
        target = layer_outputs(layer["weight"], layer.get("bias"), noise)[:, :outputs]
        return (layer_outputs(w, b, noise)[:, :outputs] - target).square().mean(0)

    def expected_discrepancy(self, w: Tensor, b: Tensor, layer: Layer) -> Tensor:
        """Return the expected `discrepancy` over standard normal noise, in closed form.

        Kernels of different sizes are aligned as in `resize_weight`.
        """
        outputs = min(len(w), len(layer["weight"]))
        inner = [max(a, c) for a, c in zip(w.shape[1:], layer["weight"].shape[1:], strict=True)]
        shape = torch.Size([outputs, *inner])
        target_bias = layer.get("bias", torch.zeros(outputs, device=w.device))[:outputs]
        gap = resize_weight(w[:outputs], shape) - resize_weight(layer["weight"][:outputs], shape)
        return gap.flatten(1).square().sum(1) + (b[:outputs] - target_bias).square()

    def align(self, server: Bridge, uploads: Replies[list[Layer]]) -> dict[int, list[Layer]]:
        """Select for each client the server's layer with the largest knowledge gain.

        The gain is over a layer that the client uploaded, which the selected one is to replace.
        Clients without a positive gain are left out.

        Returns:
            Client -> a list of the one layer, under the name of the client's layer to replace.
        """
        gifts: dict[int, list[Layer]] = {}
        for k, uploaded in uploads.items():
            best = 0.0
            for layer in uploaded:
                for g in self.candidates(server, k, layer):
                    gain = self.gain(layer["weight"], g["weight"])
                    if gain > best:
                        best = gain
                        gifts[k] = [{**g, "name": layer["name"]}]
        return gifts

    def candidates(self, server: Bridge, k: int, layer: Layer) -> list[Layer]:
        """Return the server's layers that may replace this one of client k.

        It is the corresponding one alone or, with `match` "depth", all of its kind.
        """
        if self.match == "place":
            return [server.layers[f"{server.names[k]}/{layer['name']}"]]
        return [g for g in server.layers.values() if g["kind"] == layer["kind"]]

    def gain(self, theta: Tensor, g: Tensor) -> float:
        """Return the knowledge gain KGE of weights `g` over weights `theta` (Eq. 6).

        It is the entropy of `g` less that of `theta`, see `weight_entropy`.
        """
        local = weight_entropy(theta, self.entropy, self.bins, self.tsallis_order)
        shared = weight_entropy(g, self.entropy, self.bins, self.tsallis_order)
        return shared - local

    def receive(self, client: Client, gifts: list[Layer]) -> None:
        """Copy the received layer, if any, over the client's layer of its name (Eq. 7).

        It is fitted to the shape of the client's layer. With `outputs` "trained", a head changes
        only for the client's classes; with `offset` "own", the biases of a received head are then
        moved, so that the mean logits of the client's images are as before.

        Args:
            client: The client, whose model is changed in place.
            gifts: The received layer, or nothing.
        """
        client.report["taken"] = len(gifts)
        for g in gifts:
            layer = client.model.get_submodule(g["name"])
            if self.offset == "own" and is_head(client, layer):
                mean_features = features_of(client.model, client.data).mean(0)
                mean_logits = layer(mean_features).detach()
                self.copy_layer(client, layer, g)
                if isinstance(layer.bias, Tensor):
                    layer.bias.data += mean_logits - layer(mean_features).detach()
            else:
                self.copy_layer(client, layer, g)

    def copy_layer(self, client: Client, layer: nn.Module, received: Layer) -> None:
        """Copy a received layer over one of the client's.

        With `outputs` "trained", only a head's rows of the client's classes are copied.
        """
        outputs = slice(None) if self.outputs == "all" else self.trained_outputs(client, layer)
        for parameter, values in (
            (layer.weight, received["weight"]),
            (layer.bias, received["bias"]),
        ):
            if isinstance(parameter, Tensor):
                projected = self.fit_to_layer(values, parameter.detach())
                parameter.data[outputs] = projected[outputs]

    def trained_outputs(self, client: Client, layer: nn.Module) -> Tensor | slice:
        """Return the outputs of a layer that the client's data train.

        Returns:
            For the head, a mask of the client's classes; for other layers, a slice of all outputs.
        """
        if is_head(client, layer):
            return client.data.class_counts() > 0
        return slice(None)

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        if not rounds:
            return []
        if any(r.server.get("gifts") for r in rounds):
            return describe_loss(rounds[-1])
        why = (
            "layers are exchanged only among clients of the same architecture; "
            "fedproto and dffke work with different ones"
        )
        if self.match == "depth":
            why = "no layer of the server had more entropy than the clients'; raise server_lr"
        return [
            f"no layer was exchanged in {len(rounds)} rounds, so clients only trained locally: "
            f"{why}"
        ]

    def fit_to_layer(self, received: Tensor, place: Tensor) -> Tensor:
        """Return a received weight or bias in the shape of the client's own (Eq. 7).

        If `fill` is "retain", it is placed along each axis (`resize_weight`), and entries that it
        does not cover keep the client's values. Otherwise its entries are copied in flattened order
        and the rest is zero.

        Args:
            received: The received tensor.
            place: The client's tensor, which is not changed.
        """
        if self.fill == "retain":
            return resize_weight(received, place.shape, place)
        flat = torch.zeros(place.numel(), device=place.device)
        size = min(received.numel(), place.numel())
        flat[:size] = received.flatten()[:size]
        return flat.view(place.shape)
