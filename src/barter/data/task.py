"""The task of a run: every client's data, test sets, and the image format."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Augment, Images, SharedImages, Spec, prepare_batch
from barter.core.params import BY_PYTHON, Range, Side, check_fields
from barter.core.seeds import stream_seed
from barter.data.dataset import Dataset, HoldOut, from_python
from barter.data.partition import Domains, Listed, Partition
from barter.data.sources import PATH_SOURCES, load_dataset

__all__ = [
    "SITES",
    "Data",
    "Task",
    "make_task",
    "overlap",
    "overlap_note",
    "own_data",
    "public_data",
    "split_validation",
    "validation_size",
    "with_absolute_paths",
]

CHUNK = 1024  # images that are compared with others at a time
SITES = "sites"  # the source of runs in which every site has its own data


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data source and how its images are prepared."""

    # a name from `barter list datasets`, npz:PATH, folder:PATH, domains:PATH, clients:PATH, sites,
    # or module:function for custom data; in Python also the data set itself
    source: str | Any = "digits"
    root: str = "data"  # the folder that holds named data sets
    download: bool = False  # whether to download a data set that is missing
    size: Side | None = None  # side of the square that images are resized to; none keeps their size
    # random crops of training images, and horizontal flips if `flip` allows them
    augment: bool = True
    # horizontal flips; none: for named data sets whose classes they are known to keep
    flip: bool | None = None
    # a source whose training images are public, for methods that need public data
    public: str = ""
    # fraction of each client's training images held out to select the best round
    validation: Annotated[float, Range(ge=0, le=0.9)] = 0.0
    # how a fifth is held out for testing where the source has no test part: by position in a file
    # or file name, or (as older versions did) every fifth of each class
    hold_out: HoldOut = "position"

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            dataset = from_python(self.source, BY_PYTHON, self.size, hold_out=self.hold_out)
            object.__setattr__(self, "_given", dataset)
            object.__setattr__(self, "source", f"{BY_PYTHON} {dataset.fingerprint()}")
        check_fields(self, "data.")

    @property
    def given(self) -> Dataset | None:
        """Return the data set, if it was passed from Python; otherwise None."""
        return self.__dict__.get("_given")

    def load(self) -> Dataset:
        """Return the data set that was given in Python, or load it from its source.

        Raises:
            ConfigError: If it is not there or cannot be read.
        """
        return self.given or load_dataset(
            self.source,
            root=self.root,
            download=self.download,
            size=self.size,
            hold_out=self.hold_out,
        )


def with_absolute_paths(data: Data) -> Data:
    """Return a copy with absolute paths, for processes that run in other folders.

    These are `root`, and the paths in `source` and `public`, such as npz:PATH; names of sources
    stay. Relative paths count from the current folder. The copy lacks a data set that was given in
    Python.
    """

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
    """Private data and test sets of all clients, on the run's device."""

    spec: Spec
    classes: list[str]
    train: list[Images]
    local_tests: list[Images]
    global_test: Images
    public: Images | None
    domains: list[str]
    domain_table: Tensor  # number of training images by client and domain
    # validation images of each client, held out from training; empty without data.validation
    validation: list[Images] = field(default_factory=list)
    # the validation images of all clients, joined
    global_validation: Images | None = None
    held_out: bool = False  # whether the test images were split off from the training images
    # whether the choice of clients' local test or validation images depends on training labels
    tests_by_labels: bool = False
    overlap: int = 0  # number of public images that are training or validation images too
    notes: tuple[str, ...] = ()  # changes made to the images without being configured

    def summary(self, source: str) -> str:
        """Return one line with the numbers of images and classes, image size and colours.

        Validation images do not count as training images.

        Args:
            source: The name of the data, with which the line begins.
        """
        spec = self.spec
        colours = {1: "grey", 3: "colour"}.get(spec.channels, f"{spec.channels} channels")
        input_size = f"{spec.width}x{spec.height}"
        height, width = self.global_test.pixels.shape[-2:]
        size = f"{width}x{height}"
        if size != input_size:
            size += f", resized to {input_size}"
        n_train = sum(map(len, self.train))
        tests = f"{len(self.global_test):,} test images"
        if self.held_out:
            tests += ", held out of them"
        classes = f"{spec.classes} class{'es' * (spec.classes != 1)}"
        line = f"{source}: {n_train:,} training and {tests}, {classes}, {size} {colours}"
        if self.overlap:
            line += f"; {overlap_note(self.overlap)}"
        return line

    def class_table(self) -> Tensor:
        """Return numbers of training, not validation, images (clients, classes)."""
        return torch.stack([images.class_counts().cpu() for images in self.train])


def make_task(
    data: Data,
    partition: Partition,
    clients: int,
    seed: int,
    device: torch.device,
    *,
    shared: bool = False,
) -> Task:
    """Load the data, split it over the clients, and put it on the device.

    A client's local test set has the distribution of its training images, unless every client
    brought its own test images. With `data.validation`, some training images are held out.

    Args:
        data: The data source and how images are prepared.
        partition: How training images are split over clients.
        clients: The number of clients.
        seed: The run's seed.
        device: The device that holds all images.
        shared: Clients hold indices of their images instead of copies, for many clients.

    Raises:
        ConfigError: If the data cannot be loaded or split this way.
    """
    if data.source == SITES:
        raise ConfigError(
            "data.source='sites': every site brings its own data, which needs --engine flower"
        )
    dataset = data.load()
    if dataset.held_out and isinstance(partition, Listed):
        raise ConfigError(
            "partition: lists of indices refer to training images, and here some of them are held "
            "out for testing: give test images too"
        )
    spec = _spec(dataset, data.size)
    augment = _augment(dataset, data)
    parts = partition(
        dataset.y_train.numpy(),
        dataset.domain_train.numpy(),
        clients,
        stream_seed(seed, "partition"),
    )
    global_test = Images(dataset.x_test.to(device), dataset.y_test.to(device), spec)

    everything = None
    if shared:
        everything = Images(dataset.x_train.to(device), dataset.y_train.to(device), spec)

    def training_images(index: np.ndarray[Any, Any], augment: Augment) -> Images:
        if everything is not None:
            return SharedImages(everything, torch.as_tensor(index).to(device), augment)
        pixels = dataset.x_train[index].to(device)
        return Images(pixels, dataset.y_train[index].to(device), spec, augment)

    train_parts = parts
    validation: list[Images] = []
    if data.validation:
        train_parts = []
        for k, part in enumerate(parts):
            kept, held = split_validation(dataset, part, data.validation, seed, k)
            train_parts.append(kept)
            validation.append(training_images(held, Augment()))
    brought = len(dataset.own_tests) == clients and isinstance(partition, Domains)
    if dataset.own_tests and brought:
        local_tests = [Images(x.to(device), y.to(device), spec) for x, y in dataset.own_tests]
    else:
        test_groups = _groups(dataset.domain_test, dataset.y_test, dataset)
        available = set(np.unique(test_groups).tolist())
        local_tests = []
        for k, part in enumerate(parts):
            _require_tests(dataset, available, part, k)
            choose = partial(_local_test, dataset, test_groups, part, seed, k)
            if shared:
                local_tests.append(SharedImages(global_test, choose))
            else:
                index = choose()
                pixels = dataset.x_test[index].to(device)
                local_tests.append(Images(pixels, dataset.y_test[index].to(device), spec))
    public = public_data(data, spec, device)
    n_domains = len(dataset.domains)
    domain_counts = [
        dataset.domain_train[part].bincount(minlength=n_domains) for part in train_parts
    ]
    return Task(
        spec=spec,
        classes=dataset.classes,
        train=[training_images(part, augment) for part in train_parts],
        local_tests=local_tests,
        global_test=global_test,
        public=public,
        domains=dataset.domains,
        domain_table=torch.stack(domain_counts),
        validation=validation,
        global_validation=_together(validation, spec) if validation else None,
        held_out=dataset.held_out,
        tests_by_labels=bool(data.validation) or not (dataset.own_tests and brought),
        overlap=0 if public is None else overlap(dataset.x_train, public),
        notes=dataset.notes,
    )


def place_clients(task: Task, devices: Sequence[torch.device]) -> Task:
    """Return the task with every client's images on its device.

    These are its training, local test and validation images. The global test set, the global
    validation set and public images stay where they are.

    Args:
        task: The data of all clients.
        devices: The device of each client, in order.
    """

    def place(parts: Sequence[Images]) -> list[Images]:
        return [images.to(device) for images, device in zip(parts, devices, strict=False)]

    return replace(
        task,
        train=place(task.train),
        local_tests=place(task.local_tests),
        validation=place(task.validation),
    )


def split_validation(
    dataset: Dataset,
    part: np.ndarray[Any, Any],
    share: float,
    seed: int,
    client: int,
    *,
    by_class: bool = True,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Split a client's training images into training and validation images.

    Every image is equally likely to be held out. By class, the distribution of classes and domains
    is kept: images are picked at equal distances from a list sorted by domain and class.

    Args:
        dataset: The data of all clients.
        part: Indices of the client's training images.
        share: The fraction of them that is held out, see `validation_size`; 0 holds out nothing.
        seed: The run's seed.
        client: The client's id; every client has its own random stream.
        by_class: Whether labels matter. If not, a changed label moves no image, as the privacy of a
            site's own data requires.

    Returns:
        Indices for training, then for validation, each in the order of `part`.

    Raises:
        ConfigError: If the client has fewer than two images.
    """
    count = validation_size(len(part), share, f"client {client}")
    rng = np.random.default_rng(stream_seed(seed, "validation", client))
    kinds = np.zeros(len(part), dtype=int)
    if by_class:
        kinds = (dataset.domain_train * len(dataset.classes) + dataset.y_train)[part].numpy()
    shuffled = rng.permutation(len(part))
    by_kind = shuffled[np.argsort(kinds[shuffled], kind="stable")]
    positions = np.floor((np.arange(count) + rng.random()) * len(part) / count).astype(int)
    chosen = by_kind[positions]
    held = np.zeros(len(part), dtype=bool)
    held[chosen] = True
    return part[~held], part[held]


def _together(parts: Sequence[Images], spec: Spec) -> Images:
    """Concatenate the images of several clients."""
    pixels = torch.cat([images.pixels for images in parts])
    labels = torch.cat([images.labels for images in parts])
    return Images(pixels, labels, spec)


def validation_size(images: int, share: float, owner: str) -> int:
    """Return a client's number of validation images: share * images, rounded.

    At least one image is held out, and at least one remains for training.

    Args:
        images: The client's number of training images.
        share: The fraction to hold out; 0 holds out nothing.
        owner: The client's name, for messages.

    Raises:
        ConfigError: If the client has fewer than two images.
    """
    if not share:
        return 0
    if images < 2:
        raise ConfigError(
            f"data.validation={share:g}: {owner} has {images} training image{'s' * (images != 1)}, "
            "and needs two to hold one out"
        )
    return min(max(1, round(share * images)), images - 1)


def own_data(data: Data, source: str) -> tuple[Dataset, Spec, Augment]:
    """Load the data of a single client, which no partition splits.

    Args:
        data: How images are prepared; its source is not used.
        source: Where this client's data come from, as `Data.source`.

    Returns:
        The data set, its spec, and its augmentation. All clients together may agree on another
        spec.

    Raises:
        ConfigError: If the data cannot be loaded.
    """
    dataset = replace(data, source=source).load()
    return dataset, _spec(dataset, data.size), _augment(dataset, data)


def _augment(dataset: Dataset, data: Data) -> Augment:
    """Return the augmentation of training images.

    With `data.augment`, images are shifted by up to an eighth of their width, and flipped if the
    data set allows it. `data.flip`, if given, decides about flips in any case.
    """
    # Images are padded by an eighth of their side before cropping: 4 pixels at 32, as usual for
    # CIFAR.
    crop = dataset.x_train.shape[-1] // 8 if data.augment else 0
    flip = data.augment and dataset.may_flip if data.flip is None else data.flip
    return Augment(crop, flip)


def _spec(dataset: Dataset, size: int | None) -> Spec:
    """Return the image format, with the training images' mean and deviation.

    Height and width are `size`, or those of the images if it is None. Deviations are at least
    0.001.
    """
    _, channels, height, width = dataset.x_train.shape
    # Counting the 256 values of a byte is exact and needs no float copy of the data.
    values = torch.arange(256, dtype=torch.float64) / 255
    histograms = [
        torch.bincount(dataset.x_train[:, c].flatten(), minlength=256).double()
        for c in range(channels)
    ]
    means = [float((counts * values).sum() / counts.sum()) for counts in histograms]
    squares = [float((counts * values**2).sum() / counts.sum()) for counts in histograms]
    stds = [max(square - mean**2, 1e-6) ** 0.5 for mean, square in zip(means, squares, strict=True)]
    return Spec(
        channels, size or height, size or width, len(dataset.classes), tuple(means), tuple(stds)
    )


def public_data(data: Data, spec: Spec, device: torch.device) -> Images | None:
    """Load the public images; None if the configuration names no public source.

    They are the training images of the source `data.public`, without augmentation. They get the
    task's spec, so that their labels may be beyond its classes (see `require_labels`).

    Raises:
        ConfigError: If they cannot be loaded, or have another number of channels than the task.
    """
    if not data.public:
        return None
    dataset = replace(data, source=data.public).load()
    if dataset.x_train.shape[1] != spec.channels:
        raise ConfigError(
            f"data.public={data.public!r} has {dataset.x_train.shape[1]} channels, the task {spec.channels}"
        )
    return Images(dataset.x_train.to(device), dataset.y_train.to(device), spec)


def overlap_note(count: int) -> str:
    """Return text for messages: this number of public images are training images too."""
    verb = "image is a training image" if count == 1 else "images are training images"
    return f"{count:,} public {verb} too"


def overlap(private: Tensor, public: Images) -> int:
    """Return the number of public images that are private images too.

    Two images are the same if all pixels are equal, as bytes, after both were resized to the
    input size of the networks, or if one is the other's mirror image. Other copies (cropped,
    brightened, compressed again) are not found.

    Args:
        private: The private images (uint8, NCHW).
        public: The public images.
    """
    known = set(_keys(private, public.spec))
    return sum(key in known for key in _keys(public.pixels.cpu(), public.spec))


def _keys(pixels: Tensor, spec: Spec) -> list[bytes]:
    """Return for each image a hash that is the same for its mirror image."""
    # Without normalisation, the network's input is the resized image, from 0 to 255.
    plain = replace(spec, mean=(0.0,) * spec.channels, std=(1 / 255,) * spec.channels)
    keys = []
    for chunk in torch.split(pixels, CHUNK):
        images = chunk
        if images.shape[-2:] != spec.shape[1:]:
            resized = prepare_batch(images, plain, Augment())
            images = resized.round().clamp(0, 255).to(torch.uint8)
        straight = images.contiguous().numpy()
        mirrored = images.flip(-1).contiguous().numpy()
        keys += [min(_hash(a), _hash(b)) for a, b in zip(straight, mirrored, strict=True)]
    return keys


def _hash(image: np.ndarray[Any, Any]) -> bytes:
    return hashlib.blake2b(image.data, digest_size=16).digest()


def _groups(domains: Tensor, labels: Tensor, dataset: Dataset) -> np.ndarray[Any, Any]:
    """Return a number for each image that tells its domain and class."""
    groups: np.ndarray[Any, Any] = (domains * len(dataset.classes) + labels).numpy()
    return groups


def _require_tests(
    dataset: Dataset, available: Set[int], part: np.ndarray[Any, Any], client: int
) -> None:
    """Raise if the test set has no image of any of a client's domains and classes."""
    groups = np.unique(_groups(dataset.domain_train[part], dataset.y_train[part], dataset)).tolist()
    if not available.isdisjoint(groups):
        return
    names = ", ".join(_group_name(group, dataset) for group in groups[:5])
    more = f" and {len(groups) - 5} more" if len(groups) > 5 else ""
    raise ConfigError(
        f"client {client} has training images of {names}{more} only, and the test set has no such "
        "image: add test images of them, or choose another partition"
    )


def _group_name(group: int, dataset: Dataset) -> str:
    """Describe the class of a group number of `_groups`, for messages.

    Such as "class 'cat'", or with several domains "class 'cat' of domain 'photo'".
    """
    domain, label = divmod(group, len(dataset.classes))
    name = f"class {dataset.classes[label]!r}"
    return name if len(dataset.domains) == 1 else f"{name} of domain {dataset.domains[domain]!r}"


def _local_test(
    dataset: Dataset,
    test_groups: np.ndarray[Any, Any],
    part: np.ndarray[Any, Any],
    seed: int,
    client: int,
) -> Tensor:
    """Sample the largest local test set with the client's distribution.

    The distribution is that of classes and domains in its training and validation images.
    `_require_tests` must have passed.

    Args:
        dataset: The data of all clients.
        test_groups: Domain and class of each test image.
        part: Indices of the client's training images.
        seed: The run's seed.
        client: The client's id.

    Returns:
        Indices of test images in ascending order.
    """
    rng = np.random.default_rng(stream_seed(seed, "local test", client))
    train_groups = _groups(dataset.domain_train[part], dataset.y_train[part], dataset)
    groups, counts = np.unique(train_groups, return_counts=True)
    available = np.array([(test_groups == group).sum() for group in groups])
    present = available > 0
    groups = groups[present]
    counts = counts[present]
    available = available[present]
    total = counts.sum()
    # The scarcest group limits the size.
    size = np.floor(min(available / counts) * total + 1e-9)
    chosen = []
    for group, count in zip(groups, counts, strict=True):
        shuffled = rng.permutation(np.flatnonzero(test_groups == group))
        chosen.append(shuffled[: max(1, round(size * count / total))])
    return torch.as_tensor(np.sort(np.concatenate(chosen)))
