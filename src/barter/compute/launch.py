"""Batch normalisation and pooling on kernels of our own, as functions that torch can differentiate."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from barter.compute import kernels
from barter.compute.activations import activated

__all__ = ["batch_norm", "max_pool"]

Tracked: TypeAlias = tuple[
    Tensor, Tensor, Tensor
]  # running mean and variance, and the number of batches
Settings: TypeAlias = tuple[
    bool, float, float, str, float
]  # training, momentum, epsilon, activation, its slope

TILE = 2048  # elements that a program works on at a time
POOLING = 1024  # and where it sees each of them through several windows
WARPS = 4
STAGES = 4  # tiles on their way while one is summed
REDUCING = 128  # about how many programs sum
WRITING = 1024  # about how many write


class _Grid:
    """How a matrix of m pixels by c channels is cut into tiles, and its rows into slices."""

    def __init__(self, x: Tensor, tile: int = 0) -> None:
        self.c, self.m = x.shape[1], x.numel() // x.shape[1]
        unit = next(u for u in (8, 4, 2, 1) if self.c % u == 0)
        wide = min(64, max(16, triton.next_power_of_2(self.c)))
        self.blocks, self.high = triton.cdiv(self.c, wide), (tile or TILE) // wide
        self.units, self.tiles = (
            self.c // unit,
            {"UNIT": unit, "BM": self.high, "BC": wide, "num_warps": WARPS},
        )

    def among(self, programs: int) -> tuple[tuple[int, int], int]:
        """A grid of about so many programs, and how many rows each has."""
        rows = self.high * triton.cdiv(self.m * self.blocks, self.high * programs)
        return (self.blocks, triton.cdiv(self.m, rows)), rows


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        added: Tensor | None,
        tracked: Tracked | None,
        arrived: Tensor,
        settings: Settings,
    ) -> Tensor:
        training, momentum, eps, act, slope = settings
        cut, y, weights = (
            _Grid(x),
            torch.empty_like(x),
            (x, x) if weight is None else (weight, bias),
        )
        if training:
            mean, rstd = x.new_empty((2, cut.c), dtype=torch.float32)
            grid, rows = cut.among(REDUCING)
            sums = x.new_empty((grid[1], 2, cut.c), dtype=torch.float32)
            kernels.statistics[grid](
                x, sums, arrived, mean, rstd, *(tracked or (x, x, x)), cut.m, cut.units, rows, grid[1], eps, momentum,
                **cut.tiles, STAGES=STAGES, TRACKED=tracked is not None,
            )  # fmt: skip
        else:
            assert tracked is not None
            mean, rstd = tracked[0], (tracked[1] + eps).rsqrt()
        grid, rows = cut.among(WRITING)
        kernels.forward[grid](
            x, y, x if added is None else added, *weights, mean, rstd, cut.m, cut.units, rows, slope,
            **cut.tiles, ACT=act, AFFINE=weight is not None, ADDED=added is not None,
        )  # fmt: skip
        ctx.save_for_backward(x, *weights, mean, rstd, y if added is not None else x, arrived)
        ctx.settings = weight is not None, added is not None, settings
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            return *_differentiable(ctx, dy), None, None, None
        x, weight, bias, mean, rstd, y, arrived = ctx.saved_tensors
        affine, added, (training, _, _, act, slope) = ctx.settings
        cut, g = _Grid(x), dy.contiguous(memory_format=torch.channels_last)
        dx, (dweight, dbias) = torch.empty_like(x), x.new_empty((2, cut.c), dtype=torch.float32)
        if training:
            dy, g = g, torch.empty_like(x) if added else g
            grid, rows = cut.among(REDUCING)
            sums = x.new_empty((grid[1], 2, cut.c), dtype=torch.float32)
            kernels.backward_sums[grid](
                dy, x, y, g, sums, arrived, weight, bias, mean, rstd, dweight, dbias,
                cut.m, cut.units, rows, grid[1], slope,
                **cut.tiles, STAGES=STAGES, ACT=act, AFFINE=affine, ADDED=added,
            )  # fmt: skip
        elif added:
            g = torch.where(y > 0, g, 0)
        grid, rows = cut.among(WRITING)
        kernels.backward[grid](
            g, x, dx, weight, bias, mean, rstd, dweight, dbias, cut.m, cut.units, rows, slope,
            **cut.tiles, ACT="none" if added else act, TRAIN=training, AFFINE=affine,
        )  # fmt: skip
        trained = (dweight, dbias) if affine and training else (None, None)
        return dx, *trained, g if added else None, None, None, None


def _differentiable(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """The gradients of x, weight, bias and what was added, by operations that torch can differentiate again."""
    x, weight, bias, mean, rstd, y, _ = ctx.saved_tensors
    affine, added, (training, _, eps, act, slope) = ctx.settings
    with torch.enable_grad():
        weight, bias = (weight, bias) if affine else (None, None)
        means, variances = (None, None) if training else (mean, rstd.detach() ** -2 - eps)
        z = F.batch_norm(x, means, variances, weight, bias, training, 0.0, eps)
        passed = (y > 0).to(dy.dtype) if added else None
        value = z * passed if passed is not None else activated(z, (act, slope))
        inputs = [x, weight, bias]
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(value, wanted, dy, create_graph=True) if wanted else ()
        found = dict(zip(map(id, wanted), gradients, strict=True))
    return [*(found.get(id(t)) for t in inputs), dy * passed if passed is not None else None]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    tracked: Tracked | None,
    arrived: Tensor,
    settings: Settings,
) -> Tensor:
    """act(batch_norm(x) + added).

    `arrived` are c / 16 zeros, int32, that belong to this layer alone. Only relu may follow what is added. Weight and
    bias get no gradient in evaluation.
    """
    y: Tensor = _BatchNorm.apply(x, weight, bias, added, tracked, arrived, settings)  # type: ignore[no-untyped-call]
    return y


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: int, stride: int, padding: int, shape: tuple[int, int]
    ) -> Tensor:
        n, c, height, width = x.shape
        y = torch.empty(
            (n, c, *shape), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        winner = torch.empty_like(y, dtype=torch.uint8)
        cut, window = _Grid(y, POOLING), {"K": kernel, "STRIDE": stride, "PAD": padding}
        grid = triton.cdiv(cut.m, cut.high), cut.blocks  # the first may be large, the second not
        kernels.max_pool[grid](
            x, y, winner, cut.m, cut.units, height, width, *shape, **cut.tiles, **window
        )
        ctx.save_for_backward(x, winner)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, winner = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradient of this gradient
            return _scattered(dy, winner, x, **ctx.window), None, None, None, None
        dx, cut, shape = torch.empty_like(x), _Grid(x, POOLING), (*x.shape[2:], *winner.shape[2:])
        grid, dy = (
            (triton.cdiv(cut.m, cut.high), cut.blocks),
            dy.contiguous(memory_format=torch.channels_last),
        )
        kernels.max_pool_backward[grid](
            dy, winner, dx, cut.m, cut.units, *shape, **cut.tiles, **ctx.window
        )
        return dx, None, None, None, None


def _scattered(dy: Tensor, winner: Tensor, x: Tensor, K: int, STRIDE: int, PAD: int) -> Tensor:
    """The gradient of x, linear in dy, by an operation that torch can differentiate again."""
    height, width = x.shape[2:]
    rows, columns = (torch.arange(side, device=x.device) * STRIDE - PAD for side in dy.shape[2:])
    place = winner.long()
    place = (rows[:, None] + place // K) * width + columns + place % K
    flat = dy.new_zeros((*x.shape[:2], height * width))
    return flat.scatter_add(2, place.flatten(2), dy.flatten(2)).view_as(x)


def max_pool(x: Tensor, kernel: int, stride: int, padding: int, shape: tuple[int, int]) -> Tensor:
    """The largest value of each window, for an output of this height and width."""
    y: Tensor = _MaxPool.apply(x, kernel, stride, padding, shape)  # type: ignore[no-untyped-call]
    return y
