"""RMSNorm and LayerNorm in Triton, with the residual addition in front: one source for both (`norm_kernels`).

Rows of up to 32,768 elements forward and 8,192 backward stay in registers; wider ones are read twice.

Formulas: RMSNorm, Zhang and Sennrich 2019, equation 4; LayerNorm, Ba et al. 2016, equation 4 (`reference.normalize`).
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import as_rows, block_of, operator, unit
from kernels.norm_kernels import (
    backward_kernel,
    backward_wide_kernel,
    column_sum_kernel,
    forward_kernel,
    forward_wide_kernel,
    gains_wide_kernel,
)

WHOLE_FORWARD, WHOLE_BACKWARD = 32768, 8192  # wider rows would spill registers
WIDE_BLOCK = 8192


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
        most = launch.properties(x.device).max_warps
        warps = min(max(block * tile // 1024, 1), most)  # 32 elements a thread: four loads of 16 bytes
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
    return dx, *(sums[i] if wanted else partials.new_empty(0) for i, wanted in ((0, for_weight), (-1, for_bias)))


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
