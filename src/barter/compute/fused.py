"""Faster GPU versions of common layers, with the same parameters and results.

`fuse` makes a module's containers pass to a batch normalisation what follows it directly: the
activation, and the sum of a residual block. Parameters, buffers, names, modes and hooks stay as
they are, and so do values up to rounding. First layers of ResNets and max pooling have faster
versions too.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.compute.activations import ACTIVATION_NAMES, NONE, RELU, Activation, apply_activation
from barter.compute.flops import mark_padding
from barter.compute.graphs import has_hooks

__all__ = ["FusedNorm", "fuse"]

M = TypeVar("M", bound=nn.Module)


class FusedNorm(nn.BatchNorm2d):
    """Batch normalisation with fused sum and activation: act(norm(x) + added)."""

    arrived: Tensor | None = None  # counters of the kernels, zero between any two calls

    def forward(self, x: Tensor, added: Tensor | None = None, act: Activation = NONE) -> Tensor:
        """Return act(norm(x) + added), by the kernels if they support it, else by torch.

        In training mode, running statistics are updated as by `nn.BatchNorm2d`.

        Args:
            x: Images (N, C, H, W).
            added: Addend of the shape of x, such as a residual; None adds nothing.
            act: Name and slope of the activation; none by default.
        """
        launch = _launch() if self._fits(x, added, act) else None
        if launch is None:
            y = super().forward(x)
            if added is not None:
                y += added
            return apply_activation(y, act)
        tracked = None
        if self.running_mean is not None:
            tracked = self.running_mean, self.running_var, self.num_batches_tracked
        settings = (self.training or tracked is None, self.momentum or 0.0, self.eps, *act)
        return launch.batch_norm(x, self.weight, self.bias, added, tracked, self.arrived, settings)  # type: ignore[no-any-return]

    def _fits(self, x: Tensor, added: Tensor | None, act: Activation) -> bool:
        """Return whether the kernels support these inputs and the layer's options."""
        if (
            self.arrived is None
            or not x.is_cuda
            or x.device != self.arrived.device
            or not _by_pixel(x)
        ):
            return False
        if x.shape[1] != self.num_features:
            return False  # torch raises the error.
        if added is not None:
            alike = added.shape == x.shape and added.dtype == x.dtype and act == RELU
            if not alike or not added.is_contiguous(memory_format=torch.channels_last):
                return False
        if self.running_mean is None:
            return x.numel() > x.shape[1]
        if self.training:
            usual = (
                self.track_running_stats
                and self.num_batches_tracked is not None
                and self.momentum is not None
            )
            return usual and x.numel() > x.shape[1]
        trained = any(p is not None and p.requires_grad for p in (self.weight, self.bias))
        return not (torch.is_grad_enabled() and trained)


class _MaxPool(nn.MaxPool2d):
    """Max pooling by barter's kernels where they support it."""

    def forward(self, x: Tensor) -> Tensor:
        usual = (
            self.dilation == 1
            and not self.return_indices
            and x.is_cuda
            and _by_pixel(x)
            and x.shape[1] % 8 == 0
        )
        match self.kernel_size, self.stride, self.padding:
            case int(size), int(stride), int(padding) if (
                usual and size <= 3 and (launch := _launch()) is not None
            ):
                shape = tuple(
                    _windows(side, size, stride, padding, self.ceil_mode) for side in x.shape[2:]
                )
                return launch.max_pool(x, size, stride, padding, shape)  # type: ignore[no-any-return]
        return super().forward(x)  # type: ignore[no-any-return]


class _Stem(nn.Conv2d):
    """A first convolution of stride 2 on few channels, by 2 x 2 blocks of pixels.

    Blocks have as many channels as tensor cores need.
    """

    def forward(self, x: Tensor) -> Tensor:
        even = (
            x.dim() == 4
            and x.shape[1] == self.in_channels
            and x.shape[2] % 2 == x.shape[3] % 2 == 0
        )
        if not even or not x.is_cuda or not torch.is_autocast_enabled("cuda"):
            return super().forward(x)
        return by_blocks(x, self.weight, self.bias, torch.get_autocast_dtype("cuda"))

    @staticmethod
    def suits(conv: nn.Conv2d) -> bool:
        """Return whether a convolution is a stem as in ResNets and GoogLeNet.

        That is 7 x 7 with stride 2 and padding 3 on at most four channels, without groups.
        """
        known = conv.kernel_size == (7, 7) and conv.stride == (2, 2) and conv.padding == (3, 3)
        plain = conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
        return known and plain and conv.in_channels <= 4


def by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute a 7 x 7 convolution of stride 2 and padding 3 by blocks of pixels.

    The result is that of `conv2d(x, weight, bias, stride=2, padding=3)`; the sides must be even.

    Blocks of 2 x 2 pixels become one position with 4 c channels, padded with zeros to 16. The
    kernel, extended by one row and column of zeros to 8 x 8 pixels, covers 4 x 4 blocks: two before
    the block of the output position, that block, and one after it.

    Args:
        x: Images (n, c, height, width) with c <= 4.
        weight: The kernel (outputs, c, 7, 7).
        bias: The bias, or None.
        dtype: Data type of the computation.
    """
    n, c, height, width = x.shape
    rows, columns = height // 2, width // 2

    # The images as blocks (n, rows, columns, 2 x 2 x c), padded by two blocks before and one after.
    blocks = torch.zeros(n, rows + 3, columns + 3, 16, dtype=dtype, device=x.device)
    pixels = x.permute(0, 2, 3, 1).view(n, rows, 2, columns, 2, c).transpose(2, 3)
    inner = blocks[:, 2:-1, 2:-1, : 4 * c]
    inner.view(pixels.shape).copy_(pixels)

    # The kernel as blocks (outputs, 4, 4, 16).
    taps = weight.permute(0, 2, 3, 1).flatten(1).to(dtype)
    kernel = taps.new_zeros(len(weight), 4 * 4 * 16)
    kernel = kernel.index_copy(1, _tap_positions(c, x.device), taps)
    kernel = kernel.view(-1, 4, 4, 16)

    kernel = mark_padding(kernel.permute(0, 3, 1, 2), 7 * 7 * c, 4 * 4 * 16)
    return F.conv2d(blocks.permute(0, 3, 1, 2), kernel, bias)


@cache
def _tap_positions(channels: int, device: torch.device) -> Tensor:
    """Return the index of each weight (row, column, channel) in the kernel of blocks."""
    pixel = torch.arange(1, 8)  # The row and the column of zeros come first.
    block = pixel // 2
    inside = pixel % 2
    block_index = block[:, None] * 4 + block
    pixel_index = inside[:, None] * 2 + inside
    start = block_index * 16 + pixel_index * channels
    # Made on the host, so that it is complete whichever stream reads it first.
    return (start[:, :, None] + torch.arange(channels)).flatten().to(device)


def _windows(side: int, size: int, stride: int, padding: int, ceil: bool) -> int:
    """Return the number of pooling windows along a side, as torch counts them.

    Each window must begin inside the image or its left padding.
    """
    count = (side + 2 * padding - size + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= side + padding else count


def _by_pixel(x: Tensor) -> bool:
    """Return whether the kernels can read a tensor: non-empty channels_last images."""
    known = x.dim() == 4 and 0 < x.numel() < 2**31 and x.dtype in (torch.bfloat16, torch.float32)
    return known and x.is_contiguous(memory_format=torch.channels_last)


class _Sequential(nn.Sequential):
    """A sequence whose normalisations take over the activation that follows them."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            act = _next_activation(layer, layers)
            x = layer(x) if act is None else layer(x, act=act)
            del layers[: act is not None]
        return x


def _next_activation(layer: nn.Module, rest: list[nn.Module]) -> Activation | None:
    """Return the activation that a normalisation can take over from the next layer.

    None if there is none, or if hooks observe the value in between.
    """
    if not isinstance(layer, FusedNorm) or not rest or type(rest[0]) not in ACTIVATION_NAMES:
        return None
    if has_hooks(layer, rest[0]):
        return None
    return ACTIVATION_NAMES[type(rest[0])], getattr(rest[0], "negative_slope", 0.0)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm2d: FusedNorm,
    nn.MaxPool2d: _MaxPool,
    nn.Conv2d: _Stem,
    nn.Sequential: _Sequential,
}


def _fused_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the fused version of a class of layers; None if there is none.

    torchvision takes seconds to load, so that its blocks are loaded only for a network that has
    some.
    """
    if kind.__module__.startswith("torchvision."):
        from torchvision.ops.misc import Conv2dNormActivation

        from barter.compute.fused_blocks import FUSED_BLOCKS

        return _Sequential if kind is Conv2dNormActivation else FUSED_BLOCKS.get(kind)
    return FUSED.get(kind)


def fuse(module: M) -> M:
    """Replace the classes of a module's layers by faster ones, if any; return it.

    The module is changed in place; its parameters stay the same objects. The fused kernels run for
    inputs on the device that the module is on now; elsewhere, as on the CPU, the layers compute as
    before.
    """
    device = next(
        (t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu")
    )
    for part in module.modules():
        fused = _fused_class(type(part))
        if fused is not None and not _unsupported(part):
            part.__class__ = fused
        if isinstance(part, FusedNorm):
            groups = -(-part.num_features // 16)
            # A layer is new, or a copy of another width.
            if part.arrived is None or len(part.arrived) != groups:
                part.arrived = torch.zeros(groups, dtype=torch.int32, device=device)
    return module


def _unsupported(part: nn.Module) -> bool:
    """Return whether a part must stay as it is.

    These are convolutions that are no stems, and blocks with another normalisation or activation
    than torchvision's.
    """
    if isinstance(part, nn.Conv2d):
        return not _Stem.suits(part)
    if not type(part).__module__.startswith("torchvision.models."):
        return False
    norms = [child for name, child in part.named_children() if name in ("bn", "bn1", "bn2", "bn3")]
    others = [norm for norm in norms if type(norm) not in (nn.BatchNorm2d, FusedNorm)]
    return bool(others) or type(getattr(part, "relu", None)) not in (nn.ReLU, type(None))


@cache
def _launch() -> ModuleType | None:
    """Return the module of the kernels; warn and return None if they do not compile."""
    try:
        from barter.compute import launch

        x = torch.zeros(2, 8, 2, 2, device="cuda").contiguous(memory_format=torch.channels_last)
        arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        launch.batch_norm(x, None, None, None, None, arrived, (True, 0.0, 1e-5, *NONE))
    except Exception as error:  # A compiler can fail in many ways.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"normalisation runs on PyTorch's slower kernels: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return launch
