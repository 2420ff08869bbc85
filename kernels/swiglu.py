"""The SwiGLU MLP, W_down (silu(W_gate x) * W_up x), as one autograd function (Shazeer 2020, equation 6).

Gate and up are one packed matrix product, left to cuBLAS, and one kernel over its result computes silu and the product
in float32, rounded once. The backward pass keeps only x and that packed result: 4 bytes for each of the F hidden
elements in bfloat16 instead of 6; the hidden itself is computed again on the way to the gradients.

`gate_up_kernel` does both products and the activation at once (`kernels.use(..., fused_gate_up=True)`; off by default).
It saves a round trip of the packed result through memory, which is little beside the products unless the hidden size is
small. `python -m benchmarks.kernels --only MLP` measures it.
"""

import contextvars
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from kernels import launch
from kernels.launch import alignment, as_rows, register_op, tile_width

TILE = 1024  # hidden elements in a tile: eight for each of 128 threads, for loads of 16 bytes

fused_gate_up_obstacles: list[str] = []
"""Why `gate_up_kernel` could not run since `kernels.use` was last called; each reason is printed once."""

fused_gate_up_failures: dict[tuple, str] = {}
"""Launches that failed since then, by device, dtype and tile, and how: they are not tried again."""


@triton.jit
def locate_tile(width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (ROWS, 1) in 64 bits and columns (1, BLOCK) of a program; neighbours in a row run at the same time."""
    tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)[None, :]


@launch.Kernel
@triton.jit(do_not_specialize=["rows", "stride", "width"])
def swiglu_forward_kernel(
    gate_up_ptr,  # (rows, 2F), rows `stride` apart
    hidden_ptr,  # output (rows, F), contiguous
    rows, stride, width, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate) up, for a tile of ROWS rows and BLOCK columns."""
    width = width * ALIGNMENT
    row, column = locate_tile(width, ROWS, BLOCK)
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * stride * ALIGNMENT + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + row * width + column, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@launch.Kernel
@triton.jit(do_not_specialize=["rows", "dhidden_stride", "stride", "width"])
def swiglu_backward_kernel(
    dhidden_ptr,  # gradient (rows, F) of hidden
    gate_up_ptr,  # (rows, 2F) of the forward pass
    dgate_up_ptr, hidden_ptr,  # outputs (rows, 2F) and (rows, F), contiguous
    rows, dhidden_stride, stride, width,
    ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and hidden again; with p = sigmoid(gate), silu' = p (1 + gate (1 - p))."""
    width = width * ALIGNMENT
    row, column = locate_tile(width, ROWS, BLOCK)
    inside = (row < rows) & (column < width)
    gate_ptr = gate_up_ptr + row * stride * ALIGNMENT + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    dhidden = tl.load(dhidden_ptr + row * dhidden_stride * ALIGNMENT + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.sigmoid(gate)
    silu = gate * p
    dgate = dhidden * up * (p + silu * (1 - p))
    dgate_ptr = dgate_up_ptr + row * (2 * width) + column
    tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + width, (dhidden * silu).to(dgate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + row * width + column, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "hidden_size"])
def gate_up_kernel(
    x_ptr, weight_ptr,  # (M, D) and (2F, D): rows of W_gate, then of W_up
    hidden_ptr, gate_up_ptr,  # outputs (M, F) and (M, 2F); gate_up may be None
    rows, hidden_size, width, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of silu(x W_gate^T) * (x W_up^T), with two accumulators over one pass through the tile's rows of x.

    All tensors are contiguous and accessed through descriptors, for which Hopper has copy hardware (TMA). Programs are
    numbered so that GROUP tiles of rows share the weights that are in the cache.
    """
    hidden_size = hidden_size * ALIGNMENT
    width = width * ALIGNMENT
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    row = (first + program % (GROUP * column_tiles) % group) * ROWS
    column = program % (GROUP * column_tiles) // group * COLUMNS
    up_ptr = weight_ptr + tl.cast(width, tl.int64) * hidden_size
    x = tl.make_tensor_descriptor(x_ptr, [rows, hidden_size], [hidden_size, 1], [ROWS, DEPTH])
    gate_weight = tl.make_tensor_descriptor(weight_ptr, [width, hidden_size], [hidden_size, 1], [COLUMNS, DEPTH])
    up_weight = tl.make_tensor_descriptor(up_ptr, [width, hidden_size], [hidden_size, 1], [COLUMNS, DEPTH])
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for depth in range(0, hidden_size, DEPTH):
        tile = x.load([row, depth])
        gate = tl.dot(tile, gate_weight.load([column, depth]).T, gate, input_precision="ieee")
        up = tl.dot(tile, up_weight.load([column, depth]).T, up, input_precision="ieee")
    dtype = hidden_ptr.dtype.element_ty
    if gate_up_ptr is not None:
        gate_out = tl.make_tensor_descriptor(gate_up_ptr, [rows, width], [2 * width, 1], [ROWS, COLUMNS])
        up_out = tl.make_tensor_descriptor(gate_up_ptr + width, [rows, width], [2 * width, 1], [ROWS, COLUMNS])
        gate_out.store([row, column], gate.to(dtype))
        up_out.store([row, column], up.to(dtype))
    hidden = tl.make_tensor_descriptor(hidden_ptr, [rows, width], [width, 1], [ROWS, COLUMNS])
    hidden.store([row, column], (gate * tl.sigmoid(gate) * up).to(dtype))


def gate_up_tile(device: torch.device, rows: int) -> dict[str, int]:
    """Tile of `gate_up_kernel`: the largest whose two accumulators fit in registers and operands in shared memory."""
    tile = (64, 64, 4) if rows <= 64 else (128, 128, 8) if launch.device_limits(device).has_tma else (128, 64, 8)
    return dict(zip(("ROWS", "COLUMNS", "num_warps"), tile, strict=True))


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
    align = alignment(width, gate_up.stride(0))
    grid, constants = elementwise_geometry(rows, width)
    if rows:
        swiglu_forward_kernel[grid](
            gate_up, hidden, rows, gate_up.stride(0) // align, width // align, ALIGNMENT=align, **constants
        )
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
    strides = dhidden.stride(0), gate_up.stride(0)
    align = alignment(width, *strides)
    grid, constants = elementwise_geometry(rows, width)
    if rows:
        swiglu_backward_kernel[grid](
            dhidden, gate_up, dgate_up, hidden, rows, *(stride // align for stride in strides), width // align,
            ALIGNMENT=align, **constants,
        )  # fmt: skip
    return dgate_up, hidden


def swiglu_gate_up_fake(x, weight, keep):
    width = weight.shape[0]
    return x.new_empty((*x.shape[:-1], width // 2)), x.new_empty((*x.shape[:-1], width) if keep else 0)


@register_op(
    "swiglu_gate_up(Tensor x, Tensor weight, bool keep) -> (Tensor hidden, Tensor gate_up)", swiglu_gate_up_fake
)
def swiglu_gate_up(x, weight, keep):
    """silu(x W_gate^T) * (x W_up^T), in one kernel where it can run; gate_up (..., 2F), the products, with `keep`.

    Where it cannot run, the product and the activation run one after the other, and one line on stderr says why. The
    choice is made here and not outside, because only an operator sees addresses when torch.compile compiles its caller.
    """
    hidden, gate_up = swiglu_gate_up_fake(x, weight, keep)
    obstacle = launch_gate_up_kernel(x, weight, hidden, gate_up if keep else None)
    if obstacle is None:
        return hidden, gate_up
    if obstacle not in fused_gate_up_obstacles:
        fused_gate_up_obstacles.append(obstacle)
        print(
            f"fused_gate_up: {obstacle}; a matrix product and the activation kernel run instead of one kernel.",
            file=sys.stderr,
        )
    products = F.linear(x, weight)
    return swiglu_forward(products), products if keep else gate_up


def launch_gate_up_kernel(x: Tensor, weight: Tensor, hidden: Tensor, gate_up: Tensor | None) -> str | None:
    """Fill hidden and, if given, gate_up. Returns None, or the reason why the kernel cannot run, and fills nothing.

    A tensor descriptor needs a first address and row strides divisible by 16 bytes, and fills tiles with zeros beyond
    its tensor, so any number of rows and, of the sizes that 8 divides, any will do. Outputs are new: torch aligns them.
    """
    x, weight = as_rows(x).contiguous(), weight.contiguous()
    hidden_size, width = x.shape[1], hidden.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float16) and x.device.type == "cuda":  # Triton's interpreter takes float32
        # Compiled for an H100, tiles of float32 take 327,712 bytes of shared memory, of which a block has 232,448.
        return f"it needs bfloat16 or float16, not {x.dtype}, whose tiles exceed the shared memory of a GPU"
    if alignment(hidden_size, width) == 1:
        return f"it needs sizes divisible by 8, and the hidden size is {hidden_size}, the MLP's {width}"
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "it needs an input and a weight that begin at a multiple of 16 bytes"
    tile = gate_up_tile(x.device, len(x))
    variant = x.device, x.dtype, gate_up is None, *tile.values()
    if variant not in fused_gate_up_failures and len(x):
        try:
            # In a context of its own, so that the allocator is that of this launch alone.
            contextvars.copy_context().run(launch_tiles, x, weight, hidden, gate_up, tile)
        except OutOfResources as error:  # raised before the launch, on GPUs with less shared memory than an H100
            failure = f"its tiles need {error.required:,} of this GPU's {error.limit:,} ({error.name})"
            fused_gate_up_failures[variant] = failure
        except Exception as error:  # whatever else the compiler or the driver refuses must not end a training run
            *_, last_line = str(error).strip().splitlines() or ["no message"]
            fused_gate_up_failures[variant] = f"Triton raised {type(error).__name__}: {last_line.strip()}"
    return fused_gate_up_failures.get(variant)


def launch_tiles(x: Tensor, weight: Tensor, hidden: Tensor, gate_up: Tensor | None, tile: dict[str, int]) -> None:
    """Launch `gate_up_kernel`. Its descriptors are written to memory that Triton asks torch for at each launch.

    That memory is freed when the launch returns and reused in the order of the stream, after the kernel. While a CUDA
    graph is captured, it comes from the graph's own pool, which lives as long as the graph: a replay finds it there.
    """
    device = x.device  # and not x itself, which the allocator would keep alive
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device=device, dtype=torch.int8))
    (rows, hidden_size), width = x.shape, hidden.shape[-1]
    gate_up_kernel[(triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"]),)](
        x, weight, hidden, gate_up, rows, hidden_size // 8, width // 8,
        ALIGNMENT=8, DEPTH=64, GROUP=8, num_stages=3, **tile,
    )  # fmt: skip


class SwiGLUMLP(torch.autograd.Function):
    """See `run_swiglu_mlp`. x (..., D) and weights of one dtype."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, keep: bool, fused_gate_up: bool
    ) -> Tensor:
        """Two products with the activation between them, or, with `fused_gate_up`, in the first one."""
        if fused_gate_up:
            hidden, gate_up = swiglu_gate_up(x, gate_up_weight, keep)
        else:
            gate_up = F.linear(x, gate_up_weight)  # (..., 2F)
            hidden = swiglu_forward(gate_up)
        ctx.save_for_backward(x, gate_up, gate_up_weight, down_weight)
        return F.linear(hidden, down_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Four products and one kernel; frozen inputs cost nothing."""
        x, gate_up, gate_up_weight, down_weight = ctx.saved_tensors
        needs_dx, needs_dgate_up_weight, needs_ddown_weight = ctx.needs_input_grad[:3]
        dgate_up, hidden = swiglu_backward(grad @ down_weight, gate_up)
        ddown_weight = grad.flatten(0, -2).t() @ hidden.flatten(0, -2) if needs_ddown_weight else None
        dx = dgate_up @ gate_up_weight if needs_dx else None
        dgate_up_weight = dgate_up.flatten(0, -2).t() @ x.flatten(0, -2) if needs_dgate_up_weight else None
        return dx, dgate_up_weight, ddown_weight, None, None


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """As `reference.swiglu_mlp`."""
    return run_swiglu_mlp(x, gate_up_weight, down_weight, fused_gate_up=False)


def swiglu_mlp_fused_gate_up(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """As `reference.swiglu_mlp`, with gate, up and activation in one kernel where `swiglu_gate_up` can run it."""
    return run_swiglu_mlp(x, gate_up_weight, down_weight, fused_gate_up=True)


def run_swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *, fused_gate_up: bool) -> Tensor:
    weights = gate_up_weight.to(x.dtype), down_weight.to(x.dtype)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
    return SwiGLUMLP.apply(x, *weights, keep, fused_gate_up)
