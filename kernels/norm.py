"""RMSNorm and LayerNorm in Triton, with the residual addition in front: kernels, launches and autograd of both.

LAYER_NORM, a compile-time constant, adds the mean; all else is shared, so that a comparison of the two norms compares
the mathematics. Rows of up to 32,768 elements forward and 8,192 backward stay in registers; wider ones are read twice.
Statistics are float32, each result is rounded once, and the backward pass sums in a fixed order without atomics: equal
inputs give equal bits.

Formulas: RMSNorm, Zhang and Sennrich 2019, equation 4; LayerNorm, Ba et al. 2016, equation 4 (`reference.normalize`).
In the kernels, s = x + residual (or x alone) and xhat = (s - mean) rstd, where RMSNorm has mean 0. Sizes and strides
are in units of ALIGNMENT elements (`launch.alignment`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import alignment, as_rows, register_op, tile_width

MAX_SINGLE_PASS_FORWARD, MAX_SINGLE_PASS_BACKWARD = 32768, 8192  # wider rows would spill registers
WIDE_BLOCK = 8192  # columns of a wider row that are processed at once


@triton.jit(do_not_specialize=["rows", "x_stride", "residual_stride", "width"])
def norm_forward_kernel(
    x_ptr, residual_ptr,  # (rows, width); residual may be None
    weight_ptr, bias_ptr,  # (width,) or None
    y_ptr, s_ptr,  # outputs (rows, width), contiguous; s only with a residual
    mean_ptr, rstd_ptr,  # float32 outputs (rows,); mean only with LAYER_NORM
    rows, x_stride, residual_stride, width, eps,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS complete rows: y = xhat weight + bias."""
    width = width * ALIGNMENT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits before any product
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    s = tl.load(x_ptr + row * (x_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + row * (residual_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * width + column, rounded, mask=inside)
        s = rounded.to(tl.float32)  # what is normalized is what later blocks add to
    if LAYER_NORM:
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
def combine_moments(mean, squares, s, start, width, LAYER_NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Add a block s (BLOCK,) at column `start` to the moments of the columns before it; s is 0 outside the row.

    Returns the mean and the sum of squared deviations from it (Chan, Golub and LeVeque 1983, equation 2.1); without
    LAYER_NORM the mean stays 0, and the sum is that of squares.
    """
    if LAYER_NORM:
        before = tl.cast(start, tl.float32)
        count = tl.cast(tl.minimum(width - start, BLOCK), tl.float32)
        block_mean = tl.sum(s) / count
        s = tl.where(start + tl.arange(0, BLOCK) < width, s - block_mean, 0.0)
        squares += (block_mean - mean) * (block_mean - mean) * (before / (before + count) * count)
        mean += (block_mean - mean) * (count / (before + count))
    return mean, squares + tl.sum(s * s)


@triton.jit(do_not_specialize=["x_stride", "residual_stride", "width"])
def norm_forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,  # as in norm_forward_kernel
    x_stride, residual_stride, width, eps,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in two passes: statistics, then the result; the second read mostly finds the row in the cache."""
    width = width * ALIGNMENT
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (x_stride * ALIGNMENT)
    y_ptr += row * width
    if residual_ptr is not None:
        residual_ptr += row * (residual_stride * ALIGNMENT)
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
        mean, squares = combine_moments(mean, squares, s, start, width, LAYER_NORM, BLOCK)
    rstd = tl.rsqrt(squares / width + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    if LAYER_NORM:
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
def norm_backward_kernel(
    dy_ptr, ds_ptr,  # gradients (rows, width) of y and of s; ds may be None
    s_ptr, weight_ptr, mean_ptr, rstd_ptr,  # of the forward pass; mean only with LAYER_NORM
    dx_ptr,  # output (rows, width), contiguous
    dweight_parts_ptr, dbias_parts_ptr,  # float32 outputs (programs, width), or None
    rows, dy_stride, ds_stride, s_stride, width,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th tile of ROWS rows, and keeps its share of the sums over rows in registers.

    With h = dy weight: dx = rstd (h - mean(h) - xhat mean(h xhat)) + ds, where RMSNorm lacks mean(h). The sums over
    rows are dweight = sum dy xhat and dbias = sum dy. ds is the gradient that comes back along the residual stream.
    """
    width = width * ALIGNMENT
    column = tl.arange(0, BLOCK)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        dy = tl.load(dy_ptr + row * (dy_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.load(s_ptr + row * (s_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if LAYER_NORM:
            xhat = tl.where(inside, xhat - tl.load(mean_ptr + row, mask=row < rows, other=0.0), 0.0)
        xhat *= rstd
        if dweight_parts_ptr is not None:
            dweight += dy * xhat
        if dbias_parts_ptr is not None:
            dbias += dy
        h = dy
        if weight_ptr is not None:
            h = dy * weight
        projection = xhat * (tl.sum(h * xhat, 1, keep_dims=True) / width)
        if LAYER_NORM:
            projection += tl.sum(h, 1, keep_dims=True) / width
        dx = (h - projection) * rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + row * (ds_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    offset = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < width
    if dweight_parts_ptr is not None:
        tl.store(dweight_parts_ptr + offset, tl.sum(dweight, 0), mask=inside)
    if dbias_parts_ptr is not None:
        tl.store(dbias_parts_ptr + offset, tl.sum(dbias, 0), mask=inside)


@triton.jit(do_not_specialize=["dy_stride", "ds_stride", "s_stride", "width"])
def norm_backward_wide_kernel(
    dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr,  # as in norm_backward_kernel
    dy_stride, ds_stride, s_stride, width,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of one row in two passes: the means over the row, then the result."""
    width = width * ALIGNMENT
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * (dy_stride * ALIGNMENT)
    s_ptr += row * (s_stride * ALIGNMENT)
    dx_ptr += row * width
    if ds_ptr is not None:
        ds_ptr += row * (ds_stride * ALIGNMENT)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if LAYER_NORM else 0.0
    sum_h, sum_h_xhat = 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        h = tl.load(dy_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            h *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32)
        sum_h += tl.sum(h)
        sum_h_xhat += tl.sum(h * ((s - mean) * rstd))  # h is 0 outside the row
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        h = tl.load(dy_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            h *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32)
        dx = h - (s - mean) * rstd * (sum_h_xhat / width)
        if LAYER_NORM:
            dx -= sum_h / width
        dx *= rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "dy_stride", "s_stride", "width"])
def norm_weight_gradients_wide_kernel(
    dy_ptr, s_ptr, mean_ptr, rstd_ptr, dweight_parts_ptr, dbias_parts_ptr,  # as in norm_backward_kernel
    rows, dy_stride, s_stride, width,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of dweight and dbias for wide rows: a program takes BLOCK columns of every n-th row."""
    width = width * ALIGNMENT
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        dy = tl.load(dy_ptr + row * (dy_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
        if dbias_parts_ptr is not None:
            dbias += dy
        if dweight_parts_ptr is not None:
            s = tl.load(s_ptr + row * (s_stride * ALIGNMENT) + column, mask=inside, other=0.0).to(tl.float32)
            if LAYER_NORM:
                s -= tl.load(mean_ptr + row)
            dweight += dy * (s * tl.load(rstd_ptr + row))
    offset = tl.program_id(0).to(tl.int64) * width + column
    if dweight_parts_ptr is not None:
        tl.store(dweight_parts_ptr + offset, dweight, mask=inside)
    if dbias_parts_ptr is not None:
        tl.store(dbias_parts_ptr + offset, dbias, mask=inside)


@triton.jit(do_not_specialize=["rows", "width"])
def column_sum_kernel(
    x_ptr, out_ptr, rows, width, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out (width,) = sum of the rows of a contiguous float32 matrix (rows, width), always in the same order."""
    width = width * ALIGNMENT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)[:, None]
        total += tl.load(x_ptr + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + column, tl.sum(total, 0), mask=column < width)


def column_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension of contiguous float32 (P, N)."""
    rows, width = x.shape
    out = torch.empty(width, device=x.device, dtype=torch.float32)
    align = alignment(width)
    column_sum_kernel[(triton.cdiv(width, 64),)](
        x, out, rows, width // align, ALIGNMENT=align, ROWS=32, BLOCK=64, num_warps=4
    )
    return out


def tile_rows(block: int, elements: int) -> int:
    """Rows of a tile: narrow rows share a program that takes about `elements` of them, a wide row has its own."""
    return min(32, elements // block) if block <= 256 else 1


def norm_forward_fake(x, residual, weight, bias, layer_norm, eps):
    rows = x.numel() // x.shape[-1]
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    mean = x.new_empty(rows if layer_norm else 0, dtype=torch.float32)
    return x.new_empty(x.shape), s, mean, x.new_empty(rows, dtype=torch.float32)


@register_op(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool layer_norm, float eps)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    norm_forward_fake,
)
def norm_forward(x, residual, weight, bias, layer_norm, eps):
    """y and s in x's shape, and float32 statistics of each row; s is empty without a residual, mean for RMSNorm."""
    y, s, mean, rstd = norm_forward_fake(x, residual, weight, bias, layer_norm, eps)
    x, residual = as_rows(x), None if residual is None else as_rows(residual)
    rows, width = x.shape
    if rows == 0:
        return y, s, mean, rstd
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    align = alignment(width, *strides)
    tensors = x, residual, weight, bias, y, s, mean, rstd
    sizes = *(stride // align for stride in strides), width // align, eps
    options = {"LAYER_NORM": layer_norm, "ALIGNMENT": align}
    max_warps = launch.device_limits(x.device).max_warps
    block = tile_width(width)
    if block <= MAX_SINGLE_PASS_FORWARD:
        tile = tile_rows(block, 4096)
        warps = min(max(block * tile // 1024, 1), max_warps)  # 32 elements a thread: four loads of 16 bytes
        norm_forward_kernel[(triton.cdiv(rows, tile),)](
            *tensors, rows, *sizes, **options, ROWS=tile, BLOCK=block, num_warps=warps
        )
    else:
        norm_forward_wide_kernel[(rows,)](*tensors, *sizes, **options, BLOCK=WIDE_BLOCK, num_warps=min(16, max_warps))
    return y, s, mean, rstd


def norm_backward_fake(dy, ds, s, weight, mean, rstd, layer_norm, needs_dweight, needs_dbias):
    width = s.shape[-1]
    dweight, dbias = (
        s.new_empty(width if needed else 0, dtype=torch.float32) for needed in (needs_dweight, needs_dbias)
    )
    return s.new_empty(s.shape), dweight, dbias


@register_op(
    "norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, bool layer_norm,"
    " bool needs_dweight, bool needs_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    norm_backward_fake,
)
def norm_backward(dy, ds, s, weight, mean, rstd, layer_norm, needs_dweight, needs_dbias):
    """dx in the shape and dtype of s; dweight and dbias float32 (D,), each empty if it is not needed."""
    dx = s.new_empty(s.shape)
    dy, s, ds = as_rows(dy), as_rows(s), None if ds is None else as_rows(ds)
    rows, width = s.shape
    block = tile_width(width)
    limits = launch.device_limits(s.device)
    # Few partial sums, since each is written and read once more; enough programs to keep the memory busy.
    programs = min((2 if block <= 4096 else 1) * limits.multiprocessors, max(1, rows // 16))
    dweight_parts, dbias_parts = (
        torch.empty(programs, width, device=s.device, dtype=torch.float32) if needed else None
        for needed in (needs_dweight, needs_dbias)
    )
    strides = dy.stride(0), 0 if ds is None else ds.stride(0), s.stride(0)
    align = alignment(width, *strides)
    dy_stride, ds_stride, s_stride = (stride // align for stride in strides)
    options = {"LAYER_NORM": layer_norm, "ALIGNMENT": align}
    if block <= MAX_SINGLE_PASS_BACKWARD:
        norm_backward_kernel[(programs,)](
            dy, ds, s, weight, mean, rstd, dx, dweight_parts, dbias_parts,
            rows, dy_stride, ds_stride, s_stride, width // align,
            **options, ROWS=tile_rows(block, 2048), BLOCK=block, num_warps=min(max(block // 256, 4), 16),
        )  # fmt: skip
    else:
        if rows:
            norm_backward_wide_kernel[(rows,)](
                dy, ds, s, weight, mean, rstd, dx, dy_stride, ds_stride, s_stride, width // align,
                **options, BLOCK=WIDE_BLOCK, num_warps=min(16, limits.max_warps),
            )  # fmt: skip
        if needs_dweight or needs_dbias:
            norm_weight_gradients_wide_kernel[(programs, triton.cdiv(width, 2048))](
                dy, s, mean, rstd, dweight_parts, dbias_parts, rows, dy_stride, s_stride, width // align,
                **options, BLOCK=2048, num_warps=4,
            )  # fmt: skip
    dweight, dbias = (
        dx.new_empty(0, dtype=torch.float32) if parts is None else column_sum(parts)
        for parts in (dweight_parts, dbias_parts)
    )
    return dx, dweight, dbias


class Norm(torch.autograd.Function):
    """See `normalize`. Returns y and s, which is empty without a residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        layer_norm: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Keeps s (x without a residual) and the one or two statistics of each row for the backward pass."""
        y, s, mean, rstd = norm_forward(x, residual, weight, bias, layer_norm, eps)
        ctx.save_for_backward(x if residual is None else s, weight, bias, mean, rstd)
        ctx.layer_norm, ctx.has_residual = layer_norm, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        """x and residual share one gradient."""
        s, weight, bias, mean, rstd = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(s)
        needs_dweight, needs_dbias = ctx.needs_input_grad[2:4]
        ds = ds if ctx.has_residual else None
        dx, dweight, dbias = norm_backward(dy, ds, s, weight, mean, rstd, ctx.layer_norm, needs_dweight, needs_dbias)
        return (
            dx.to(dy.dtype),
            dx if ctx.has_residual else None,
            dweight.to(weight.dtype) if needs_dweight else None,
            dbias.to(bias.dtype) if needs_dbias else None,
            None,
            None,
        )


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `reference.normalize`, for rows of 2 to 131,072 elements."""
    y, s = Norm.apply(x, residual, weight, bias, kind == "layer", eps)
    return y, x if residual is None else s
