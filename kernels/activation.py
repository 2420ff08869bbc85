"""SwiGLU in Triton: silu(gate) * up of the packed product of gate and up (Shazeer 2020, equation 6).

The arithmetic is float32, each result is rounded once, and only the packed product is kept for the backward pass: the
MLP as one function computes the hidden elements again, and keeps 4 bytes for each of them in bfloat16 instead of 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.launch import as_rows, register_op, tile_width

TILE = 1024  # hidden elements in a tile: eight for each of 128 threads, for loads of 16 bytes


@triton.jit
def load_tile(gate_up_ptr, stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (ROWS, 1) in 64 bits and columns (1, BLOCK) of a program, which of them exist, and gate and up in float32.
    Neighbours in a row run at the same time."""
    tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    return row, column, inside, gate, tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward_kernel(
    gate_up_ptr,  # (rows, 2F), rows `stride` apart
    hidden_ptr,  # output (rows, F), contiguous
    stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate) up, for a tile of ROWS rows and BLOCK columns."""
    row, column, inside, gate, up = load_tile(gate_up_ptr, stride, rows, width, ROWS, BLOCK)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + row * width + column, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    dhidden_ptr,  # gradient (rows, F) of hidden
    gate_up_ptr,  # (rows, 2F) of the forward pass
    dgate_up_ptr, hidden_ptr,  # outputs (rows, 2F) and (rows, F), contiguous
    dhidden_stride, stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and hidden again; with p = sigmoid(gate), silu' = p (1 + gate (1 - p))."""
    row, column, inside, gate, up = load_tile(gate_up_ptr, stride, rows, width, ROWS, BLOCK)
    dhidden = tl.load(dhidden_ptr + row * dhidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.sigmoid(gate)
    silu = gate * p
    dgate = dhidden * up * (p + silu * (1 - p))
    dgate_ptr = dgate_up_ptr + row * (2 * width) + column
    tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + width, (dhidden * silu).to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + row * width + column, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)


def launch_tiles(kernel, *arguments, rows, width):
    """Launch a kernel on all tiles of (rows, width) elements; narrow rows share a program."""
    block = min(tile_width(width), TILE)
    programs = triton.cdiv(rows, TILE // block) * triton.cdiv(width, block)
    kernel[(programs,)](*arguments, rows, width, ROWS=TILE // block, BLOCK=block, num_warps=4)


def swiglu_forward_fake(gate_up):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@register_op(swiglu_forward_fake)
def swiglu_forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of packed (..., 2F): (..., F)."""
    hidden = swiglu_forward_fake(gate_up)
    gate_up = as_rows(gate_up)
    launch_tiles(swiglu_forward_kernel, gate_up, hidden, gate_up.stride(0), rows=len(gate_up), width=hidden.shape[-1])
    return hidden


def swiglu_backward_fake(dhidden, gate_up):
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dhidden.shape)


@register_op(swiglu_backward_fake)
def swiglu_backward(dhidden: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The packed gradient (..., 2F), and the hidden (..., F) that the forward pass did not keep."""
    dgate_up, hidden = swiglu_backward_fake(dhidden, gate_up)
    dhidden, gate_up = as_rows(dhidden), as_rows(gate_up)
    rows, width = dhidden.shape
    tensors = dhidden, gate_up, dgate_up, hidden
    launch_tiles(swiglu_backward_kernel, *tensors, dhidden.stride(0), gate_up.stride(0), rows=rows, width=width)
    return dgate_up, hidden


class TritonSwiGLU(torch.autograd.Function):
    """`reference.swiglu` as one function."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return swiglu_backward(grad, *ctx.saved_tensors)[0]


swiglu = TritonSwiGLU.apply


class TritonMLP(torch.autograd.Function):
    """See `swiglu_mlp`. x (..., D) and weights of one dtype."""

    @staticmethod
    def forward(ctx, x, gate_up_weight, down_weight):
        gate_up = F.linear(x, gate_up_weight)  # (..., 2F)
        ctx.save_for_backward(x, gate_up, gate_up_weight, down_weight)
        return F.linear(swiglu_forward(gate_up), down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """One kernel, and four products, of which a frozen matrix saves its own."""
        x, gate_up, gate_up_weight, down_weight = ctx.saved_tensors
        needs_dx, needs_dgate_up_weight, needs_ddown_weight = ctx.needs_input_grad
        dgate_up, hidden = swiglu_backward(grad @ down_weight, gate_up)
        ddown_weight = grad.flatten(0, -2).t() @ hidden.flatten(0, -2) if needs_ddown_weight else None
        dx = dgate_up @ gate_up_weight if needs_dx else None
        dgate_up_weight = dgate_up.flatten(0, -2).t() @ x.flatten(0, -2) if needs_dgate_up_weight else None
        return dx, dgate_up_weight, ddown_weight


def swiglu_mlp(x, gate_up_weight, down_weight):
    """As `reference.swiglu_mlp`."""
    return TritonMLP.apply(x, gate_up_weight.to(x.dtype), down_weight.to(x.dtype))
