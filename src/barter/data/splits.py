"""Read and write data split into one file per client, as HtFLlib and PFLlib do.

    train/0.npz ... train/9.npz    test/0.npz ... test/9.npz    test.npz

A file holds arrays `x` and `y`, or `data`, an object with these two, as the other libraries write
it. `test.npz` is the global test set; without it the clients' test sets are joined. Images are
bytes with channels last, or floats between 0 and 1 or -1 and 1 with channels first, which are
converted back to bytes.
"""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from barter.core.errors import ConfigError, summarise_error
from barter.core.files import create_folder
from barter.core.images import Images
from barter.data.dataset import Dataset, from_python

__all__ = ["arrays_in", "clients_in", "read_split", "write_split"]

Array = np.ndarray[Any, Any]

# The only names that pickled numpy arrays need; any other name is refused before it is imported.
PICKLE_NAMES = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"{root}.{module}", name)
    for root in ("numpy.core", "numpy._core")
    for module, name in (
        ("multiarray", "_reconstruct"),
        ("multiarray", "scalar"),
        ("numeric", "_frombuffer"),
    )
}


class _Arrays(pickle.Unpickler):
    """An unpickler that can build numpy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLE_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def clients_in(path: Path) -> int:
    """Return the number of clients in a folder with one file train/K.npz per client.

    Raises:
        ConfigError: If there are no such files, or a number K from 0 on is missing.
    """
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
    """Load data stored by client; every client is a domain with its own test set.

    Args:
        path: The folder with one file per client in train/ and in test/, and maybe test.npz.
        name: The name of the data set.

    Raises:
        ConfigError: If a file is missing or holds something else, or clients do not fit together.
    """
    clients = clients_in(path)
    train_paths = [path / "train" / f"{k}.npz" for k in range(clients)]
    test_paths = [path / "test" / f"{k}.npz" for k in range(clients)]
    global_path = path / "test.npz"
    paths = list(chain(*zip(train_paths, test_paths, strict=True)))
    if global_path.exists():
        paths.append(global_path)
    files = {file: _file(file) for file in paths}
    # All files share one scale: a file of bright images may have no negative pixel although the
    # scale begins at -1.
    signed = any(_is_float(file["x"]) and file["x"].min(initial=0) < 0 for file in files.values())
    for file, arrays in files.items():
        arrays["x"] = _pixels(arrays["x"], file, signed=signed)
    # Classes without names are counted over all clients: one of them may have fewer images than
    # there are classes.
    labels = [file["y"] for file in files.values()]
    largest = max(int(y.max(initial=-1)) for y in labels)
    numbered = not any("classes" in files[file] for file in train_paths)
    numbered = numbered and largest < sum(map(len, labels))
    numbers = np.array([str(c) for c in range(largest + 1)]) if numbered else None
    parts = []
    for train_path, test_path in zip(train_paths, test_paths, strict=True):
        train = files[train_path]
        test = files[test_path]
        part = {
            "x_train": train["x"],
            "y_train": train["y"],
            "x_test": test["x"],
            "y_test": test["y"],
        }
        if "classes" in train:
            part["classes"] = train["classes"]
        elif numbers is not None:
            part["classes"] = numbers
        parts.append(part)
    tests = None
    if global_path in files:
        tests = (files[global_path]["x"], files[global_path]["y"])
    return replace(from_python(parts, name, tests=tests), numbered=numbered)


def write_split(
    path: Path, train: list[Images], tests: list[Images], test: Images, classes: list[str]
) -> None:
    """Write each client's training and test images, and the global test set.

    Args:
        path: A new or empty folder.
        train: Training images of each client.
        tests: Test images of each client, which may be images of `test`.
        test: The global test set.
        classes: Names of the classes, which every file repeats.

    Raises:
        ConfigError: If the path exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} already exists: give a new folder for the split")
    with suppress(OSError):
        path.rmdir()  # An empty folder would be in the way of the new one.
    with create_folder(path) as new:
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

    A few megabytes can decompress to many gigabytes, so headers are checked first: the size in an
    array's header must equal the size in the archive.

    Args:
        path: The file.
        objects: Whether to read object arrays too, if they consist of arrays.
        require: Called before anything is decompressed, with placeholders that have the dtypes and
            shapes of the arrays and take no memory; raises ConfigError to refuse the file.

    Raises:
        ConfigError: If the file cannot be read, or does not fit into memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            size = sum(entry.file_size for entry in entries.values())
            if size > _memory():
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
    except Exception as error:  # A damaged file can raise anything.
        raise ConfigError(
            f"{path} cannot be read as an npz file: {summarise_error(error)}"
        ) from error


def _memory() -> int:
    """Return the available memory in bytes, or all memory if that is unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_pairs(path: Path, headers: Mapping[str, Array]) -> None:
    """Raise ConfigError unless `x` can hold images and `y` one label for each."""
    x = headers.get("x")
    y = headers.get("y")
    if x is not None and (x.dtype.kind not in "uifO" or x.ndim not in (1, 3, 4)):
        raise ConfigError(f"{path}: x is {x.dtype} of shape {x.shape}; images are expected")
    if x is not None and y is not None and x.shape[:1] != y.shape[:1]:
        raise ConfigError(f"{path}: y must hold a class number for each image of x")


def _file(path: Path) -> dict[str, Array]:
    """Read one client's file; return images `x`, labels `y`, and maybe `classes`.

    Raises:
        ConfigError: The file is missing or holds something else.
    """
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such file; every client has one in train/ and one in test/"
        )
    content: Any = arrays_in(path, objects=True, require=partial(_require_pairs, path))
    if set(content) == {"data"}:
        content = content["data"]
        if content.dtype == object and content.ndim == 0:
            content = content.item()
    if not isinstance(content, dict) or not {"x", "y"} <= set(content):
        has = ", ".join(map(str, content)) if isinstance(content, dict) else "something else"
        raise ConfigError(
            f"{path}: arrays x and y are expected, or data with both; it has {has or 'nothing'}"
        )
    try:
        x = np.asarray(content["x"])
        labels = np.asarray(content["y"])
        y = labels.astype(np.int64)
        if not np.array_equal(y, labels):
            raise ValueError("classes must be integers")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: y must hold a class number for each image of x: {error}"
        ) from error
    return {**content, "x": x, "y": y}


def _header(
    file: BinaryIO | Any, size: int, *, objects: bool
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype from the start of an npy file.

    Args:
        file: The opened file.
        size: Its number of bytes.
        objects: Whether object arrays are allowed.

    Raises:
        ValueError: If the header does not match the size, or the array holds Python objects and
            `objects` is False.
    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        if not objects:
            raise ValueError(
                "it holds Python objects, which are not loaded; give arrays of numbers and text"
            )
    elif min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"{size - file.tell()} bytes do not make {shape} of {dtype}")
    return shape, dtype


def _array(file: BinaryIO | Any, size: int, path: Path, *, objects: bool) -> Any:
    """Read an array; unpickle an object array without running code but numpy's.

    Args:
        file: The array's file.
        size: Its size in bytes.
        path: The path for messages.
        objects: Whether object arrays are allowed.

    Raises:
        ConfigError: The array holds other Python objects.
    """
    shape, dtype = _header(file, size, objects=objects)
    if not dtype.hasobject:
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    try:
        return np.asarray(_Arrays(file).load(), dtype=object).reshape(shape)
    except Exception as error:
        raise ConfigError(
            f"{path} holds Python objects, which are not loaded because that could run untrusted "
            f"code ({summarise_error(error)}). If you trust the file: "
            "d = np.load(path, allow_pickle=True)['data'].item(); "
            "np.savez(path, x=d['x'], y=d['y'])"
        ) from error


def _is_float(x: Array) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating))


def _pixels(x: Array, path: Path, *, signed: bool) -> Array:
    """Return images as bytes with channels last.

    Channels are taken to be first if the second axis has 1 or 3 entries and the last has not. A
    missing channel axis is added.

    Args:
        x: Bytes or floats, (N, H, W, C), (N, C, H, W) or (N, H, W).
        path: The file, for messages.
        signed: Whether floats are between -1 and 1, and not between 0 and 1.

    Raises:
        ConfigError: If these are no images, or floats outside of -1 to 1.
    """
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[-1] not in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    if _is_float(x) and x.size and x.min() >= -1 and x.max() <= 1:
        unit = (x + 1) / 2 if signed else x
        x = (unit * 255).round().astype(np.uint8)
    if x.dtype != np.uint8 or x.ndim != 4:
        span = ""
        if x.size and np.issubdtype(x.dtype, np.number):
            span = f", between {x.min():g} and {x.max():g}"
        raise ConfigError(
            f"{path}: x is {x.dtype} of shape {x.shape}{span}; give bytes, or floats between 0 and "
            "1 or -1 and 1"
        )
    return np.ascontiguousarray(x)
