"""Train a network on images that `moments` decodes, and on nothing else.

    python -m benchmarks.decoded_images fashion-10k.npz --out decoded-images.json

It tells what the clients of `moments` lose on the way from the images to their networks. The
classifier of the joint moments, the discriminant, teaches a small-cnn, which is tested on real
images. Rows differ in where components are sampled, in how the decoder is trained, and in what the
discriminant is asked about (`Row`). With real components or a covariance of each class nothing is
protected: these rows show what better statistics could bring.

Ten clients have equally many images; ε is for replacing one of them, δ = 1e-5, and infinity is
without noise. Prints accuracies in % on the test images, and writes them to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.algorithms.moments import (
    CROPS,
    ClassMoments,
    Discriminant,
    blend_with_photographs,
    decode_codes,
    decoding_loss,
    discriminant_logits,
    photographs,
    public_format,
    render_codes,
)
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.seeds import stream_seed
from barter.data.sources import load_dataset
from barter.models.generators import PixelDecoder, resize_images
from barter.models.zoo import build_network
from barter.ops.distill import kl
from barter.ops.moments import (
    SharedGaussian,
    Whitening,
    add_moments,
    fit_whitening,
    shared_gaussians,
    sum_moments,
    whiten_features,
)
from barter.ops.transfer import to_half
from barter.privacy.account import calibrate_noise

CLIENTS = 10
DELTA = 1e-5
SAMPLES = 6000  # decoded images
BATCH = 100
SHIFT = 2  # largest shift of its images in pixels

Sampling = Literal["Gaussians", "a covariance of each class", "real images"]
Teacher = Callable[[Tensor, Tensor], Tensor]  # (images after augmentation, their places) -> logits


@dataclass(frozen=True)
class Row:
    """What is sampled and decoded, with how much noise, and how a network learns from it."""

    name: str
    epsilon: float = 8.0
    sampling: Sampling = "Gaussians"
    decoder_steps: int = 600  # 0 only with real images, which are then not decoded
    matched: float = 1.0  # weight of decoded images having the sampled components
    restored: float = 0.0  # weight of photographs being restored from their components
    # what the logits to learn are of: the components, or the images after augmentation
    targets: Literal["components", "images"] = "components"
    blended: float = 0.0  # fraction of images that are blended with crops of photographs
    steps: int = 400  # of the network that learns


ROWS = (
    Row("ε = 8"),
    Row("200 steps of the decoder", decoder_steps=200),
    Row("the decoder restores photographs, too", restored=1.0),
    Row("the decoder restores photographs, and nothing else", matched=0.0, restored=1.0),
    Row("logits of the augmented images", targets="images"),
    Row("the same, half of the images blended with photographs", targets="images", blended=0.5),
    Row("the same, four times the steps", targets="images", blended=0.5, steps=1600),
    Row("no noise", epsilon=math.inf),
    Row(
        "no noise, a covariance of each class",
        epsilon=math.inf,
        sampling="a covariance of each class",
    ),
    Row("no noise, components of real images", epsilon=math.inf, sampling="real images"),
    Row(
        "no noise, components of real images, the decoder restores photographs, too",
        epsilon=math.inf,
        sampling="real images",
        restored=1.0,
    ),
    Row("no noise, real images", epsilon=math.inf, sampling="real images", decoder_steps=0),
    Row(
        "no noise, real images, logits of the augmented images",
        epsilon=math.inf,
        sampling="real images",
        decoder_steps=0,
        targets="images",
    ),
)


class Study:
    """The images, their components, and everything that does not depend on a row."""

    def __init__(self, source: str) -> None:
        dataset = load_dataset(source)
        channels, height, width = dataset.x_train.shape[1:]
        classes = len(dataset.classes)
        self.spec = public_format(Spec(channels, height, width, classes, mean=(0.5,), std=(0.5,)))
        self.method = ClassMoments()
        self.train = Images(dataset.x_train, dataset.y_train, self.spec)
        self.test = Images(dataset.x_test, dataset.y_test, self.spec)
        self.extractor: Classifier = self.method.make_extractor(self.spec)
        crops = partial(photographs, self.spec)
        features = predict(self.extractor.features, crops, torch.arange(CROPS))
        self.whitening: Whitening = fit_whitening(features, self.method.components)
        self.crops = crops(torch.arange(CROPS))
        self.crop_components = whiten_features(features, self.whitening)
        self.components = self.describe(self.train)

    def describe(self, images: Images) -> Tensor:
        """Return the components of images."""
        features = predict(self.extractor.features, images.batch, torch.arange(len(images)))
        return whiten_features(features, self.whitening)

    def gaussians(self, epsilon: float, generator: torch.Generator) -> SharedGaussian:
        """Return the Gaussians of all clients' moments with noise."""
        deviation = 0.0 if math.isinf(epsilon) else calibrate_noise(epsilon, DELTA, 1)
        parts = []
        for places in torch.arange(len(self.train)).chunk(CLIENTS):
            moments = sum_moments(
                self.components[places], self.train.labels[places], self.spec.classes
            )
            for value in (moments["counts"], moments["sums"], moments["squares"]):
                value += deviation * torch.randn(value.shape, generator=generator)
            parts.append(moments)
        return shared_gaussians(add_moments(parts), len(self.train))

    def sampler(self, row: Row, gaussians: SharedGaussian) -> partial[Tensor]:
        """Return a function that samples a number of components."""
        if row.sampling == "real images":
            return partial(sample_real, self.components)
        if row.sampling == "Gaussians":
            return partial(self.method.sample_codes, gaussians)
        return partial(sample_classes, class_gaussians(self.components, self.train.labels))


def sample_real(components: Tensor, count: int) -> Tensor:
    return components[torch.randint(len(components), (count,))]


def class_gaussians(components: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the mean and a factor of the covariance of each class."""
    found = []
    for label in range(int(labels.max()) + 1):
        rows = components[labels == label].double()
        values, vectors = torch.linalg.eigh(torch.cov(rows.T))
        found.append((rows.mean(0).float(), (vectors * values.clamp(min=0).sqrt()).float()))
    return found


def sample_classes(gaussians: list[tuple[Tensor, Tensor]], count: int) -> Tensor:
    labels = torch.randint(len(gaussians), (count,))
    samples = torch.empty(count, len(gaussians[0][0]))
    for label, (mean, factor) in enumerate(gaussians):
        chosen = labels == label
        samples[chosen] = mean + torch.randn(int(chosen.sum()), factor.shape[1]) @ factor.T
    return F.normalize(samples, dim=1)


def train_decoder(study: Study, row: Row, sample: partial[Tensor]) -> PixelDecoder:
    """Train a decoder as `moments` does, or as the row says."""
    method = study.method
    decoder = PixelDecoder(method.components, study.spec).train()
    constants = (study.whitening["center"], study.whitening["projection"])

    def decoder_loss() -> Tensor:
        loss = torch.zeros(())
        if row.matched:
            codes = sample(method.decoder_batch)
            matching = decoding_loss(decoder, study.extractor, study.spec, codes, *constants)
            loss = loss + row.matched * matching
        if row.restored:
            places = torch.randint(len(study.crops), (method.decoder_batch,))
            images = resize_images(render_codes(decoder, study.crop_components[places]), study.spec)
            loss = loss + row.restored * (images - study.crops[places]).square().mean()
        return loss

    train(decoder, decoder_loss, row.decoder_steps, method.lr)
    return decoder.eval()


def train(network: nn.Module, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
    """Train a network by Adam with a cosine schedule; each call of `loss` is a new batch's."""
    optimizer = torch.optim.Adam(network.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()
        schedule.step()


def train_student(study: Study, images: Tensor, teach: Teacher, steps: int) -> Classifier:
    """Train a small-cnn on a teacher's logits of shifted and mirrored images."""
    network = build_network("small-cnn", study.spec).train()

    def imitation() -> Tensor:
        places = torch.randint(len(images), (BATCH,))
        down, right = torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist()
        batch = torch.roll(images[places], (down, right), (2, 3))
        if torch.rand(()) < 0.5:
            batch = batch.flip(3)
        return kl(teach(batch, places), network(batch))

    train(network, imitation, steps, study.method.lr)
    return network.eval()


def make_teacher(study: Study, row: Row, gaussians: SharedGaussian, codes: Tensor) -> Teacher:
    """Return the discriminant as a function of images, or of their places in `codes`."""
    if row.targets == "components":
        logits = discriminant_logits(gaussians, codes)
        return lambda images, places: logits[places]
    discriminant = Discriminant(study.extractor, study.whitening, gaussians, study.spec).eval()

    def teach(images: Tensor, places: Tensor) -> Tensor:
        with torch.no_grad():
            return discriminant(images)  # type: ignore[no-any-return]

    return teach


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return round(100 * float((logits.argmax(1) == labels).double().mean()), 2)


def measure(study: Study, row: Row, seed: int) -> dict[str, float | str]:
    """Return the accuracies of a row: of the discriminant, and of what learns from it."""
    began = time.perf_counter()
    torch.manual_seed(stream_seed(seed, "decoded images"))
    generator = torch.Generator().manual_seed(stream_seed(seed, "noise"))
    gaussians = study.gaussians(row.epsilon, generator)
    if row.decoder_steps:
        sample = study.sampler(row, gaussians)
        decoder = train_decoder(study, row, sample)
        codes = sample(SAMPLES)
        decoded = decode_codes(to_half(decoder.state_dict()), study.spec, codes)
        blend_with_photographs(decoded, round(row.blended * len(decoded)), study.spec)
        images = resize_images(decoded, study.spec)
    else:
        places = torch.randint(len(study.train), (SAMPLES,))
        codes = study.components[places]
        images = study.train.batch(places)
    teach = make_teacher(study, row, gaussians, codes)
    student = train_student(study, images, teach, row.steps)
    components = study.describe(study.test)
    logits = predict(student, study.test.batch, torch.arange(len(study.test)))
    return {
        "row": row.name,
        "seed": seed,
        "discriminant": accuracy(discriminant_logits(gaussians, components), study.test.labels),
        "student": accuracy(logits, study.test.labels),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a data set's name, or an npz file")
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path("decoded-images.json"))
    args = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in args.rows if name not in known]:
        parser.error(f"there is no row {unknown[0]!r}: {', '.join(known)}")
    source = f"npz:{args.source}" if args.source.endswith(".npz") else args.source
    study = Study(source)
    results = []
    for seed in args.seeds:
        for name in args.rows:
            results.append(measure(study, known[name], seed))
            sys.stdout.write(f"{results[-1]}\n")
            sys.stdout.flush()
            args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
