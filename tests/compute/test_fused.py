"""Fused networks compute what the plain ones do."""

from __future__ import annotations

import copy
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import barter.models
from barter.compute import fused, lanes
from barter.compute.activations import RELU, apply_activation
from barter.compute.fused import FusedNorm, fuse
from barter.core.images import Spec
from barter.models.zoo import ZOO, build_network
from tests.forked import forked, status

cuda = pytest.mark.cuda
LAST = torch.channels_last


def images(*shape: int, seed: int = 0, like: Any = None) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (
        drawn.to(like).contiguous(memory_format=LAST)
        if like
        else drawn.contiguous(memory_format=LAST)
    )


def far(one: Tensor | None, other: Tensor | None) -> float:
    assert one is not None
    assert other is not None
    return float((one.double() - other.double()).norm() / (other.double().norm() + 1e-12))


def normalised(
    launch: ModuleType, shape: tuple[int, ...], act: str, added: bool, training: bool, like: Any
) -> float:
    """How far values, gradients and statistics are from those of torch in double precision, at most."""
    norm = nn.BatchNorm2d(shape[1]).to(like[0]).train(training)
    for i, tensor in enumerate([norm.weight, norm.bias, norm.running_mean]):
        assert tensor is not None
        tensor.data.copy_(torch.randn(shape[1], generator=torch.Generator().manual_seed(i)))
    assert norm.running_var is not None
    norm.running_var.copy_(
        0.5 + 1.5 * torch.rand(shape[1], generator=torch.Generator().manual_seed(3))
    )
    if not training:
        norm.requires_grad_(False)
    truth = copy.deepcopy(norm).double()
    x, r, dy = (images(*shape, seed=i, like=like[1]).to(like[0]) for i in range(3))
    x = (3 + 2 * x).contiguous(memory_format=LAST)
    with torch.no_grad():  # a value so near to zero is cut off by the one and not by the other
        before = copy.deepcopy(truth)(x.double()) + (r.double() if added else 0)
    dy = dy * (before.abs() > 1e-4)
    mine, also = x.clone().requires_grad_(), r.clone().requires_grad_()
    tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
    arrived = torch.zeros(8, dtype=torch.int32, device=like[0])
    settings = training, 0.1, 1e-5, act, 0.2
    y = launch.batch_norm(
        mine, norm.weight, norm.bias, also if added else None, tracked, arrived, settings
    )
    y.backward(dy)
    theirs, other = x.double().requires_grad_(), r.double().requires_grad_()
    z = apply_activation(truth(theirs) + other if added else truth(theirs), (act, 0.2))
    z.backward(dy.double())
    assert not arrived.any()
    assert norm.num_batches_tracked == truth.num_batches_tracked
    apart = [far(y, z), far(mine.grad, theirs.grad)]
    apart += [far(norm.running_mean, truth.running_mean), far(norm.running_var, truth.running_var)]
    if added:
        apart.append(far(also.grad, other.grad))
    if training:
        apart += [far(norm.weight.grad, truth.weight.grad), far(norm.bias.grad, truth.bias.grad)]
    return max(apart)


def pooled(launch: ModuleType, window: tuple[int, int, int, bool], like: Any) -> None:
    size, stride, padding, ceil = window
    for shape in [(2, 5, 7, 6), (2, 24, 9, 4)]:
        x = images(*shape, like=like[1]).to(like[0]).mul(2).round()  # with ties
        mine, theirs = x.clone().requires_grad_(), x.contiguous().requires_grad_()
        z = F.max_pool2d(theirs, size, stride, padding, ceil_mode=ceil)
        sides = tuple(fused._windows(side, size, stride, padding, ceil) for side in shape[2:])
        assert sides == z.shape[2:]
        y = launch.max_pool(mine, size, stride, padding, sides)
        assert torch.equal(y, z)
        dy = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z).round()
        (one,) = torch.autograd.grad(y, mine, dy, retain_graph=True)
        (again,) = torch.autograd.grad(y, mine, dy.clone().requires_grad_(), create_graph=True)
        (other,) = torch.autograd.grad(z, theirs, dy)
        assert torch.equal(one, other)
        assert torch.equal(again, other)
        assert again.requires_grad


def interpreted() -> int:
    """Triton decides when it is imported whether to interpret: it is imported again, in a process of its own."""
    os.environ["TRITON_INTERPRET"] = "1"
    ours = ("barter.compute.kernels", "barter.compute.launch")
    for name in [
        name for name in sys.modules if name in ours or re.match(r"triton(?!\._C)\b", name)
    ]:
        del sys.modules[name]
    for name in ours:
        vars(barter.models).pop(name.rpartition(".")[2], None)
    path = Path(__file__).with_name("interpreted_kernels.py")
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]))


def test_kernels_as_triton_interprets_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert status(forked(interpreted, tmp_path / "said")) == 0, (tmp_path / "said").read_text()[
        -3000:
    ]


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from barter.compute import kernels

    tile = {
        "UNIT": 8,
        "BM": 16,
        "BC": 16,
    }  # smaller than in use: a larger one takes five times as long, not more code
    window = {"K": 3, "STRIDE": 2, "PAD": 1}
    work = [(kernels.statistics, {"STAGES": 3, "TRACKED": True})]
    for act in ("none", "relu", "silu"):
        work += [
            (kernels.forward, {"ACT": act, "AFFINE": act != "none", "ADDED": act == "relu"}),
            (
                kernels.backward_sums,
                {"STAGES": 3, "ACT": act, "AFFINE": True, "ADDED": act == "relu"},
            ),
            (kernels.backward, {"ACT": act, "AFFINE": True, "TRAIN": act != "none"}),
        ]
    work += [(kernels.max_pool_forward, window), (kernels.max_pool_backward, window)]
    pointers = {"arrived_ptr": "*i32", "count_ptr": "*i64", "winner_ptr": "*u8"}
    pointers |= dict.fromkeys(["x_ptr", "y_ptr", "dy_ptr", "dx_ptr", "g_ptr", "added_ptr"], "*bf16")
    for kernel, settings in work:
        constants = {**tile, **settings}
        kinds = {
            name: pointers.get(name, "*fp32" if name.endswith("_ptr") else "i32")
            for name in kernel.arg_names
        }
        kinds |= {name: "fp32" for name in ("eps", "momentum", "slope") if name in kinds}
        kinds |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, kinds, constexprs=constants)
        assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


# The same blocks as in shallower ResNets, only more of them.
DEEPER = {"resnet101", "resnet152", "resnet34", "resnet34-3x3", "resnet8", "resnet10"}


@pytest.mark.parametrize("name", sorted(ZOO.keys() - DEEPER))
def test_a_fused_network_is_the_same_network(name: str) -> None:
    side = 64 if name.startswith(("efficient", "google", "vit")) else 32
    spec = Spec(3, side, side, 10, (0.5,) * 3, (0.5,) * 3)
    torch.manual_seed(0)
    plain = build_network(name, spec).to(memory_format=LAST)
    other = fuse(fuse(copy.deepcopy(plain)))
    assert list(plain.state_dict()) == list(other.state_dict())
    lanes.take_over(other, plain)  # the same tree of modules
    x = images(2, 3, side, side)
    for training in (True, False):
        torch.manual_seed(1)
        one = plain.train(training)(x)
        torch.manual_seed(1)
        assert torch.equal(one, other.train(training)(x))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))


def test_hooks_see_what_they_saw() -> None:
    seen: list[Tensor] = []
    network = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    network[0].register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    x = images(8, 4, 3, 3)
    y = fuse(network)(x)
    assert isinstance(network[0], FusedNorm)
    assert float(seen[0].detach().min()) < 0
    assert torch.equal(y, F.relu(seen[0]))
    assert torch.equal(network[:1](x), seen[0])


@pytest.mark.parametrize("at", ["bn1", "layer1.0.relu", "layer2.0.bn2"])
def test_hooks_in_a_block_see_what_they_saw(at: str) -> None:
    seen: list[Tensor] = []
    plain = torchvision.models.resnet18(num_classes=10).eval()
    plain.get_submodule(at).register_forward_hook(
        lambda module, inputs, output: seen.append(output.clone())
    )
    other = fuse(copy.deepcopy(plain))
    x = images(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain(x), other(x))
    half = len(seen) // 2
    assert half > 0
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


class Other(nn.BatchNorm2d):
    """A normalisation of somebody's own."""


@pytest.mark.parametrize("change", ["silu", "norm", "no norm"])
def test_blocks_that_were_changed_stay_as_they_are(change: str) -> None:
    torch.manual_seed(0)
    plain = torchvision.models.resnet18(
        num_classes=10, norm_layer=Other if change == "norm" else None
    )
    for part in [part for part in plain.modules() if hasattr(part, "relu")]:
        if change == "silu":
            part.relu = nn.SiLU()
        if change == "no norm":
            part.bn1 = nn.Identity()
    x = images(4, 3, 32, 32)
    assert torch.equal(plain(x), fuse(copy.deepcopy(plain))(x))


def test_what_the_kernels_cannot_do_is_left_to_torch() -> None:
    def fits(norm: nn.BatchNorm2d, **changes: Any) -> bool:
        contiguous = {
            "is_contiguous": lambda memory_format: True,
            "dim": lambda: 4,
            "numel": lambda: 256,
        }
        shape = torch.Size((4, 8, 4, 2))
        x: Any = SimpleNamespace(
            is_cuda=True, device=norm.weight.device, dtype=torch.float32, shape=shape, **contiguous
        )
        for name, value in changes.items():
            setattr(x, name, value)
        return fuse(norm)._fits(x, None, RELU)  # type: ignore[operator]

    assert fits(nn.BatchNorm2d(8))
    assert fits(nn.BatchNorm2d(8, track_running_stats=False))
    assert not fits(nn.BatchNorm2d(16)), "another number of channels"
    assert not fits(nn.BatchNorm2d(8, momentum=None))
    assert not fits(nn.BatchNorm2d(8), dtype=torch.float64)
    assert not fits(nn.BatchNorm2d(8), is_contiguous=lambda memory_format: False)
    assert not fits(nn.BatchNorm2d(8), numel=lambda: 8), "one value per channel"
    assert not fits(nn.BatchNorm2d(8), is_cuda=False)
    assert not fits(nn.BatchNorm2d(8), device=torch.device("meta"))
    still = nn.BatchNorm2d(8)
    still.track_running_stats = False
    assert not fits(still)
    assert not fits(nn.BatchNorm2d(8).eval()), "its weights are trained"
    assert fits(nn.BatchNorm2d(8).eval().requires_grad_(False))
    bias = nn.BatchNorm2d(8).eval()
    bias.weight.requires_grad_(False)
    assert not fits(bias)
    with torch.no_grad():
        assert fits(nn.BatchNorm2d(8).eval())


def test_without_a_compiler_torch_does_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "barter.compute.launch", None)
    monkeypatch.delattr("barter.compute.launch", raising=False)
    fused._launch.cache_clear()
    with pytest.warns(RuntimeWarning, match="PyTorch's slower kernels"):
        assert fused._launch() is None
    fused._launch.cache_clear()


@cuda
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(precision: torch.dtype) -> None:
    from barter.compute import launch

    near = 5e-6 if precision == torch.float32 else 2e-2
    like = "cuda", precision
    for shape in [(100, 64, 32, 32), (4, 70, 6, 6), (100, 512, 4, 4)]:
        for training in (True, False):
            assert normalised(launch, shape, "silu", False, training, like) < near
            assert normalised(launch, shape, "relu", True, training, like) < near
    pooled(launch, (3, 2, 1, False), like)
    x = (
        torch.ones(100, 64, 112, 112, device="cuda", dtype=precision)
        .contiguous(memory_format=LAST)
        .requires_grad_()
    )
    y = launch.max_pool(
        x, 3, 2, 1, (56, 56)
    )  # more rows of tiles than a grid has in its second dimension
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert float(x.grad.float().sum()) == y.numel()


@cuda
@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "googlenet", "mobilenet-v3-small", "small-resnet"]
)
def test_a_fused_step_is_the_plain_step(name: str) -> None:
    spec = Spec(3, 64, 64, 10, (0.5,) * 3, (0.5,) * 3)
    torch.manual_seed(0)
    plain = build_network(name, spec).cuda().to(memory_format=LAST)
    for dropout in [m for m in plain.modules() if isinstance(m, nn.Dropout)]:
        dropout.p = 0.0
    x, y = images(16, 3, 64, 64).cuda(), torch.arange(16, device="cuda") % 10

    def gradient(model: nn.Module, like: torch.dtype) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            F.cross_entropy(model(x.to(like)), y).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    mine = gradient(fuse(copy.deepcopy(plain)), torch.float32)
    truth = gradient(copy.deepcopy(plain).double(), torch.float64)
    assert far(mine, truth) < 3 * far(gradient(plain, torch.float32), truth) + 1e-5
    assert fused._launch() is not None
    norm = FusedNorm(8).cuda()
    fuse(norm)
    z = norm(images(4, 8, 3, 3).cuda(), act=RELU)
    assert z.grad_fn is not None
    assert "BatchNorm" in type(z.grad_fn).__name__
    assert "Native" not in type(z.grad_fn).__name__


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_first_layer_by_blocks_is_the_same_layer(channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 10, 14, dtype=torch.float64).requires_grad_()
    weight = (
        torch.randn(5, channels, 7, 7, dtype=torch.float64)
        .contiguous(memory_format=LAST)
        .requires_grad_()
    )
    bias, cotangent = (
        torch.randn(5, dtype=torch.float64).requires_grad_(),
        torch.randn(2, 5, 5, 7, dtype=torch.float64),
    )
    ways = [
        F.conv2d(x, weight, bias, 2, 3),
        fused.by_blocks(x, weight, bias, torch.float64),
        fused.by_blocks(x.contiguous(memory_format=LAST), weight, bias, torch.float64),
    ]
    slopes = [
        torch.autograd.grad(way, (x, weight, bias), cotangent, create_graph=True) for way in ways
    ]
    for way, found in zip(ways[1:], slopes[1:], strict=True):
        assert torch.allclose(way, ways[0], rtol=0, atol=1e-12)
        assert all(
            torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, slopes[0], strict=True)
        )
    again = [
        torch.autograd.grad(s[0].square().sum(), weight)[0] for s in slopes
    ]  # zeroth-order and matching methods
    assert all(torch.allclose(g, again[0], rtol=0, atol=1e-9) for g in again)


def test_only_the_first_layer_of_a_resnet_goes_by_blocks() -> None:
    spec = Spec(3, 64, 64, 10, (0.5,) * 3, (0.5,) * 3)
    stems = [
        name
        for name, part in fuse(build_network("resnet18", spec)).named_modules()
        if isinstance(part, fused._Stem)
    ]
    assert [name.rsplit(".", 1)[-1] for name in stems] == ["conv1"]
    assert not any(
        isinstance(part, fused._Stem)
        for part in fuse(build_network("resnet18-3x3", spec)).modules()
    )
    for changed in (
        {"padding_mode": "reflect"},
        {"dilation": 2},
        {"stride": 1},
        {"padding": 2},
        {"in_channels": 5},
    ):
        options: Any = {
            "in_channels": 3,
            "out_channels": 8,
            "kernel_size": 7,
            "stride": 2,
            "padding": 3,
            **changed,
        }
        assert not isinstance(fuse(nn.Conv2d(**options)), fused._Stem)


@cuda
def test_a_first_layer_by_blocks_on_a_gpu() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 64, 7, 2, 3, bias=False).cuda().to(memory_format=LAST)
    x = images(16, 3, 64, 64).cuda()
    stem = fuse(copy.deepcopy(plain))
    assert isinstance(stem, fused._Stem)
    with torch.autocast("cuda", torch.bfloat16):
        one, other = plain(x), stem(x)
    assert other.is_contiguous(memory_format=LAST)
    assert other.dtype == torch.bfloat16
    assert far(other.float(), plain(x)) < 2 * far(one.float(), plain(x)) + 1e-4
    assert torch.equal(stem(x), plain(x)), "in full precision torch does it"
