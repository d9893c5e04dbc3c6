from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from barter.core.errors import ConfigError
from barter.core.images import Images, Spec
from barter.data.partition import Dirichlet, Domains, Iid, Quantity
from barter.data.task import Data, Task, make_task, overlap, split_validation

CPU = torch.device("cpu")


def test_local_tests_have_the_clients_own_mix() -> None:
    task = make_task(Data(), Dirichlet(alpha=0.3), 5, 0, CPU)
    for train, test in zip(task.train, task.local_tests, strict=True):
        mine, theirs = (images.class_counts().double() for images in (train, test))
        assert set(theirs.nonzero().flatten().tolist()) == set(mine.nonzero().flatten().tolist())
        assert (mine / mine.sum() - theirs / theirs.sum()).abs().max() < 0.06
        assert len(test) >= 10


def test_training_data_are_split_and_the_test_set_is_whole() -> None:
    task = make_task(Data(), Iid(), 4, 0, CPU)
    assert sum(len(images) for images in task.train) == 1433
    assert len(task.global_test) == 364
    assert task.class_table().sum() == 1433
    assert len(task.local_tests[0]) > 300, "an even mix takes almost the whole test set"


def test_the_split_depends_on_the_seed_alone() -> None:
    one, again, other = (
        make_task(Data(), Dirichlet(), 5, seed, CPU).class_table() for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def held(task: Task) -> torch.Tensor:
    assert task.global_validation is not None
    return task.global_validation.pixels.flatten(1)


def test_validation_images_are_held_out_from_each_clients_own() -> None:
    whole, task, again, other = (
        make_task(Data(validation=share), Dirichlet(), 5, 0, CPU) for share in (0.0, 0.2, 0.2, 0.1)
    )
    assert (whole.validation, whole.global_validation) == ([], None)
    for k, (train, kept) in enumerate(zip(task.train, task.validation, strict=True)):
        before = whole.train[k].pixels.flatten(1)
        after = torch.cat([train.pixels, kept.pixels]).flatten(1)
        assert sorted(map(tuple, after.tolist())) == sorted(map(tuple, before.tolist()))
        assert len(kept) == round(0.2 * len(before))
        counts = whole.train[k].class_counts().double() * 0.2
        assert (kept.class_counts() - counts).abs().max() <= 1, "the client's own mix of classes"
        assert torch.equal(task.local_tests[k].pixels, whole.local_tests[k].pixels)
        assert not kept.augment.crop
    assert torch.equal(held(task), torch.cat([own.pixels for own in task.validation]).flatten(1))
    assert torch.equal(held(task), held(again))
    assert len(held(other)) < len(held(task))
    assert int(task.domain_table.sum()) == sum(map(len, task.train)) < 1433
    assert torch.equal(task.global_test.pixels, whole.global_test.pixels)
    assert task.spec == whole.spec


def test_every_image_can_be_held_out_and_one_stays() -> None:
    dataset = Data().load()
    part = np.arange(40)
    found = [split_validation(dataset, part, 0.1, seed, 0) for seed in range(100)]
    assert all(len(kept) == 4 and len(rest) == 36 for rest, kept in found)
    assert set(np.concatenate([kept for _, kept in found])) == set(part)
    assert [len(kept) for kept in split_validation(dataset, part[:2], 0.9, 0, 0)] == [1, 1]
    with pytest.raises(ConfigError, match="client 3 has 1 training image, and needs two"):
        split_validation(dataset, part[:1], 0.1, 0, 3)


def test_without_classes_a_changed_label_changes_no_validation_image() -> None:
    dataset = Data().load()
    labels = dataset.y_train.clone()
    labels[5] = (labels[5] + 1) % 10
    other = replace(dataset, y_train=labels)
    part = np.arange(200)
    for by_class in (False, True):
        one, two = (
            split_validation(d, part, 0.1, 0, 0, by_class=by_class)[1] for d in (dataset, other)
        )
        assert np.array_equal(one, two) != by_class
        assert len(one) == 20


def test_classes_and_domains_that_cannot_be_tested_are_named(tmp_path: Path) -> None:
    labels = np.arange(14) % 7
    arrays = {
        "x_train": np.arange(14 * 64, dtype=np.uint8).reshape(14, 8, 8),
        "y_train": labels,
        "x_test": np.zeros((2, 8, 8), dtype=np.uint8),
        "y_test": np.array([7, 7]),
        "classes": np.array(["cat", "dog", "owl", "fox", "bee", "cow", "ant", "elk"]),
    }
    np.savez(tmp_path / "one.npz", **arrays)
    names = "class 'cat', class 'dog', class 'owl', class 'fox', class 'bee' and 2 more only"
    with pytest.raises(ConfigError, match=f"client 0 has training images of {names}"):
        make_task(Data(source=f"npz:{tmp_path / 'one.npz'}"), Iid(), 1, 0, CPU)
    arrays["y_train"] = labels % 2
    arrays["y_test"] = np.array([0, 1])
    domains = np.arange(14) // 7
    np.savez(
        tmp_path / "two.npz",
        **arrays,
        domains=np.array(["photo", "sketch"]),
        domain_train=domains,
        domain_test=np.zeros(2, dtype=int),
    )
    names = "class 'cat' of domain 'sketch', class 'dog' of domain 'sketch' only"
    with pytest.raises(ConfigError, match=f"client 1 has training images of {names}"):
        make_task(Data(source=f"npz:{tmp_path / 'two.npz'}"), Domains(), 2, 0, CPU)


def test_pixels_are_normalised_by_their_own_statistics() -> None:
    task = make_task(Data(), Iid(), 1, 0, CPU)
    pixels = task.train[0].pixels.double() / 255
    assert task.spec.mean == pytest.approx([float(pixels.mean())])
    assert task.spec.std == pytest.approx([float(pixels.std(correction=0))])
    batch = task.train[0].batch(torch.arange(1433))
    assert (float(batch.mean()), float(batch.std())) == pytest.approx((0, 1), abs=1e-3)


def test_size_augmentation_and_public_data() -> None:
    task = make_task(Data(size=16, augment=False, public="digits"), Quantity(), 3, 0, CPU)
    assert task.spec.shape == (1, 16, 16)
    assert task.train[0].batch(torch.arange(2)).shape == (2, 1, 16, 16)
    assert task.train[0].augment.crop == 0
    assert task.public is not None
    assert len(task.public) == 1433
    assert make_task(Data(), Iid(), 2, 0, CPU).train[0].augment == type(task.train[0].augment)(
        crop=1, flip=False
    )


def test_public_images_that_are_private_are_counted() -> None:
    digits = Data().load()
    spec = Spec(1, 8, 8, 10, (0.3,), (0.4,))
    private = digits.x_train[:50]

    def shared(pixels: Tensor, spec: Spec = spec) -> int:
        return overlap(private, Images(pixels, torch.zeros(len(pixels)).long(), spec))

    assert shared(digits.x_train[40:80]) == 10
    assert shared(digits.x_train[40:80].flip(-1)) == 10, "mirrored"
    assert shared(digits.x_test) == 0
    assert shared(digits.x_train[40:80].flip(-2)) == 0, "what is not covered"
    large = replace(spec, height=12, width=12)
    enlarged = F.interpolate(private[:7].float(), (12, 12), mode="bilinear").round()
    assert shared(enlarged.to(torch.uint8), large) == 7, "as the networks see them"
    task = make_task(Data(public="digits"), Iid(), 2, 0, CPU)
    assert task.overlap == 1433
    assert task.summary("digits").endswith("8x8 grey; 1,433 public images are training images too")


def test_public_data_of_another_kind_are_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/colour.npz"
    x, y = np.zeros((4, 8, 8, 3), dtype=np.uint8), np.zeros(4, dtype=np.int64)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ConfigError, match="3 channels, the task 1"):
        make_task(Data(public=f"npz:{path}"), Iid(), 2, 0, CPU)
