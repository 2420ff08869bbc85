"""The SwiGLU MLP, W_down (silu(W_gate x) * W_up x), as one autograd function (Shazeer 2020, equation 6).

Gate and up are one packed product, left to cuBLAS, and one kernel over its packed result computes silu and the product
in float32, rounded once. Kept for the backward pass are x and that packed result alone: 4 bytes for each of the F
hidden elements in bfloat16 instead of 6; the hidden itself is computed again on the way to the gradients.

`gate_up_kernel` does both products and the activation at once. What it saves, a round trip of the packed result,
is small beside the products except where the hidden size is small: `WINS` says where it was measured to be faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from kernels import launch
from kernels.launch import as_rows, operator, unit

BLOCK = 1024

# Where one kernel beat cuBLAS and the elementwise kernel: (most rows, largest hidden size), from
# `python -m benchmarks.kernels --only mlp`. Empty: not measured on any GPU yet, so cuBLAS does every product.
WINS: tuple[tuple[int, int], ...] = ()


@triton.jit(do_not_specialize=["stride", "width"])
def forward_kernel(gate_up_ptr, hidden_ptr, stride, width, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """hidden = silu(gate) up, for a piece of a row; gate_up (M, 2F), hidden (M, F)."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptr = gate_up_ptr + row * (stride * UNIT) + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + row * width + column, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["dhidden_stride", "stride", "width"])
def backward_kernel(
    dhidden_ptr, gate_up_ptr, dgate_up_ptr, hidden_ptr, dhidden_stride, stride, width,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and the hidden again; with p = sigmoid(gate), silu' = p (1 + gate (1 - p))."""
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptr = gate_up_ptr + row * (stride * UNIT) + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    dhidden = tl.load(dhidden_ptr + row * (dhidden_stride * UNIT) + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.sigmoid(gate)
    silu = gate * p
    dgate = dhidden * up * (p + silu * (1 - p))
    dgate_ptr = dgate_up_ptr + row * (2 * width) + column
    tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + width, (dhidden * silu).to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + row * width + column, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "hidden_size"])
def gate_up_kernel(
    x_ptr, weight_ptr, hidden_ptr, gate_up_ptr, rows, hidden_size, width, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of silu(x W_gate^T) * (x W_up^T) with two accumulators over one walk through x; gate_up may be None.

    x (M, D), weight (2F, D) and the outputs are contiguous and read as descriptors, which Hopper's copy engine serves.
    Programs are numbered so that GROUP row tiles share the weights that are in the cache.
    """
    hidden_size = hidden_size * UNIT
    width = width * UNIT
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    row = (first + program % (GROUP * column_tiles) % group) * ROWS
    column = program % (GROUP * column_tiles) // group * COLUMNS
    up_ptr = weight_ptr + tl.cast(width, tl.int64) * hidden_size
    x = tl.make_tensor_descriptor(x_ptr, [rows, hidden_size], [hidden_size, 1], [ROWS, DEPTH])
    of_gate = tl.make_tensor_descriptor(weight_ptr, [width, hidden_size], [hidden_size, 1], [COLUMNS, DEPTH])
    of_up = tl.make_tensor_descriptor(up_ptr, [width, hidden_size], [hidden_size, 1], [COLUMNS, DEPTH])
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for depth in range(0, hidden_size, DEPTH):
        tile = x.load([row, depth])
        gate = tl.dot(tile, of_gate.load([column, depth]).T, gate, input_precision="ieee")
        up = tl.dot(tile, of_up.load([column, depth]).T, up, input_precision="ieee")
    dtype = hidden_ptr.dtype.element_ty
    if gate_up_ptr is not None:
        gate_out = tl.make_tensor_descriptor(gate_up_ptr, [rows, width], [2 * width, 1], [ROWS, COLUMNS])
        up_out = tl.make_tensor_descriptor(gate_up_ptr + width, [rows, width], [2 * width, 1], [ROWS, COLUMNS])
        gate_out.store([row, column], gate.to(dtype))
        up_out.store([row, column], up.to(dtype))
    hidden = tl.make_tensor_descriptor(hidden_ptr, [rows, width], [width, 1], [ROWS, COLUMNS])
    hidden.store([row, column], (gate * tl.sigmoid(gate) * up).to(dtype))


def tile_of(device: torch.device, rows: int) -> dict[str, int]:
    """Tile of `gate_up_kernel`: as large as two accumulators fit into registers and the operands into shared memory."""
    tile = (64, 64, 4) if rows <= 64 else (128, 128, 8) if launch.properties(device).copy_engine else (128, 64, 8)
    return dict(zip(("ROWS", "COLUMNS", "num_warps"), tile, strict=True))


def swiglu_forward_fake(gate_up):
    """Shapes of `swiglu_forward`."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@operator("swiglu_forward(Tensor gate_up) -> Tensor", swiglu_forward_fake)
def swiglu_forward(gate_up):
    """silu(gate) * up of packed (..., 2F): (..., F)."""
    hidden = swiglu_forward_fake(gate_up)
    gate_up = as_rows(gate_up)
    rows, width = gate_up.shape[0], hidden.shape[-1]
    size = unit(width, gate_up.stride(0))
    if rows:
        forward_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate_up, hidden, gate_up.stride(0) // size, width // size, UNIT=size, BLOCK=BLOCK, num_warps=4
        )
    return hidden


def swiglu_backward_fake(dhidden, gate_up):
    """Shapes of `swiglu_backward`."""
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dhidden.shape)


@operator("swiglu_backward(Tensor dhidden, Tensor gate_up) -> (Tensor dgate_up, Tensor hidden)", swiglu_backward_fake)
def swiglu_backward(dhidden, gate_up):
    """The packed gradient (..., 2F), and the hidden (..., F) that the forward pass did not keep."""
    dgate_up, hidden = swiglu_backward_fake(dhidden, gate_up)
    dhidden, gate_up = as_rows(dhidden), as_rows(gate_up)
    rows, width = dhidden.shape
    strides = dhidden.stride(0), gate_up.stride(0)
    size = unit(width, *strides)
    if rows:
        backward_kernel[(rows, triton.cdiv(width, BLOCK))](
            dhidden, gate_up, dgate_up, hidden, *(stride // size for stride in strides), width // size,
            UNIT=size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return dgate_up, hidden


def swiglu_gate_up_fake(x, weight, keep):
    """Shapes of `swiglu_gate_up`."""
    width = weight.shape[0]
    return x.new_empty((*x.shape[:-1], width // 2)), x.new_empty((*x.shape[:-1], width) if keep else 0)


@operator("swiglu_gate_up(Tensor x, Tensor weight, bool keep) -> (Tensor hidden, Tensor gate_up)", swiglu_gate_up_fake)
def swiglu_gate_up(x, weight, keep):
    """silu(x W_gate^T) * (x W_up^T) in one kernel, and with `keep` the packed products; D and F divisible by 8."""
    hidden, gate_up = swiglu_gate_up_fake(x, weight, keep)
    x, weight = as_rows(x).contiguous(), weight.contiguous()
    rows, hidden_size, width = *x.shape, hidden.shape[-1]
    if unit(hidden_size, width) != 8:
        raise ValueError(f"the one-kernel MLP takes sizes divisible by 8, not hidden {hidden_size} and MLP {width}")
    tile = tile_of(x.device, rows)
    device = x.device  # and not x itself, which the allocator would keep alive
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device=device, dtype=torch.int8))
    if rows:
        gate_up_kernel[(triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"]),)](
            x, weight, hidden, gate_up if keep else None, rows, hidden_size // 8, width // 8,
            UNIT=8, DEPTH=64, GROUP=8, num_stages=3, **tile,
        )  # fmt: skip
    return hidden, gate_up


def one_kernel_wins(rows: int, hidden_size: int, width: int) -> bool:
    """Whether `WINS` has this shape; sizes must also be those that descriptors take."""
    measured = any(rows <= most and hidden_size <= largest for most, largest in WINS)
    return measured and unit(hidden_size, width) == 8


class SwiGLUMLP(torch.autograd.Function):
    """See `swiglu_mlp`. x (..., D) and weights of one dtype."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, keep: bool) -> Tensor:
        """Two products, with silu and the product between them in one kernel."""
        if one_kernel_wins(x.numel() // x.shape[-1], x.shape[-1], down_weight.shape[1]):
            hidden, gate_up = swiglu_gate_up(x, gate_up_weight, keep)
        else:
            gate_up = F.linear(x, gate_up_weight)  # (..., 2F)
            hidden = swiglu_forward(gate_up)
        ctx.save_for_backward(x, gate_up, gate_up_weight, down_weight)
        return F.linear(hidden, down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Four products and one kernel; what is frozen costs nothing."""
        x, gate_up, gate_up_weight, down_weight = ctx.saved_tensors
        for_x, for_gate_up, for_down, _ = ctx.needs_input_grad
        dgate_up, hidden = swiglu_backward(grad @ down_weight, gate_up)
        ddown = grad.flatten(0, -2).t() @ hidden.flatten(0, -2) if for_down else None
        dx = dgate_up @ gate_up_weight if for_x else None
        dgate_up_weight = dgate_up.flatten(0, -2).t() @ x.flatten(0, -2) if for_gate_up else None
        return dx, dgate_up_weight, ddown, None


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """As `reference.swiglu_mlp`."""
    weights = gate_up_weight.to(x.dtype), down_weight.to(x.dtype)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
    return SwiGLUMLP.apply(x, *weights, keep)
