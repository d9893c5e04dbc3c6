"""Batch normalisation and max pooling by Triton kernels, differentiable."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from barter.compute import kernels
from barter.compute.activations import apply_activation

__all__ = ["batch_norm", "max_pool"]

# Running mean, running variance, and the number of batches.
Tracked: TypeAlias = tuple[Tensor, Tensor, Tensor]
# Training mode, momentum, epsilon, activation, and the activation's slope.
NormSettings: TypeAlias = tuple[bool, float, float, str, float]

TILE = 2048  # Elements that a program works on at a time.
POOLING = 1024  # The same for pooling, which reads an element in several windows.
WARPS = 4
STAGES = 4  # Tiles that are loaded while one is summed.
REDUCING = 128  # Approximate number of programs of a reduction.
WRITING = 1024  # Approximate number of programs that write results.


class _Grid:
    """Division of a matrix (pixels, channels) into tiles, and of rows into slices."""

    def __init__(self, x: Tensor, tile: int = 0) -> None:
        self.c = x.shape[1]
        self.m = x.numel() // self.c
        unit = next(u for u in (8, 4, 2, 1) if self.c % u == 0)
        wide = min(64, max(16, triton.next_power_of_2(self.c)))
        self.blocks = triton.cdiv(self.c, wide)
        self.high = (tile or TILE) // wide
        self.units = self.c // unit
        self.tiles = {"UNIT": unit, "BM": self.high, "BC": wide, "num_warps": WARPS}

    def among(self, programs: int) -> tuple[tuple[int, int], int]:
        """Return a grid (blocks of channels, slices of rows), and the rows of each slice.

        The grid has about this number of programs.
        """
        rows = self.high * triton.cdiv(self.m * self.blocks, self.high * programs)
        return (self.blocks, triton.cdiv(self.m, rows)), rows


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation with a fused sum and activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        added: Tensor | None,
        tracked: Tracked | None,
        arrived: Tensor,
        settings: NormSettings,
    ) -> Tensor:
        training, momentum, eps, act, slope = settings
        cut = _Grid(x)
        y = torch.empty_like(x)
        weights = (x, x) if weight is None else (weight, bias)
        if training:
            mean, rstd = x.new_empty((2, cut.c), dtype=torch.float32)
            grid, rows = cut.among(REDUCING)
            sums = x.new_empty((grid[1], 2, cut.c), dtype=torch.float32)
            kernels.statistics[grid](
                x, sums, arrived, mean, rstd, *(tracked or (x, x, x)),
                cut.m, cut.units, rows, grid[1], eps, momentum,
                **cut.tiles, STAGES=STAGES, TRACKED=tracked is not None,
            )  # fmt: skip
        else:
            assert tracked is not None
            mean = tracked[0]
            rstd = (tracked[1] + eps).rsqrt()
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
        if torch.is_grad_enabled():  # A gradient of this gradient is wanted.
            return *_differentiable(ctx, dy), None, None, None
        x, weight, bias, mean, rstd, y, arrived = ctx.saved_tensors
        affine, added, (training, _, _, act, slope) = ctx.settings
        cut = _Grid(x)
        g = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        dweight, dbias = x.new_empty((2, cut.c), dtype=torch.float32)
        if training:
            dy = g
            if added:
                g = torch.empty_like(x)
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
    """Return the gradients of x, weight, bias and the addend, by operations of torch.

    Unlike the kernels, these can be differentiated again.
    """
    x, weight, bias, mean, rstd, y, _ = ctx.saved_tensors
    affine, added, (training, _, eps, act, slope) = ctx.settings
    with torch.enable_grad():
        weight, bias = (weight, bias) if affine else (None, None)
        means, variances = (None, None) if training else (mean, rstd.detach() ** -2 - eps)
        z = F.batch_norm(x, means, variances, weight, bias, training, 0.0, eps)
        passed = (y > 0).to(dy.dtype) if added else None
        value = z * passed if passed is not None else apply_activation(z, (act, slope))
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
    settings: NormSettings,
) -> Tensor:
    """Compute act(batch_norm(x) + added) by Triton kernels, differentiable twice.

    Args:
        x: Images on a GPU in channels_last, bfloat16 or float32.
        weight: Weight of each channel, or None. Gets no gradient in evaluation.
        bias: Bias of each channel, or None. Gets no gradient in evaluation.
        added: Addend of the same shape, or None; only relu may follow it.
        tracked: Running mean, running variance and number of batches, updated in place in training,
            used in evaluation; None, in training only, for a layer without them.
        arrived: Zeros (int32), one for each 16 channels rounded up, that only this layer uses. They
            are zero again after the call.
        settings: Training mode, momentum, epsilon, activation, and the activation's slope.
    """
    y: Tensor = _BatchNorm.apply(x, weight, bias, added, tracked, arrived, settings)  # type: ignore[no-untyped-call]
    return y


class _MaxPool(torch.autograd.Function):
    """Max pooling that remembers which element of each window was the largest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: int, stride: int, padding: int, shape: tuple[int, int]
    ) -> Tensor:
        n, c, height, width = x.shape
        y = torch.empty(
            (n, c, *shape), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        winner = torch.empty_like(y, dtype=torch.uint8)
        cut = _Grid(y, POOLING)
        window = {"K": kernel, "STRIDE": stride, "PAD": padding}
        # CUDA allows large values only along the first axis of a grid.
        grid = triton.cdiv(cut.m, cut.high), cut.blocks
        kernels.max_pool_forward[grid](
            x, y, winner, cut.m, cut.units, height, width, *shape, **cut.tiles, **window
        )
        ctx.save_for_backward(x, winner)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, winner = ctx.saved_tensors
        if torch.is_grad_enabled():  # A gradient of this gradient is wanted.
            return _scattered(dy, winner, x, **ctx.window), None, None, None, None
        dx = torch.empty_like(x)
        cut = _Grid(x, POOLING)
        shape = (*x.shape[2:], *winner.shape[2:])
        grid = triton.cdiv(cut.m, cut.high), cut.blocks
        dy = dy.contiguous(memory_format=torch.channels_last)
        kernels.max_pool_backward[grid](
            dy, winner, dx, cut.m, cut.units, *shape, **cut.tiles, **ctx.window
        )
        return dx, None, None, None, None


def _scattered(dy: Tensor, winner: Tensor, x: Tensor, K: int, STRIDE: int, PAD: int) -> Tensor:
    """Return the gradient of x of max pooling, by a differentiable operation.

    Args:
        dy: The gradient of the output.
        winner: Position of the maximum in each window.
        x: The input.
        K: Side of a window.
        STRIDE: Distance of windows.
        PAD: Padding.
    """
    height, width = x.shape[2:]
    rows, columns = (torch.arange(side, device=x.device) * STRIDE - PAD for side in dy.shape[2:])
    place = winner.long()
    place = (rows[:, None] + place // K) * width + columns + place % K
    flat = dy.new_zeros((*x.shape[:2], height * width))
    return flat.scatter_add(2, place.flatten(2), dy.flatten(2)).view_as(x)


def max_pool(x: Tensor, kernel: int, stride: int, padding: int, shape: tuple[int, int]) -> Tensor:
    """Compute the maximum of each window by Triton kernels, differentiable twice.

    Args:
        x: Images on a GPU in channels_last.
        kernel: Side of the windows.
        stride: Distance between windows.
        padding: Padding at each side, whose pixels never are the maximum.
        shape: Height and width of the result, as torch computes them from the other arguments.
    """
    y: Tensor = _MaxPool.apply(x, kernel, stride, padding, shape)  # type: ignore[no-untyped-call]
    return y
