from __future__ import annotations

import torch

from barter.core.images import Augment, Images, Spec, augment_images


def numbered(n: int, side: int, augment: Augment, size: int | None = None) -> Images:
    """Images whose every pixel says where it stands."""
    spec = Spec(1, size or side, size or side, 3, (0.0,), (1.0,))
    pixels = (
        torch.arange(1, side * side + 1, dtype=torch.uint8)
        .view(1, 1, side, side)
        .expand(n, -1, -1, -1)
        .clone()
    )
    return Images(pixels, torch.arange(n) % 3, spec, augment)


def test_normalisation_by_hand() -> None:
    spec = Spec(2, 1, 1, 2, (0.5, 0.2), (0.25, 0.1))
    images = Images(torch.tensor([[[[255]], [[51]]]], dtype=torch.uint8), torch.tensor([1]), spec)
    assert torch.allclose(
        images.batch(torch.tensor([0])).flatten(), torch.tensor([2.0, 0.0]), atol=1e-6
    )
    assert images.class_counts().tolist() == [0, 1]


def test_crops_are_shifts_of_each_image_by_its_own_amount() -> None:
    torch.manual_seed(0)
    images = numbered(64, 4, Augment(crop=1))
    batch = (images.batch(torch.arange(64), augmented=True) * 255).round().int()[:, 0]
    padded = torch.nn.functional.pad(images.pixels[0, 0].int(), [1] * 4)
    shifts = {(dy, dx): padded[dy : dy + 4, dx : dx + 4] for dy in range(3) for dx in range(3)}
    seen = {at for picture in batch for at, shift in shifts.items() if torch.equal(picture, shift)}
    assert all(any(torch.equal(picture, shift) for shift in shifts.values()) for picture in batch)
    assert len(seen) == 9


def test_flips_mirror_about_half_of_the_images() -> None:
    torch.manual_seed(0)
    images = numbered(200, 3, Augment(flip=True))
    plain, batch = images.batch(torch.arange(200)), images.batch(torch.arange(200), augmented=True)
    mirrored = (batch == plain.flip(-1)).flatten(1).all(1)
    kept = (batch == plain).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 60 < int(mirrored.sum()) < 140


def test_test_images_are_never_augmented() -> None:
    images = numbered(5, 4, Augment(crop=2, flip=True))
    assert torch.equal(images.batch(torch.arange(5)), images.batch(torch.arange(5)))


def test_images_come_in_the_size_the_task_asks_for() -> None:
    assert numbered(2, 4, Augment(crop=1), size=8).batch(torch.arange(2), augmented=True).shape == (
        2,
        1,
        8,
        8,
    )


def test_images_that_are_floats_already_are_shifted_over_zeros() -> None:
    torch.manual_seed(0)
    picture = torch.randn(2, 3, 4)
    batch = augment_images(picture.expand(200, -1, -1, -1), Augment(crop=1, flip=True))
    assert (batch.shape, batch.dtype) == ((200, 2, 3, 4), torch.float32)
    padded = [torch.nn.functional.pad(side, [1] * 4) for side in (picture, picture.flip(-1))]
    shifts = [
        side[:, dy : dy + 3, dx : dx + 4] for side in padded for dy in range(3) for dx in range(3)
    ]
    found = [
        [at for at, shift in enumerate(shifts) if torch.equal(image, shift)] for image in batch
    ]
    assert all(len(at) == 1 for at in found), (
        "every image is one of them, and nothing but zeros comes in"
    )
    assert {at for (at,) in found} == set(range(18))


def test_without_augmentation_images_are_what_they_were() -> None:
    picture = torch.randn(2, 1, 3, 3)
    assert augment_images(picture, Augment()) is picture
