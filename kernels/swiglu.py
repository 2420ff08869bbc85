"""The SwiGLU MLP, W_down (silu(W_gate x) * W_up x), as one autograd function (Shazeer 2020, equation 6).

Gate and up are one packed matrix product, left to cuBLAS, and one kernel over its result computes silu and the product
in float32, rounded once. The backward pass keeps only x and that packed result: 4 bytes for each of the F hidden
elements in bfloat16 instead of 6; the hidden itself is computed again on the way to the gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from kernels.launch import as_rows, register_op, tile_width

TILE = 1024  # hidden elements in a tile: eight for each of 128 threads, for loads of 16 bytes


@triton.jit
def locate_tile(width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (ROWS, 1) in 64 bits and columns (1, BLOCK) of a program; neighbours in a row run at the same time."""
    tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward_kernel(
    gate_up_ptr,  # (rows, 2F), rows `stride` apart
    hidden_ptr,  # output (rows, F), contiguous
    rows, stride, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate) up, for a tile of ROWS rows and BLOCK columns."""
    row, column = locate_tile(width, ROWS, BLOCK)
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + row * width + column, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    dhidden_ptr,  # gradient (rows, F) of hidden
    gate_up_ptr,  # (rows, 2F) of the forward pass
    dgate_up_ptr, hidden_ptr,  # outputs (rows, 2F) and (rows, F), contiguous
    rows, dhidden_stride, stride, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and hidden again; with p = sigmoid(gate), silu' = p (1 + gate (1 - p))."""
    row, column = locate_tile(width, ROWS, BLOCK)
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    dhidden = tl.load(dhidden_ptr + row * dhidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.sigmoid(gate)
    silu = gate * p
    dgate = dhidden * up * (p + silu * (1 - p))
    dgate_ptr = dgate_up_ptr + row * (2 * width) + column
    tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + width, (dhidden * silu).to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + row * width + column, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)


def elementwise_geometry(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of the forward and backward kernels; narrow rows share a program."""
    block = min(tile_width(width), TILE)
    constants = {"ROWS": TILE // block, "BLOCK": block, "num_warps": 4}
    return (triton.cdiv(rows, TILE // block) * triton.cdiv(width, block),), constants


def swiglu_forward_fake(gate_up):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@register_op("swiglu_forward(Tensor gate_up) -> Tensor", swiglu_forward_fake)
def swiglu_forward(gate_up):
    """silu(gate) * up of packed (..., 2F): (..., F)."""
    hidden = swiglu_forward_fake(gate_up)
    gate_up = as_rows(gate_up)
    rows, width = gate_up.shape[0], hidden.shape[-1]
    grid, constants = elementwise_geometry(rows, width)
    if rows:
        swiglu_forward_kernel[grid](gate_up, hidden, rows, gate_up.stride(0), width, **constants)
    return hidden


def swiglu_backward_fake(dhidden, gate_up):
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dhidden.shape)


@register_op(
    "swiglu_backward(Tensor dhidden, Tensor gate_up) -> (Tensor dgate_up, Tensor hidden)", swiglu_backward_fake
)
def swiglu_backward(dhidden, gate_up):
    """The packed gradient (..., 2F), and the hidden (..., F) that the forward pass did not keep."""
    dgate_up, hidden = swiglu_backward_fake(dhidden, gate_up)
    dhidden, gate_up = as_rows(dhidden), as_rows(gate_up)
    rows, width = dhidden.shape
    grid, constants = elementwise_geometry(rows, width)
    if rows:
        swiglu_backward_kernel[grid](
            dhidden, gate_up, dgate_up, hidden, rows, dhidden.stride(0), gate_up.stride(0), width, **constants
        )
    return dgate_up, hidden


class SwiGLUMLP(torch.autograd.Function):
    """See `swiglu_mlp`. x (..., D) and weights of one dtype."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
        """Two products with the activation between them."""
        gate_up = F.linear(x, gate_up_weight)  # (..., 2F)
        ctx.save_for_backward(x, gate_up, gate_up_weight, down_weight)
        return F.linear(swiglu_forward(gate_up), down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Four products and one kernel; frozen inputs cost nothing."""
        x, gate_up, gate_up_weight, down_weight = ctx.saved_tensors
        needs_dx, needs_dgate_up_weight, needs_ddown_weight = ctx.needs_input_grad
        dgate_up, hidden = swiglu_backward(grad @ down_weight, gate_up)
        ddown_weight = grad.flatten(0, -2).t() @ hidden.flatten(0, -2) if needs_ddown_weight else None
        dx = dgate_up @ gate_up_weight if needs_dx else None
        dgate_up_weight = dgate_up.flatten(0, -2).t() @ x.flatten(0, -2) if needs_dgate_up_weight else None
        return dx, dgate_up_weight, ddown_weight


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """As `reference.swiglu_mlp`."""
    return SwiGLUMLP.apply(x, gate_up_weight.to(x.dtype), down_weight.to(x.dtype))
