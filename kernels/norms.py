"""RMSNorm and LayerNorm in Triton, with the residual addition in front: one source for both.

LAYER, a constant of the compiler, adds the mean; all else is shared, so that a comparison of the two compares the
mathematics. Statistics are float32, each result is rounded once, and the backward pass sums in a fixed order without
atomics: equal inputs give equal bits. Rows of up to 32,768 elements forward and 8,192 backward stay in registers; wider
ones are read twice.

Formulas: RMSNorm, Zhang and Sennrich 2019, equation 4; LayerNorm, Ba et al. 2016, equation 4; see `reference.norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import as_rows, block_of, operator, unit

WHOLE_FORWARD, WHOLE_BACKWARD = 32768, 8192  # wider rows would spill registers
WIDE_BLOCK = 8192


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


def column_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension of contiguous float32 (P, N)."""
    rows, width = x.shape
    out = torch.empty(width, device=x.device, dtype=torch.float32)
    size = unit(width)
    column_sum_kernel[(triton.cdiv(width, 64),)](x, out, rows, width // size, UNIT=size, ROWS=32, BLOCK=64, num_warps=4)
    return out


def tile_rows(block: int, elements: int) -> int:
    """Rows in a tile: narrow ones share a program, up to so many elements; wide ones have one of their own."""
    return min(32, elements // block) if block <= 256 else 1


def forward_fake(x, residual, weight, bias, layer, eps):
    """Shapes of `norm_forward`."""
    rows = x.numel() // x.shape[-1]
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    mean = x.new_empty(rows if layer else 0, dtype=torch.float32)
    return x.new_empty(x.shape), s, mean, x.new_empty(rows, dtype=torch.float32)


@operator(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, bool layer, float eps)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    forward_fake,
)
def norm_forward(x, residual, weight, bias, layer, eps):
    """y and, with a residual, s in x's shape; float32 statistics of each row. What there is none of has no elements."""
    y, s, mean, rstd = forward_fake(x, residual, weight, bias, layer, eps)
    x, residual = as_rows(x), None if residual is None else as_rows(residual)
    rows, width = x.shape
    if rows == 0:
        return y, s, mean, rstd
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    size = unit(width, *strides)
    block = block_of(width)
    tensors = x, residual, weight, bias, y, s, mean, rstd
    sizes = *(stride // size for stride in strides), width // size, eps
    if block <= WHOLE_FORWARD:
        tile = tile_rows(block, 4096)
        warps = min(
            max(block * tile // 1024, 1), launch.properties(x.device).max_warps
        )  # 32 elements a thread: four loads of 16 bytes
        forward_kernel[(triton.cdiv(rows, tile),)](
            *tensors, rows, *sizes, LAYER=layer, UNIT=size, ROWS=tile, BLOCK=block, num_warps=warps
        )
    else:
        forward_wide_kernel[(rows,)](
            *tensors,
            *sizes,
            LAYER=layer,
            UNIT=size,
            BLOCK=WIDE_BLOCK,
            num_warps=min(16, launch.properties(x.device).max_warps),
        )
    return y, s, mean, rstd


def backward_fake(dy, ds, s, weight, mean, rstd, layer, for_weight, for_bias):
    """Shapes of `norm_backward`."""
    width = s.shape[-1]
    gains = [s.new_empty(width if wanted else 0, dtype=torch.float32) for wanted in (for_weight, for_bias)]
    return s.new_empty(s.shape), *gains


@operator(
    "norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, bool layer,"
    " bool for_weight, bool for_bias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    backward_fake,
)
def norm_backward(dy, ds, s, weight, mean, rstd, layer, for_weight, for_bias):
    """The gradient of s, in its dtype, and float32 ones of the gains, with no elements where they are not wanted."""
    dx = backward_fake(dy, ds, s, weight, mean, rstd, layer, False, False)[0]
    dy, s, ds = as_rows(dy), as_rows(s), None if ds is None else as_rows(ds)
    rows, width = s.shape
    wanted = for_weight + for_bias
    block = block_of(width)
    whole = block <= WHOLE_BACKWARD
    # Few partial sums, since each is written and read once more; enough programs to keep the memory busy.
    programs = min((2 if block <= 4096 else 1) * launch.properties(s.device).multiprocessors, max(1, rows // 16))
    partials = torch.empty(wanted, programs, width, device=s.device, dtype=torch.float32)
    dweight, dbias = partials[0] if for_weight else None, partials[-1] if for_bias else None
    strides = dy.stride(0), 0 if ds is None else ds.stride(0), s.stride(0)
    size = unit(width, *strides)
    of_dy, of_ds, of_s = (stride // size for stride in strides)
    if whole:
        backward_kernel[(programs,)](
            dy, ds, s, weight, mean, rstd, dx, dweight, dbias, rows, of_dy, of_ds, of_s, width // size,
            LAYER=layer, UNIT=size, ROWS=tile_rows(block, 2048), BLOCK=block,
            num_warps=min(max(block // 256, 4), 16),
        )  # fmt: skip
    else:
        options = {"LAYER": layer, "UNIT": size}
        if rows:
            backward_wide_kernel[(rows,)](
                dy, ds, s, weight, mean, rstd, dx, of_dy, of_ds, of_s, width // size,
                **options, BLOCK=WIDE_BLOCK, num_warps=min(16, launch.properties(s.device).max_warps),
            )  # fmt: skip
        if wanted:
            gains_wide_kernel[(programs, triton.cdiv(width, 2048))](
                dy, s, mean, rstd, dweight, dbias, rows, of_dy, of_s, width // size, **options, BLOCK=2048, num_warps=4
            )
    sums = [column_sum(part) for part in partials]
    empty = partials.new_empty(0)
    return dx, sums[0] if for_weight else empty, sums[-1] if for_bias else empty


class Norm(torch.autograd.Function):
    """See `norm`. Returns y and s, which has no elements without a residual."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Keeps s, or x when nothing was added to it, and a statistic or two of each row."""
        y, s, mean, rstd = norm_forward(x, residual, weight, bias, layer, eps)
        ctx.save_for_backward(x if residual is None else s, weight, bias, mean, rstd)
        ctx.layer, ctx.added = layer, residual is not None
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
        for_weight, for_bias = ctx.needs_input_grad[2:4]
        ds = ds if ctx.added else None
        dx, dweight, dbias = norm_backward(dy, ds, s, weight, mean, rstd, ctx.layer, for_weight, for_bias)
        return (
            dx.to(dy.dtype),
            dx if ctx.added else None,
            dweight.to(weight.dtype) if for_weight else None,
            dbias.to(bias.dtype) if for_bias else None,
            None,
            None,
        )


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `reference.norm`, for rows of 2 to 131,072 elements."""
    y, s = Norm.apply(x, residual, weight, bias, kind == "layer", eps)
    return y, x if residual is None else s
