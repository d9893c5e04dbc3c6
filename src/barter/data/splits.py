"""A split as files, one for each client: as HtFLlib and PFLlib write them, and as barter does.

    train/0.npz ... train/9.npz    test/0.npz ... test/9.npz    test.npz

A file holds arrays `x` and `y`, or `data`, an object with these two, as the other libraries write it; `test.npz` is the
test set of all, which is made of the clients' own where there is none. Images are bytes with channels last, or floats
between 0 and 1 or -1 and 1, with channels first, which become the bytes they were.
"""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from barter.core.errors import ConfigError, in_short
from barter.core.files import whole
from barter.core.images import Images
from barter.data.dataset import Dataset, from_python

__all__ = ["arrays_in", "clients_in", "read_split", "write_split"]

Array = np.ndarray[Any, Any]

# All that numpy's arrays ask of a pickle; whatever else a file names is not looked up, let alone called.
HARMLESS = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"{root}.{module}", name)
    for root in ("numpy.core", "numpy._core")
    for module, name in (
        ("multiarray", "_reconstruct"),
        ("multiarray", "scalar"),
        ("numeric", "_frombuffer"),
    )
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def clients_in(path: Path) -> int:
    """How many clients a split has."""
    found = sorted(
        int(file.stem) for file in (path / "train").glob("*.npz") if file.stem.isdecimal()
    )
    if not found:
        raise ConfigError(
            f"{path} holds no train/0.npz: one file for each client is expected, train/ and test/"
        )
    if found != list(range(len(found))):
        missing = min(set(range(len(found))) - set(found))
        raise ConfigError(f"{path / 'train'} lacks {missing}.npz: clients are numbered from 0 on")
    return len(found)


def read_split(path: Path, name: str) -> Dataset:
    """The data set of which every client's is a domain, with its own test set."""
    own = [
        (path / "train" / f"{k}.npz", path / "test" / f"{k}.npz") for k in range(clients_in(path))
    ]
    everybody = path / "test.npz"
    places = [*chain(*own), *([everybody] if everybody.exists() else [])]
    files = {place: _file(place) for place in places}
    # One scale for all: a file of bright images has no pixel below zero, wherever the others begin.
    signed = any(_is_float(file["x"]) and file["x"].min(initial=0) < 0 for file in files.values())
    for place, file in files.items():
        file["x"] = _pixels(file["x"], place, signed=signed)
    parts = []
    for train, test in ((files[one], files[other]) for one, other in own):
        names = {"classes": train["classes"]} if "classes" in train else {}
        parts.append(
            {
                "x_train": train["x"],
                "y_train": train["y"],
                "x_test": test["x"],
                "y_test": test["y"],
                **names,
            }
        )
    together = files.get(everybody)
    return from_python(
        parts, name, tests=None if together is None else (together["x"], together["y"])
    )


def write_split(
    path: Path, train: list[Images], tests: list[Images], test: Images, classes: list[str]
) -> None:
    """Every client's images and test set, and the test set of all, as files that anything can read."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: a split goes to a new folder")
    with suppress(OSError):
        path.rmdir()  # an empty one is as good as none
    with whole(path) as new:
        for part, clients in (("train", train), ("test", tests)):
            (new / part).mkdir()
            for k, images in enumerate(clients):
                _save(new / part / f"{k}.npz", images, classes)
        _save(new / "test.npz", test, classes)


def _save(path: Path, images: Images, classes: list[str]) -> None:
    pixels = images.pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    np.savez_compressed(path, x=pixels, y=images.labels.cpu().numpy(), classes=np.array(classes))


def arrays_in(
    path: Path,
    *,
    objects: bool = False,
    require: Callable[[Mapping[str, Array]], None] = lambda headers: None,
) -> dict[str, Any]:
    """Read the arrays of an npz file, by name.

    A few megabytes can decompress to many gigabytes, so headers are read first. What is decompressed then has the
    size that its header and the archive agree on: neither can lie alone.

    Args:
        path: The file.
        objects: Whether arrays of objects are read too, as far as they are made of arrays.
        require: Called before anything is decompressed, with stand-ins that have the kinds and shapes of the arrays,
            and take no memory; raises ConfigError for what is not wanted.

    Raises:
        ConfigError: If the file cannot be read, or does not fit into memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            size, there = sum(entry.file_size for entry in entries.values()), _memory()
            if size > there:
                raise ConfigError(
                    f"{path} holds {size:,} bytes of arrays, more than this machine's memory"
                )
            headers = {}
            for name, entry in entries.items():
                with archive.open(entry) as file:
                    shape, dtype = _header(file, entry.file_size, objects=objects)
                    headers[name] = np.broadcast_to(np.zeros((), dtype), shape)
            require(headers)
            arrays = {}
            for name, entry in entries.items():
                with archive.open(entry) as file:
                    arrays[name] = _array(file, entry.file_size, path, objects=objects)
            return arrays
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes go wrong
        raise ConfigError(f"{path} cannot be read as an npz file: {in_short(error)}") from error


def _memory() -> int:
    """Return the bytes of memory that are free on this machine, or where it does not say, all it has."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_pairs(path: Path, headers: Mapping[str, Array]) -> None:
    """Refuse images that cannot be some, and labels that are not one for each."""
    x, y = headers.get("x"), headers.get("y")
    if x is not None and (x.dtype.kind not in "uifO" or x.ndim not in (1, 3, 4)):
        raise ConfigError(f"{path}: x is {x.dtype} of shape {x.shape}; images are expected")
    if x is not None and y is not None and x.shape[:1] != y.shape[:1]:
        raise ConfigError(f"{path}: y must hold a class number for each image of x")


def _file(path: Path) -> dict[str, Array]:
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such file; every client has one in train/ and one in test/"
        )
    held = arrays_in(path, objects=True, require=partial(_require_pairs, path))
    if set(held) == {"data"}:
        held = (
            held["data"].item()
            if held["data"].dtype == object and held["data"].ndim == 0
            else held["data"]
        )
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        has = ", ".join(map(str, held)) if isinstance(held, dict) else "something else"
        raise ConfigError(
            f"{path}: arrays x and y are expected, or data with both; it has {has or 'nothing'}"
        )
    try:
        x, named = np.asarray(held["x"]), np.asarray(held["y"])
        y = named.astype(np.int64)
        if not np.array_equal(y, named):
            raise ValueError("classes are whole numbers")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: y must hold a class number for each image of x: {error}"
        ) from error
    return {**held, "x": x, "y": y}


def _header(
    file: BinaryIO | Any, size: int, *, objects: bool
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and kind of an array from the start of its file, which ends after so many bytes."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    if dtype.hasobject:
        if not objects:
            raise ValueError(
                "it holds objects, which are not read; give arrays of numbers and of text"
            )
    elif min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"{size - file.tell()} bytes do not make {shape} of {dtype}")
    return shape, dtype


def _array(file: BinaryIO | Any, size: int, path: Path, *, objects: bool) -> Any:
    """An array of a file; if it is one of objects, nothing that its pickle names is run but what makes arrays."""
    shape, dtype = _header(file, size, objects=objects)
    if not dtype.hasobject:
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    try:
        return np.asarray(_Arrays(file).load(), dtype=object).reshape(shape)
    except Exception as error:
        raise ConfigError(
            f"{path} holds objects that are not read, for that could run what a stranger wrote into them "
            f"({in_short(error)}). If you trust the file: d = np.load(path, allow_pickle=True)['data'].item(); "
            "np.savez(path, x=d['x'], y=d['y'])"
        ) from error


def _is_float(x: Array) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating))


def _pixels(x: Array, path: Path, *, signed: bool) -> Array:
    """Images as bytes with channels last; floats are from -1 on if they are `signed`, else from 0 on."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[-1] not in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    if _is_float(x) and x.size and x.min() >= -1 and x.max() <= 1:
        x = ((x + 1) / 2 if signed else x) * 255
        x = x.round().astype(np.uint8)
    if x.dtype != np.uint8 or x.ndim != 4:
        span = (
            f", between {x.min():g} and {x.max():g}"
            if x.size and np.issubdtype(x.dtype, np.number)
            else ""
        )
        raise ConfigError(
            f"{path}: x is {x.dtype} of shape {x.shape}{span}; give bytes, or floats between 0 and 1 or -1 and 1"
        )
    return np.ascontiguousarray(x)
