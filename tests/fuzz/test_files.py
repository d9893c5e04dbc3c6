"""Files that somebody else wrote: what is wrong with one is an error of one line, whatever it is."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from barter.core.errors import BarterError
from barter.core.payload import leaves
from barter.data.partition import Iid
from barter.data.sources import load_dataset
from barter.data.splits import read_split
from barter.data.task import Data, make_task
from barter.runs import checkpoint
from barter.runs.folder import METRICS_FILE, read_records
from tests.conftest import same
from tests.fuzz.limits import EDGES, Cases, damaged, one_line

CPU = torch.device("cpu")
KINDS = (
    "|u1",
    "<u1",
    "<i8",
    ">i8",
    "<u8",
    "<f4",
    "<c8",
    "|b1",
    "<U3",
    "|S2",
    "|O",
    "|V4",
    "<M8[s]",
    "|V0",
    "<i4",
)


def arrays(rng: random.Random) -> dict[str, Any]:
    """Arrays as they should be, some of which are not."""
    x, y = np.arange(12 * 36, dtype=np.uint8).reshape(12, 4, 3, 3), np.arange(12) % 3
    whole = {
        "x_train": x,
        "y_train": y,
        "x_test": x[:6],
        "y_test": y[:6],
        "classes": np.array(["a", "b", "c"]),
    }
    whole |= {
        "domains": np.array(["day", "night"]),
        "domain_train": y % 2,
        "domain_test": y[:6] % 2,
    }
    for name in rng.sample(sorted(whole), rng.randrange(3)):
        match rng.randrange(4):
            case 0:
                del whole[name]
            case 1:
                kind = rng.choice([kind for kind in KINDS if kind != "|O"])
                whole[name] = np.zeros([rng.randrange(4) for _ in range(rng.randrange(6))], kind)
            case 2:
                kinds = (
                    ("O", "S1", "U1")
                    if whole[name].dtype.kind == "U"
                    else ("u8", "i1", "f8", "O", "S1")
                )
                whole[name] = whole[name].astype(rng.choice(kinds))
            case _:
                whole[f"{name}s"] = whole.pop(name)
    if (
        "y_train" in whole
        and whole["y_train"].size
        and whole["y_train"].dtype == np.int64
        and not rng.randrange(4)
    ):
        whole["y_train"][0] = rng.choice((-1, 2**62, 7))
    return whole


def npz(rng: random.Random) -> bytes:
    """An archive of such arrays, some with headers of their own, the whole of it damaged or not."""
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, array in arrays(rng).items():
            held = io.BytesIO()
            np.lib.format.write_array(held, np.asarray(array))
            data = held.getvalue()
            if not rng.randrange(8):
                shape = tuple(rng.choice((*EDGES, -1, 3)) for _ in range(rng.randrange(5)))
                head = f"{{'descr': '{rng.choice(KINDS)}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
                data = (
                    b"\x93NUMPY\x01\x00"
                    + len(head).to_bytes(2, "little")
                    + head
                    + rng.randbytes(rng.randrange(99))
                )
            elif not rng.randrange(8):
                data = damaged(rng, data)
            archive.writestr(f"{name}.npy", data)
    return damaged(rng, out.getvalue()) if rng.randrange(2) else out.getvalue()


def test_npz(cases: Cases, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for rng in cases(250):
        path.write_bytes(npz(rng))
        with one_line():
            task = make_task(Data(source=f"npz:{path}"), Iid(min_samples=1), 2, 0, CPU)
            for images in (*task.train, task.global_test):
                assert images.pixels.dtype == torch.uint8
                assert 0 <= int(images.labels.min()) <= int(images.labels.max()) < len(task.classes)


def test_splits(cases: Cases, tmp_path: Path) -> None:
    x, y = np.zeros((4, 3, 3, 1), np.uint8), np.arange(4) % 2
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "0.npz", data=np.array({"x": x, "y": y}, object))
    path = tmp_path / "train" / "0.npz"
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("data.npy")
    for rng in cases(150):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.npy", damaged(rng, pickled))
        with one_line(starved=True):  # objects say how much they need
            assert len(read_split(tmp_path, "a").y_train)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "gif"])
def test_pictures(cases: Cases, tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("L", (4, 4)).save(tmp_path / name / f"{i}.png")
    whole = []
    for mode in ("RGB", "L", "P", "CMYK") if kind == "jpeg" else ("RGB", "L", "P"):
        out = io.BytesIO()
        picture = Image.effect_noise((24, 24), 90).convert(
            "L" if kind == "jpeg" and mode == "P" else mode
        )
        picture.save(out, "PNG" if kind == "webp" and mode == "P" else kind.upper())
        whole.append(out.getvalue())
    for rng in cases(40):
        (tmp_path / "a" / "2.png").write_bytes(damaged(rng, rng.choice(whole)))
        with one_line():
            assert load_dataset(f"folder:{tmp_path}", size=4).x_train.shape[1:] == (3, 4, 4)


def test_checkpoints(cases: Cases, tmp_path: Path) -> None:
    """One that was damaged is refused, or is read as it was written: there is no third way."""
    path, state = (
        tmp_path / "c.safetensors",
        {"w": torch.arange(40.0), "n": [1, None, "a"], "b": torch.ones(3, 2)},
    )
    checkpoint.write_checkpoint(path, state, {"round": "3"})
    whole = path.read_bytes()
    for rng in cases(400):
        path.write_bytes(damaged(rng, whole))
        with one_line():
            found, notes = checkpoint.read_checkpoint(path, CPU)
            assert same(dict(leaves(found)), dict(leaves(state)))
            assert notes["round"] == "3"


LINE = {
    "round": 1,
    "clients": {"0": {"global": 0.5, "bytes_up": 3}},
    "server": {},
    "seconds": {"round": 1.5},
    "bytes": {"learn": {"up": 3, "down": 4}},
    "failures": ["site a: lost"],
}


def swapped(rng: random.Random, tree: Any) -> Any:
    """The tree with one of its values in another one's place."""
    strange = rng.choice(
        (None, [], {}, "x", -1, 2**70, float("nan"), [[]], {"up": None}, {"0": {}}, True)
    )
    if not isinstance(tree, dict) or not tree or not rng.randrange(3):
        return strange
    key = rng.choice(sorted(tree))
    return {**tree, key: swapped(rng, tree[key])}


def test_records(cases: Cases, tmp_path: Path) -> None:
    """A line that is no record is none; the others can be used."""
    for rng in cases(400):
        line = json.dumps(swapped(rng, LINE) if rng.randrange(2) else LINE).encode()
        (tmp_path / METRICS_FILE).write_bytes(b"\n".join([damaged(rng, line), line, b""]))
        for record in read_records(tmp_path):
            assert record.scalars().keys() >= {"bytes/up", "seconds/round", "failures"}
            assert isinstance(record.traffic("up"), int | float)
            assert record.to_json()


def test_the_errors_are_ours() -> None:
    """So that the fuzzers can fail."""
    with pytest.raises(ZeroDivisionError), one_line():
        _ = 1 / 0
    with pytest.raises(AssertionError, match="two"), one_line():
        raise BarterError("one\ntwo")
    with pytest.raises(MemoryError), one_line():
        bytearray(2**31)
