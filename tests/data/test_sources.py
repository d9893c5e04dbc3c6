from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from barter.core.errors import ConfigError
from barter.data.sources import PATH_SOURCES, SOURCES, load_dataset


def picture(path: Path, shade: int, size: tuple[int, int] = (10, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 0, 0)).save(path)


def test_digits_come_with_the_package() -> None:
    data = load_dataset("digits")
    assert data.x_train.shape[1:] == (1, 8, 8)
    assert (len(data.y_train), len(data.y_test)) == (1433, 364)
    assert data.x_train.dtype == torch.uint8
    assert int(data.x_train.max()) == 255
    assert data.classes == [str(c) for c in range(10)]
    assert not data.may_flip
    assert set(data.y_test.tolist()) == set(range(10))


def save(path: Path, **changes: Any) -> str:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8),
        "y_train": np.arange(20) % 4,
        "x_test": rng.integers(0, 256, (8, 6, 5, 3), dtype=np.uint8),
        "y_test": np.arange(8) % 4,
    } | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return f"npz:{path}"


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    data = load_dataset(save(path))
    assert data.x_train.shape == (20, 3, 6, 5)
    assert np.array_equal(data.x_train.permute(0, 2, 3, 1).numpy(), np.load(path)["x_train"])
    assert len(data.classes) == 4
    assert not data.may_flip, "nobody knows what is on them"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "lacks y_test"),
        ({"x_train": None}, "lacks x_train"),
        ({"class_names": np.array(["a"])}, "unknown array 'class_names': did you mean 'classes'"),
        ({"classes": np.array(["a", "b"])}, "y_train holds class number 3, but there are 2 names"),
        ({"domains": np.array(["a", "b"])}, "lacks domain_test, domain_train"),
        (
            {
                "domains": np.array(["a"]),
                "domain_train": np.arange(20) % 2,
                "domain_test": np.zeros(8, int),
            },
            "domain_train holds domain number 1, but there are 1 names",
        ),
        ({"x_train": np.full((20, 6, 5, 3), 1.5)}, "float64.*divide them by the largest"),
        ({"x_train": np.full((20, 6, 5, 3), -1.5)}, "between -1.5 and -1.5.*normalisation"),
        ({"x_train": np.full((20, 6, 5, 3), np.nan)}, "between nan and nan"),
        ({"x_train": np.zeros((20, 6, 5, 3), int)}, r"int64.*x\.astype\(np\.uint8\)"),
        ({"x_train": np.zeros((20, 6), dtype=np.uint8)}, "NHWC.*sensor data are not supported"),
        ({"y_train": np.zeros(3, dtype=int)}, "y_train"),
        ({"y_train": np.full(20, -1)}, "from 0 on"),
        ({"y_train": np.zeros(20)}, r"class number.*y\.astype\(int\).*regression"),
        ({"y_train": np.eye(20, dtype=int)}, r"y\.argmax\(1\).*several labels per image"),
        ({"x_test": np.zeros((8, 9, 9, 3), dtype=np.uint8)}, "test images"),
    ],
)
def test_bad_npz_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(save(tmp_path / "a.npz", **changes))


def test_npz_with_names_and_domains_and_without_a_test_part(tmp_path: Path) -> None:
    names = {"classes": np.array(list("abcd")), "domains": np.array(["day", "night"])}
    numbers = {"domain_train": np.arange(20) // 10, "domain_test": np.arange(8) // 4}
    whole = load_dataset(save(tmp_path / "a.npz", **names, **numbers))
    assert (whole.classes, whole.domains, whole.held_out) == (
        ["a", "b", "c", "d"],
        ["day", "night"],
        False,
    )
    assert whole.domain_test.tolist() == [0] * 4 + [1] * 4
    numbers.pop("domain_test")
    parts = load_dataset(save(tmp_path / "b.npz", **names, **numbers, x_test=None, y_test=None))
    assert parts.held_out
    assert parts.domain_test.tolist() == [0] * 2 + [1] * 2, "a fifth of each domain"
    assert len(parts.y_train) == 16
    by_class = load_dataset(f"npz:{tmp_path / 'b.npz'}", hold_out="class")
    assert sorted(zip(by_class.y_test.tolist(), by_class.domain_test.tolist(), strict=True)) == [
        (c, d) for c in range(4) for d in range(2)
    ], "the rule of older versions: one of each class in each domain"


def test_a_changed_label_moves_no_image_between_training_and_test(tmp_path: Path) -> None:
    """The number of images is public, and ε covers one image: it alone may change."""
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(300, 4, 4, 1), dtype=np.uint8)
    y = rng.integers(10, size=300)
    changed = y.copy()
    changed[50] = (y[50] + 3) % 10
    for labels, name in ((y, "a"), (changed, "b")):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=labels)
    one, other = (load_dataset(f"npz:{tmp_path / name}.npz") for name in "ab")
    assert torch.equal(one.x_train, other.x_train)
    assert torch.equal(one.x_test, other.x_test)
    assert (len(one.y_test), one.held_out) == (60, True)
    assert int((one.y_train != other.y_train).sum() + (one.y_test != other.y_test).sum()) == 1
    before, after = (load_dataset(f"npz:{tmp_path / name}.npz", hold_out="class") for name in "ab")
    assert before.x_train.shape != after.x_train.shape or not torch.equal(
        before.x_train, after.x_train
    ), "by class, the same change moves others"


@pytest.mark.parametrize("kind", ["folder", "domains"])
def test_a_file_that_moves_to_another_class_moves_no_other(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "set" if kind == "folder" else tmp_path / "set" / "day"
    for i in range(30):
        picture(place / "abc"[i % 3] / f"{i}.png", shade=i)

    def shades() -> tuple[list[int], list[int]]:
        dataset = load_dataset(f"{kind}:{tmp_path / 'set'}", size=4)
        both = (dataset.x_train, dataset.x_test)
        train, test = (sorted(x[:, 0, 0, 0].tolist()) for x in both)
        return train, test

    before = shades()
    shutil.move(place / "a" / "9.png", place / "c" / "9.png")
    assert shades() == before
    assert len(before[1]) == 6


def test_a_file_that_is_no_npz(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("hello")
    with pytest.raises(ConfigError, match="cannot be read as an npz"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}")


def test_folder_with_and_without_a_test_part(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        for i in range(10):
            picture(tmp_path / "flat" / kind / f"{i}.png", shade=i)
            picture(
                tmp_path / "parts" / ("test" if i < 3 else "train") / kind / f"{i}.png", shade=i
            )
    flat = load_dataset(f"folder:{tmp_path / 'flat'}", size=16)
    assert flat.classes == ["cat", "dog"]
    assert flat.x_train.shape == (16, 3, 16, 16)
    assert len(flat.y_test) == 4
    parts = load_dataset(f"folder:{tmp_path / 'parts'}")
    assert (parts.x_train.shape, len(parts.y_test)) == ((14, 3, 64, 64), 6)
    assert set(parts.x_test[:, 0].flatten().tolist()) == {0, 1, 2}


def test_the_parts_of_a_folder_are_no_classes(tmp_path: Path) -> None:
    for part, images in (("train", 10), ("val", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            for i in range(images):
                picture(tmp_path / part / kind / f"{i}.png", shade=i)
    assert len(load_dataset(f"folder:{tmp_path}").y_test) == 4, (
        "test/ is the test part where there is one"
    )
    shutil.rmtree(tmp_path / "test")
    validated = load_dataset(f"folder:{tmp_path}")
    assert (validated.classes, len(validated.y_train), len(validated.y_test)) == (
        ["cat", "dog"],
        20,
        6,
    )
    shutil.move(tmp_path / "val", tmp_path / "extra")
    with pytest.raises(ConfigError, match="holds train/ and extra/ next to it"):
        load_dataset(f"folder:{tmp_path}")
    shutil.rmtree(tmp_path / "extra")
    alone = load_dataset(f"folder:{tmp_path}")
    assert (alone.classes, len(alone.y_train), len(alone.y_test), alone.held_out) == (
        ["cat", "dog"],
        16,
        4,
        True,
    )
    shutil.move(tmp_path / "train", tmp_path / "val")
    with pytest.raises(ConfigError, match="holds val/ and no train/"):
        load_dataset(f"folder:{tmp_path}")


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_that_come_first_are_said(tmp_path: Path, channels: int) -> None:
    x, y = np.zeros((4, channels, 8, 8), np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    with pytest.raises(ConfigError, match=r"channels first: x\.transpose"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}")
    np.savez(tmp_path / "a.npz", x_train=x.transpose(0, 2, 3, 1), y_train=y)
    assert load_dataset(f"npz:{tmp_path / 'a.npz'}").x_train.shape[1:] == (channels, 8, 8)


def test_domains(tmp_path: Path) -> None:
    for d, domain in enumerate(("photo", "sketch")):
        for kind in ("a", "b", "c"):
            for i in range(5):
                picture(tmp_path / domain / kind / f"{i}.png", shade=100 * d + i)
    data = load_dataset(f"domains:{tmp_path}", size=8)
    assert data.domains == ["photo", "sketch"]
    assert len(data.y_train) == 24
    assert len(data.y_test) == 6
    assert bool(((data.x_train[:, 0, 0, 0] >= 100) == (data.domain_train == 1)).all())


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_dataset(f"folder:{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="one folder per class"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no images"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "empty" / "x.png").write_text("no picture")
    with pytest.raises(ConfigError, match=r"x\.png is not an image"):
        load_dataset(f"folder:{tmp_path}")


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    for wnid in ("n01", "n02"):
        for i in range(3):
            picture(
                tmp_path / "tiny-imagenet-200" / "train" / wnid / "images" / f"{wnid}_{i}.JPEG",
                50,
                (64, 64),
            )
    val = tmp_path / "tiny-imagenet-200" / "val"
    for i in range(4):
        picture(val / "images" / f"val_{i}.JPEG", 90, (64, 64))
    (val / "val_annotations.txt").write_text(
        "".join(f"val_{i}.JPEG\tn0{i % 2 + 1}\t0\t0\t62\t62\n" for i in range(4))
    )
    data = load_dataset("tiny-imagenet", root=str(tmp_path))
    assert data.x_train.shape == (6, 3, 64, 64)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.y_test.tolist() == [0, 1, 0, 1]


def idx(path: Path, array: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_mnist_through_torchvision(tmp_path: Path, name: str, folder: str) -> None:
    x, y = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 256, np.arange(5)
    for part, n in (("train", 5), ("t10k", 3)):
        idx(tmp_path / folder / "raw" / f"{part}-images-idx3-ubyte", x[:n])
        idx(tmp_path / folder / "raw" / f"{part}-labels-idx1-ubyte", y[:n])
    data = load_dataset(name, root=str(tmp_path))
    assert data.x_train.shape == (5, 1, 28, 28)
    assert data.y_test.tolist() == [0, 1, 2]
    assert np.array_equal(data.x_train[2, 0].numpy(), x[2])
    assert len(data.classes) == 10


def test_emnist_stands_upright(tmp_path: Path) -> None:
    x = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    for part in ("train", "test"):
        for kind, array in (("images-idx3", x), ("labels-idx1", np.array([1, 46]))):
            idx(tmp_path / "EMNIST" / "raw" / f"emnist-balanced-{part}-{kind}-ubyte", array)
    data = load_dataset("emnist", root=str(tmp_path))
    assert np.array_equal(data.x_train[0, 0].numpy(), x[0].T)
    assert len(data.classes) == 47


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_through_torchvision(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    monkeypatch.setattr(
        datasets.CIFAR10, "_check_integrity", lambda self: True
    )  # small files have other checksums
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    rows = np.arange(2 * 3072).reshape(2, 3072) % 256
    key = "labels" if name == "cifar10" else "fine_labels"
    for file, _ in [*kind.train_list, *kind.test_list]:
        (folder / file).write_bytes(pickle.dumps({"data": rows.astype(np.uint8), key: [0, 1]}))
    names = [f"class {i}" for i in range(10 if name == "cifar10" else 100)]
    meta = {kind.meta["key"]: names}
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps(meta))
    data = load_dataset(name, root=str(tmp_path))
    assert data.x_test.shape == (2, 3, 32, 32)
    assert data.x_test[1].flatten().tolist() == rows[1].tolist()
    assert data.classes == names


def test_svhn_and_food_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision import datasets

    monkeypatch.setattr(datasets.SVHN, "_check_integrity", lambda self: True)
    for part, n in (("train", 6), ("test", 4)):
        x = np.arange(32 * 32 * 3 * n).reshape(32, 32, 3, n) % 256
        savemat(
            tmp_path / f"{part}_32x32.mat",
            {"X": x.astype(np.uint8), "y": np.arange(1, n + 1)[:, None]},
        )
    svhn = load_dataset("svhn", root=str(tmp_path))
    assert svhn.x_train.shape == (6, 3, 32, 32)
    assert svhn.x_test[1, 2, 5, 7].item() == x[5, 7, 2, 1]
    root = tmp_path / "food-101"
    for kind in ("apple_pie", "waffles"):
        for i in range(2):
            picture(root / "images" / kind / f"{i}.jpg", 40)
    (root / "meta").mkdir()
    for part, i in (("train", 0), ("test", 1)):
        lists = '{"apple_pie": ["apple_pie/%d"], "waffles": ["waffles/%d"]}' % (i, i)  # noqa: UP031
        (root / "meta" / f"{part}.json").write_text(lists)
    food = load_dataset("food101", root=str(tmp_path), size=20)
    assert food.x_train.shape == (2, 3, 20, 20)
    assert food.y_test.tolist() == [0, 1]


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"digits"}))
def test_what_is_absent_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is not in .*data\.root"):
        load_dataset(name, root=str(tmp_path))


def test_numbers_between_0_and_1_and_images_without_channels_are_taken(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (20, 6, 5, 1), dtype=np.uint8)
    tests = {"x_test": grey[:8]}
    expected = load_dataset(save(tmp_path / "a.npz", x_train=grey, **tests))
    for i, given in enumerate((grey[..., 0], grey / 255, (grey[..., 0] / 255).astype(np.float32))):
        found = load_dataset(save(tmp_path / f"{i}.npz", x_train=given, x_test=given[:8]))
        assert torch.equal(found.x_train, expected.x_train)
        assert torch.equal(found.x_test, expected.x_test)
    with pytest.raises(ConfigError, match="x_test is float64 .*between 0 and 2"):
        load_dataset(
            save(
                tmp_path / "b.npz",
                x_train=grey / 255,
                x_test=np.full((8, 6, 5, 1), 2.0) * np.eye(5)[0, :, None],
            )
        )


def test_folders_say_that_images_were_resized(tmp_path: Path) -> None:
    for i, size in enumerate(((40, 30), (90, 80), (64, 64))):
        for kind in ("cat", "dog"):
            picture(tmp_path / "mixed" / kind / f"{i}.png", shade=i)
            with Image.open(tmp_path / "mixed" / kind / f"{i}.png") as image:
                image.resize(size).save(tmp_path / "mixed" / kind / f"{i}.png")
    (note,) = load_dataset(f"folder:{tmp_path / 'mixed'}").notes
    assert note.startswith("images of 40x30 to 90x80 pixels were resized to 64x64; set data.size")
    assert load_dataset(f"folder:{tmp_path / 'mixed'}", size=16).notes == (), "that was asked for"
    for kind in ("cat", "dog"):
        for i in (0, 1):
            (tmp_path / "mixed" / kind / f"{i}.png").unlink()
        picture(tmp_path / "same" / "all" / kind / "a.png", shade=1)
    (note,) = load_dataset(f"domains:{tmp_path / 'same'}").notes
    assert "to 64x64" in note
    assert " to 8x8" not in note


def test_paths_without_their_kind_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat" / "cat").mkdir(parents=True)
    (tmp_path / "parts" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "split" / "train").mkdir(parents=True)
    (tmp_path / "split" / "train" / "0.npz").touch()
    for source, advice in (
        ("own.npz", r"did you mean 'npz:own\.npz'\?$"),
        ("flat", "write folder:flat with a folder per class, or domains:flat with"),
        ("parts", "write folder:parts with a folder per class$"),
        ("split", "write clients:split for data that are already split$"),
    ):
        with pytest.raises(ConfigError, match=advice):
            load_dataset(source)


def test_unknown_sources_have_neighbours() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load_dataset("cifar-10")
    with pytest.raises(ConfigError, match="did you mean 'folder'"):
        load_dataset("foldr:/x")
    assert set(PATH_SOURCES) == {"npz", "folder", "domains", "clients"}
