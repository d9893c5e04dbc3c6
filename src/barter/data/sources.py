"""Load data sets by name or path as uint8 arrays.

`SOURCES` and `PATH_SOURCES` list them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from barter.core.errors import ConfigError, summarise_error
from barter.core.files import parse_file
from barter.core.params import BY_PYTHON, call_user_code, did_you_mean, import_object
from barter.data.dataset import (
    NEEDED,
    Dataset,
    HoldOut,
    build_dataset,
    from_arrays,
    from_python,
    hold_out_mask,
    require_headers,
    test_mask,
)
from barter.data.splits import arrays_in, read_split

__all__ = ["PATH_SOURCES", "SOURCES", "load_dataset"]

# Pillow supports more formats, but runs other programs for some of them.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
# Names of the folder with test images; the first that exists is used.
TEST_FOLDERS = ("test", "val", "valid", "validation")
# Side of the square that images of different sizes are resized to without data.size.
FOLDER_SIZE = 64


@dataclass(frozen=True)
class SourceRequest:
    """The arguments of a source: name, path, download, image size, hold-out rule."""

    name: str
    path: Path
    download: bool
    size: int | None
    hold_out: HoldOut


@cache
def _eight_by_eight() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return scikit-learn's digits (n, 8, 8, 1) as bytes, and their labels.

    They are cached, as reading them is slower than a small round. The file is read as `load_digits`
    does it, without importing scikit-learn, which takes seconds.
    """
    rows = np.loadtxt(_digits_file(), delimiter=",")
    images = rows[:, :-1].reshape(-1, 8, 8)
    pixels = (images * (255 / 16)).round().astype(np.uint8)[..., None]
    return pixels, rows[:, -1].astype(int)


def _digits_file() -> Path:
    """Return the path of scikit-learn's digits."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError("the digits are scikit-learn's: pip install scikit-learn")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _digits(request: SourceRequest) -> Dataset:
    """Load the digits of scikit-learn; every fifth of a class is always a test image."""
    x, y = _eight_by_eight()
    test = test_mask(y)
    return build_dataset(request.name, (x[~test], y[~test], x[test], y[test]))


def _torchvision(name: str, request: SourceRequest) -> Dataset:
    """Load a data set of torchvision, with its training and test split.

    Args:
        name: The name in `SOURCES`, such as "cifar10".
        request: Path, download and image size; the size is used by "food101" only.
    """
    from torchvision import datasets

    root = str(request.path)
    download = request.download
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
            return build_dataset(request.name, arrays)
        if name == "food101":
            train, test = (
                datasets.Food101(root, split, download=download) for split in ("train", "test")
            )
            x_train = np.stack([_picture(path, request.size) for path in train._image_files])
            x_test = np.stack([_picture(path, request.size) for path in test._image_files])
            arrays = (x_train, train._labels, x_test, test._labels)
            return build_dataset(request.name, arrays, list(train.classes))
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
        advice = "set data.root to the folder that holds it, or data.download=true"
        if download:
            advice = "the download failed"
        raise ConfigError(f"{name} is not in {root}: {advice} ({error})") from error
    except Exception as error:  # A damaged file can raise anything.
        raise ConfigError(
            f"{name} could not be read or downloaded into {root}: {summarise_error(error)}"
        ) from error
    images = [np.asarray(part.data) for part in (train, test)]
    if images[0].ndim == 3:
        images = [image[..., None] for image in images]
    if name == "emnist":  # The files hold every letter transposed.
        images = [image.transpose(0, 2, 1, 3) for image in images]
    arrays = (images[0], np.asarray(train.targets), images[1], np.asarray(test.targets))
    return build_dataset(request.name, arrays, [str(c) for c in train.classes])


def _picture(
    path: Path, size: int | None, sizes: set[tuple[int, int]] | None = None
) -> np.ndarray[Any, Any]:
    """Read an image file and resize it to a square.

    Args:
        path: The file.
        size: The side of the square; `FOLDER_SIZE` by default.
        sizes: The original width and height are added to this set; None for no set.

    Returns:
        RGB bytes (side, side, 3), whatever the proportions of the image were.

    Raises:
        ConfigError: If the file is missing, damaged, of another format or far too large.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=IMAGE_FORMATS) as image:
                if sizes is not None:
                    sizes.add(image.size)
                side = size or FOLDER_SIZE
                square = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
            return np.asarray(square, dtype=np.uint8)
    except Exception as error:  # For damaged files Pillow can raise anything.
        raise ConfigError(
            f"{path} is not an image that can be read: {summarise_error(error)}"
        ) from error


def _subfolders(path: Path, what: str) -> list[Path]:
    """Return the sorted folders inside a folder, one per class or domain.

    Hidden ones are ignored.

    Raises:
        ConfigError: If there is no such folder, or none in it.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    found = sorted(
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    if not found:
        raise ConfigError(f"{path} holds no folders: one folder per {what} is expected")
    return found


def _pictures(folder: Path) -> list[Path]:
    """Return the sorted paths of all image files in a folder and its subfolders.

    Raises:
        ConfigError: If there are none.
    """
    files = folder.rglob("*")
    found = sorted(
        path for path in files if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()
    )
    if not found:
        raise ConfigError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def _resizing(sizes: set[tuple[int, int]], size: int | None) -> tuple[str, ...]:
    """Return a note that images were resized, unless the size was configured.

    It is empty, too, if all images have the default size.

    Args:
        sizes: The original sizes of all images.
        size: The configured size.
    """
    if size is not None or sizes == {(FOLDER_SIZE, FOLDER_SIZE)}:
        return ()
    by_area = sorted(sizes, key=lambda pair: (pair[0] * pair[1], pair))
    # A dict drops the second of two equal sizes.
    ends = dict.fromkeys("{}x{}".format(*by_area[i]) for i in (0, -1))
    return (
        f"images of {' to '.join(ends)} pixels were resized to {FOLDER_SIZE}x{FOLDER_SIZE}; "
        "set data.size to choose another size",
    )


def _read_classes(
    path: Path, classes: list[str], size: int | None, sizes: set[tuple[int, int]]
) -> tuple[Any, Any, list[str]]:
    """Read a folder with one folder per class; return images, labels and names.

    A name is the path of an image inside the folder of its class.
    """
    images = []
    labels = []
    names = []
    for folder in _subfolders(path, "class"):
        if folder.name not in classes:
            raise ConfigError(
                f"{folder} is a class that the other folders do not have: "
                f"{did_you_mean(folder.name, classes)}"
            )
        for file in _pictures(folder):
            images.append(_picture(file, size, sizes))
            labels.append(classes.index(folder.name))
            names.append(file.relative_to(folder).as_posix())
    return np.stack(images), np.array(labels), names


def _folder(request: SourceRequest) -> Dataset:
    """Load a folder with one folder per class, or with train/ and test/ of such."""
    path = request.path
    sizes = set[tuple[int, int]]()
    names = {folder.name for folder in _subfolders(path, "class")}
    tests = [name for name in TEST_FOLDERS if name in names]
    parts = {"train", *TEST_FOLDERS} & names
    others = sorted(names - parts)
    if parts and ("train" not in parts or others):
        known = " and ".join(f"{name}/" for name in sorted(parts))
        problem = f"{others[0]}/ next to it" if "train" in parts else "no train/"
        raise ConfigError(
            f"{path} holds {known} and {problem}: give one folder per class, or only train/ and "
            "test/"
        )
    if tests:
        classes = [folder.name for folder in _subfolders(path / "train", "class")]
        x_train, y_train, _ = _read_classes(path / "train", classes, request.size, sizes)
        x_test, y_test, _ = _read_classes(path / tests[0], classes, request.size, sizes)
        notes = _resizing(sizes, request.size)
        return build_dataset(request.name, (x_train, y_train, x_test, y_test), classes, notes=notes)
    path = path / "train" if parts else path
    classes = [folder.name for folder in _subfolders(path, "class")]
    x, y, files = _read_classes(path, classes, request.size, sizes)
    in_test = hold_out_mask(request.hold_out, files, y, np.zeros_like(y))
    arrays = (x[~in_test], y[~in_test], x[in_test], y[in_test])
    notes = _resizing(sizes, request.size)
    return build_dataset(request.name, arrays, classes, held_out=True, notes=notes)


def _domains(request: SourceRequest) -> Dataset:
    """Load a folder with one folder per domain, each with one folder per class."""
    domains = _subfolders(request.path, "domain")
    classes = sorted({folder.name for domain in domains for folder in _subfolders(domain, "class")})
    sizes = set[tuple[int, int]]()
    parts = [_read_classes(domain, classes, request.size, sizes) for domain in domains]
    x = np.concatenate([images for images, _, _ in parts])
    y = np.concatenate([labels for _, labels, _ in parts])
    names = [name for _, _, names in parts for name in names]
    domain = np.repeat(np.arange(len(parts)), [len(labels) for _, labels, _ in parts])
    test = hold_out_mask(request.hold_out, names, y, domain)
    domain_arrays = ([folder.name for folder in domains], domain[~test], domain[test])
    arrays = (x[~test], y[~test], x[test], y[test])
    notes = _resizing(sizes, request.size)
    return build_dataset(request.name, arrays, classes, domain_arrays, held_out=True, notes=notes)


def _tiny_imagenet(request: SourceRequest) -> Dataset:
    """Load Tiny ImageNet from its unpacked archive."""
    root = request.path / "tiny-imagenet-200"
    root = root if root.is_dir() else request.path
    if not (root / "train").is_dir() or not (root / "val" / "val_annotations.txt").is_file():
        raise ConfigError(
            f"tiny-imagenet is not in {request.path}: set data.root to the unpacked folder with "
            "train/ and val/; barter does not download it"
        )
    classes = [folder.name for folder in _subfolders(root / "train", "class")]
    x_train, y_train, _ = _read_classes(root / "train", classes, request.size, set())
    rows = parse_file(
        root / "val" / "val_annotations.txt", lambda text: _annotations(text, classes)
    )
    x_test = np.stack([_picture(root / "val" / "images" / name, request.size) for name, _ in rows])
    y_test = np.array([label for _, label in rows])
    return build_dataset(request.name, (x_train, y_train, x_test, y_test), classes)


def _annotations(text: str, classes: list[str]) -> list[tuple[str, int]]:
    """Return (file name, class number) of lines "FILE<tab>CLASS<tab>..."."""
    rows = [line.split("\t") for line in text.splitlines() if line]
    return [(row[0], classes.index(row[1])) for row in rows]


def _npz(request: SourceRequest) -> Dataset:
    """Load an npz file as a data set."""
    if request.path.is_file() and request.path.open("rb").read(6) == b"\x93NUMPY":
        raise ConfigError(
            f"{request.path} holds one array; an npz file with {', '.join(NEEDED)} is expected"
        )
    where = str(request.path)
    arrays = arrays_in(request.path, require=partial(require_headers, where=where))
    return from_arrays(arrays, request.name, where, request.hold_out)


def _clients(request: SourceRequest) -> Dataset:
    """Load data that are already split into one file per client."""
    return read_split(request.path, request.name)


def _torchvision_loader(name: str) -> Callable[[SourceRequest], Dataset]:
    """Return the function that loads a data set of torchvision."""
    return lambda request: _torchvision(name, request)


SOURCES: dict[str, tuple[Callable[[SourceRequest], Dataset], str]] = {
    "digits": (
        _digits,
        "1,797 handwritten digits, 8x8 grey, 10 classes; inside scikit-learn, no download",
    ),
    "mnist": (_torchvision_loader("mnist"), "70,000 handwritten digits, 28x28 grey, 10 classes"),
    "fashion-mnist": (
        _torchvision_loader("fashion-mnist"),
        "70,000 articles of clothing, 28x28 grey, 10 classes",
    ),
    "emnist": (
        _torchvision_loader("emnist"),
        "131,600 handwritten characters (balanced split), 28x28 grey, 47 classes",
    ),
    "svhn": (_torchvision_loader("svhn"), "99,289 house numbers, 32x32, 10 classes"),
    "cifar10": (_torchvision_loader("cifar10"), "60,000 photographs, 32x32, 10 classes"),
    "cifar100": (_torchvision_loader("cifar100"), "60,000 photographs, 32x32, 100 classes"),
    "food101": (
        _torchvision_loader("food101"),
        "101,000 dishes, resized to data.size (64), 101 classes",
    ),
    "tiny-imagenet": (
        _tiny_imagenet,
        "110,000 photographs, resized to data.size (64), 200 classes; no download",
    ),
}
PATH_SOURCES: dict[str, tuple[Callable[[SourceRequest], Dataset], str]] = {
    "npz": (
        _npz,
        "npz:PATH, a file with x_train, y_train (NHWC); optional: x_test, y_test, classes, domains",
    ),
    "folder": (
        _folder,
        "folder:PATH, one folder per class, or train/ and test/ (or val/) with one each",
    ),
    "domains": (
        _domains,
        "domains:PATH, one folder per domain, each with one folder per class: feature skew",
    ),
    "clients": (
        _clients,
        "clients:PATH, one file per client: train/0.npz ... and test/0.npz ..., as HtFLlib and "
        "PFLlib write them",
    ),
}


def load_dataset(
    source: str,
    *,
    root: str = "data",
    download: bool = False,
    size: int | None = None,
    hold_out: HoldOut = "position",
) -> Dataset:
    """Load a data set.

    Args:
        source: A name of `SOURCES`, KIND:PATH with a kind of `PATH_SOURCES`, or module:function
            for custom data.
        root: The folder that holds named data sets.
        download: Whether to download a named data set that is missing.
        size: Side of the square that image files, and PIL images from custom data, are resized to;
            None resizes files to 64 pixels and keeps the size of PIL images. Arrays keep theirs.
        hold_out: How test images are chosen if the source has none (`hold_out_mask`); a name of
            `SOURCES` always has.

    Raises:
        ConfigError: If the source is unknown, missing or damaged.
    """
    kind, colon, path = source.partition(":")
    if colon and kind not in PATH_SOURCES:
        return _from_function(source, size, hold_out)
    if colon:
        if not Path(path).exists():
            raise ConfigError(f"{source}: {path or 'the path'} does not exist")
        return PATH_SOURCES[kind][0](SourceRequest(source, Path(path), download, size, hold_out))
    if source.startswith(BY_PYTHON):
        raise ConfigError(
            "this run's data were given in Python: resume it there, with out=... and resume=True"
        )
    if source not in SOURCES:
        advice = _by_path(source) or did_you_mean(source, [*SOURCES, *PATH_SOURCES])
        raise ConfigError(f"unknown data set {source!r}: {advice}")
    return SOURCES[source][0](SourceRequest(source, Path(root), download, size, hold_out))


def _by_path(source: str) -> str:
    """Return advice on how to write a path as a source; empty if it is none."""
    path = Path(source)
    if path.is_dir():
        kinds = ["folder", "domains"]
        if (path / "train" / "0.npz").is_file():
            kinds = ["clients"]
        elif any(
            child.is_dir() and child.name in ("train", *TEST_FOLDERS) for child in path.iterdir()
        ):
            kinds = ["folder"]
        uses = {
            "clients": "for data that are already split",
            "folder": "with a folder per class",
            "domains": "with a folder per domain, in it one per class",
        }
        return "it is a folder: write " + ", or ".join(f"{k}:{source} {uses[k]}" for k in kinds)
    if path.suffix == ".npz" or path.is_file():
        return f"did you mean 'npz:{source}'?"
    return ""


def _from_function(source: str, size: int | None, hold_out: HoldOut) -> Dataset:
    """Load custom data from a Python object or function, written as module:name.

    Raises:
        ConfigError: It cannot be imported, fails, or returns no data set.
    """
    kind = source.partition(":")[0]
    try:
        make = import_object(source, "data")
    except ConfigError as error:
        if getattr(error.__cause__, "name", None) != kind:
            raise
        guess = did_you_mean(kind, PATH_SOURCES)
        raise ConfigError(
            f"unknown kind of data {kind + ':'!r}, and no module either: {guess}"
        ) from None

    def build() -> Dataset:
        given = make() if callable(make) else make
        return from_python(given, source, size, hold_out=hold_out)

    return call_user_code(f"data {source!r}", build)
