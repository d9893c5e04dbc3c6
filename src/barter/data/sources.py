"""Data sets by name or by path, as uint8 arrays in memory. The registry is a dict one can read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from barter.core.errors import ConfigError, in_short
from barter.core.files import understood
from barter.core.params import BY_PYTHON, did_you_mean, imported, made
from barter.data.dataset import (
    NEEDED,
    Dataset,
    assembled,
    from_arrays,
    from_python,
    held_out,
    require_headers,
)
from barter.data.splits import arrays_in, read_split

__all__ = ["PATH_SOURCES", "SOURCES", "load"]

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "BMP",
    "GIF",
)  # Pillow knows more, and for some runs other programs
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
TESTS = (
    "test",
    "val",
    "valid",
    "validation",
)  # names of the folder of test images, best first
# the side that photographs of different sizes are brought to when data.size says nothing
FOLDER_SIZE = 64


@dataclass(frozen=True)
class Request:
    """What is asked of a source."""

    name: str
    path: Path
    download: bool
    size: int | None


@cache
def _eight_by_eight() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return (bunch.images * (255 / 16)).round().astype(np.uint8)[..., None], bunch.target


def _digits(request: Request) -> Dataset:
    x, y = _eight_by_eight()  # kept: reading them takes longer than a small round
    test = held_out(y)
    return assembled(request.name, (x[~test], y[~test], x[test], y[test]))


def _torchvision(name: str, request: Request) -> Dataset:
    from torchvision import datasets

    root, download = str(request.path), request.download
    try:
        if name == "svhn":
            train, test = (
                datasets.SVHN(root, split, download=download) for split in ("train", "test")
            )
            arrays = (
                train.data.transpose(0, 2, 3, 1),
                train.labels,
                test.data.transpose(0, 2, 3, 1),
                test.labels,
            )
            return assembled(request.name, arrays)
        if name == "food101":
            train, test = (
                datasets.Food101(root, split, download=download) for split in ("train", "test")
            )
            pictures = [
                [_picture(path, request.size) for path in part._image_files]
                for part in (train, test)
            ]
            arrays = (np.stack(pictures[0]), train._labels, np.stack(pictures[1]), test._labels)
            return assembled(request.name, arrays, list(train.classes))
        if name == "emnist":
            train, test = (
                datasets.EMNIST(root, "balanced", train=t, download=download) for t in (True, False)
            )
        else:
            kinds: dict[str, Any] = {
                "cifar10": datasets.CIFAR10,
                "cifar100": datasets.CIFAR100,
                "mnist": datasets.MNIST,
                "fashion-mnist": datasets.FashionMNIST,
            }
            train, test = (kinds[name](root, train=t, download=download) for t in (True, False))
    except RuntimeError as error:
        advice = (
            "the download failed"
            if download
            else "set data.root to the folder that holds it, or data.download=true"
        )
        raise ConfigError(f"{name} is not in {root}: {advice} ({error})") from error
    except Exception as error:  # whatever a damaged file makes go wrong
        raise ConfigError(
            f"{name} could not be read or downloaded into {root}: {in_short(error)}"
        ) from error
    images = [np.asarray(part.data) for part in (train, test)]
    if images[0].ndim == 3:
        images = [image[..., None] for image in images]
    # The files of EMNIST hold every letter on its side.
    images = [image.transpose(0, 2, 1, 3) for image in images] if name == "emnist" else images
    classes = [str(c) for c in train.classes]
    return assembled(
        request.name,
        (images[0], np.asarray(train.targets), images[1], np.asarray(test.targets)),
        classes,
    )


def _picture(
    path: Path, size: int | None, sizes: set[tuple[int, int]] | None = None
) -> np.ndarray[Any, Any]:
    """Read a picture as a square of this side; its own width and height are added to `sizes`."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                if sizes is not None:
                    sizes.add(image.size)
                square = image.convert("RGB").resize(
                    (size or FOLDER_SIZE,) * 2, Image.Resampling.BILINEAR
                )
            return np.asarray(square, dtype=np.uint8)
    except Exception as error:  # Pillow raises whatever a damaged file makes go wrong
        raise ConfigError(f"{path} is not an image that can be read: {in_short(error)}") from error


def _subfolders(path: Path, what: str) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    found = sorted(
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    if not found:
        raise ConfigError(f"{path} holds no folders: one folder per {what} is expected")
    return found


def _pictures(folder: Path) -> list[Path]:
    every = folder.rglob("*")
    found = sorted(
        path for path in every if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()
    )
    if not found:
        raise ConfigError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def _resizing(sizes: set[tuple[int, int]], size: int | None) -> tuple[str, ...]:
    """Say that images were resized, and how to choose the size; nothing where it was chosen or is their own."""
    if size is not None or sizes == {(FOLDER_SIZE, FOLDER_SIZE)}:
        return ()
    by_area = sorted(sizes, key=lambda pair: (pair[0] * pair[1], pair))
    ends = dict.fromkeys("{}x{}".format(*by_area[i]) for i in (0, -1))
    return (
        f"images of {' to '.join(ends)} pixels were resized to {FOLDER_SIZE}x{FOLDER_SIZE}; "
        "set data.size to choose another size",
    )


def _read_classes(
    path: Path, classes: list[str], size: int | None, sizes: set[tuple[int, int]]
) -> tuple[Any, Any]:
    pictures, labels = [], []
    for folder in _subfolders(path, "class"):
        if folder.name not in classes:
            raise ConfigError(
                f"{folder} is a class that the other folders do not have: {did_you_mean(folder.name, classes)}"
            )
        for picture in _pictures(folder):
            pictures.append(_picture(picture, size, sizes))
            labels.append(classes.index(folder.name))
    return np.stack(pictures), np.array(labels)


def _folder(request: Request) -> Dataset:
    path, sizes = request.path, set[tuple[int, int]]()
    inside = [folder.name for folder in _subfolders(path, "class")]
    tests, parts = [name for name in TESTS if name in inside], {"train", *TESTS} & set(inside)
    if parts and ("train" not in parts or set(inside) - parts):
        known = " and ".join(f"{name}/" for name in sorted(parts))
        lacking = (
            "no train/" if "train" not in parts else f"{sorted(set(inside) - parts)[0]}/ beside it"
        )
        raise ConfigError(
            f"{path} holds {known} and {lacking}: give one folder per class, or train/ and test/ alone"
        )
    if tests:
        classes = [folder.name for folder in _subfolders(path / "train", "class")]
        train, test = (
            _read_classes(path / part, classes, request.size, sizes) for part in ("train", tests[0])
        )
        notes = _resizing(sizes, request.size)
        return assembled(request.name, (*train, *test), classes, notes=notes)
    path = path / "train" if parts else path
    classes = [folder.name for folder in _subfolders(path, "class")]
    x, y = _read_classes(path, classes, request.size, sizes)
    chosen = held_out(y)
    arrays = (x[~chosen], y[~chosen], x[chosen], y[chosen])
    notes = _resizing(sizes, request.size)
    return assembled(request.name, arrays, classes, held_out=True, notes=notes)


def _domains(request: Request) -> Dataset:
    domains = _subfolders(request.path, "domain")
    classes = sorted({folder.name for domain in domains for folder in _subfolders(domain, "class")})
    sizes = set[tuple[int, int]]()
    parts = [_read_classes(domain, classes, request.size, sizes) for domain in domains]
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    domain = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    test = held_out(domain * len(classes) + y)
    numbered = ([folder.name for folder in domains], domain[~test], domain[test])
    arrays = (x[~test], y[~test], x[test], y[test])
    notes = _resizing(sizes, request.size)
    return assembled(request.name, arrays, classes, numbered, held_out=True, notes=notes)


def _tiny_imagenet(request: Request) -> Dataset:
    root = request.path / "tiny-imagenet-200"
    root = root if root.is_dir() else request.path
    if not (root / "train").is_dir() or not (root / "val" / "val_annotations.txt").is_file():
        raise ConfigError(
            f"tiny-imagenet is not in {request.path}: set data.root to the unpacked folder with train/ and val/; "
            "barter does not download it"
        )
    classes = [folder.name for folder in _subfolders(root / "train", "class")]
    x_train, y_train = _read_classes(root / "train", classes, request.size, set())
    rows = understood(
        root / "val" / "val_annotations.txt", lambda text: _annotations(text, classes)
    )
    x_test = np.stack([_picture(root / "val" / "images" / name, request.size) for name, _ in rows])
    return assembled(
        request.name, (x_train, y_train, x_test, np.array([number for _, number in rows])), classes
    )


def _annotations(text: str, classes: list[str]) -> list[tuple[str, int]]:
    """Names of images and the numbers of their classes, from lines that begin with two names."""
    rows = [line.split("\t") for line in text.splitlines() if line]
    return [(row[0], classes.index(row[1])) for row in rows]


def _npz(request: Request) -> Dataset:
    if request.path.is_file() and request.path.open("rb").read(6) == b"\x93NUMPY":
        raise ConfigError(
            f"{request.path} holds one array; an npz file with {', '.join(NEEDED)} is expected"
        )
    where = str(request.path)
    arrays = arrays_in(request.path, require=partial(require_headers, where=where))
    return from_arrays(arrays, request.name, where)


def _clients(request: Request) -> Dataset:
    return read_split(request.path, request.name)


def _named(name: str) -> Callable[[Request], Dataset]:
    return lambda request: _torchvision(name, request)


SOURCES: dict[str, tuple[Callable[[Request], Dataset], str]] = {
    "digits": (
        _digits,
        "1,797 handwritten digits, 8x8 grey, 10 classes; inside scikit-learn, no download",
    ),
    "mnist": (_named("mnist"), "70,000 handwritten digits, 28x28 grey, 10 classes"),
    "fashion-mnist": (
        _named("fashion-mnist"),
        "70,000 articles of clothing, 28x28 grey, 10 classes",
    ),
    "emnist": (
        _named("emnist"),
        "131,600 handwritten characters (balanced split), 28x28 grey, 47 classes",
    ),
    "svhn": (_named("svhn"), "99,289 house numbers, 32x32, 10 classes"),
    "cifar10": (_named("cifar10"), "60,000 photographs, 32x32, 10 classes"),
    "cifar100": (_named("cifar100"), "60,000 photographs, 32x32, 100 classes"),
    "food101": (_named("food101"), "101,000 dishes, brought to data.size (64), 101 classes"),
    "tiny-imagenet": (
        _tiny_imagenet,
        "110,000 photographs, brought to data.size (64), 200 classes; no download",
    ),
}
PATH_SOURCES: dict[str, tuple[Callable[[Request], Dataset], str]] = {
    "npz": (
        _npz,
        "npz:PATH, a file with x_train, y_train (NHWC); if need be x_test, y_test, classes, domains",
    ),
    "folder": (
        _folder,
        "folder:PATH, one folder per class, or train/ and test/ (or val/) with one each",
    ),
    "domains": (_domains, "domains:PATH, one folder per domain, in it one per class: feature skew"),
    "clients": (
        _clients,
        "clients:PATH, a split: train/0.npz ... and test/0.npz ..., as HtFLlib and PFLlib write them",
    ),
}


def load(
    source: str, *, root: str = "data", download: bool = False, size: int | None = None
) -> Dataset:
    """The data set of this name, at this path, or from this function of one's own."""
    kind, colon, path = source.partition(":")
    if colon and kind not in PATH_SOURCES:
        return _from_function(source, size)
    if colon:
        if not Path(path).exists():
            raise ConfigError(f"{source}: {path or 'the path'} does not exist")
        return PATH_SOURCES[kind][0](Request(source, Path(path), download, size))
    if source.startswith(BY_PYTHON):
        raise ConfigError(
            "this run's data were given in Python: resume it there, with out=... and resume=True"
        )
    if source not in SOURCES:
        advice = _by_path(source) or did_you_mean(source, [*SOURCES, *PATH_SOURCES])
        raise ConfigError(f"unknown data set {source!r}: {advice}")
    return SOURCES[source][0](Request(source, Path(root), download, size))


def _by_path(source: str) -> str:
    """Say how to give a path, where the source looks like one; nothing where it does not."""
    path = Path(source)
    if path.is_dir():
        kinds = ["folder", "domains"]
        if (path / "train" / "0.npz").is_file():
            kinds = ["clients"]
        elif any(child.is_dir() and child.name in ("train", *TESTS) for child in path.iterdir()):
            kinds = ["folder"]
        said = {
            "clients": "for data that are split already",
            "folder": "with a folder per class",
            "domains": "with a folder per domain, in it one per class",
        }
        return "it is a folder: write " + ", or ".join(f"{k}:{source} {said[k]}" for k in kinds)
    if path.suffix == ".npz" or path.is_file():
        return f"did you mean 'npz:{source}'?"
    return ""


def _from_function(source: str, size: int | None) -> Dataset:
    kind = source.partition(":")[0]
    try:
        make = imported(source, "data")
    except ConfigError as error:
        if getattr(error.__cause__, "name", None) != kind:
            raise
        guess = did_you_mean(kind, PATH_SOURCES)
        raise ConfigError(
            f"unknown kind of data {kind + ':'!r}, and no module either: {guess}"
        ) from None
    return made(
        f"data {source!r}", lambda: from_python(make() if callable(make) else make, source, size)
    )
