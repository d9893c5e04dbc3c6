"""Class moments: a method of barter, without a paper, for federations that need a privacy guarantee.

Clients with different networks share one upload each: sums over their images of features that
depend on no private data, as in Fed3R (Fanì et al., ICML 2024) and FedPFT (Beitollahi et al.,
arXiv:2402.01862). One image changes a sum little, so that little noise protects it (`[privacy]`).
Decoding and learning follow DFFKE.

1. Each client uploads, once in a run, the moments of its images: the number of images and the sum of
   features of each class, and the sum of x xᵀ over all images.
2. The server adds all moments and makes a Gaussian of each class, with a common covariance. It
   trains a decoder whose images have the features that are sampled from the Gaussians.
3. In its first round, each client first trains on its private images alone.
4. In every round each client samples features and decodes them to images. It blends half of the
   images with crops of two photographs. It trains on all of them and on its private images. The
   Gaussians' discriminant, applied to the augmented image, gives the logits to learn.

Networks never leave the clients. After the upload nothing else depends on private images, so that ε
of one release holds for the whole run.

Differences from the methods that it follows:

- Fed3R solves a ridge regression and FedPFT fits mixtures for each client. Both share a network on
  the fixed features; here clients keep any networks, which never see these features.
- DFFKE's features are those of the clients' networks, which were trained on private images. No
  noise on such features gives a guarantee for the run.
- Features are centred and whitened by crops of two photographs, and scaled to norm 1, so that the
  influence of an image is bounded without a choice of a clipping norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from barter.algorithms.dffke import augment_and_resize, review_loss
from barter.compute import lanes
from barter.core import seeds
from barter.core.algorithm import Algorithm, Crossing, ServerClassifier
from barter.core.clients import Clients
from barter.core.contracts import Content
from barter.core.errors import ConfigError
from barter.core.evaluation import predict, record_before_exchange, score
from barter.core.images import Images, Spec, channel_statistics, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Whole,
    did_you_mean,
)
from barter.core.payload import Payload, State
from barter.core.record import Round
from barter.models.generators import PixelDecoder, decoder_side, resize_images
from barter.models.zoo import ZOO, build_network
from barter.ops.distill import kl
from barter.ops.fit import Subject, Trainer, adam, alternate, epoch_length, fit, join_subjects
from barter.ops.moments import (
    Moments,
    SharedGaussian,
    Whitening,
    add_moments,
    fit_whitening,
    sample_features,
    shared_gaussians,
    sum_moments,
    whiten_features,
)
from barter.ops.photographs import photograph_images
from barter.ops.shares import log_class_prior
from barter.ops.transfer import to_half, to_single

__all__ = ["ClassMoments", "Discriminant", "MomentsClient", "MomentsServer", "decoding_loss"]

CROPS = 4000  # crops of photographs by which features are whitened
COMPARED_CROPS = 8  # crops by which clients check that their features are the server's
FEATURE_TOLERANCE = 0.01  # largest difference of such components, which have norm 1
UNKNOWN = 30.0  # logits of unknown classes are by so much below the lowest one of the others
# Parameters of the largest built-in extractor that is built for a checkpoint, which does not hold
# its weights: 1 GiB.
LARGEST_EXTRACTOR = 2**28
IMAGES_OF_A_CLASS = 10  # decoded images of each class that reports choose from


class Reference(TypedDict):
    """The whitening of features, and an example by which clients check theirs."""

    whitening: Annotated[Whitening, Content("exact")]
    example: Annotated[Tensor, Content("exact")]  # the components of some crops of photographs


class Knowledge(TypedDict):
    """Gaussians to sample from and their decoder; empty if there are none, or none are new.

    A client that could not upload moments also gets the whitening, which others have already.
    """

    gaussians: NotRequired[Annotated[SharedGaussian, Content("exact")]]
    decoder: NotRequired[State]
    reference: NotRequired[Reference]


class MomentsServer(Server):
    """A server that holds the clients' moments, and the Gaussians and decoder made of them."""

    whitening: dict[str, Tensor] = {}  # a `Whitening`; empty before the first round
    moments: dict[int, Moments] = {}
    images: dict[int, int] = {}  # for each of these clients, its number of images
    knowledge: Knowledge = {}
    version: int = 0  # how often the knowledge has changed
    held: dict[int, int] = {}  # for each client, the version that it was sent
    decoder: State = {}  # the last decoder, from which training continues when moments arrive


class MomentsClient(Client):
    """A client that remembers the whitening, the Gaussians and the decoder that it was sent."""

    whitening: dict[str, Tensor] = {}  # a `Whitening`; empty before the first call
    knowledge: Knowledge = {}
    trained: bool = False  # whether it has trained on its private images alone


class Discriminant(Classifier):
    """The classifier that follows from the Gaussians, on whitened fixed features."""

    center: Tensor
    projection: Tensor
    weights: Tensor
    bias: Tensor
    known: Tensor

    def __init__(
        self, extractor: Classifier, whitening: Whitening, gaussians: SharedGaussian, spec: Spec
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.spec = spec
        self.feature_dim = len(gaussians["factor"])
        self.register_buffer("center", whitening["center"])
        self.register_buffer("projection", whitening["projection"])
        self.register_buffer("weights", gaussians["weights"])
        self.register_buffer("bias", gaussians["bias"])
        self.register_buffer("known", gaussians["known"])

    def features(self, x: Tensor) -> Tensor:
        inputs = change_format(x, self.spec, public_format(self.spec))
        whitening: Whitening = {"center": self.center, "projection": self.projection}
        return whiten_features(self.extractor.features(inputs), whitening)

    def logits(self, features: Tensor) -> Tensor:
        return linear_logits(features, self.weights, self.bias, self.known)


def discriminant_logits(gaussians: SharedGaussian, x: Tensor) -> Tensor:
    """Return the discriminant's logits of components (images, classes)."""
    return linear_logits(x, gaussians["weights"], gaussians["bias"], gaussians["known"])


def linear_logits(x: Tensor, weights: Tensor, bias: Tensor, known: Tensor) -> Tensor:
    """Return the logits of components (images, classes).

    Those of classes that are not known are far below all others: by `UNKNOWN`, from the lowest.
    """
    logits = F.linear(x, weights, bias)
    lowest = logits.masked_fill(~known, torch.inf).amin(1, keepdim=True)
    return torch.where(known, logits, lowest - UNKNOWN)


def decoding_loss(
    decoder: PixelDecoder,
    extractor: Classifier,
    spec: Spec,
    codes: Tensor,
    center: Tensor,
    projection: Tensor,
) -> Tensor:
    """Return the mean squared distance between codes and the components of decoded images.

    Args:
        decoder: The decoder, which is trained.
        extractor: The network of the fixed features.
        spec: Format of the extractor's input, see `public_format`.
        codes: The components to decode (images, components), of norm 1.
        center: The center of the features' whitening.
        projection: Its projection.
    """
    whitening: Whitening = {"center": center, "projection": projection}
    images = resize_images(render_codes(decoder, codes), spec)
    components = whiten_features(extractor.features(images).float(), whitening)
    return (components - codes).square().sum(1).mean()


def render_codes(decoder: PixelDecoder, codes: Tensor) -> Tensor:
    """Return the normalised images of codes of norm 1, in the decoder's size."""
    # Scaled to numbers of about 1, as the first layer expects them.
    images: Tensor = decoder((codes * codes.shape[1] ** 0.5)[:, None])
    return images


@dataclass(frozen=True, kw_only=True)
class ClassMoments(Algorithm[MomentsServer, MomentsClient]):
    """Networks learn from images that are decoded from the classes' joint moments."""

    crosses = {
        "describe": Crossing(
            down="the whitening of fixed features",
            up="once: numbers of images and sums of fixed features by class, sums of their products",
        ),
        "exchange": Crossing(
            down="a Gaussian of each class and a decoder, if they are new; the whitening, if the "
            "client could not upload"
        ),
    }
    tells = {"describe.counts": "sum", "describe.sums": "sum", "describe.squares": "sum"}
    once = frozenset({"describe"})
    sizes = ("components",)

    fraction: Fraction = 1.0  # fraction of clients sampled per round
    # the network of the fixed features: a name of the zoo, or package.module:function; it must not
    # depend on private images, and be the same at every client. Its inputs have mean 0.5 and
    # deviation 0.25 in place of those of private pixels
    extractor: str = "filters"
    components: Count = 200  # d: principal components of the features
    tau: Fraction = 0.98  # τ: local training ends when an epoch's training accuracy reaches it
    max_epochs: Whole = 30  # largest number of local epochs, before the first exchange
    decoder_steps: Count = 600  # steps of the decoder, whenever new moments have arrived
    decoder_batch: Count = 50  # sampled codes in a step of the decoder
    samples: Count = 3000  # decoded images of a client in a round, sampled anew each time
    # fraction of the decoded images that are blended with crops of photographs
    blended: Annotated[float, Range(ge=0, le=1)] = 0.5
    # what clients learn: the discriminant's logits of each image as they see it, augmented and
    # blended; or its logits of the components that were sampled, which needs blended = 0
    targets: Literal["images", "components"] = "images"
    exchange_epochs: Count = 3  # passes over them
    lr: Positive = 1e-3  # η: Adam's learning rate, for every network
    weight_decay: NonNegative = 1e-5  # weight decay of the clients' Adam
    batch_size: Count = 100  # B: images per step, half of them decoded

    def __post_init__(self) -> None:
        super().__post_init__()
        if ":" not in self.extractor and self.extractor not in ZOO:
            raise ConfigError(
                f"extractor={self.extractor!r} is neither a network of the zoo nor "
                f"package.module:function: {did_you_mean(self.extractor, ZOO)}"
            )
        if self.targets == "components" and self.blended:
            raise ConfigError(
                f"targets='components' with blended={self.blended:g}: blended images do not have "
                "the components that were sampled; use blended=0, or targets='images'"
            )

    def setup(self, server: MomentsServer, clients: Clients) -> None:
        """Compute the whitening of the extractor's features from crops of photographs."""
        if server.spec.channels not in (1, 3):
            raise ConfigError(
                f"moments: the task's images have {server.spec.channels} channels, and the "
                "photographs by which features are whitened have 1 (grey) or 3"
            )
        extractor = self.build_extractor(server)
        crops = torch.arange(CROPS, device=server.device)
        features = predict(extractor.features, partial(photographs, server.spec), crops)
        whitening = fit_whitening(features, self.components)
        server.whitening = {
            "center": whitening["center"],
            "projection": whitening["projection"],
        }

    def round(self, server: MomentsServer, clients: Clients, t: int) -> None:
        participants = clients.sample(self.fraction)
        reference = self.make_reference(server)
        new = participants.run_missing(self.describe, server.moments, reference)
        if new:
            server.moments = {**server.moments, **new}
            server.images = {**server.images, **new.num_examples}
            self.renew_knowledge(server)
        deliveries = {k: self.make_delivery(server, k, reference) for k in participants}
        answers = participants.scatter(self.exchange, deliveries)
        server.held |= dict.fromkeys(answers, server.version)

    def make_delivery(self, server: MomentsServer, k: int, reference: Reference) -> Knowledge:
        """Return Gaussians and decoder for a client; empty if it has them, or there are none.

        A client that has sent no moments also gets the whitening.
        """
        if server.held.get(k) == server.version:
            return {}
        if server.knowledge and k not in server.moments:
            return {**server.knowledge, "reference": reference}
        return server.knowledge

    def build_extractor(self, party: Server | Client) -> Classifier:
        """Return the frozen network of the fixed features; it is the same for every party."""
        spec = public_format(party.data.spec if isinstance(party, Client) else party.spec)

        def make() -> Classifier:
            return self.make_extractor(spec).to(party.device)

        return lanes.lane_module(("extractor", self.extractor, spec), make).eval()

    def make_extractor(self, spec: Spec) -> Classifier:
        """Build the network of the fixed features for images of a public format, on the CPU."""
        with seeds.scope(0, "extractor"):
            return build_network(self.extractor, spec).eval().requires_grad_(False)

    def make_reference(self, server: MomentsServer) -> Reference:
        """Return the whitening, and the components of some crops of photographs."""
        whitening = whitening_of(server)
        extractor = self.build_extractor(server)
        return {
            "whitening": whitening,
            "example": example_components(extractor, whitening, server.spec),
        }

    def local_offset(self, client: MomentsClient) -> Tensor | None:
        return log_class_prior(client.data)

    def describe(self, client: MomentsClient, reference: Reference) -> Moments:
        """Return the moments of all private images; they do not depend on the client's network.

        Raises:
            ConfigError: If the client's extractor computes other features than the server's.
        """
        self.adopt_whitening(client, reference)
        data = client.data
        extractor = self.build_extractor(client)

        def inputs(index: Tensor) -> Tensor:
            return change_format(data.batch(index), data.spec, public_format(data.spec))

        every = torch.arange(len(data), device=data.device)
        features = predict(extractor.features, inputs, every)
        components = whiten_features(features, whitening_of(client))
        return sum_moments(components, data.labels, data.spec.classes)

    def adopt_whitening(self, client: MomentsClient, reference: Reference) -> None:
        """Remember the server's whitening, if the client's extractor is the server's.

        Both compute the components of the same crops of photographs, which must agree.

        Raises:
            ConfigError: If the client's extractor computes other components.
        """
        whitening = reference["whitening"]
        data = client.data
        extractor = self.build_extractor(client)
        same = extractor.feature_dim == len(whitening["center"])
        if same:
            own = example_components(extractor, whitening, data.spec)
            same = torch.allclose(own, reference["example"], atol=FEATURE_TOLERANCE)
        if not same:
            raise ConfigError(
                f"extractor={self.extractor!r}: its features here are not the server's; every party "
                "must have the same code and the same weights"
            )
        client.whitening = {
            "center": whitening["center"],
            "projection": whitening["projection"],
        }

    def renew_knowledge(self, server: MomentsServer) -> None:
        """Make Gaussians and decoder of all moments; report the number of classes.

        If no class is known, the knowledge stays as it is.
        """
        joint = add_moments(server.moments.values())
        gaussians = shared_gaussians(joint, sum(server.images.values()))
        n_known = int(gaussians["known"].sum())
        server.report["classes"] = n_known
        if n_known:
            server.decoder = self.train_decoder(server, gaussians)
            server.knowledge = {"gaussians": gaussians, "decoder": to_half(server.decoder)}
            server.version += 1

    def train_decoder(self, server: MomentsServer, gaussians: SharedGaussian) -> State:
        """Train a decoder of samples of the Gaussians to images; return its state.

        Training continues from `server.decoder`, unless it is empty. The mean loss of the last
        tenth of the steps is reported.
        """
        spec = public_format(server.spec)
        new = PixelDecoder(self.components, spec).to(server.device)
        decoder = lanes.keep(("pixel decoder", spec), new).train()
        if server.decoder:
            decoder.load_state_dict(server.decoder)
        extractor = self.build_extractor(server)
        whitening = whitening_of(server)
        trainer = Trainer.of(decoder, adam(self.lr, cosine=True))
        # Tensors of the whitening are part of the batch, so that a step can be a CUDA graph.
        loss = partial(decoding_loss, decoder, extractor, spec)
        constants = (whitening["center"], whitening["projection"])
        last_steps = -(-self.decoder_steps // 10)
        total = torch.zeros((), device=server.device)
        for step in server.track("decoder", range(self.decoder_steps)):
            codes = self.sample_codes(gaussians, self.decoder_batch)
            value = trainer.step(loss, codes, *constants)
            if step >= self.decoder_steps - last_steps:
                total += value
            trainer.anneal((step + 1) / self.decoder_steps)
        server.report["decoder_loss"] = float(total) / last_steps
        return {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}

    def sample_codes(self, gaussians: SharedGaussian, count: int) -> Tensor:
        """Return samples of random known classes (count, components)."""
        device = gaussians["means"].device
        classes = gaussians["known"].nonzero().flatten()
        labels = classes[torch.randint(len(classes), (count,), device=device)]
        noise = torch.randn(count, self.components, device=device)
        return sample_features(gaussians, labels, noise)

    def exchange(self, client: MomentsClient, knowledge: Knowledge) -> None:
        """Train on decoded images and on private images, half of a batch each.

        Before that, in its first call, the client trains on private images alone, and its metrics
        are recorded. As long as there is no decoder, nothing else is done.

        Args:
            client: The client, whose model is trained in place.
            knowledge: What images are sampled and decoded from; empty if the client has it.
        """
        if "reference" in knowledge:
            self.adopt_whitening(client, knowledge["reference"])
        if "gaussians" in knowledge:
            client.knowledge = {
                "gaussians": knowledge["gaussians"],
                "decoder": knowledge["decoder"],
            }
        if not client.trained:
            self.train(client)
            record_before_exchange(client, self.local_offset(client))
            client.trained = True
        if client.knowledge:
            if not client.whitening:
                raise ConfigError(
                    "this run was begun by an earlier version of moments, whose clients did not "
                    "keep the whitening; start a new run"
                )
            self.learn_from_images(client)

    def train(self, client: MomentsClient) -> None:
        """Train on private images until the training accuracy reaches τ, or for `max_epochs`."""
        fit(
            client,
            epochs=self.max_epochs,
            goal=self.tau,
            batch_size=self.batch_size,
            recipe=adam(self.lr, self.weight_decay, cosine=True),
            by_class=self.local_offset(client),
        )

    def learn_from_images(self, client: MomentsClient) -> None:
        """Train on newly decoded images and on private images."""
        data = client.data
        gaussians = client.knowledge["gaussians"]
        codes = self.sample_codes(gaussians, self.samples)
        images = decode_codes(client.knowledge["decoder"], data.spec, codes)
        augment = data.augment.rescale(data.side, decoder_side(data.spec))
        show = partial(augment_and_resize, data.spec, augment)
        private = Subject(
            [data.pixels, data.labels],
            partial(prepare_batch, spec=data.spec, augment=data.augment),
            partial(review_loss, client.model),
            (log_class_prior(data),),
        )
        if self.targets == "components":
            logits = discriminant_logits(gaussians, codes)
            decoded = Subject([images, logits], show, partial(imitation_loss, client.model))
        else:
            blend_with_photographs(images, round(self.blended * len(images)), data.spec)
            extractor = self.build_extractor(client)
            whitening = whitening_of(client)
            # Tensors of the discriminant are arguments, so that a step can be a CUDA graph.
            constants = (
                whitening["center"],
                whitening["projection"],
                gaussians["weights"],
                gaussians["bias"],
                gaussians["known"],
            )
            loss = partial(guided_loss, client.model, extractor, data.spec)
            decoded = Subject([images], show, loss, constants, by_inputs=True)
        course = join_subjects(client.model, [private, decoded], self.batch_size)
        passes = self.exchange_epochs * epoch_length(len(images), self.batch_size)
        alternate(client, [course], 2 * passes, adam(self.lr, self.weight_decay, cosine=True))

    def evaluate_server(self, server: MomentsServer, test: Images) -> dict[str, float]:
        """Return the metrics of the discriminant on a test set; empty before it is known."""
        if not server.knowledge:
            return {}
        extractor = self.build_extractor(server)
        gaussians = server.knowledge["gaussians"]
        model = Discriminant(extractor, whitening_of(server), gaussians, test.spec)
        return score(model, test, "global", server.evaluation)

    def server_classifier(
        self, memory: Mapping[str, Payload], spec: Spec
    ) -> ServerClassifier | None:
        # Its inputs have the public format, so that statistics of private pixels stay private.
        public = public_format(spec)
        gaussians = memory["knowledge"].get("gaussians")
        if gaussians is None:
            return None
        self.require_size(public)
        extractor = self.make_extractor(public)
        self.require_shapes(extractor, memory["whitening"], gaussians, spec.classes)
        network = Discriminant(extractor, memory["whitening"], gaussians, public)
        return ServerClassifier(f"discriminant of {self.extractor}", network.eval(), public)

    def require_size(self, spec: Spec) -> None:
        """Check the size of a built-in extractor before memory is allocated for it.

        Raises:
            ValueError: If it has more than `LARGEST_EXTRACTOR` parameters.
        """
        if ":" in self.extractor:
            return  # It is code that the user consented to.
        try:
            with torch.device("meta"):
                network = ZOO[self.extractor](spec)
        except (NotImplementedError, RuntimeError):
            return  # Building it needs values, as the filters do, which have few parameters.
        size = sum(parameter.numel() for parameter in network.parameters())
        if size > LARGEST_EXTRACTOR:
            raise ValueError(f"extractor {self.extractor} would have {size:,} parameters")

    def require_shapes(
        self,
        extractor: Classifier,
        whitening: Mapping[str, Tensor],
        gaussians: SharedGaussian,
        classes: int,
    ) -> None:
        """Check the shapes of what a checkpoint says of the discriminant.

        Raises:
            ValueError: If a tensor has another shape than its extractor and the task require.
        """
        width = self.components
        wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "center": (whitening["center"], (extractor.feature_dim,)),
            "projection": (whitening["projection"], (extractor.feature_dim, width)),
            "factor": (gaussians["factor"], (width, width)),
            "weights": (gaussians["weights"], (classes, width)),
            "bias": (gaussians["bias"], (classes,)),
            "known": (gaussians["known"], (classes,)),
        }
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and not {shape}")

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        known = [record.server["classes"] for record in rounds if "classes" in record.server]
        if not known or known[-1]:
            return super().remarks(rounds)
        return [
            "no class has enough images to be described, so training was local only: use more "
            "images, fewer components, or less noise"
        ]

    def creations(
        self, party: MomentsServer | MomentsClient, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        # Clients have the same as the server.
        if not isinstance(party, MomentsServer) or not party.knowledge:
            return None
        gaussians = party.knowledge["gaussians"]
        labels = gaussians["known"].nonzero().flatten().repeat_interleave(IMAGES_OF_A_CLASS)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(len(labels), self.components, generator=generator).to(labels.device)
        chosen = wanted(labels)
        codes = sample_features(gaussians, labels[chosen], noise[chosen])
        images = decode_codes(party.knowledge["decoder"], party.spec, codes)
        return labels[chosen], resize_images(images, party.spec)


def public_format(spec: Spec) -> Spec:
    """Return a task's format with constants in place of its private pixels' mean and deviation."""
    return replace(spec, mean=(0.5,) * spec.channels, std=(0.25,) * spec.channels)


def change_format(images: Tensor, before: Spec, after: Spec) -> Tensor:
    """Return normalised images normalised by the mean and deviation of another format."""
    mean, std = channel_statistics(before, images.device)
    new_mean, new_std = channel_statistics(after, images.device)
    return (images * std + mean - new_mean) / new_std


def photographs(spec: Spec, index: Tensor) -> Tensor:
    """Return crops of photographs in the public format of a task, at its networks' input size."""
    public = public_format(spec)
    return resize_images(photograph_images(public, index, CROPS, seed=0), public)


def whitening_of(party: MomentsServer | MomentsClient) -> Whitening:
    """Return the whitening that `setup` has computed, and that clients have been sent."""
    return {
        "center": party.whitening["center"],
        "projection": party.whitening["projection"],
    }


def example_components(extractor: Classifier, whitening: Whitening, spec: Spec) -> Tensor:
    """Return the components of the first crops of photographs."""
    index = torch.arange(COMPARED_CROPS, device=whitening["center"].device)
    features = predict(extractor.features, partial(photographs, spec), index)
    return whiten_features(features, whitening)


def decode_codes(decoder: State, spec: Spec, codes: Tensor) -> Tensor:
    """Return the images of codes in the decoder's size, normalised as the task's images are.

    Args:
        decoder: State of a `PixelDecoder`, in half precision.
        spec: Format of the task's images.
        codes: The components to decode (images, components).
    """
    public = public_format(spec)
    network = PixelDecoder.from_state(to_single(decoder), public)
    index = torch.arange(len(codes), device=codes.device)
    images = predict(partial(render_codes, network), lambda part: codes[part], index)
    return change_format(images, public, spec)


def blend_with_photographs(images: Tensor, count: int, spec: Spec) -> None:
    """Blend the first images with crops of photographs, in place.

    Each of them becomes w x + (1 - w) c, where x is the image. The crop c and the weight w, uniform
    from 0 to 1, are drawn for each image in each call.

    Args:
        images: Images in the decoder's size, normalised as the task's images are.
        count: How many of them are blended.
        spec: Format of the task's images.
    """
    if not count:
        return
    public = public_format(spec)
    seed = int(torch.randint(2**31, ()))
    index = torch.arange(count, device=images.device)
    crops = change_format(photograph_images(public, index, count, seed), public, spec)
    # Decoded images have a side that is a multiple of 4.
    crops = F.interpolate(crops, images.shape[-2:], mode="bilinear").to(images)
    weights = torch.rand(count, 1, 1, 1, device=images.device)
    images[:count] = torch.lerp(crops, images[:count], weights)


def guided_loss(
    model: Classifier,
    extractor: Classifier,
    spec: Spec,
    x: Tensor,
    features: Tensor,
    center: Tensor,
    projection: Tensor,
    weights: Tensor,
    bias: Tensor,
    known: Tensor,
) -> Tensor:
    """Return KL(discriminant ‖ student) of logits of the same images.

    The discriminant gets the fixed features of the images, and no gradient.

    Args:
        model: The student, of which only the head is used.
        extractor: The network of the fixed features.
        spec: Format of the task's images.
        x: The student's input: normalised images (N, C, H, W).
        features: The student's features of these images.
        center: The center of the fixed features' whitening.
        projection: Its projection.
        weights: The weights of the discriminant.
        bias: Its bias.
        known: Which classes it knows.
    """
    whitening: Whitening = {"center": center, "projection": projection}
    with torch.no_grad():
        inputs = change_format(x, spec, public_format(spec))
        components = whiten_features(extractor.features(inputs).float(), whitening)
        target = linear_logits(components, weights, bias, known)
    return kl(target, model.logits(features))


def imitation_loss(model: Classifier, features: Tensor, target: Tensor) -> Tensor:
    """Return KL(target ‖ student) of logits, from a student's features of decoded images."""
    return kl(target, model.logits(features))
