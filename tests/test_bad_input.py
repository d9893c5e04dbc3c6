"""What is damaged, unreadable or nonsense ends in one line that says what and where; and nothing is lost by it."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from barter.cli.app import main
from barter.core.errors import ConfigError
from barter.data.sources import load_dataset
from barter.runs import checkpoint
from tests.fuzz.limits import within_limits

CPU = torch.device("cpu")
X, Y = np.zeros((20, 8, 8, 1), np.uint8), np.arange(20) % 2
PARTITION = ["show", "partition", "--set", "clients=2"]

LOCAL = [
    "run",
    "--algorithm",
    "local",
    "--out",
    "run",
    "--set",
    "algorithm.max_epochs=1",
    "--set",
    "rounds=1",
]
KTL = ["run", "--algorithm", "fedktl", "--out", "run", "--set", "rounds=1", "--set", "clients=2"]


def said(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that a command ends in."""
    status = main(arguments)
    shown = capsys.readouterr()
    assert status in (1, 2), shown.out
    assert "Traceback" not in shown.err + shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("barter: ")
    return line


def npz(**arrays: object) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def entry(header: bytes, data: bytes = b"") -> Callable[[Path], None]:
    """An npz file whose one array has a header of somebody's own."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                "x_train.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data
            )

    return write


def bomb(path: Path) -> None:
    """An archive that says it holds a petabyte."""
    npz(x_train=X)(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 2**32 - 1)
    extra = struct.pack("<HHQ", 1, 8, 2**50)
    name, old = struct.unpack_from("<HH", data, at + 28)
    data[at + 30 : at + 32] = struct.pack("<H", old + len(extra))
    data[at + 46 + name : at + 46 + name] = extra
    end = data.index(b"PK\x05\x06")
    (size,) = struct.unpack_from("<I", data, end + 12)
    data[end + 12 : end + 16] = struct.pack("<I", size + len(extra))
    path.write_bytes(data)


BAD_NPZ: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (Path.touch, "cannot be read as an npz file: BadZipFile: File is not a zip"),
    "folder": (Path.mkdir, "cannot be read as an npz file: .*Is a directory"),
    "text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read as an npz"),
    "objects": (
        npz(x_train=np.array([{}], object), y_train=Y),
        "it holds Python objects, which are not loaded",
    ),
    "no labels": (npz(x_train=X), "lacks y_train; it has x_train"),
    "nothing": (npz(), "lacks x_train, y_train; it has nothing"),
    "one name": (npz(x_train=X, y_train=Y, classes=np.array("cat")), "a list of names is expected"),
    "name is no text": (
        npz(x_train=X, y_train=Y, classes=["\ud800", "b"]),
        r"the name '\\ud800' is not text",
    ),
    "name is not UTF-8": (
        npz(x_train=X, y_train=Y, classes=np.array([b"\xff", b"b"])),
        "names that are not UTF-8",
    ),
    "no pixels": (npz(x_train=X[:, :0], y_train=Y), "uint8 NHWC is expected"),
    "header is no header": (entry(b"{'descr': "), "cannot be read as an npz"),
    "header lies": (
        entry(
            b"{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 8, 8, 1)}\n", b"abc"
        ),
        r"3 bytes do not make \(1099511627776, 8, 8, 1\) of uint8",
    ),
    "negative shape": (
        entry(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -3)}\n", b"abc"),
        r"3 bytes do not make \(-1, -3\)",
    ),
    "bomb": (bomb, "1,125,899,906,842,624 bytes of arrays, more than this machine's memory"),
    "too many labels": (npz(x_train=X, y_train=Y[:5]), "a class number from 0 on for each of 20"),
    "other domains": (
        npz(x_train=X, y_train=Y, domains=["a"], domain_train=Y[:3]),
        "domain_train must hold a domain number from 0 on for each of 20",
    ),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_arrays(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = BAD_NPZ[case]
    write(tmp_path / "a.npz")
    line = said(capsys, [*PARTITION, "--set", f"data.source=npz:{tmp_path / 'a.npz'}"])
    assert re.search(message, line), line
    assert str(tmp_path / "a.npz") in line


def test_what_a_header_rules_out_is_not_decompressed(tmp_path: Path) -> None:
    """20 kB that decompress to 20 MB are refused by their header, as 4 MB for 4 GB are."""
    many = np.zeros((300_000, 8, 8, 1), np.uint8)
    cases = {
        "lacks y_train": {"x_train": many},
        "for each of 300000 images": {"x_train": many, "y_train": Y},
        r"shape \(19200000,\), uint8 NHWC": {"x_train": many.reshape(-1), "y_train": Y},
        r"\|S1 of shape .*, uint8 NHWC": {"x_train": many.view("S1"), "y_train": Y},
    }
    path = tmp_path / "a.npz"
    for message, arrays in cases.items():
        np.savez_compressed(path, **arrays)
        assert path.stat().st_size < 25_000
        tracemalloc.start()
        with pytest.raises(ConfigError, match=message):
            load_dataset(f"npz:{path}")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2_000_000, message  # numpy's arrays are traced too


@pytest.mark.parametrize("order", ["<", ">"])
def test_labels_in_any_order_of_bytes(order: str, tmp_path: Path) -> None:
    domains = {"domains": ["a", "b"], "domain_train": Y.astype(f"{order}i2")}
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y.astype(f"{order}i8"), **domains)
    found = load_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert sorted(found.y_train.tolist()) == [0] * 8 + [1] * 8
    assert sorted(found.domain_train.tolist()) == [0] * 8 + [1] * 8


def test_a_name_with_colons_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, [*PARTITION, "--set", "a:dog:b=1"])
    assert "unknown key 'a:dog:b'" in line


ROUND = "checkpoints/round-000001.safetensors"


def claim(round: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        state, notes = checkpoint.read_checkpoint(run / ROUND, CPU)
        checkpoint.write_checkpoint(run / ROUND, state, {**told(notes), "round": round})

    return change


def told(notes: dict[str, str]) -> dict[str, str]:
    """What a run writes beside its state."""
    return {key: notes[key] for key in ("config", "data", "round")}


def no_state(run: Path) -> None:
    _, notes = checkpoint.read_checkpoint(run / ROUND, CPU)
    checkpoint.write_checkpoint(run / ROUND, None, told(notes))


def no_networks(run: Path) -> None:
    state, notes = checkpoint.read_checkpoint(run / ROUND, CPU)
    checkpoint.write_checkpoint(
        run / ROUND, {**state, "clients": {0: {}, 1: {"model": []}}}, told(notes)
    )


def no_toml(run: Path) -> None:
    state, notes = checkpoint.read_checkpoint(run / ROUND, CPU)
    checkpoint.write_checkpoint(run / ROUND, state, {**told(notes), "config": "= ["})


CRAFTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a billion rounds": (claim("1000000000"), "'1000000000' is no number of a round"),
    "another round": (claim("7"), "its header says that it is of round 7"),
    "round -5": (claim("-5"), "'-5' is no number of a round"),
    "path": (claim("../../x"), "'../../x' is no number of a round"),
    "null": (no_state, "does not hold the state of a run"),
    "other clients": (no_networks, "holds the checkpoint of another experiment"),
    "no TOML": (no_toml, "its configuration is not TOML"),
}


def test_crafted_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*LOCAL, "--set", "clients=2", "--set", "models=small-mlp"]) == 0
    capsys.readouterr()
    run = tmp_path / "run"
    whole = (run / ROUND).read_bytes()
    recorded = (run / "metrics.jsonl").read_text()
    for case, (change, message) in CRAFTED.items():
        change(run)
        line = said(capsys, ["resume", str(run), "--rounds", "2"])
        assert message in line, case
        assert (run / "metrics.jsonl").read_text() == recorded, case
        (run / ROUND).write_bytes(whole)


def test_a_billion_clients_take_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with within_limits():
        line = said(capsys, [*LOCAL, "--set", "clients=1000000000", "--set", "models=small-mlp"])
    assert "1000000000 clients with at least 2 samples each need 2000000000 samples" in line


def test_objects_of_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "0.npz", data=np.array({"x": X, "y": ["a"] * 20}, object))
    line = said(capsys, ["show", "partition", "--set", f"data.source=clients:{tmp_path}"])
    assert f"{tmp_path / 'train' / '0.npz'}: y must hold a class number for each image" in line


def png(side: int) -> bytes:
    """A picture of so many pixels a side, all of them black, of which there is next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(99)))
        + chunk(b"IEND", b"")
    )


def whole_png(path: Path) -> bytes:
    Image.effect_noise((40, 40), 50).save(path)
    return path.read_bytes()


BAD_PICTURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (Path.touch, "cannot identify image file"),
    "text": (lambda path: path.write_text("hello"), "cannot identify image file"),
    "truncated": (lambda path: path.write_bytes(whole_png(path)[:200]), "truncated"),
    "broken": (lambda path: path.write_bytes(whole_png(path).replace(b"IDAT", b"IDOT")), "image"),
    "bomb": (lambda path: path.write_bytes(png(40_000)), "exceeds limit"),
    "large": (lambda path: path.write_bytes(png(10_000)), "exceeds limit"),
    "other program": (
        lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        "identify",
    ),
    "pipe": (os.mkfifo, "is not a file"),
    "leads nowhere": (lambda path: path.symlink_to("nowhere"), "is not a file"),
}


@pytest.mark.parametrize("case", BAD_PICTURES)
def test_pictures(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(6):
        (tmp_path / "d" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(tmp_path / "d" / f"class{i % 2}" / f"{i}.png")
    write, message = BAD_PICTURES[case]
    write(tmp_path / "d" / "class0" / "bad.png")
    line = said(capsys, [*PARTITION, "--set", f"data.source=folder:{tmp_path / 'd'}"])
    assert str(tmp_path / "d" / "class0" / "bad.png") in line
    assert re.search(message, line), line


def test_a_class_whose_folder_has_no_name_in_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (b"caf\xe9", b"tea"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        for i in range(5):
            Image.new("L", (4, 4), i).save(folder / f"{i}.png")
    line = said(capsys, [*PARTITION, "--set", f"data.source=folder:{tmp_path}"])
    assert r"the name 'caf\udce9' is not text that UTF-8 can hold: rename it" in line


MINE = """
import sys
import numpy as np
import torch
from dataclasses import dataclass
from torch import nn
from barter import Local

def data_raises():
    raise LookupError("the drawer\\nis empty")

def data_is_none():
    return None

class Half:
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return ("no", "image")[i]

def data_is_text():
    return Half()

def data_leaves():
    sys.exit("bye")

def net_raises(spec):
    raise ZeroDivisionError("no width")

def net_is_text(spec):
    return "net"

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        raise KeyError("mood")

def net_is_moody(spec):
    return Moody()

@dataclass(frozen=True, kw_only=True)
class Picky(Local):
    def __post_init__(self):
        super().__post_init__()
        raise LookupError("not today")

class Drawer(nn.Module):
    latent_dim = 3
    def forward(self, codes):
        return self.draw(codes)
    def draw(self, codes):
        raise IndexError("no ink")

def draws_nothing():
    return Drawer()

def draws_text():
    drawer = Drawer()
    drawer.draw = lambda codes: "ink"
    return drawer

def generator_raises():
    raise OSError("no paper")
"""

FACTORIES: dict[str, tuple[list[str], str]] = {
    "data_raises": (
        [*PARTITION, "--set", "data.source=mine:data_raises"],
        "LookupError: the drawer is empty .*mine",
    ),
    "data_is_none": (
        [*PARTITION, "--set", "data.source=mine:data_is_none"],
        "a NoneType is no data set; give arrays",
    ),
    "data_is_text": (
        [*PARTITION, "--set", "data.source=mine:data_is_text"],
        "'mine:data_is_text' failed",
    ),
    "data_leaves": ([*PARTITION, "--set", "data.source=mine:data_leaves"], "SystemExit: bye"),
    "module_breaks": (
        [*PARTITION, "--set", "data.source=torn:data"],
        "'torn:data' cannot be imported: SyntaxError",
    ),
    "net_raises": (
        [*LOCAL, "--set", "models=mine:net_raises"],
        "ZeroDivisionError: no width .*mine.py:28",
    ),
    "net_is_text": (
        [*LOCAL, "--set", "models=mine:net_is_text"],
        "made a str of the task's spec, not a module",
    ),
    "net_is_moody": (
        [*LOCAL, "--set", "models=mine:net_is_moody"],
        "mine:net_is_moody failed: KeyError: 'mood'",
    ),
    "algorithm_raises": (
        ["run", "--algorithm", "mine:Picky"],
        "algorithm failed: LookupError: not today",
    ),
    "generator_raises": (
        [*KTL, "--set", "algorithm.generator=mine:generator_raises"],
        "failed: no paper .*mine.py",
    ),
    "draws_nothing": (
        [*KTL, "--set", "algorithm.generator=mine:draws_nothing"],
        "the generator failed: IndexError",
    ),
    "draws_text": (
        [*KTL, "--set", "algorithm.generator=mine:draws_text"],
        "the generator made a str of",
    ),
    "no TorchScript": ([*KTL, "--set", "algorithm.generator=mine.py"], "is not TorchScript"),
}


@pytest.mark.parametrize("case", FACTORIES)
def test_factories(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "torn.py").write_text("def data(:\n")
    arguments, message = FACTORIES[case]
    line = said(capsys, arguments)
    assert re.search(message, line), line


JOINT = """
from pathlib import Path
from barter import Local

class Joint(Local):
    def round(self, server, clients, t):
        super().round(server, clients, t)
        if t == 2 and not Path("mended").exists():
            raise ValueError("rows of two kinds:\\n3 and 4")
"""


def test_what_goes_wrong_in_the_server_is_said_with_its_place_and_costs_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("joint.py").write_text(JOINT)
    command = [
        "run",
        "--algorithm",
        "joint:Joint",
        "--out",
        "run",
        "--set",
        "rounds=3",
        "--set",
        "clients=2",
    ]
    assert main([*command, "--set", "algorithm.max_epochs=1"]) == 1
    line, *where = capsys.readouterr().err.splitlines()
    kept = "finished rounds are kept, `barter resume run` continues"
    assert (
        line
        == f"barter: the server stopped in round 2: ValueError: rows of two kinds: 3 and 4; {kept}"
    )
    assert any(f'"{tmp_path / "joint.py"}", line 9' in told for told in where)
    Path("mended").touch()
    assert main(["resume", "run"]) == 0
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 3
