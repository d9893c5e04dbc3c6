"""FedKTL: Zhang et al., "An Upload-Efficient Scheme for Transferring Knowledge From a Server-Side Pre-trained Generator
to Clients in Heterogeneous Federated Learning", CVPR 2024, Algorithm 1 (arXiv:2403.15760).

The server has a generator of images that somebody trained on other data. Clients learn with heads whose classes are
equally far apart (an ETF), and send where their classes lie. The server learns to take these places into the space
that the generator draws from, and draws one image for each class. Clients learn, beside their own task, to tell from
an image the latent vector that it was drawn from.

- Where the paper left us unsure, this is its authors' code: constants of ArcFace's loss (0.5 and 64), kernels of the
  discrepancy, learnt centres, gradients clipped at a norm of 100, here over all that is trained together.
- The projection to latent vectors begins each round anew, and the same at all clients, as in the code.
- The frame has as many dimensions as classes, as in the code, and is not turned at random.
- Images are drawn of classes that somebody has sent so far; the code draws all, also those that nobody has.
- Images travel as bytes, and are normalised as the clients' own; in the code from -1 to 1 whatever the data's range.
- Predictions are by the frame's nearest corner, which is the network's largest logit.
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
from barter.compute import lanes
from barter.core.clients import Clients
from barter.core.contracts import Named
from barter.core.evaluation import predict
from barter.core.images import Augment, Images, Spec, prepared
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, NonNegative, Positive
from barter.core.payload import State, isolate
from barter.models.framed import frame_of, framed
from barter.models.pooled import pooled
from barter.models.pretrained import drawn, latent_dim, latents, pretrained
from barter.ops.fit import Recipe, adam, by_name, fit_rows, index_batches
from barter.ops.prototypes import ByClass, class_means, joined

__all__ = [
    "Aligner",
    "FedKTL",
    "Lesson",
    "Teacher",
    "alignment",
    "arcface",
    "loss",
    "mmd",
    "own_task",
    "places_of",
]

CLIP = 100.0  # the largest norm of a gradient
WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the discrepancy's kernels


class Lesson(TypedDict):
    """What clients learn beside their own task."""

    images: Tensor  # one for each class, as bytes
    latents: Tensor  # what it was drawn from
    projection: State  # from features to latent vectors, as it begins


class Teacher(Server):
    """A server that knows how to take prototypes to latent vectors."""

    aligner: State = {}
    known: list[int] = []  # the classes that somebody has sent so far
    lessons: list[Lesson] = []  # none before the first round, then one


class Aligner(nn.Module):
    """F: prototypes to latent vectors; and a centre for each class among these."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        layers = (
            nn.Linear(classes, classes),
            nn.BatchNorm1d(classes),
            nn.ReLU(),
            nn.Linear(classes, width),
        )
        self.body, self.centres = nn.Sequential(*layers), nn.Parameter(torch.zeros(classes, width))

    def forward(self, prototypes: Tensor) -> Tensor:
        codes: Tensor = self.body(prototypes)
        return codes

    @torch.no_grad()
    def centre(self, prototypes: ByClass) -> None:
        """Put the centres where the classes are."""
        means = class_means(self.eval()(prototypes["vectors"]), prototypes["classes"])
        self.centres[means["classes"]] = means["vectors"]


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """The maximum mean discrepancy of two samples, by a sum of Gaussian kernels."""
    both, n = torch.cat([x, y]), len(x)
    squares = torch.cdist(both, both).square()
    k = torch.stack([torch.exp(-squares / (2 * width)) for width in WIDTHS]).sum(0)
    return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


def alignment(
    aligner: Aligner, lam: float, vectors: Tensor, classes: Tensor, codes: Tensor
) -> Tensor:
    """Codes should be spread as the generator's are, and those of a class lie together."""
    q = aligner(vectors).float()
    own = classes[:, None] == torch.arange(len(aligner.centres), device=classes.device)
    return mmd(q, codes) + lam * F.mse_loss(q, (own.float() @ aligner.centres).float())


def arcface(cosines: Tensor, labels: Tensor, scale: float, margin: float) -> Tensor:
    """Cross entropy of scaled cosines, the angle to the right corner wider by a margin."""
    sines = (1 - cosines.square()).clamp_min(1e-7).sqrt()
    right = labels[:, None] == torch.arange(cosines.shape[1], device=labels.device)
    wider = cosines * math.cos(margin) - sines * math.sin(margin)
    return F.cross_entropy(scale * torch.where(right, wider, cosines), labels)


def own_task(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    scale: float,
    margin: float,
    pixels: Tensor,
    labels: Tensor,
) -> Tensor:
    """What a client learns from its own images."""
    return arcface(model(prepared(pixels, spec, augment)).float() / scale, labels, scale, margin)


def loss(
    model: Classifier,
    projection: nn.Linear,
    mu: float,
    spec: Spec,
    augment: Augment,
    scale: float,
    margin: float,
    pixels: Tensor,
    labels: Tensor,
    images: Tensor,
    codes: Tensor,
) -> Tensor:
    """The own task and, μ times, the mean square between projected features of drawn images and their codes."""
    told = projection(model.features(prepared(images, spec, Augment()))).float()
    return own_task(model, spec, augment, scale, margin, pixels, labels) + mu * F.mse_loss(
        told, codes
    )


def places_of(model: Classifier, data: Images) -> ByClass:
    """Where the classes of some images lie on the sphere of the frame's corners."""
    model.eval()
    everything = torch.arange(len(data), device=data.device)
    places = predict(lambda x: frame_of(model).projected(model.features(x)), data.batch, everything)
    table = class_means(places, data.labels)
    return {"classes": table["classes"], "vectors": F.normalize(table["vectors"])}


@dataclass(frozen=True, kw_only=True)
class FedKTL(OneWidth[Teacher]):
    """Places of classes go up, images of a pre-trained generator and what they were drawn from come down."""

    crosses = {
        "learn": "down: an image and a latent vector for each class, a projection; up: where the client's classes lie"
    }

    generator: str = ""  # G: a TorchScript file, or package.module:function that returns a torch module; at the server
    # of what the function returns: a safetensors file; empty: those that it comes with
    weights: str = ""
    mu: NonNegative = 50.0  # μ: how much telling latent vectors from images counts
    scale: Positive = 64.0  # s: what cosines are multiplied by
    # m: by how much, in radians, the angle to the right corner is made wider in training
    margin: NonNegative = 0.5
    lam: NonNegative = 1.0  # λ: how much it counts that codes of a class lie together
    server_epochs: Count = 100  # times that the server goes over the prototypes
    server_batch_size: Count = 100  # prototypes, and latent vectors to compare with, per step
    server_lr: Positive = 0.01  # η_S: learning rate of the server's Adam

    def recipe(self) -> Recipe:
        return by_name(self.optimizer, self.lr, clip=CLIP)

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        return framed(pooled(network, self.features), self.scale)

    def setup(self, server: Teacher, clients: Clients) -> None:
        pretrained(
            self.generator, self.weights, server.device
        )  # what is missing is said before anybody trains

    def round(self, server: Teacher, clients: Clients, t: int) -> None:
        prototypes = clients.sample(self.fraction).run(self.learn, server.lessons)
        codes = self.align(server, joined(prototypes.values()))
        server.lessons = [self.lesson(server, codes)]

    def learn(
        self, client: Client, lessons: list[Lesson]
    ) -> Annotated[ByClass, Named("vector", "classes")]:
        data, model = client.data, client.model
        task = data.spec, data.augment, self.scale, self.margin
        if lessons and self.mu:
            images, codes, start = (
                lessons[0]["images"],
                lessons[0]["latents"],
                lessons[0]["projection"],
            )
            projection = lanes.keep(
                "projection", nn.Linear(self.features, codes.shape[1]).to(client.device)
            )
            projection.load_state_dict(start)
            chosen = index_batches(len(images), self.batch_size, client.device)
            pairs = ((images[index], codes[index]) for index in chosen)
            self.train(
                client, partial(loss, model, projection, self.mu, *task), pairs, [projection]
            )
        else:
            self.train(client, partial(own_task, model, *task))
        return places_of(model, data)

    def align(self, server: Teacher, prototypes: ByClass) -> Tensor:
        """Train what takes prototypes to latent vectors; the centres of all classes that were sent so far."""
        device = server.device
        generator = pretrained(self.generator, self.weights, device)
        aligner = lanes.keep(
            "aligner", Aligner(server.spec.classes, latent_dim(generator)).to(device)
        )
        if server.aligner:
            aligner.load_state_dict(server.aligner)
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
            beside=((latents(generator, self.server_batch_size, device),) for _ in count()),
        )
        aligner.centre(prototypes)
        server.aligner = isolate(dict(aligner.state_dict()))
        server.known = sorted({*server.known, *prototypes["classes"].tolist()})
        return aligner.centres.detach()[server.known]

    def lesson(self, server: Teacher, codes: Tensor) -> Lesson:
        """An image of each of these codes; the projection is the one of the first round."""
        generator = pretrained(self.generator, self.weights, server.device)
        new = nn.Linear(self.features, codes.shape[1]).to(server.device).state_dict()
        projection = server.lessons[0]["projection"] if server.lessons else isolate(dict(new))
        return {
            "images": drawn(generator, codes, server.spec),
            "latents": codes,
            "projection": projection,
        }

    def creations(
        self, party: Teacher | Client, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(party, Teacher) or not party.lessons:
            return None
        labels = torch.tensor(party.known, device=party.device)
        chosen = wanted(labels)
        return labels[chosen], prepared(party.lessons[0]["images"], party.spec, Augment())[chosen]
