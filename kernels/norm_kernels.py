"""The Triton kernels of both norms: whole rows in tiles, rows too wide for registers in two passes, and sums over rows.

LAYER, a constant of the compiler, adds the mean; all else is shared, so that a comparison of the two compares the
mathematics. Statistics are float32, each result is rounded once, and the backward pass sums in a fixed order without
atomics: equal inputs give equal bits. Sizes and strides are in units of UNIT elements (`launch.unit`).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "x_stride", "residual_stride", "width"])
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    rows, x_stride, residual_stride, width, eps,
    LAYER: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows: y = (s - mean) rstd weight + bias, where s = x + residual."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits before any product
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    s = tl.load(x_ptr + row * (x_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + row * (residual_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * width + column, rounded, mask=inside)
        s = rounded.to(tl.float32)  # what is normalized is what later blocks add to
    if LAYER:
        mean = tl.sum(s, 1, keep_dims=True) / width
        s = tl.where(inside, s - mean, 0.0)
        tl.store(mean_ptr + row, mean, mask=row < rows)
    rstd = tl.rsqrt(tl.sum(s * s, 1, keep_dims=True) / width + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = s * rstd
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def with_part(mean, squares, s, start, width, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of squared deviations from it of a row's first `start` elements and the next ones, s (BLOCK,).

    Chan, Golub and LeVeque 1983, equation 2.1; without LAYER the deviations are those from 0. s is 0 outside the row.
    """
    if LAYER:
        before = tl.cast(start, tl.float32)
        count = tl.cast(tl.minimum(width - start, BLOCK), tl.float32)
        part = tl.sum(s) / count
        s = tl.where(start + tl.arange(0, BLOCK) < width, s - part, 0.0)
        squares += (part - mean) * (part - mean) * (before / (before + count) * count)
        mean += (part - mean) * (count / (before + count))
    return mean, squares + tl.sum(s * s)


@triton.jit(do_not_specialize=["x_stride", "residual_stride", "width"])
def forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, width, eps,
    LAYER: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in two passes: statistics, then the result; the second read mostly finds the row in the cache."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (x_stride * UNIT)
    y_ptr += row * width
    if residual_ptr is not None:
        residual_ptr += row * (residual_stride * UNIT)
        s_ptr += row * width
    mean, squares = 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        s = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            s += tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
            rounded = s.to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + column, rounded, mask=inside)
            s = rounded.to(tl.float32)
        mean, squares = with_part(mean, squares, s, start, width, LAYER, BLOCK)
    rstd = tl.rsqrt(squares / width + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    if LAYER:
        tl.store(mean_ptr + row, mean)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        s = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            s += tl.load(residual_ptr + column, mask=inside, other=0.0).to(tl.float32)
            s = s.to(s_ptr.dtype.element_ty).to(tl.float32)
        y = (s - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "dy_stride", "ds_stride", "s_stride", "width"])
def backward_kernel(
    dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, dy_stride, ds_stride, s_stride, width,
    LAYER: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every program takes tiles of rows in turn, and keeps its part of the sums over rows in registers.

    With xhat = (s - mean) rstd and h = dy weight: dx = rstd (h - mean(h) - xhat mean(h xhat)) + ds, where RMSNorm lacks
    mean(h); dweight = sum over rows of dy xhat, dbias of dy. ds is what comes back along the residual stream.
    """
    width = width * UNIT
    column = tl.arange(0, BLOCK)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        dy = tl.load(dy_ptr + row * (dy_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.load(s_ptr + row * (s_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if LAYER:
            xhat = tl.where(inside, xhat - tl.load(mean_ptr + row, mask=row < rows, other=0.0), 0.0)
        xhat *= rstd
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        h = dy
        if weight_ptr is not None:
            h = dy * weight
        along = xhat * (tl.sum(h * xhat, 1, keep_dims=True) / width)
        if LAYER:
            along += tl.sum(h, 1, keep_dims=True) / width
        dx = (h - along) * rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + row * (ds_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    partial = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < width
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=inside)


@triton.jit(do_not_specialize=["dy_stride", "ds_stride", "s_stride", "width"])
def backward_wide_kernel(
    dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr,
    dy_stride, ds_stride, s_stride, width,
    LAYER: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of one row in two passes: the means over the row, then the result."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * (dy_stride * UNIT)
    s_ptr += row * (s_stride * UNIT)
    dx_ptr += row * width
    if ds_ptr is not None:
        ds_ptr += row * (ds_stride * UNIT)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if LAYER else 0.0
    of_h, of_h_xhat = 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        h = tl.load(dy_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            h *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32)
        of_h += tl.sum(h)
        of_h_xhat += tl.sum(h * ((s - mean) * rstd))  # h is 0 outside the row
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        h = tl.load(dy_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            h *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32)
        dx = h - (s - mean) * rstd * (of_h_xhat / width)
        if LAYER:
            dx -= of_h / width
        dx *= rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "dy_stride", "s_stride", "width"])
def gains_wide_kernel(
    dy_ptr, s_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr,
    rows, dy_stride, s_stride, width,
    LAYER: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts of dweight and dbias for wide rows: a program takes some of the columns of every n-th row."""
    width = width * UNIT
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        dy = tl.load(dy_ptr + row * (dy_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
        if dbias_ptr is not None:
            dbias += dy
        if dweight_ptr is not None:
            s = tl.load(s_ptr + row * (s_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
            if LAYER:
                s -= tl.load(mean_ptr + row)
            dweight += dy * (s * tl.load(rstd_ptr + row))
    partial = tl.program_id(0).to(tl.int64) * width + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, dweight, mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, dbias, mask=inside)


@triton.jit(do_not_specialize=["rows", "width"])
def column_sum_kernel(
    x_ptr, out_ptr, rows, width, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum of the rows of a contiguous float32 matrix, always in the same order."""
    width = width * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
        total += tl.load(x_ptr + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + column, tl.sum(total, 0), mask=column < width)
