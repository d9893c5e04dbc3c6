"""Parts of images: where they lie, how often each is looked at, and what they tell that a whole does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.models.generators import Decoder, resize_images
from barter.ops.fit import adam
from barter.ops.inversion import Schedule, Terms, Viewer, fit_decoder
from barter.ops.views import (
    choose_views,
    count_views,
    embed_all_views,
    extract_views,
    parts_of_views,
    parts_per_side,
    select_view,
)
from tests.conftest import federation, tiny


def spec(side: int, channels: int = 1) -> Spec:
    return Spec(channels, side, side, 2, (0.5,) * channels, (0.25,) * channels)


def test_the_first_view_is_the_whole() -> None:
    images = torch.randn(3, 2, 8, 8)
    for side in (8, 16):
        for parts in (0, 2, 3):
            whole = extract_views(images, torch.zeros(3, dtype=torch.long), parts, spec(side, 2))
            assert torch.allclose(whole, resize_images(images, spec(side, 2)), atol=1e-5)


def test_parts_by_hand() -> None:
    """Of 8 pixels a side, a part of two by two takes 5: those from 0 or from 3 on, drawn out to 8 pixels again."""
    ramp = torch.arange(8.0).expand(8, 8)
    rows, columns = ramp.T[None, None], ramp[None, None]
    drawn_out = (
        torch.arange(8) + 0.5
    ) * 5 / 8 - 0.5  # where the middle of each new pixel lies, in old ones
    for view, (low, left) in enumerate([(0, 0), (0, 3), (3, 0), (3, 3)], 1):
        for image, start, axis in ((rows, low, 2), (columns, left, 3)):
            part = extract_views(image.contiguous(), torch.tensor([view]), 2, spec(8))
            expected = (start + drawn_out).clamp(
                0, 7
            )  # at the edge of the image its last pixel goes on
            assert torch.allclose(part.select(5 - axis, 0).flatten(), expected, atol=1e-5)


def test_nothing_outside_of_a_part_matters_to_it() -> None:
    image = torch.randn(1, 1, 16, 16, requires_grad=True)
    extract_views(
        image, torch.tensor([4]), 2, spec(16)
    ).sum().backward()  # the last: 10 pixels from the 7th on
    assert image.grad is not None
    assert (image.grad[0, 0].abs() > 0).nonzero().amin(0).tolist() == [5, 5], (
        "with one more that is blended in"
    )
    assert (image.grad[0, 0, 6:, 6:] > 0).all()


@given(st.integers(1, 200), st.integers(2, 5))
def test_views_come_in_turn(images: int, parts: int) -> None:
    views = choose_views(images, parts, torch.device("cpu"))
    assert ((views == 0) == (torch.arange(images) % parts == 0)).all()
    counts = torch.bincount(views, minlength=count_views(parts))[1:]
    assert len(counts) == parts**2
    assert counts.max() - counts.min() <= 1


@given(st.integers(0, 9).filter(lambda parts: parts != 1))
def test_the_number_of_views_tells_that_of_parts(parts: int) -> None:
    assert parts_of_views(count_views(parts)) == parts


def test_an_image_is_not_cut_into_parts_of_less_than_eight_pixels() -> None:
    sides = {8: 0, 15: 0, 16: 2, 28: 3, 32: 4, 128: 4}
    assert {side: parts_per_side(4, spec(side)) for side in sides} == sides
    assert parts_per_side(2, spec(32)) == 2
    assert parts_per_side(0, spec(32)) == 0


class Brightness(Classifier):
    """Features are the mean of all pixels: they do not tell where anything is."""

    feature_dim = 1

    def features(self, x: Tensor) -> Tensor:
        return x.mean((1, 2, 3))[:, None]

    def logits(self, features: Tensor) -> Tensor:
        return torch.cat([features, -features], 1)


def halves(images: int) -> Images:
    """Images that are bright in one half, above, below, left or right, by their label."""
    bright, labels = torch.zeros(4, 1, 16, 16, dtype=torch.uint8), torch.arange(images) % 4
    for half in (bright[0, :, :8], bright[1, :, 8:], bright[2, ..., :8], bright[3, ..., 8:]):
        half.fill_(255)
    return Images(bright[labels], labels, spec(16))


def test_embeddings_of_parts_are_those_of_what_is_seen_of_them() -> None:
    data, index = halves(8), torch.tensor([5, 0, 2])
    model = Brightness()
    made = embed_all_views(model, data, index, 2)
    assert made.shape == (3, 5, 1)
    for view in range(5):
        looked = extract_views(data.batch(index), torch.full((3,), view), 2, data.spec)
        assert torch.equal(made[:, view], model.features(looked))
    assert torch.equal(
        select_view(made, torch.tensor([4, 0, 1])),
        torch.stack([made[0, 4], made[1, 0], made[2, 1]]),
    )
    assert torch.allclose(made[:, 0], torch.zeros(()), atol=1e-6), "all wholes are alike"
    assert made[:, 1].std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("parts", [0, 2])
def test_parts_tell_the_decoder_where_things_are(parts: int) -> None:
    torch.manual_seed(0)
    data, model, same = halves(8), Brightness(), nn.Identity()
    codes = {0: embed_all_views(model, data, torch.arange(8), parts)}
    server = federation(tiny("dffke")).server
    server.spec = data.spec
    schedule = Schedule(1, 40, 8, mixed=True)
    state, _ = fit_decoder(
        server, {}, {0: Viewer(model, same)}, codes, codes, adam(1e-2), schedule, Terms()
    )
    drawn = Decoder.from_state(state, data.spec, parts)(codes[0]).flatten(1)
    private = data.batch(torch.arange(8)).flatten(1)
    likeness = F.cosine_similarity(
        drawn - drawn.mean(1, keepdim=True), private - private.mean(1, keepdim=True)
    ).mean()
    assert likeness > 0.8 if parts else likeness.abs() < 0.1
