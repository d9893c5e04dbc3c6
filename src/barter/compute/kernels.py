"""Triton kernels of batch normalisation and max pooling for channels_last images.

PyTorch's own kernels take a third of a network's step: their reductions are far below the memory's
bandwidth, and what follows a normalisation reads and writes everything again. Here normalisation, a
sum and the activation take two passes over memory in each direction. An image tensor is a matrix of
M pixels by C channels, C being `units` times UNIT, and is processed in tiles of BM by BC. One
kernel sums over slices of the rows, and the program that finishes last adds up the slices in their
order; the next kernel writes the result. So the same input gives the same bits.

`launch.py` calls them.
"""

# mypy: ignore-errors
# ruff: noqa: RET505
# fmt: off

import triton
import triton.language as tl


@triton.jit
def _activated(z, ACT: tl.constexpr, slope):
    """Apply the activation."""
    if ACT == "relu":
        z = tl.where(z <= 0, 0.0, z)  # keeps NaN
    elif ACT == "leaky":
        z = tl.where(z > 0, z, z * slope)
    elif ACT == "relu6":
        z = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACT == "silu":
        z = z / (1 + tl.exp(-z))
    elif ACT == "hardswish":
        z = z * tl.where(z <= -3, 0.0, tl.where(z >= 3, 6.0, z + 3)) / 6
    return z


@triton.jit
def _before(g, z, ACT: tl.constexpr, slope):
    """Return the gradient before the activation, from g, that after it.

    It is zero, not NaN, where the activation passes nothing. z is the activation's input.
    """
    if ACT == "relu":
        return tl.where(z > 0, g, 0.0)
    elif ACT == "leaky":
        return tl.where(z > 0, g, g * slope)
    elif ACT == "relu6":
        return tl.where((z > 0) & (z < 6), g, 0.0)
    elif ACT == "silu":
        s = 1 / (1 + tl.exp(-z))
        return g * s * (1 + z * (1 - s))
    elif ACT == "hardswish":
        return tl.where(z < -3, 0.0, tl.where(z <= 3, g * (z / 3 + 0.5), g))
    else:
        return g


@triton.jit
def _scaling(weight_ptr, bias_ptr, columns, inside, AFFINE: tl.constexpr):
    """Load weight and bias of these channels; ones and zeros if there are none."""
    if AFFINE:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0)
    else:
        weight = tl.where(inside, 1.0, 0.0)
        bias = tl.where(inside, 0.0, 0.0)
    return weight, bias


@triton.jit
def _added_up(sums_ptr, arrived_ptr, c, columns, inside, slices, one, other, BM: tl.constexpr, BC: tl.constexpr):
    """Store one slice's two sums; the last program to arrive adds up all slices.

    Returns:
        Both totals, and True, for the last program of these columns; otherwise zeros and False.
    """
    place = sums_ptr + tl.program_id(1) * 2 * c + columns
    tl.store(place, one, mask=inside)
    tl.store(place + c, other, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + tl.program_id(0), 1) == slices - 1
    ones = tl.zeros((BM, BC), tl.float32)
    others = tl.zeros((BM, BC), tl.float32)
    if last:
        for start in range(0, slices, BM):
            at = start + tl.arange(0, BM)
            mask = (at < slices)[:, None] & inside[None, :]
            places = sums_ptr + at[:, None] * 2 * c + columns[None, :]
            ones += tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
            others += tl.load(places + c, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(arrived_ptr + tl.program_id(0), 0)
    return tl.sum(ones, 0), tl.sum(others, 0), last


@triton.jit(do_not_specialize=["m", "units", "rows", "slices"])
def statistics(
    x_ptr, sums_ptr, arrived_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, count_ptr,
    m, units, rows, slices, eps, momentum,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, TRACKED: tl.constexpr,
):
    """Compute each channel's mean and 1 / standard deviation.

    The running statistics are updated, too. Sums are of x minus its first row, which avoids
    cancellation.
    """
    c = units * UNIT
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < c
    slice_ = tl.program_id(1)
    first = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    end = tl.minimum((slice_ + 1) * rows, m)
    for start in tl.range(slice_ * rows, end, BM, num_stages=STAGES):
        at = start + tl.arange(0, BM)
        mask = (at < end)[:, None] & inside[None, :]
        x = tl.load(x_ptr + at[:, None] * c + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, x - first[None, :], 0.0)
        total += d
        squares += d * d
    one, other, last = _added_up(
        sums_ptr, arrived_ptr, c, columns, inside, slices, tl.sum(total, 0), tl.sum(squares, 0), BM, BC
    )
    if last:
        shift = one / m
        mean = first + shift
        var = other / m - shift * shift
        var = tl.where(var < 0, 0.0, var)  # A maximum would hide NaN.
        tl.store(mean_ptr + columns, mean, mask=inside)
        tl.store(rstd_ptr + columns, 1 / tl.sqrt(var + eps), mask=inside)
        if TRACKED:
            old = tl.load(running_mean_ptr + columns, mask=inside, other=0.0)
            tl.store(running_mean_ptr + columns, old + momentum * (mean - old), mask=inside)
            old = tl.load(running_var_ptr + columns, mask=inside, other=0.0)
            tl.store(running_var_ptr + columns, old + momentum * (var * (m / (m - 1)) - old), mask=inside)
            if tl.program_id(0) == 0:
                tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit(do_not_specialize=["m", "units", "rows"])
def forward(
    x_ptr, y_ptr, added_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, units, rows, slope,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr, AFFINE: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Compute y = act((x - mean) * rstd * weight + bias [+ added]).

    Matrices are (m pixels, c channels); without AFFINE, weight is 1 and bias 0.
    """
    c = units * UNIT
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < c
    slice_ = tl.program_id(1)
    mean = tl.load(mean_ptr + columns, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0.0)
    weight, bias = _scaling(weight_ptr, bias_ptr, columns, inside, AFFINE)
    end = tl.minimum((slice_ + 1) * rows, m)
    for start in range(slice_ * rows, end, BM):
        at = start + tl.arange(0, BM)
        mask = (at < end)[:, None] & inside[None, :]
        place = at[:, None] * c + columns[None, :]
        z = (tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        z = z * weight[None, :] + bias[None, :]
        if ADDED:
            z += tl.load(added_ptr + place, mask=mask, other=0.0).to(tl.float32)
        z = _activated(z, ACT, slope)
        tl.store(y_ptr + place, z.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m", "units", "rows", "slices"])
def backward_sums(
    dy_ptr, x_ptr, y_ptr, g_ptr, sums_ptr, arrived_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
    dweight_ptr, dbias_ptr, m, units, rows, slices, slope,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr,
    AFFINE: tl.constexpr, ADDED: tl.constexpr,
):
    """Compute the gradients of bias and weight.

    These are sums of g, the gradient before the activation, and of g times normalised x. Where
    something was added, its gradient is g, written here; the sign of y then shows what the
    activation (relu) let pass.
    """
    c = units * UNIT
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < c
    slice_ = tl.program_id(1)
    mean = tl.load(mean_ptr + columns, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0.0)
    weight, bias = _scaling(weight_ptr, bias_ptr, columns, inside, AFFINE)
    total = tl.zeros((BM, BC), tl.float32)
    products = tl.zeros((BM, BC), tl.float32)
    end = tl.minimum((slice_ + 1) * rows, m)
    for start in tl.range(slice_ * rows, end, BM, num_stages=STAGES):
        at = start + tl.arange(0, BM)
        mask = (at < end)[:, None] & inside[None, :]
        place = at[:, None] * c + columns[None, :]
        g = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        x = (tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        if ADDED:
            y = tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
            g = tl.where(y > 0, g, 0.0)
            tl.store(g_ptr + place, g.to(g_ptr.dtype.element_ty), mask=mask)
        else:
            g = _before(g, x * weight[None, :] + bias[None, :], ACT, slope)
        g = tl.where(mask, g, 0.0)
        total += g
        products += g * x
    one, other, last = _added_up(
        sums_ptr, arrived_ptr, c, columns, inside, slices, tl.sum(total, 0), tl.sum(products, 0), BM, BC
    )
    if last:
        tl.store(dbias_ptr + columns, one, mask=inside)
        tl.store(dweight_ptr + columns, other, mask=inside)


@triton.jit(do_not_specialize=["m", "units", "rows"])
def backward(
    g_ptr, x_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, m, units, rows, slope,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr,
    TRAIN: tl.constexpr, AFFINE: tl.constexpr,
):
    """Compute the gradient of x from g, the gradient of y.

    In training (TRAIN), it also flows through the batch's mean and variance, for which dweight and
    dbias hold the sums of `backward_sums`. Matrices are (m pixels, c channels).
    """
    c = units * UNIT
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < c
    slice_ = tl.program_id(1)
    mean = tl.load(mean_ptr + columns, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0.0)
    weight, bias = _scaling(weight_ptr, bias_ptr, columns, inside, AFFINE)
    if TRAIN:
        total = tl.load(dbias_ptr + columns, mask=inside, other=0.0) / m
        products = tl.load(dweight_ptr + columns, mask=inside, other=0.0) / m
    end = tl.minimum((slice_ + 1) * rows, m)
    for start in range(slice_ * rows, end, BM):
        at = start + tl.arange(0, BM)
        mask = (at < end)[:, None] & inside[None, :]
        place = at[:, None] * c + columns[None, :]
        g = tl.load(g_ptr + place, mask=mask, other=0.0).to(tl.float32)
        x = (tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        g = _before(g, x * weight[None, :] + bias[None, :], ACT, slope)
        if TRAIN:
            g = g - total[None, :] - x * products[None, :]
        tl.store(dx_ptr + place, (g * (rstd * weight)[None, :]).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m", "units", "height", "width", "p", "q"])
def max_pool_forward(
    x_ptr, y_ptr, winner_ptr, m, units, height, width, p, q,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
):
    """Compute the maximum of each K x K window, and its position in the window."""
    c = units * UNIT
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    n, row, column = at // (p * q), at // q % p, at % q
    written = (at < m)[:, None] & (columns < c)[None, :]
    best = tl.full((BM, BC), float("-inf"), tl.float32)
    winner = tl.full((BM, BC), 255, tl.int32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            y, x = row * STRIDE - PAD + i, column * STRIDE - PAD + j
            mask = ((y >= 0) & (y < height) & (x >= 0) & (x < width))[:, None] & written
            place = ((n * height + y) * width + x)[:, None] * c + columns[None, :]
            value = tl.load(x_ptr + place, mask=mask, other=float("-inf")).to(tl.float32)
            better = mask & ((value > best) | (value != value) | (winner == 255))
            best = tl.where(better, value, best)
            winner = tl.where(better, i * K + j, winner)
    place = at[:, None] * c + columns[None, :]
    tl.store(y_ptr + place, best.to(y_ptr.dtype.element_ty), mask=written)
    tl.store(winner_ptr + place, winner.to(tl.uint8), mask=written)


@triton.jit(do_not_specialize=["m", "units", "height", "width", "p", "q"])
def max_pool_backward(
    dy_ptr, winner_ptr, dx_ptr, m, units, height, width, p, q,
    UNIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
):
    """Sum for every pixel the gradients of the windows whose maximum it is."""
    c = units * UNIT
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    n, y, x = at // (height * width), at // width % height, at % width
    written = (at < m)[:, None] & (columns < c)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            down, right = y + PAD - i, x + PAD - j
            row, column = down // STRIDE, right // STRIDE
            whole = (down >= 0) & (right >= 0) & (row * STRIDE == down) & (column * STRIDE == right)
            mask = (whole & (row < p) & (column < q))[:, None] & written
            place = ((n * p + row) * q + column)[:, None] * c + columns[None, :]
            won = tl.load(winner_ptr + place, mask=mask, other=255).to(tl.int32) == i * K + j
            total += tl.where(won, tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32), 0.0)
    tl.store(dx_ptr + at[:, None] * c + columns[None, :], total.to(dx_ptr.dtype.element_ty), mask=written)
