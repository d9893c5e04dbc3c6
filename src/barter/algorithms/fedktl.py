"""FedKTL: Zhang et al., "An Upload-Efficient Scheme for Transferring Knowledge From a Server-Side Pre-trained Generator
to Clients in Heterogeneous Federated Learning", CVPR 2024, Algorithm 1 (arXiv:2403.15760).

The server has a generator of images that was pre-trained on other data. Clients train with heads
whose classes are equally far apart, a simplex equiangular tight frame (ETF).

One round:

1. Sampled clients train on their own images. From the second round on they also learn to predict,
   from the generated image of each class, the latent vector from which it was generated.
2. They upload their prototypes: for each of their classes, its mean direction in the space of the
   frame.
3. The server trains a network that maps prototypes to latent vectors of the generator.
4. The server generates one image for each class from the mean latent vector of the class.

Differences from the paper:

- The projection from features to latent vectors is reset in each round, to the same weights at all
  clients, as in the authors' code.
- The frame has as many dimensions as classes, as in the code, and is not rotated at random.
- Images are generated for classes that some client has sent so far; the code generates all classes,
  including those that no client has.
- Images are sent as bytes and normalised as the clients' own; in the code they are scaled from -1
  to 1 whatever the range of the data.
- Predictions are by the nearest vertex of the frame, which is the network's largest logit.

Where the paper is ambiguous, the implementation follows the authors' code: constants of ArcFace's
loss (0.5 and 64), kernels of the discrepancy, trained centres, gradients clipped at a norm of 100,
here over all modules that are trained together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.one_width import OneWidth
from barter.core.algorithm import Crossing
from barter.core.clients import Clients
from barter.core.contracts import Content, Named
from barter.core.evaluation import predict
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.models.framed import add_frame_head, frame_head
from barter.models.pooled import pool_features
from barter.models.pretrained import (
    generate_pixels,
    latent_dim,
    pretrained_generator,
    sample_latents,
)
from barter.ops.fit import Recipe, adam, fit_rows, index_batches, recipe_by_name
from barter.ops.modules import copy_state, restore_module
from barter.ops.prototypes import ByClass, class_means, concatenate_tables, select_trusted_tables

__all__ = [
    "Aligner",
    "AligningServer",
    "FedKTL",
    "LatentLesson",
    "alignment",
    "arcface",
    "fedktl_loss",
    "local_arcface_loss",
    "mean_directions",
    "mmd",
]

CLIP = 100.0  # largest norm of a gradient
WIDTHS = (10.0, 15.0, 20.0, 50.0)  # widths of the discrepancy's kernels


class LatentLesson(TypedDict):
    """The payload from which clients learn in addition to their own images."""

    images: Tensor  # a generated image for each class, as bytes
    latents: Annotated[
        Tensor, Content("embeddings")
    ]  # the latent vectors from which they were generated
    projection: State  # initial weights of the layer from features to latent vectors


class AligningServer(Server):
    """A server that maps prototypes to latent vectors of a generator."""

    aligner: State = {}  # weights of the `Aligner`
    known: list[int] = []  # the classes that some client has sent so far
    lessons: list[LatentLesson] = []  # empty before the first round, then one lesson


class Aligner(nn.Module):
    """F, the map from prototypes to latent vectors, with a centre for each class.

    Args:
        classes: The number of classes, which is the width of prototypes.
        width: The width of latent vectors.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        layers = (
            nn.Linear(classes, classes),
            nn.BatchNorm1d(classes),
            nn.ReLU(),
            nn.Linear(classes, width),
        )
        self.body = nn.Sequential(*layers)
        self.centres = nn.Parameter(torch.zeros(classes, width))

    def forward(self, prototypes: Tensor) -> Tensor:
        codes: Tensor = self.body(prototypes)
        return codes

    @torch.no_grad()
    def centre(self, prototypes: ByClass) -> None:
        """Set the centres of classes to the mean latent vectors of their prototypes.

        They are changed in place. Classes without a prototype keep their centres. The aligner is
        left in evaluation mode.
        """
        means = class_means(self.eval()(prototypes["vectors"]), prototypes["classes"])
        self.centres[means["classes"]] = means["vectors"]


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return the maximum mean discrepancy of two samples by Gaussian kernels.

    Args:
        x: The first sample (rows, width).
        y: The second sample (rows, width).

    Returns:
        The squared discrepancy for the sum of kernels with the variances `WIDTHS`, a scalar.
    """
    both = torch.cat([x, y])
    n = len(x)
    squares = torch.cdist(both, both).square()
    kernel = torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS]).sum(0)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def alignment(
    aligner: Aligner, lam: float, vectors: Tensor, classes: Tensor, codes: Tensor
) -> Tensor:
    """Return the aligner's loss: discrepancy plus λ times distance to centres.

    The discrepancy is `mmd` between the aligned prototypes and `codes`; the distance is the mean
    square between an aligned prototype and the centre of its class, which is trained too.

    Args:
        aligner: The network to train.
        lam: λ, the weight of the second term.
        vectors: The clients' prototypes.
        classes: Their classes.
        codes: Latent vectors of the generator, whose distribution is the target.
    """
    q = aligner(vectors).float()
    is_own_class = classes[:, None] == torch.arange(len(aligner.centres), device=classes.device)
    own_centres = (is_own_class.float() @ aligner.centres).float()
    return mmd(q, codes) + lam * F.mse_loss(q, own_centres)


def arcface(cosines: Tensor, labels: Tensor, scale: float, margin: float) -> Tensor:
    """Return ArcFace's loss: cross entropy of scaled cosines with an angular margin.

    Args:
        cosines: Cosines of the angles to the vertex of each class (images, classes).
        labels: The classes of the images.
        scale: The factor of the cosines.
        margin: Radians that are added to the angle to the vertex of an image's own class.
    """
    sines = (1 - cosines.square()).clamp_min(1e-7).sqrt()
    is_own_class = labels[:, None] == torch.arange(cosines.shape[1], device=labels.device)
    with_margin = cosines * math.cos(margin) - sines * math.sin(margin)
    return F.cross_entropy(scale * torch.where(is_own_class, with_margin, cosines), labels)


def local_arcface_loss(
    model: Classifier, scale: float, margin: float, x: Tensor, labels: Tensor
) -> Tensor:
    """Return ArcFace's loss of a client's network on its own images.

    The network's logits must be cosines times `scale`, as those of a frame head are.
    """
    cosines = model(x).float() / scale
    return arcface(cosines, labels, scale, margin)


def fedktl_loss(
    model: Classifier,
    projection: nn.Linear,
    mu: float,
    spec: Spec,
    scale: float,
    margin: float,
    x: Tensor,
    labels: Tensor,
    images: Tensor,
    codes: Tensor,
) -> Tensor:
    """Return the loss on own images plus μ times that of predicting latent vectors.

    Args:
        model: The client's network.
        projection: The layer from features to latent vectors.
        mu: μ, the weight of the second term.
        spec: The format of the images.
        scale: The factor of cosines in ArcFace's loss.
        margin: The margin of ArcFace's loss.
        x: The client's images.
        labels: Their classes.
        images: Generated images as bytes.
        codes: The latent vectors from which they were generated.
    """
    predicted_codes = projection(model.features(prepare_batch(images, spec, Augment()))).float()
    task = local_arcface_loss(model, scale, margin, x, labels)
    return task + mu * F.mse_loss(predicted_codes, codes)


def mean_directions(model: Classifier, data: Images) -> ByClass:
    """Return the prototype of each class that occurs: its mean direction (length 1).

    Features are projected by the frame head, scaled to length 1, averaged over the class and scaled
    again. The model must have a frame head (`add_frame_head`); it is left in evaluation mode.

    Returns:
        A table: "classes", sorted, and "vectors", one row for each of them.
    """
    model.eval()

    def project(x: Tensor) -> Tensor:
        return frame_head(model).project(model.features(x))

    index = torch.arange(len(data), device=data.device)
    table = class_means(predict(project, data.batch, index), data.labels)
    return {"classes": table["classes"], "vectors": F.normalize(table["vectors"])}


@dataclass(frozen=True, kw_only=True)
class FedKTL(OneWidth[AligningServer]):
    """Transfer a pre-trained generator's knowledge by an image and latent per class."""

    aggregates = ("sets",)
    crosses = {
        "learn": Crossing(
            down="an image and a latent vector for each class, a projection",
            up="prototypes of the client's classes in the space of the frame",
        ),
    }

    # G: the server's generator: a TorchScript file, or package.module:function returning a module
    generator: str = ""
    # weights of that module: a safetensors file; empty: those that the function returns
    weights: str = ""
    mu: NonNegative = 50.0  # μ: weight of predicting latent vectors from generated images
    scale: Positive = 64.0  # s: factor of the cosines
    # m: margin, in radians, that training adds to the angle to the vertex of the own class
    margin: NonNegative = 0.5
    lam: NonNegative = 1.0  # λ: weight of the distance of latent vectors to their class's centre
    server_epochs: Count = 100  # passes of the server over the prototypes in a round
    server_batch_size: Count = 100  # prototypes, and latent vectors to compare with, per step
    server_lr: Positive = 0.01  # η_S: learning rate of the server, with Adam

    def recipe(self) -> Recipe:
        return recipe_by_name(self.optimizer, self.lr, clip=CLIP)

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        return add_frame_head(pool_features(network, self.features), self.scale)

    def setup(self, server: AligningServer, clients: Clients) -> None:
        """Load the generator, so that a missing one is reported before any client trains."""
        pretrained_generator(self.generator, self.weights, server.device)

    def round(self, server: AligningServer, clients: Clients, t: int) -> None:
        prototypes = clients.sample(self.fraction).run(self.learn, server.lessons)
        codes = self.align(server, concatenate_tables(select_trusted_tables(prototypes)))
        server.lessons = [self.make_lesson(server, codes)]

    def learn(
        self, client: Client, lessons: list[LatentLesson]
    ) -> Annotated[ByClass, Named("vector", "classes")]:
        """Train the client's network and return its prototypes.

        Args:
            client: The client that trains.
            lessons: The last round's lesson, a list of one; empty in the first round.
        """
        data = client.data
        model = client.model
        if lessons and self.mu:
            lesson = lessons[0]
            images = lesson["images"]
            codes = lesson["latents"]
            layer = nn.Linear(self.features, codes.shape[1])
            projection = restore_module(client, "projection", layer, lesson["projection"])
            batches = index_batches(len(images), self.batch_size, client.device)
            pairs = ((images[index], codes[index]) for index in batches)
            client_loss = partial(
                fedktl_loss, model, projection, self.mu, data.spec, self.scale, self.margin
            )
            self.train(client, client_loss, pairs, [projection])
        else:
            self.train(client, partial(local_arcface_loss, model, self.scale, self.margin))
        return mean_directions(model, data)

    def align(self, server: AligningServer, prototypes: ByClass) -> Tensor:
        """Train the aligner on the clients' prototypes and store it at the server.

        The classes of the prototypes are added to `server.known`.

        Returns:
            The latent centres (classes, latent_dim) of all classes that some client has sent so
            far, in ascending order of the classes.
        """
        device = server.device
        generator = pretrained_generator(self.generator, self.weights, device)
        new = Aligner(server.spec.classes, latent_dim(generator))
        aligner = restore_module(server, "aligner", new, server.aligner)
        aligner.centre(prototypes)
        fit_rows(
            server,
            "align",
            aligner,
            partial(alignment, aligner, self.lam),
            (prototypes["vectors"], prototypes["classes"]),
            epochs=self.server_epochs,
            batch_size=self.server_batch_size,
            recipe=adam(self.server_lr, clip=CLIP),
            extras=((sample_latents(generator, self.server_batch_size, device),) for _ in count()),
        )
        aligner.centre(prototypes)
        server.aligner = copy_state(aligner)
        server.known = sorted({*server.known, *prototypes["classes"].tolist()})
        return aligner.centres.detach()[server.known]

    def make_lesson(self, server: AligningServer, codes: Tensor) -> LatentLesson:
        """Generate one image per class and return the lesson for the clients.

        Args:
            server: The server, which is not changed; its last lesson provides the projection.
            codes: Latent vectors (classes, latent_dim), one for each class sent so far.

        Returns:
            The images as bytes, `codes`, and the initial weights of the linear layer from features
            to latent vectors: random in the first round, later those of the last lesson.
        """
        generator = pretrained_generator(self.generator, self.weights, server.device)
        new = nn.Linear(self.features, codes.shape[1]).to(server.device).state_dict()
        projection = server.lessons[0]["projection"] if server.lessons else isolate(dict(new))
        return {
            "images": generate_pixels(generator, codes, server.spec),
            "latents": codes,
            "projection": projection,
        }

    def creations(
        self, party: AligningServer | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, AligningServer) or not party.lessons:
            return None
        labels = torch.tensor(party.known, device=party.device)
        chosen = wanted(labels)
        images = prepare_batch(party.lessons[0]["images"], party.spec, Augment())
        return labels[chosen], images[chosen]
