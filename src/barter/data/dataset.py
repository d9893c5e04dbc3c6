"""The `Dataset` class, built from arrays, PyTorch data sets, or one per client."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import fingerprint
from barter.core.params import did_you_mean, is_utf8

__all__ = [
    "Dataset",
    "HoldOut",
    "build_dataset",
    "from_arrays",
    "from_python",
    "hold_out_mask",
    "test_mask",
]

HELD_OUT = 5  # without a test set, one image in five is held out for testing
# How test images are chosen, see `hold_out_mask`.
HoldOut = Literal["position", "class"]
# Data sets whose images may be flipped. Characters are not among them: a mirrored 3 is no digit.
MIRRORED = {"fashion-mnist", "cifar10", "cifar100", "food101", "tiny-imagenet"}
CHANNELS = (1, 3, 4)  # usual numbers of channels
MOST_NAMES = 100_000_000  # limit in bytes for the names of classes or domains
NEEDED = ("x_train", "y_train")
OPTIONAL = ("x_test", "y_test", "classes", "domains", "domain_train", "domain_test")

SUPPORTED = (
    "barter classifies images, each of one class; regression, several labels per image, text, tables and sensor data "
    "are not supported"
)


@dataclass(frozen=True)
class Dataset:
    """Training and test images (uint8, NCHW) with the label and domain of each."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: list[str]
    domains: list[str]
    domain_train: Tensor
    domain_test: Tensor
    held_out: bool = False  # whether the test images were split off from the training images
    numbered: bool = False  # whether classes have no names, so that numbers stand for them
    # test images and labels of each client, if every client brought its own
    own_tests: tuple[tuple[Tensor, Tensor], ...] = ()
    notes: tuple[str, ...] = ()  # changes made to the images without being configured

    def __post_init__(self) -> None:
        for name in (*self.classes, *self.domains):
            if not is_utf8(name):
                raise ConfigError(
                    f"{self.name}: the name {name!a} is not text that UTF-8 can hold: rename it"
                )

    def fingerprint(self) -> str:
        """Return a hash of all images, labels and domain numbers, 16 hexadecimal digits.

        Names of classes and domains do not count.
        """
        train = (self.x_train, self.y_train, self.domain_train)
        test = (self.x_test, self.y_test, self.domain_test)
        return fingerprint(*train, *test)

    @property
    def may_flip(self) -> bool:
        """Return whether flipping an image horizontally is known to keep its class.

        It is known of the data sets named in `MIRRORED`.
        """
        return self.name in MIRRORED


def build_dataset(
    name: str,
    arrays: tuple[Any, Any, Any, Any],
    classes: list[str] | None = None,
    domains: tuple[list[str], Any, Any] | None = None,
    *,
    held_out: bool = False,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Build a data set from NHWC arrays, which are not checked (see `from_arrays`).

    Args:
        name: The name of the data set.
        arrays: x_train, y_train, x_test and y_test; images are bytes.
        classes: Names of the classes; by default numbers, up to the largest label.
        domains: Names of the domains, and the domain of each training and test image. By default
            there is one domain.
        held_out: Whether the test images were split off from the training images.
        notes: Changes made to the images without being configured.
    """
    x_train, y_train, x_test, y_test = map(_as_tensor, arrays)
    if domains is None:
        domains = (["all"], np.zeros(len(y_train)), np.zeros(len(y_test)))
    names, domain_train, domain_test = domains
    return Dataset(
        name=name,
        x_train=x_train.permute(0, 3, 1, 2).contiguous(),
        y_train=y_train.long(),
        x_test=x_test.permute(0, 3, 1, 2).contiguous(),
        y_test=y_test.long(),
        classes=classes or [str(c) for c in range(int(max(y_train.max(), y_test.max())) + 1)],
        domains=names,
        domain_train=_as_tensor(domain_train).long(),
        domain_test=_as_tensor(domain_test).long(),
        held_out=held_out,
        numbered=classes is None,
        notes=notes,
    )


def _as_tensor(given: Any) -> Tensor:
    """Convert an array of any byte order to a tensor, which has the native order."""
    array = np.ascontiguousarray(given)
    return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))


def test_mask(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask, true for test samples: every fifth of each group is held out.

    The first of each group is held out, then the sixth, and so on; a group of one sample is held
    out.

    Args:
        groups: The group of each sample, such as its class.
    """
    mask = np.zeros(len(groups), dtype=bool)
    for group in np.unique(groups):
        mask[np.flatnonzero(groups == group)[::HELD_OUT]] = True
    return mask


def hold_out_mask(
    rule: HoldOut,
    names: Sequence[str],
    labels: np.ndarray[Any, Any],
    domains: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Return a mask, true for images to hold out for testing: a fifth of each domain.

    With the rule "position", a hash of an image's name decides: its position in an array, or its
    file name without the folder of its class. Neither pixels nor labels matter, so that replacing
    an image, or correcting its label, moves no image between training and test. A fifth of the
    names is held out, rounded up. The rule "class" holds out every fifth image of each class of a
    domain, by `test_mask`: a changed label moves all later images of two classes.

    Args:
        rule: "position" or "class".
        names: The name of each image; images of one domain with the same name stay together.
        labels: The class number of each image.
        domains: The domain number of each image.
    """
    if rule == "class":
        return test_mask(domains * (int(labels.max()) + 1) + labels)
    mask = np.zeros(len(names), dtype=bool)
    for domain in np.unique(domains):
        members: list[int] = np.flatnonzero(domains == domain).tolist()
        ranked = sorted({names[i] for i in members}, key=_name_hash)
        chosen = set(ranked[: math.ceil(len(ranked) / HELD_OUT)])
        mask[[i for i in members if names[i] in chosen]] = True
    return mask


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=8).digest()


def require_names(given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a required array is missing or a name is unknown.

    `NEEDED` arrays are required; x_test and y_test come together, and with `domains` each part
    needs its domain numbers.

    Args:
        given: Arrays by name.
        where: Where the arrays come from, for messages.
    """
    needed = set(NEEDED)
    test_arrays = {"x_test", "y_test"}
    if test_arrays & given.keys():
        needed |= test_arrays
    if "domains" in given:
        needed |= {f"domain_{part}" for part in ("train", "test") if f"x_{part}" in given}
    missing = sorted(needed - given.keys())
    if missing:
        raise ConfigError(
            f"{where} lacks {', '.join(missing)}; it has {', '.join(given) or 'nothing'}"
        )
    for key in given.keys() - {*NEEDED, *OPTIONAL}:
        raise ConfigError(
            f"{where}: unknown array {key!r}: {did_you_mean(key, [*NEEDED, *OPTIONAL])}"
        )


def require_headers(given: Mapping[str, np.ndarray[Any, Any]], where: str) -> None:
    """Check names, dtypes and shapes of arrays before anything is decompressed.

    Args:
        given: Arrays of the right dtypes and shapes; their contents are not read.
        where: Where the arrays come from, for messages.

    Raises:
        ConfigError: If a name is missing or unknown, images are no numbers of three or four axes,
            labels or domains are not one per image, or names take too much memory.
    """
    require_names(given, where)
    for part in ("train", "test"):
        x = given.get(f"x_{part}")
        if x is None:
            continue
        if x.dtype.kind not in "uif" or x.ndim not in (3, 4) or 0 in x.shape[1:]:
            raise ConfigError(
                f"{where}: x_{part} is {x.dtype} of shape {x.shape}, uint8 NHWC is expected. "
                f"{SUPPORTED}"
            )
        for key, what in (("y", "class"), ("domain", "domain")):
            numbers = given.get(f"{key}_{part}")
            if numbers is not None:
                _require_one_per_image(numbers, len(x), what, f"{where}: {key}_{part}")
    for key in ("classes", "domains"):
        if key in given and given[key].nbytes > MOST_NAMES:
            raise ConfigError(f"{where}: {key} holds {given[key].nbytes:,} bytes of names")


def from_arrays(
    source: Mapping[str, Any], name: str, where: str, hold_out: HoldOut = "position"
) -> Dataset:
    """Build a data set from named arrays, as stored in an npz file.

    Without test images, a fifth of the training images of each domain is held out.

    Args:
        source: Arrays by name, see `NEEDED` and `OPTIONAL`. Images are NHWC or NHW, bytes or floats
            between 0 and 1; labels and domains are numbers from 0 on.
        name: The name of the data set.
        where: Where the arrays come from, for messages.
        hold_out: How test images are chosen if there are none, see `hold_out_mask`.

    Raises:
        ConfigError: If arrays are missing, unknown, or do not fit together.
    """
    given = {key: np.asarray(value) for key, value in source.items()}
    require_names(given, where)
    classes = _names(given["classes"], f"{where}: classes") if "classes" in given else None
    domains = _names(given["domains"], f"{where}: domains") if "domains" in given else None
    without_test = "x_test" not in given
    for part in ("train",) if without_test else ("train", "test"):
        x = _as_images(given[f"x_{part}"], f"{where}: x_{part}")
        given[f"x_{part}"] = x
        if x.shape[1] in CHANNELS and x.shape[3] not in CHANNELS:
            raise ConfigError(
                f"{where}: x_{part} of shape {x.shape} has its channels first: x.transpose(0, 2, 3, 1)"
            )
        _require_numbers(given[f"y_{part}"], len(x), classes, "class", f"{where}: y_{part}")
        if given[f"y_{part}"].max() >= max(len(given["x_train"]), len(classes or ())):
            worst = given[f"y_{part}"].max()
            raise ConfigError(
                f"{where}: class number {worst} in y_{part}, but only {len(given['x_train'])} images"
            )
        if domains is not None:
            _require_numbers(
                given[f"domain_{part}"], len(x), domains, "domain", f"{where}: domain_{part}"
            )
        if x.shape[1:] != given["x_train"].shape[1:]:
            raise ConfigError(
                f"{where}: training images are {given['x_train'].shape[1:]}, test images {x.shape[1:]}"
            )
    if without_test:
        labels = given["y_train"].astype(np.int64)
        domain = np.zeros_like(labels)
        kinds = ["x", "y"]
        if domains is not None:
            domain = given["domain_train"].astype(np.int64)
            kinds.append("domain")
        positions = [str(i) for i in range(len(labels))]
        test = hold_out_mask(hold_out, positions, labels, domain)
        for kind in kinds:
            every = given[f"{kind}_train"]
            given[f"{kind}_train"] = every[~test]
            given[f"{kind}_test"] = every[test]
    arrays = (given["x_train"], given["y_train"], given["x_test"], given["y_test"])
    domain_arrays = None
    if domains is not None:
        domain_arrays = (domains, given["domain_train"], given["domain_test"])
    return build_dataset(name, arrays, classes, domain_arrays, held_out=without_test)


def _as_images(x: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    """Return images as uint8 NHWC.

    Floats between 0 and 1 are scaled, and a missing channel axis is added; both are unambiguous.

    Raises:
        ConfigError: If these are no images, or numbers of another range or type.
    """
    found = f"{where} is {x.dtype} of shape {x.shape}"
    if x.ndim not in (3, 4) or 0 in x.shape[1:] or x.dtype.kind not in "uifb":
        raise ConfigError(f"{found}, uint8 NHWC is expected. {SUPPORTED}")
    if x.dtype.kind == "f":
        x = _to_bytes(x, found)
    elif x.dtype != np.uint8:
        raise ConfigError(
            f"{found}, uint8 NHWC is expected: x.astype(np.uint8), if its numbers are from 0 to 255"
        )
    return x[..., None] if x.ndim == 3 else x


def _to_bytes(x: np.ndarray[Any, Any], found: str) -> np.ndarray[Any, Any]:
    """Convert floats from 0 to 1 to bytes from 0 to 255.

    Args:
        x: The images.
        found: What was found, the beginning of the message.

    Raises:
        ConfigError: Values are outside of this range.
    """
    if not x.size:
        return x.astype(np.uint8)
    least = float(x.min())
    most = float(x.max())
    if not (least >= 0 and most <= 1):  # Also true for NaN, which compares as false.
        if least >= 0 and math.isfinite(most):
            advice = "divide them by the largest value that a pixel can have, such as 255"
        else:
            advice = "undo the normalisation, barter normalises images itself"
        raise ConfigError(
            f"{found}, between {least:g} and {most:g}; give bytes, or numbers between 0 and 1: "
            f"{advice}. {SUPPORTED}"
        )
    return (x * 255).round().astype(np.uint8)


def _names(given: np.ndarray[Any, Any], where: str) -> list[str]:
    """Return the names of classes or domains as strings.

    Raises:
        ConfigError: If they are no non-empty list of text or integers, or not UTF-8.
    """
    if given.ndim != 1 or given.dtype.kind not in "USiu" or not len(given):
        raise ConfigError(
            f"{where} is {given.dtype} of shape {given.shape}, a list of names is expected"
        )
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in given.tolist()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} holds names that are not UTF-8: {error}") from error


def _require_one_per_image(y: np.ndarray[Any, Any], n: int, what: str, where: str) -> str:
    """Raise ConfigError unless `y` has one entry per image.

    Args:
        y: Labels or domains.
        n: The number of images.
        what: What a number is, "class" or "domain".
        where: Where the array comes from.

    Returns:
        The beginning of other error messages about `y`.
    """
    wanted = f"{where} must hold a {what} number from 0 on for each of {n} images"
    if y.ndim == 2 and len(y) == n and y.shape[1] > 1:
        raise ConfigError(
            f"{wanted}, and is of shape {y.shape}: y.argmax(1), if each row marks one class. "
            f"{SUPPORTED}"
        )
    if y.shape != (n,):
        raise ConfigError(wanted)
    return wanted


def _require_numbers(
    y: np.ndarray[Any, Any], n: int, names: list[str] | None, what: str, where: str
) -> None:
    """Raise ConfigError unless `y` holds one valid class or domain number per image."""
    wanted = _require_one_per_image(y, n, what, where)
    if y.dtype.kind == "f":
        raise ConfigError(
            f"{wanted}, and is {y.dtype}: y.astype(int), if these are {what} numbers. {SUPPORTED}"
        )
    if not np.issubdtype(y.dtype, np.integer) or n == 0 or y.min() < 0:
        raise ConfigError(wanted)
    if names is not None and y.max() >= len(names):
        raise ConfigError(
            f"{where} holds {what} number {y.max()}, but there are {len(names)} names"
        )


def from_python(
    given: Any,
    name: str,
    size: int | None = None,
    tests: tuple[Any, Any] | None = None,
    hold_out: HoldOut = "position",
) -> Dataset:
    """Build a data set from Python objects.

    Args:
        given: A `Dataset`, arrays (x_train, y_train[, x_test, y_test]), a dict of named arrays, a
            PyTorch data set, a pair (train, test) of PyTorch data sets, or a list with one of these
            per client. In a list every client is a domain. Images in arrays have their channels
            last, in tensors first; they are bytes, or floats between 0 and 1.
        name: The name of the data set.
        size: Side of the square that PIL images are resized to; None keeps their size. Other images
            keep their size.
        tests: Images (NHWC, bytes) and labels of the global test set, if `given` is a list; ignored
            otherwise. By default the clients' test images are joined.
        hold_out: How test images are chosen if there are none, see `hold_out_mask`.

    Raises:
        ConfigError: If the objects cannot be read as labelled images.
    """
    if isinstance(given, Dataset):
        return replace(given, name=name)
    if isinstance(given, list) and given:
        parts = [
            from_python(part, f"{name}, client {k}", size, hold_out=hold_out)
            for k, part in enumerate(given)
        ]
        joined = _join_datasets(parts, name)
        return joined if tests is None else _replace_test_set(joined, *tests)
    if (
        isinstance(given, tuple)
        and len(given) in (2, 4)
        and all(isinstance(a, np.ndarray | Tensor) for a in given)
    ):
        given = dict(zip(("x_train", "y_train", "x_test", "y_test"), given, strict=False))
    if isinstance(given, Mapping):
        named = {key: _channels_last(value) for key, value in given.items()}
        return from_arrays(named, name, "the data", hold_out)
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given,)
    indexable = all(hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in pair)
    if not indexable or isinstance(given, list):
        raise ConfigError(
            f"data: a {type(given).__name__} is no data set; give arrays (x_train, y_train, "
            "x_test, y_test), a dict of them, a PyTorch data set with a length, a pair "
            "(train, test) of those, or a list with one of them per client"
        )
    arrays: dict[str, Any] = {}
    for part, source in zip(("train", "test"), pair, strict=False):
        samples = [source[i] for i in range(len(source))]
        images = [_bytes(_pair(sample)[0], size) for sample in samples]
        labels = [_label(_pair(sample)[1]) for sample in samples]
        arrays[f"x_{part}"] = _stack_images(images)
        arrays[f"y_{part}"] = np.array(labels)
    if getattr(pair[0], "classes", None):
        arrays["classes"] = np.array([str(name) for name in pair[0].classes])
    return from_arrays(arrays, name, "the data", hold_out)


def _channels_last(value: Any) -> Any:
    """Move the channels of a tensor of images last; arrays have them there already."""
    return value.permute(0, 2, 3, 1) if isinstance(value, Tensor) and value.ndim == 4 else value


def _pair(sample: Any) -> Any:
    """Return an item of a data set; raise ConfigError unless it is (image, label)."""
    if isinstance(sample, str | bytes | Mapping) or not hasattr(sample, "__len__"):
        raise ConfigError(
            f"the data: an item is a {type(sample).__name__}, a pair (image, label) is expected. {SUPPORTED}"
        )
    if len(sample) != 2:
        raise ConfigError(
            f"the data: an item has {len(sample)} parts, a pair (image, label) is expected. {SUPPORTED}"
        )
    return sample


def _label(label: Any) -> int:
    """Return a label as an int; it may be a tensor or a float without a fraction.

    Raises:
        ConfigError: If it is anything else.
    """
    array = np.asarray(label)
    if array.size != 1 or array.dtype.kind not in "iufb":
        raise ConfigError(
            f"the data: a label is {array.dtype} of shape {array.shape}, a class number is expected. {SUPPORTED}"
        )
    number = array.item()
    if number != int(number):
        raise ConfigError(
            f"the data: a label is {number:g}, a class number is expected. {SUPPORTED}"
        )
    return int(number)


def _bytes(image: Any, size: int | None) -> np.ndarray[Any, Any]:
    """Return an image as bytes (H, W, C).

    Args:
        image: A PIL image, a tensor (C, H, W) or an array (H, W, C), of bytes or between 0 and 1.
        size: Side of the square that PIL images are resized to; None keeps their size.

    Raises:
        ConfigError: If it is no image, or has numbers outside of this range.
    """
    if isinstance(image, Image.Image):
        picture = image if image.mode == "L" else image.convert("RGB")
        if size is not None:
            picture = picture.resize((size, size), Image.Resampling.BILINEAR)
        array = np.asarray(picture)
    elif isinstance(image, Tensor):
        array = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    else:
        array = np.asarray(image)
    if array.dtype.kind not in "uifb":
        raise ConfigError(
            f"the data: an image is a {type(image).__name__}, PIL images, bytes or numbers are "
            f"expected. {SUPPORTED}"
        )
    if array.ndim == 2:
        array = array[..., None]
    is_float = np.issubdtype(array.dtype, np.floating)
    if is_float and array.size and array.min() >= 0 and array.max() <= 1:
        array = (array * 255).round().astype(np.uint8)
    if array.ndim != 3:
        raise ConfigError(
            f"the data: an image is {array.dtype} of shape {array.shape}, height, width and "
            f"channels are expected. {SUPPORTED}"
        )
    if array.dtype != np.uint8:
        extent = f", between {array.min():g} and {array.max():g}" if array.size else ""
        raise ConfigError(
            f"the data: an image is {array.dtype} of shape {array.shape}{extent}; "
            "give bytes, or numbers between 0 and 1; barter normalises images itself"
        )
    return array


def _stack_images(images: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Stack images; raise ConfigError if there are none or their shapes differ."""
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        raise ConfigError(
            f"the data: images of {shapes[0]} and of {shapes[-1]}; bring them to one size"
        )
    if not images:
        raise ConfigError("the data: there are no images")
    return np.stack(images)


def _join_datasets(parts: Sequence[Dataset], name: str) -> Dataset:
    """Join the data sets of all clients into one, in which every client is a domain.

    Clients with numbered classes may have different numbers of them; names must be equal.

    Raises:
        ConfigError: If image sizes or classes differ.
    """
    first = parts[0]
    longest = max((part.classes for part in parts), key=len)
    for k, part in enumerate(parts):
        if part.x_train.shape[1:] != first.x_train.shape[1:]:
            sizes = f"{tuple(first.x_train.shape[1:])}, client {k} {tuple(part.x_train.shape[1:])}"
            raise ConfigError(f"the data: client 0 has images of {sizes}; bring them to one size")
        if part.numbered != first.numbered or (not part.numbered and part.classes != longest):
            raise ConfigError(
                f"the data: client {k} has other classes than client 0: give all of them the same names"
            )

    def concatenate(field: str) -> Tensor:
        return torch.cat([getattr(part, field) for part in parts])

    def client_ids(field: str) -> Tensor:
        sizes = torch.tensor([len(getattr(part, field)) for part in parts])
        return torch.repeat_interleave(torch.arange(len(parts)), sizes)

    return Dataset(
        name=name,
        x_train=concatenate("x_train"),
        y_train=concatenate("y_train"),
        x_test=concatenate("x_test"),
        y_test=concatenate("y_test"),
        classes=longest,
        domains=[f"client {k}" for k in range(len(parts))],
        domain_train=client_ids("y_train"),
        domain_test=client_ids("y_test"),
        held_out=any(part.held_out for part in parts),
        numbered=first.numbered,
        own_tests=tuple((part.x_test, part.y_test) for part in parts),
    )


def _replace_test_set(
    dataset: Dataset, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]
) -> Dataset:
    """Return the data set with this global test set instead of its test images.

    Args:
        dataset: The data set.
        x: Images (N, H, W, C) as bytes.
        y: Their labels.
    """
    names = None if dataset.numbered else dataset.classes
    _require_numbers(y, len(x), names, "class", "the global test set: y")
    images = torch.as_tensor(x).permute(0, 3, 1, 2).contiguous()
    if images.shape[1:] != dataset.x_train.shape[1:]:
        sizes = f"{tuple(dataset.x_train.shape[1:])}, the global test set {tuple(images.shape[1:])}"
        raise ConfigError(f"the data: clients have images of {sizes}")
    classes = dataset.classes
    if dataset.numbered:
        classes = [str(c) for c in range(max(len(dataset.classes), int(y.max()) + 1))]
    return replace(
        dataset,
        x_test=images,
        y_test=torch.as_tensor(y).long(),
        classes=classes,
        domain_test=torch.zeros(len(y), dtype=torch.long),
    )
