"""RMSNorm and LayerNorm in Triton, with the residual addition in front: kernels, launches and autograd of both.

KIND, a compile-time constant, adds LayerNorm's mean; all else is shared, so that a comparison of the two norms
compares the mathematics. A row stays in registers; for wider rows both norms are the reference's. Statistics are
float32, each result is rounded once, and sums over rows have a fixed order: equal inputs give equal bits.

Formulas: RMSNorm, Zhang and Sennrich 2019, equation 4; LayerNorm, Ba et al. 2016, equation 4 (`reference.normalize`).
In the kernels, s = x + residual (or x alone) and xhat = (s - mean) rstd, where RMSNorm has mean 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.launch import as_rows, max_warps, multiprocessors, register_op, tile_width

# The widest row, padded to a power of two: with more, LayerNorm's backward pass spills registers, which also hold the
# sums of dweight and dbias, and two tiles of dy, ds and s exceed the 99 KB of shared memory of a program (Ampere on).
MAX_ROW_BYTES = 16384
REGISTERS = 65536  # 32-bit registers of a multiprocessor, which its programs share
# The backward pass: rows of up to so many columns, and a thread's registers, without spills (test_compiled.py).
REGISTERS_PER_THREAD = ((512, 96), (4096, 64), (8192, 128))


@triton.jit(do_not_specialize=["rows"])
def norm_forward_kernel(
    x_ptr, residual_ptr,  # (rows, width); residual may be None
    weight_ptr, bias_ptr,  # (width,) or None
    y_ptr, s_ptr,  # outputs (rows, width), contiguous; s only with a residual
    statistics_ptr,  # float32 output (1 or 2, rows): rstd, and of LayerNorm the mean
    rows, x_stride, residual_stride, width, eps, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS complete rows: y = xhat weight + bias."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits before any product
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    s = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        s += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * width + column, rounded, mask=inside)
        s = rounded.to(tl.float32)  # what is normalized is what later blocks add to
    if KIND == "layer":
        mean = tl.sum(s, 1, keep_dims=True) / width
        s = tl.where(inside, s - mean, 0.0)
        tl.store(statistics_ptr + rows + row, mean, mask=row < rows)
    rstd = tl.rsqrt(tl.sum(s * s, 1, keep_dims=True) / width + tl.cast(eps, tl.float32))
    tl.store(statistics_ptr + row, rstd, mask=row < rows)
    y = s * rstd
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    dy_ptr, ds_ptr,  # gradients (rows, width) of y and of s; ds may be None
    s_ptr, weight_ptr, statistics_ptr,  # from the forward pass
    dx_ptr,  # output (rows, width), contiguous
    parts_ptr,  # float32 output (programs, 0 to 2, width): each program's share of dweight and of dbias
    rows, dy_stride, ds_stride, s_stride, parts_stride, width,
    KIND: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th tile of ROWS rows, and keeps its share of the sums over rows in registers.

    With h = dy weight: dx = rstd (h - mean(h) - xhat mean(h xhat)) + ds, where RMSNorm lacks mean(h). The sums over
    rows are dweight = sum dy xhat and dbias = sum dy. ds is the gradient that comes back along the residual stream.
    With 3 stages, two tiles have room in shared memory, and one is loaded while the other is processed. (With 2, Triton
    loads a tile after the one before, as with 1.)
    """
    column = tl.arange(0, BLOCK)[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=3):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width) if ROWS > 1 else column < width
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.load(s_ptr + row * s_stride + column, mask=inside, other=0.0).to(tl.float32)
        if ds_ptr is not None:
            ds = tl.load(ds_ptr + row * ds_stride + column, mask=inside, other=0.0)
        rstd = tl.load(statistics_ptr + row, mask=row < rows, other=0.0)
        if KIND == "layer":
            xhat -= tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)
        xhat *= rstd
        if DWEIGHT:
            dweight += dy * xhat  # dy is 0 outside the rows, so that h is, too
        if DBIAS:
            dbias += dy
        h = dy
        if weight_ptr is not None:
            h = dy * weight
        if KIND == "layer":  # one reduction for both sums
            sum_h_xhat, sum_h = tl.split(tl.sum(tl.join(h * xhat, h), 1, keep_dims=True))
            mean_h_xhat, mean_h = sum_h_xhat / width, sum_h / width
        else:
            mean_h_xhat = tl.sum(h * xhat, 1, keep_dims=True) / width
        dx = h - xhat * mean_h_xhat
        if KIND == "layer":
            dx -= mean_h
        dx *= rstd
        if ds_ptr is not None:
            dx += ds.to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    parts_ptr += tl.program_id(0).to(tl.int64) * parts_stride + column
    if DWEIGHT:
        tl.store(parts_ptr, tl.sum(dweight, 0), mask=column < width)
        parts_ptr += width
    if DBIAS:
        tl.store(parts_ptr, tl.sum(dbias, 0), mask=column < width)


def norm_forward_fake(x, residual, weight, bias, kind, eps):
    rows = x.numel() // x.shape[-1]
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(x.shape), s, x.new_empty((2 if kind == "layer" else 1, rows), dtype=torch.float32)


@register_op(norm_forward_fake)
def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y and s in x's shape, s empty without a residual; float32 statistics (1 or 2, rows): rstd, for LayerNorm mean."""
    y, s, statistics = norm_forward_fake(x, residual, weight, bias, kind, eps)
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    rows, width = x.shape
    residual_stride = 0 if residual is None else residual.stride(0)
    block = tile_width(width)
    tile = min(32, 4096 // block) if block <= 256 else 1  # narrow rows share a program
    warps = max(block * tile // 1024, 1)  # 32 elements a thread: four loads of 16 bytes
    norm_forward_kernel[(triton.cdiv(rows, tile),)](
        x, residual, weight, bias, y, s, statistics, rows, x.stride(0), residual_stride, width, eps,
        KIND=kind, ROWS=tile, BLOCK=block, num_warps=min(warps, max_warps(x.device)),
    )  # fmt: skip
    return y, s, statistics


def norm_backward_fake(dy, ds, s, weight, statistics, kind, needs_dweight, needs_dbias):
    sums = [needs_dweight, needs_dbias].count(True)
    return s.new_empty(s.shape), s.new_empty((sums, s.shape[-1]), dtype=torch.float32)


@register_op(norm_backward_fake)
def norm_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor | None, statistics: Tensor,
    kind: str, needs_dweight: bool, needs_dbias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx in the shape and dtype of s; sums float32 (0 to 2, D): of dweight and of dbias those that are needed."""
    dx, sums = norm_backward_fake(dy, ds, s, weight, statistics, kind, needs_dweight, needs_dbias)
    dy, s = as_rows(dy), as_rows(s)
    ds = None if ds is None else as_rows(ds)
    rows, width = s.shape
    ds_stride = 0 if ds is None else ds.stride(0)
    block = tile_width(width)
    programs, options = backward_geometry(block, rows, s.device)
    parts = sums.new_empty(programs, sums.numel())
    norm_backward_kernel[(programs,)](
        dy, ds, s, weight, statistics, dx, parts, rows, dy.stride(0), ds_stride, s.stride(0), sums.numel(), width,
        KIND=kind, DWEIGHT=needs_dweight, DBIAS=needs_dbias, BLOCK=block, **options,
    )  # fmt: skip
    return dx, parts.sum(0).view_as(sums)


def backward_geometry(block: int, rows: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Programs of norm_backward_kernel, and its options, for rows of `block` columns.

    What is loaded ahead must cover the latency of memory, about 30 KB in flight on each multiprocessor of an H100. So
    a multiprocessor gets as many programs as its registers hold. Each takes at least 8 rows: its share of a sum over
    rows is float32, written and read again, 8 bytes per column where a row of bfloat16 moves 6.
    """
    tile = min(32, max(1024 // block, 1))
    threads = block * tile // (8 if block <= 4096 else 16)  # loads of 16 bytes, one or two for each tensor
    registers = next(registers for widest, registers in REGISTERS_PER_THREAD if block <= widest)
    resident = multiprocessors(device) * (REGISTERS // (threads * registers))
    warps = max_warps(device)
    options = {"ROWS": tile, "num_warps": min(max(threads * warps // 1024, 1), warps)}
    if torch.version.hip is None:
        options["maxnreg"] = registers  # the compiler for AMD has no such option
    return max(1, min(resident, rows // max(tile, 8))), options


class TritonNorm(torch.autograd.Function):
    """See `normalize`. Returns y and s, empty without a residual; keeps s (or x) and the statistics of each row."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, kind, eps):
        y, s, statistics = norm_forward(x, residual, weight, bias, kind, eps)
        ctx.save_for_backward(x if residual is None else s, weight, bias, statistics)
        ctx.kind, ctx.has_residual = kind, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        """x and residual share one gradient."""
        s, weight, bias, statistics = ctx.saved_tensors
        dy = torch.zeros_like(s) if dy is None else dy
        needs_dweight, needs_dbias = ctx.needs_input_grad[2:4]
        ds = ds if ctx.has_residual else None
        dx, sums = norm_backward(dy, ds, s, weight, statistics, ctx.kind, needs_dweight, needs_dbias)
        dresidual = dx if ctx.has_residual else None
        dweight = sums[0].to(weight.dtype) if needs_dweight else None
        dbias = sums[1 if needs_dweight else 0].to(bias.dtype) if needs_dbias else None
        return dx.to(dy.dtype), dresidual, dweight, dbias, None, None


def normalize(x, weight=None, bias=None, residual=None, *, kind, eps):
    """As `reference.normalize`. It calls that for rows of more than 8,192 elements of 2 bytes, or 4,096 of 4 bytes."""
    element_size = max(x.element_size(), 0 if residual is None else residual.element_size())
    if tile_width(x.shape[-1]) * element_size > MAX_ROW_BYTES:
        return reference.normalize(x, weight, bias, residual, kind=kind, eps=eps)
    y, s = TritonNorm.apply(x, residual, weight, bias, kind, eps)
    return y, x if residual is None else s
