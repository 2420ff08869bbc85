"""The head's loss, -log softmax(W x)[target], without the logits of all tokens; cuBLAS computes the products.

Tokens are processed in chunks whose logits fit in WORKSPACE bytes. A kernel turns a chunk's logits, as the product
rounded them, into losses and, in place, into the gradient: weight times (softmax - onehot), where `weight` is what the
token's loss is multiplied by. Two products make dx and dweight of it, and the next chunk reuses the memory.

A caller that gives the weights of the tokens gets the weighted sum of the losses, and both gradients are made in the
forward pass: 3 products, the minimum. A caller that gives none gets the loss of each token. The weights are then the
upstream gradient, which only the backward pass knows, and it computes the logits again: 4 products.
The weight's gradient is summed in float32, and the host never waits for a result.
"""

import sys
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import register_op, tile_width

WORKSPACE = 2**30  # bytes of logits at once


@triton.jit(do_not_specialize=["rows", "width", "stride", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr,  # (rows, 8 stride), of which the first `width` columns are logits; overwritten with GRADIENT
    target_ptr, weight_ptr, loss_ptr,  # int64, float32 and float32 output, (rows,) each; weight only with GRADIENT
    rows, width, stride, ignore_index,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th row: loss = log sum exp(logits) - logits[target].

    With GRADIENT, weight (softmax - onehot) overwrites the logits, rounded once, and the columns after `width` become 0.
    The sum is rescaled whenever a larger logit appears (Milakov and Gimelshein 2018, algorithm 3).
    Ignored rows are not read; they get loss 0 and gradient 0. A target that is no column gives NaN for both.

    No barrier is needed before the logits are replaced: a thread replaces the columns that it has read itself, and the
    target's logit is taken from the registers of the thread that read it.
    """
    stride = stride * 8
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        row_ptr = logits_ptr + row * stride
        target = tl.load(target_ptr + row)
        counted = target != ignore_index
        valid = (target >= 0) & (target < width)
        end = tl.where(counted, stride, 0)
        # The lowest number and not -inf: a block whose logits are all -inf would rescale by exp(-inf + inf), NaN.
        largest, chosen = -3.4028234663852886e38, float("nan")
        total = tl.zeros((BLOCK,), tl.float32)  # one sum for each column of a block: reduced once for each row
        column = tl.arange(0, BLOCK)
        following = tl.load(row_ptr + column, mask=column < end, other=float("-inf"), eviction_policy="evict_last")
        for start in range(0, end, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logits = tl.where(column < width, following.to(tl.float32), float("-inf"))
            column += BLOCK  # the next block is on its way while this one is summed
            following = tl.load(row_ptr + column, mask=column < end, other=float("-inf"), eviction_policy="evict_last")
            if valid & (target >= start) & (target < start + BLOCK):
                chosen = tl.sum(tl.where(column - BLOCK == target, logits, 0.0))
            before, largest = largest, tl.maximum(largest, tl.max(logits))
            total = total * tl.exp(before - largest) + tl.exp(logits - largest)
        normalizer = tl.sum(total)
        loss = largest + tl.log(normalizer) - chosen
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        if GRADIENT:
            weight = tl.where(valid, tl.load(weight_ptr + row), float("nan"))
            scale = tl.where(counted, weight / normalizer, 0.0)
            for start in range(0, stride, BLOCK):
                column = start + tl.arange(0, BLOCK)
                logits = tl.load(row_ptr + column, mask=column < end, other=float("-inf"), eviction_policy="evict_first")
                logits = tl.where(column < width, logits.to(tl.float32), float("-inf"))
                delta = tl.exp(logits - largest) * scale
                delta -= tl.where((column == target) & counted, weight, 0.0)
                tl.store(row_ptr + column, delta.to(logits_ptr.dtype.element_ty), mask=column < stride)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None, loss: Tensor, ignore_index: int) -> None:
    """Write losses (n,) of logits (n, V) from `padded_logits`; with weights (n,), the gradient overwrites the logits.

    A row is read twice, and the second read should find it in the cache. A multiprocessor therefore works on few rows
    at once, with 1,024 threads of 8 elements in total: rows of at most 16 blocks are 256 KB of bfloat16, where an
    H100's L2 cache has 380 KB for each multiprocessor.
    """
    rows, width = logits.shape
    limits = launch.device_limits(logits.device)
    block = min(max(tile_width(width) // 16, 256), 8192)
    cross_entropy_kernel[(min(rows, limits.multiprocessors * (8192 // block)),)](
        logits, targets, weights, loss, rows, width, logits.stride(0) // 8, ignore_index,
        BLOCK=block, GRADIENT=weights is not None, num_warps=min(block // 256, limits.max_warps),
    )  # fmt: skip


def padded_logits(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """Uninitialized (rows, V) in rows of a multiple of 8 elements: 16-byte accesses and aligned products for any V."""
    return like.new_empty(rows, -(-vocabulary // 8) * 8)[:, :vocabulary]


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """Tokens in a chunk: all if their logits fit in WORKSPACE, else the multiple of 128 that fits, at least 128."""
    fitting = WORKSPACE // (vocabulary * itemsize)
    return rows if rows <= fitting else max(fitting // 128 * 128, 128)


def power_of_two_below(weights: Tensor) -> Tensor:
    """The largest power of two that is not above the largest magnitude, 0-dimensional; 2^-126 if all are 0.

    float32 has the exponent in 8 bits: what is left without the others is a power of two, or inf if a weight is inf or
    NaN, and then no gradient is finite.
    """
    if not weights.numel():
        return weights.new_ones(())
    largest = torch.linalg.vector_norm(weights, float("inf"))
    return (largest.view(torch.int32) & 0x7F800000).clamp(min=0x00800000).view(torch.float32)


def run_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None, ignore_index: int,
    needs_dx: bool, needs_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses (N,), and with token_weights (N,) the gradients of their weighted sum: dx in x's dtype, float32 dweight."""
    rows, vocabulary = x.shape[0], weight.shape[0]
    chunk = chunk_rows(rows, vocabulary, x.element_size())
    targets = targets.contiguous()
    loss = x.new_empty(rows, dtype=torch.float32)
    dx = torch.empty(x.shape if needs_dx else 0, device=x.device, dtype=x.dtype)
    dweight = None
    buffer = padded_logits(min(chunk, rows), vocabulary, x)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        logits = buffer[: rows - start]
        torch.mm(x[part], weight.t(), out=logits)
        weights = None if token_weights is None else token_weights[part]
        cross_entropy(logits, targets[part], weights, loss[part], ignore_index)
        if needs_dx:
            torch.mm(logits, weight, out=dx[part])
        if needs_dweight:
            dweight = add_product(dweight, logits.t(), x[part])
    if dweight is None:
        dweight = weight.new_zeros(weight.shape if needs_dweight else 0, dtype=torch.float32)
    return loss, dx, dweight


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in total's memory, in float32 for a and b of any dtype; no total is 0."""
    if a.dtype == torch.float32 or not has_float32_products(a.device, a.dtype):
        a, b = a.float(), b.float()
        return a @ b if total is None else total.addmm_(a, b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


@cache
def has_float32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of a 16-bit dtype into a float32 one: tried once, since only CUDA can.

    A GPU that cannot is reported on stderr, because the float32 product in its place is several times slower.
    """
    a, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if device.type != "cpu":
            reason = str(error).partition("\n")[0]
            print(f"the weight gradient of the loss uses slow float32 products: {reason}", file=sys.stderr)
        return False
    return True


def loss_forward_fake(x, weight, targets, ignore_index):
    return x.new_empty(x.shape[0], dtype=torch.float32)


@register_op("loss_forward(Tensor x, Tensor weight, Tensor targets, int ignore_index) -> Tensor", loss_forward_fake)
def loss_forward(x, weight, targets, ignore_index):
    """Losses (N,)."""
    return run_chunks(x, weight, targets, None, ignore_index, False, False)[0]


def loss_gradients_fake(x, weight, targets, token_weights, ignore_index, needs_dx, needs_dweight):
    dx = x.new_empty(x.shape if needs_dx else 0)
    dweight = weight.new_empty(weight.shape if needs_dweight else 0, dtype=torch.float32)
    return x.new_empty(x.shape[0], dtype=torch.float32), dx, dweight, x.new_empty((), dtype=torch.float32)


@register_op(
    "loss_gradients(Tensor x, Tensor weight, Tensor targets, Tensor token_weights, int ignore_index, bool needs_dx,"
    " bool needs_dweight) -> (Tensor loss, Tensor dx, Tensor dweight, Tensor scale)",
    loss_gradients_fake,
)
def loss_gradients(x, weight, targets, token_weights, ignore_index, needs_dx, needs_dweight):
    """Losses (N,), and the gradients of the weighted sum of the losses divided by `scale`: x's and weight's shapes.

    dx has x's dtype and dweight is float32; each is empty if it is not needed. A weight of 1/N times a small
    probability would vanish in float16. Weights are therefore divided by a power of two that brings the largest to
    between 1 and 2, which is exact, and the caller multiplies by it what is left to multiply: see `rescale`.
    """
    token_weights = token_weights.float().masked_fill(targets == ignore_index, 0.0)
    scale = power_of_two_below(token_weights)
    loss, dx, dweight = run_chunks(x, weight, targets, token_weights / scale, ignore_index, needs_dx, needs_dweight)
    return loss, dx, dweight, scale


def rescale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient times a float32 factor (1,), computed in float32 and rounded once to a dtype, in one pass."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


class TokenLosses(torch.autograd.Function):
    """The loss of each token; the backward pass computes the logits again. See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        ctx.ignore_index, ctx.dtype = ignore_index, weight.dtype
        # Cast here and not by the caller: autograd would round the float32 gradient to x's dtype on its way back.
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight, targets)
        return loss_forward(x, weight, targets, ignore_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The weights of the tokens are the upstream gradient."""
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        _, dx, dweight, scale = loss_gradients(*ctx.saved_tensors, grad, ctx.ignore_index, needs_dx, needs_dweight)
        dx = rescale(dx, scale[None], dx.dtype) if needs_dx else None
        return dx, rescale(dweight, scale[None], ctx.dtype) if needs_dweight else None, None, None


class WeightedLoss(torch.autograd.Function):
    """The weighted sum of the losses; the forward pass makes the gradients. See `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, token_weights: Tensor,
        needs_dx: bool, needs_dweight: bool,
    ) -> Tensor:  # fmt: skip
        arguments = targets, token_weights, ignore_index, needs_dx, needs_dweight
        losses, dx, dweight, scale = loss_gradients(x, weight.to(x.dtype), *arguments)
        ctx.dtype = weight.dtype
        ctx.save_for_backward(dx, dweight, scale)
        return (losses * token_weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scaled out of place: what was saved must serve a second backward pass (retain_graph)."""
        dx, dweight, scale = ctx.saved_tensors
        factor = (grad * scale)[None]
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        dx = rescale(dx, factor, dx.dtype) if needs_dx else None
        return dx, rescale(dweight, factor, ctx.dtype) if needs_dweight else None, *[None] * 5


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, token_weights: Tensor | None = None
) -> Tensor:
    """As `reference.linear_cross_entropy`; a target that is no class gives a NaN loss and NaN gradients.

    With token_weights, dx is rounded once if the upstream gradient is a power of two, as in training, and else twice.
    """
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    if token_weights is not None and any(needs):
        token_weights = token_weights.detach().float().expand(targets.shape)
        return WeightedLoss.apply(x, weight, targets, ignore_index, token_weights, *needs)
    losses = TokenLosses.apply(x, weight, targets, ignore_index)
    return losses if token_weights is None else (losses * token_weights).sum()
