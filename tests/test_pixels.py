"""A trained network takes images as people have them, and refuses what it could only guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from barter.core.errors import ConfigError
from barter.core.images import Augment, Spec, prepare_batch
from barter.trained.model import TrainedModel

GREY = Spec(1, 8, 8, 10, (0.3,), (0.4,))
COLOUR = Spec(3, 8, 10, 4, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def trained(spec: Spec) -> TrainedModel:
    torch.manual_seed(0)
    features = spec.channels * spec.height * spec.width
    network: Any = nn.Sequential(nn.Flatten(), nn.Linear(features, spec.classes))
    names = tuple(map(str, range(spec.classes)))
    return TrainedModel(network.eval(), spec, names, "linear", "client 0", 1)


def some_bytes(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(256, shape, dtype=torch.uint8)


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "NCHW": lambda x: x,
    "NHWC": lambda x: x.permute(0, 2, 3, 1),
    "array NCHW": lambda x: x.numpy(),
    "array NHWC": lambda x: x.permute(0, 2, 3, 1).numpy(),
    "reversed array": lambda x: np.flip(np.flip(x.numpy(), 2).copy(), 2),
    "one CHW": lambda x: x[0],
    "one HWC": lambda x: x[0].permute(1, 2, 0),
    "one array HWC": lambda x: x[0].permute(1, 2, 0).numpy(),
}
SCALES: dict[str, Callable[[Any], Any]] = {
    "uint8": lambda x: x,
    "float": lambda x: x / 255,
    "float64": lambda x: x.double() / 255 if isinstance(x, Tensor) else x.astype(">f8") / 255,
}


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_scale_gives_the_same_logits(layout: str, scale: str, spec: Spec) -> None:
    x, model = some_bytes(4, *spec.shape), trained(spec)
    with torch.no_grad():
        batch = x[:1] if layout.startswith("one") else x
        expected = model.network(prepare_batch(batch, spec, Augment()))
    given = SCALES[scale](LAYOUTS[layout](x))
    torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-4)
    if scale == "uint8":
        assert torch.equal(model(given), expected), "bytes are not rounded on the way"


@pytest.mark.parametrize("shape", [(5, 8, 8), (8, 8), (1, 8, 8), (8, 8, 1), (5, 20, 30)])
def test_grey_images_need_no_axis_for_the_channel(shape: tuple[int, ...]) -> None:
    x, model = some_bytes(*shape), trained(GREY)
    size = (8, 8) if 20 not in shape else (20, 30)
    assert torch.equal(model(x), model(x.reshape(-1, 1, *size)))


def test_images_of_other_sizes_are_resized_in_both_layouts() -> None:
    x, model = some_bytes(4, 3, 40, 30), trained(COLOUR)
    assert torch.equal(model(x.permute(0, 2, 3, 1).numpy()), model(x))
    assert model(x).shape == (4, 4)


def test_the_networks_size_decides_where_the_shape_does_not() -> None:
    narrow = Spec(3, 8, 3, 4, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    x, model = some_bytes(2, 3, 8, 3), trained(narrow)
    with torch.no_grad():
        expected = model.network(prepare_batch(x, narrow, Augment()))
    assert torch.equal(model(x), expected)


def test_dark_floats_and_no_images_at_all_are_fine() -> None:
    model, dark = trained(COLOUR), some_bytes(2, 3, 8, 10) // 50
    torch.testing.assert_close(model(dark / 255), model(dark), rtol=1e-4, atol=1e-4)
    assert model(torch.zeros(2, 3, 8, 10)).shape == (2, 4)
    assert model(torch.zeros(0, 3, 8, 10)).shape == (0, 4)


REFUSED: dict[str, tuple[Any, str]] = {
    "floats to 255": (
        torch.full((2, 3, 8, 10), 200.0),
        "images are floats from 200 to 200: give floats in 0..1, or uint8 in 0..255",
    ),
    "normalised": (torch.full((2, 3, 8, 10), -0.5), "images are floats from -0.5 to -0.5"),
    "nan": (torch.full((2, 3, 8, 10), float("nan")), "values that are not finite"),
    "infinite": (np.full((2, 3, 8, 10), np.inf), "values that are not finite"),
    "int64": (torch.zeros(2, 3, 8, 10, dtype=torch.int64), "images of type int64: give uint8"),
    "bool": (np.zeros((2, 3, 8, 10), dtype=bool), "images of type bool: give uint8"),
    "uint16": (np.zeros((2, 3, 8, 10), dtype=np.uint16), "images of type uint16: give uint8"),
    "list": ([[0.1]], "must be a tensor or an array, not list"),
    "one channel": (
        some_bytes(2, 1, 8, 10),
        r"shape \(2, 1, 8, 10\) are none of \(N, 3, H, W\) or \(N, H, W, 3\), which .* \(3 channels\)",
    ),
    "no channel": (some_bytes(2, 8, 10), r"shape \(2, 8, 10\) are none of"),
    "flat": (some_bytes(2, 240), r"shape \(2, 240\) are none of"),
    "video": (some_bytes(2, 3, 3, 8, 10), "are none of"),
    "no pixels": (some_bytes(2, 3, 0, 10), "are none of"),
    "ambiguous": (some_bytes(2, 3, 50, 3), r"shape \(2, 3, 50, 3\) could be either of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_only_be_guessed_is_refused_in_one_line(what: str) -> None:
    images, message = REFUSED[what]
    model = trained(COLOUR)
    for use in (model, model.prepare):
        with pytest.raises(ConfigError, match=message) as caught:
            use(images)
        assert "\n" not in str(caught.value)


def test_colour_images_for_a_grey_network_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"are none of .*\(1 channel\)$"):
        trained(GREY)(some_bytes(5, 3, 8, 8))
