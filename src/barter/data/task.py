"""A task: every client's private data, the test sets, and what all parties agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, Spec
from barter.core.params import BY_PYTHON, Range, Side, check
from barter.core.seeds import stream_seed
from barter.data.dataset import Dataset, from_python
from barter.data.partition import Domains, Listed, Partition
from barter.data.sources import PATH_SOURCES, load

__all__ = [
    "SITES",
    "Data",
    "Task",
    "anchored",
    "held_out",
    "make_task",
    "own_data",
    "public_data",
    "validation_size",
]

SITES = "sites"  # the source of a run to which every client brings its own data


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which data, and in which form."""

    # a name from `barter list datasets`, npz:PATH, folder:PATH, domains:PATH, clients:PATH, sites,
    # or module:function for one's own; in Python also the data themselves
    source: str | Any = "digits"
    root: str = "data"  # the folder that holds named data sets
    download: bool = False  # whether to download what is missing
    size: Side | None = None  # side of the square that images are resized to; none keeps theirs
    # random changes to training images: crops, and mirror images where `flip` has them
    augment: bool = True
    # mirror images; none means where they are known to show the same, not of one's own data
    flip: bool | None = None
    # a source whose training images everybody has, for methods that want public data
    public: str = ""
    # share of each client's training images that it holds out to choose rounds by
    validation: Annotated[float, Range(ge=0, le=0.9)] = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            given = from_python(self.source, BY_PYTHON, self.size)
            object.__setattr__(self, "_given", given)
            object.__setattr__(self, "source", f"{BY_PYTHON} {given.fingerprint()}")
        check(self, "data.")

    @property
    def given(self) -> Dataset | None:
        """The images themselves, where they came from Python."""
        return self.__dict__.get("_given")

    def load(self) -> Dataset:
        """The images, wherever they come from."""
        return self.given or load(
            self.source, root=self.root, download=self.download, size=self.size
        )


def anchored(data: Data) -> Data:
    """The same data for processes that start in other folders: paths from the root."""

    def absolute(source: str) -> str:
        kind, colon, path = source.partition(":")
        return f"{kind}:{Path(path).absolute()}" if kind in PATH_SOURCES and colon else source

    return replace(
        data,
        root=str(Path(data.root).absolute()),
        source=absolute(data.source),
        public=absolute(data.public),
    )


@dataclass(frozen=True)
class Task:
    """Private data and test sets of every client, on the run's device."""

    spec: Spec
    classes: list[str]
    train: list[Images]
    local_tests: list[Images]
    global_test: Images
    public: Images | None
    domains: list[str]
    domain_table: Tensor  # samples by client and domain
    # of each client, held out from its training images; none without data.validation
    validation: list[Images] = field(default_factory=list)
    # the validation images of all clients together
    global_validation: Images | None = None
    held_out: bool = False  # whether the test images were taken from those given for training
    notes: tuple[str, ...] = ()  # what was done to the images that nobody asked for

    def summary(self, source: str) -> str:
        """Return a line that says what was read: images, classes, size and colours."""
        spec, stored = self.spec, self.global_test.pixels.shape
        colours = {1: "grey", 3: "colour"}.get(spec.channels, f"{spec.channels} channels")
        seen = f"{spec.width}x{spec.height}"
        size = f"{stored[-1]}x{stored[-2]}"
        if size != seen:
            size += f", resized to {seen}"
        train, test = sum(map(len, self.train)), len(self.global_test)
        tests = f"{test:,} test images{', held out of them' if self.held_out else ''}"
        classes = f"{spec.classes} class{'es' * (spec.classes != 1)}"
        return f"{source}: {train:,} training and {tests}, {classes}, {size} {colours}"

    def class_table(self) -> Tensor:
        """Samples by client and class."""
        return torch.stack([images.class_counts() for images in self.train]).cpu()


def make_task(
    data: Data, partition: Partition, clients: int, seed: int, device: torch.device
) -> Task:
    """Load the data, split it, and put it on the device."""
    if data.source == SITES:
        raise ConfigError(
            "data.source='sites': every site brings its own data, which takes --engine flower"
        )
    dataset = data.load()
    if dataset.held_out and isinstance(partition, Listed):
        raise ConfigError(
            "partition: lists of indices count training images, and here some of them are held out for "
            "testing: give a test part too"
        )
    spec, augment = _spec(dataset, data.size), _augment(dataset, data)
    parts = partition(
        dataset.y_train.numpy(),
        dataset.domain_train.numpy(),
        clients,
        stream_seed(seed, "partition"),
    )
    global_test = Images(dataset.x_test.to(device), dataset.y_test.to(device), spec)
    trained, validation = parts, list[Images]()
    if data.validation:
        split = [held_out(dataset, part, data.validation, seed, k) for k, part in enumerate(parts)]
        trained = [kept for kept, _ in split]
        validation = [
            Images(dataset.x_train[held].to(device), dataset.y_train[held].to(device), spec)
            for _, held in split
        ]
    return Task(
        spec=spec,
        classes=dataset.classes,
        train=[
            Images(
                dataset.x_train[part].to(device), dataset.y_train[part].to(device), spec, augment
            )
            for part in trained
        ],
        local_tests=[
            _local_test(dataset, part, spec, seed, k, device) for k, part in enumerate(parts)
        ]
        if not (
            dataset.own_tests
            and len(dataset.own_tests) == clients
            and isinstance(partition, Domains)
        )
        else [Images(x.to(device), y.to(device), spec) for x, y in dataset.own_tests],
        global_test=global_test,
        public=public_data(data, spec, device),
        domains=dataset.domains,
        domain_table=torch.stack(
            [
                dataset.domain_train[part].bincount(minlength=len(dataset.domains))
                for part in trained
            ]
        ),
        validation=validation,
        global_validation=_together(validation, spec) if validation else None,
        held_out=dataset.held_out,
        notes=dataset.notes,
    )


def held_out(
    dataset: Dataset, part: np.ndarray[Any, Any], share: float, seed: int, client: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Split a client's training images into those it trains on and its validation images.

    Every image is equally likely to be held out, and the client's mix of classes and domains is kept:
    images are drawn at equal distances from a list that is sorted by class.

    Args:
        dataset: The data of all clients.
        part: Indices of the client's training images.
        share: The share of them that is held out.
        seed: The run's seed.
        client: The client's id, which has a random stream of its own.

    Returns:
        Indices for training and for validation, each in the order of `part`.
    """
    count = validation_size(len(part), share, f"client {client}")
    rng = np.random.default_rng(stream_seed(seed, "validation", client))
    kinds = (dataset.domain_train * len(dataset.classes) + dataset.y_train)[part].numpy()
    shuffled = rng.permutation(len(part))
    by_kind = shuffled[np.argsort(kinds[shuffled], kind="stable")]
    chosen = by_kind[np.floor((np.arange(count) + rng.random()) * len(part) / count).astype(int)]
    held = np.zeros(len(part), dtype=bool)
    held[chosen] = True
    return part[~held], part[held]


def _together(parts: Sequence[Images], spec: Spec) -> Images:
    pixels = torch.cat([images.pixels for images in parts])
    labels = torch.cat([images.labels for images in parts])
    return Images(pixels, labels, spec)


def validation_size(images: int, share: float, owner: str) -> int:
    """Return how many of a client's training images it holds out; one at least, and one stays."""
    if not share:
        return 0
    if images < 2:
        raise ConfigError(
            f"data.validation={share:g}: {owner} has {images} training image{'s' * (images != 1)}, "
            "and needs two to hold one out"
        )
    return min(max(1, round(share * images)), images - 1)


def own_data(data: Data, source: str) -> tuple[Dataset, Spec, Augment]:
    """The whole of a source, which is one client's own; other clients may make another spec of it."""
    dataset = replace(data, source=source).load()
    return dataset, _spec(dataset, data.size), _augment(dataset, data)


def _augment(dataset: Dataset, data: Data) -> Augment:
    # Padding by an eighth of the side: 4 pixels at 32, as usual for CIFAR.
    crop = dataset.x_train.shape[-1] // 8 if data.augment else 0
    return Augment(crop, data.augment and dataset.may_flip if data.flip is None else data.flip)


def _spec(dataset: Dataset, size: int | None) -> Spec:
    _, channels, height, width = dataset.x_train.shape
    # Exact and without a float copy of the data: bytes have 256 values.
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = [
        torch.bincount(dataset.x_train[:, c].flatten(), minlength=256).double()
        for c in range(channels)
    ]
    means = [float((share * values).sum() / share.sum()) for share in shares]
    squares = [float((share * values**2).sum() / share.sum()) for share in shares]
    stds = [max(square - mean**2, 1e-6) ** 0.5 for mean, square in zip(means, squares, strict=True)]
    return Spec(
        channels, size or height, size or width, len(dataset.classes), tuple(means), tuple(stds)
    )


def public_data(data: Data, spec: Spec, device: torch.device) -> Images | None:
    """What everybody has."""
    if not data.public:
        return None
    dataset = replace(data, source=data.public).load()
    if dataset.x_train.shape[1] != spec.channels:
        raise ConfigError(
            f"data.public={data.public!r} has {dataset.x_train.shape[1]} channels, the task {spec.channels}"
        )
    return Images(dataset.x_train.to(device), dataset.y_train.to(device), spec)


def _local_test(
    dataset: Dataset,
    part: np.ndarray[Any, Any],
    spec: Spec,
    seed: int,
    client: int,
    device: torch.device,
) -> Images:
    """As many test images as there are in the client's own mix of classes and domains."""
    rng = np.random.default_rng(stream_seed(seed, "local test", client))
    classes = len(dataset.classes)
    trained = (dataset.domain_train * classes + dataset.y_train)[part].numpy()
    tested = (dataset.domain_test * classes + dataset.y_test).numpy()
    groups, counts = np.unique(trained, return_counts=True)
    available = np.array([(tested == group).sum() for group in groups])
    groups, counts, available = (column[available > 0] for column in (groups, counts, available))
    if not len(groups):
        raise ConfigError(
            f"client {client} holds classes {np.unique(trained).tolist()} that the test set does not have"
        )
    size = np.floor(min(available / counts) * counts.sum() + 1e-9)
    chosen = [
        rng.permutation(np.flatnonzero(tested == group))[
            : max(1, round(size * count / counts.sum()))
        ]
        for group, count in zip(groups, counts, strict=True)
    ]
    index = torch.as_tensor(np.sort(np.concatenate(chosen)))
    return Images(dataset.x_test[index].to(device), dataset.y_test[index].to(device), spec)
