"""Resize, crop and average images with gradients that are the same in every run, also on a GPU.

On a GPU PyTorch adds the gradients of these three operations in an order that varies from run to
run, and with it their rounding. There, and only where a gradient is needed, they are products with
matrices: R x Cᵀ for each channel x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["average_cells", "resize_bilinear", "sample_boxes", "sum_rows"]


def resize_bilinear(images: Tensor, size: tuple[int, int], *, antialias: bool = False) -> Tensor:
    """Resize images bilinearly.

    Args:
        images: The images (N, C, H, W).
        size: Height and width of the result.
        antialias: Whether a pixel of smaller images is a mean of all pixels that it covers.
    """
    if not gradient_order_varies(images):
        return F.interpolate(images, size, mode="bilinear", antialias=antialias)
    rows, columns = (
        resizing_matrix(before, after, images.device, antialias=antialias)
        for before, after in zip(images.shape[-2:], size, strict=True)
    )
    return apply_matrices(rows, images, columns)


def sample_boxes(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a box of each image, interpolated bilinearly (N, C, rows, columns).

    A place beyond the image has the value of the image's nearest pixel.

    Args:
        images: The images (N, C, H, W), in single precision.
        x: For each image, the places of the box's columns (N, columns): -1 is the image's left
            border, 1 its right border.
        y: For each image, the places of the box's rows (N, rows): -1 is the image's upper border,
            1 its lower border.
    """
    if not gradient_order_varies(images):
        grid = torch.stack(
            [x[:, None, :].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], 3
        )
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    height, width = images.shape[-2:]
    rows, columns = sampling_matrices(y, height), sampling_matrices(x, width)
    return apply_matrices(rows[:, None], images, columns[:, None])


def average_cells(images: Tensor, cells: int) -> Tensor:
    """Return the mean of each cell of a grid on each image (N, C, cells, cells).

    Cells overlap if an image's height or width is not a multiple of `cells`.

    Args:
        images: The images (N, C, H, W).
        cells: Number of cells along each side.
    """
    if not gradient_order_varies(images):
        return F.adaptive_avg_pool2d(images, cells)
    rows, columns = (pooling_matrix(side, cells, images.device) for side in images.shape[-2:])
    return apply_matrices(rows, images, columns)


def sum_rows(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the sum of the rows of each class (classes, ...); labels are class numbers.

    On a GPU sums are made in double precision by a product, since torch adds them in an order that
    varies.
    """
    if rows.is_cuda:
        one_hot = F.one_hot(labels, classes).double()
        sums = one_hot.T @ rows.flatten(1).double()
        return sums.view(classes, *rows.shape[1:]).to(rows)
    return rows.new_zeros(classes, *rows.shape[1:]).index_add_(0, labels, rows)


def gradient_order_varies(images: Tensor) -> bool:
    """Return whether torch would add the images' gradient in an order that varies."""
    return images.is_cuda and images.requires_grad


def apply_matrices(rows: Tensor, images: Tensor, columns: Tensor) -> Tensor:
    """Return R x Cᵀ of each channel x of images, in their precision and memory format.

    Args:
        rows: R, for all images (rows, H) or one for each (N, 1, rows, H).
        images: The images (N, C, H, W).
        columns: C, likewise.
    """
    with torch.autocast(images.device.type, enabled=False):
        found = (rows @ images.float() @ columns.mT).to(images.dtype)
    if images.is_contiguous(memory_format=torch.channels_last):
        return found.contiguous(memory_format=torch.channels_last)
    return found


def resizing_matrix(
    before: int, after: int, device: torch.device, *, antialias: bool = False
) -> Tensor:
    """Return the matrix (after, before) that resizes a column of pixels."""
    unit = torch.eye(before, device=device)[None, None]
    size = (after, before)
    return F.interpolate(unit, size, mode="bilinear", antialias=antialias)[0, 0]


def pooling_matrix(side: int, cells: int, device: torch.device) -> Tensor:
    """Return the matrix (cells, side) that averages a column of pixels over cells."""
    return F.adaptive_avg_pool2d(torch.eye(side, device=device)[None], (cells, side))[0]


def sampling_matrices(places: Tensor, side: int) -> Tensor:
    """Return the matrices (N, places, side) that interpolate between pixels at places (N, places).

    A place is -1 at the first edge and 1 at the last one.
    """
    pixels = ((places + 1) * side - 1) / 2
    apart = pixels.clamp(0, side - 1)[..., None] - torch.arange(side, device=places.device)
    return (1 - apart.abs()).clamp_min(0)
