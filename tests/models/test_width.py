from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from barter.compute.fused import FusedNorm, fuse
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.models.width import (
    narrow_network,
    narrow_width,
    scale_activations,
    widen_network,
    without_running_statistics,
)
from barter.models.zoo import build_network

SPEC = Spec(1, 8, 8, 10, (0.5,), (0.5,))


def test_widths_are_rounded_up_and_never_empty() -> None:
    assert [narrow_width(64, 0.5**s) for s in range(5)] == [64, 32, 16, 8, 4]
    assert [narrow_width(n, 1 / 16) for n in (1, 16, 17, 24)] == [1, 1, 2, 2]


def test_images_and_classes_are_never_cut() -> None:
    part = narrow_network(build_network("small-cnn", SPEC), 0.25)
    shapes = {name: tuple(p.shape) for name, p in part.named_parameters()}
    assert shapes["body.0.0.weight"] == (8, 1, 3, 3)
    assert shapes["body.2.0.weight"] == (8, 8, 3, 3)
    assert shapes["head.weight"] == (10, 8 * 16)
    assert part(torch.randn(3, 1, 8, 8)).shape == (3, 10)


def test_a_resnet_at_a_sixteenth_has_a_two_hundred_and_fiftieth_of_the_parameters() -> None:
    full = build_network("resnet18", Spec(3, 32, 32, 10, (0.5,) * 3, (0.5,) * 3))
    part = narrow_network(full, 1 / 16)
    assert [sum(p.numel() for p in m.parameters()) for m in (full, part)] == [11_181_642, 45_102]


@pytest.mark.parametrize("rate", [0.0, 1.5, -1.0])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(
        ConfigError, match=f"rate={rate}: a part of a network's width is > 0 and <= 1"
    ):
        narrow_network(build_network("small-cnn", SPEC), rate)


def test_groups_that_are_neither_one_nor_all_are_refused() -> None:
    network = build_network("small-cnn", SPEC)
    network.body[2][0] = nn.Conv2d(32, 32, 3, padding=1, groups=4)  # type: ignore[union-attr, operator, index]
    with pytest.raises(
        ConfigError, match="a convolution of 4 groups cannot be cut by width; use another network"
    ):
        narrow_network(network, 0.5)


def test_the_scaler_divides_hidden_outputs_in_training_only() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(x))

    plain = Two()
    x = torch.randn(3, 2)
    model = scale_activations(copy.deepcopy(plain), 0.25)  # type: ignore[arg-type]
    assert torch.allclose(model.train()(x), 4 * plain(x))
    assert torch.equal(model.eval()(x), plain(x))
    assert torch.allclose(copy.deepcopy(model).train()(x), 4 * plain(x)), "a copy scales too"


def test_before_a_normalisation_the_scaler_changes_nothing_but_epsilon() -> None:
    part = narrow_network(build_network("small-cnn", SPEC), 0.5).train()
    x = torch.randn(20, 1, 8, 8)
    assert torch.allclose(scale_activations(copy.deepcopy(part), 0.5)(x), part(x), atol=1e-3)


def test_without_running_statistics_a_batch_is_normalised_by_itself() -> None:
    network = build_network("small-cnn", SPEC)
    static = without_running_statistics(copy.deepcopy(network))
    assert not [name for name in static.state_dict() if "running" in name or "num_batches" in name]
    x = 5 + 3 * torch.randn(20, 1, 8, 8)
    assert torch.allclose(static.eval()(x), network.train()(x), atol=1e-6)
    assert not torch.allclose(
        static.eval()(x), build_network("small-cnn", SPEC).eval()(x), atol=1e-2
    )
    alone = without_running_statistics(build_network("small-mlp", SPEC)).eval()(x[:1])
    assert torch.isfinite(alone).all(), "one image is enough"


@pytest.mark.parametrize("name", ["small-cnn", "small-resnet", "small-separable"])
def test_a_part_knows_how_wide_it_was(name: str) -> None:
    full = build_network(name, SPEC)
    part = scale_activations(
        narrow_network(full, 1 / 32), 1 / 32
    )  # of some layers one channel is left
    whole = widen_network(part)
    whole.load_state_dict(full.state_dict())
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(whole.eval()(x), full.eval()(x))
    assert [p.shape for p in part.parameters()] != [p.shape for p in whole.parameters()]


def test_a_wider_copy_has_room_for_what_kernels_count() -> None:
    part = fuse(narrow_network(build_network("small-resnet", SPEC), 0.25))
    whole = fuse(widen_network(part))
    found = {m.num_features: len(m.arrived) for m in whole.modules() if isinstance(m, FusedNorm)}  # type: ignore[arg-type]
    assert found == {16: 1, 32: 2}


def test_a_network_that_was_not_cut_stays_as_it_is() -> None:
    full = build_network("small-cnn", SPEC)
    copied = widen_network(full)
    torch.testing.assert_close(copied.state_dict(), full.state_dict())
    assert copied is not full
