"""The head's loss, -log softmax(W x)[target], without float32 logits of all tokens; cuBLAS computes the products.

A kernel turns logits, as the product rounded them, into losses and, in place, into softmax - onehot, from which the
gradients follow. If that fits in WORKSPACE bytes for all tokens it is kept for the backward pass, which then computes
two products. Otherwise tokens are processed in chunks that fit, and the backward pass computes each chunk's logits
again: a third more arithmetic for memory that does not grow with the number of tokens. The weight's gradient is summed
in float32, the host never waits for a result, and the upstream gradient may differ from token to token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from kernels.launch import alignment, register_op

WORKSPACE = 2**30  # bytes of logits at once


@triton.jit(do_not_specialize=["width", "ignore_index"])
def cross_entropy_loss_kernel(
    logits_ptr,  # (N, V), contiguous; overwritten with REPLACE
    target_ptr, loss_ptr,  # int64 (N,) and float32 output (N,)
    width, ignore_index,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, REPLACE: tl.constexpr,
):  # fmt: skip
    """One row: loss = log sum exp(logits) - logits[target]; with REPLACE, softmax - onehot overwrites the logits.

    The sum is rescaled whenever a larger logit appears (Milakov and Gimelshein 2018, algorithm 3). Ignored rows get 0.
    """
    width = width * ALIGNMENT
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    target = tl.where(counted, target, 0)
    largest, total = float("-inf"), 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(logits))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(logits - largest))
    loss = largest + tl.log(total) - tl.load(logits_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
    if REPLACE:
        tl.debug_barrier()  # the target's logit is read before any thread replaces it
        scale = tl.where(counted, 1 / total, 0.0)
        one = tl.where(counted, 1.0, 0.0)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
            delta = tl.exp(logits - largest) * scale - tl.where(column == target, one, 0.0)
            tl.store(logits_ptr + column, delta.to(logits_ptr.dtype.element_ty), mask=column < width)


def compute_losses(logits: Tensor, targets: Tensor, ignore_index: int, replace: bool) -> Tensor:
    """Losses (N,) of contiguous logits (N, V), which softmax - onehot overwrites with `replace`."""
    rows, width = logits.shape
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    align = alignment(width)
    if rows:
        cross_entropy_loss_kernel[(rows,)](
            logits, targets, loss, width // align, ignore_index,
            ALIGNMENT=align, BLOCK=4096, REPLACE=replace, num_warps=8,
        )  # fmt: skip
    return loss


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """Tokens in a chunk: all if their logits fit in WORKSPACE, else the multiple of 128 that fits, at least 128."""
    fitting = WORKSPACE // (vocabulary * itemsize)
    return max(rows, 1) if rows <= fitting else max(fitting // 128 * 128, 128)


def loss_forward_fake(x, weight, targets, ignore_index, keep):
    keep_delta = keep and chunk_rows(len(x), len(weight), x.element_size()) >= len(x)
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty((len(x), len(weight)) if keep_delta else (0, 0))


@register_op(
    "loss_forward(Tensor x, Tensor weight, Tensor targets, int ignore_index, bool keep) -> (Tensor loss, Tensor delta)",
    loss_forward_fake,
)
def loss_forward(x, weight, targets, ignore_index, keep):
    """Losses (N,), and delta = softmax - onehot (N, V) in x's dtype: empty without `keep` or if it does not fit."""
    chunk = chunk_rows(len(x), len(weight), x.element_size())
    targets = targets.contiguous()
    if chunk >= len(x):
        logits = F.linear(x, weight)
        loss = compute_losses(logits, targets, ignore_index, keep)
        return loss, logits if keep else x.new_empty(0, 0)
    chunks = zip(x.split(chunk), targets.split(chunk), strict=True)
    losses = [compute_losses(F.linear(rows, weight), labels, ignore_index, False) for rows, labels in chunks]
    return torch.cat(losses), x.new_empty(0, 0)


def loss_backward_fake(grad, x, weight, targets, delta, ignore_index, needs_dx, needs_dweight):
    dx = x.new_empty(x.shape if needs_dx else 0)
    return dx, weight.new_empty(weight.shape if needs_dweight else 0, dtype=torch.float32)


@register_op(
    "loss_backward(Tensor grad, Tensor x, Tensor weight, Tensor targets, Tensor delta, int ignore_index, bool needs_dx,"
    " bool needs_dweight) -> (Tensor dx, Tensor dweight)",
    loss_backward_fake,
)
def loss_backward(grad, x, weight, targets, delta, ignore_index, needs_dx, needs_dweight):
    """dx (N, D) and float32 dweight (V, D), each empty if it is not needed.

    grad[i] scales row i of delta. That commutes with both products, so it is applied to the narrower matrix.
    """
    grad, targets = grad.float()[:, None], targets.contiguous()
    chunk = chunk_rows(len(x), len(weight), x.element_size())
    dx = torch.empty(x.shape if needs_dx else 0, device=x.device, dtype=x.dtype)
    dweight = torch.zeros(weight.shape if needs_dweight else 0, device=x.device, dtype=torch.float32)
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        if len(delta):
            chunk_delta = delta[rows]
        else:
            chunk_delta = F.linear(x[rows], weight)
            compute_losses(chunk_delta, targets[rows], ignore_index, True)
        if needs_dx:
            torch.mul(chunk_delta @ weight, grad[rows], out=dx[rows])
        if needs_dweight:
            add_product(dweight, chunk_delta.t(), (x[rows] * grad[rows]).to(x.dtype))
    return dx, dweight


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in float32 for a and b of any dtype."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        total.addmm_(a.float(), b.float())
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, keep: bool) -> Tensor:
        ctx.ignore_index, ctx.dtype = ignore_index, weight.dtype
        # Cast here and not by the caller: autograd would round the float32 gradient to x's dtype on its way back.
        weight = weight.to(x.dtype)
        loss, delta = loss_forward(x, weight, targets, ignore_index, keep)
        ctx.save_for_backward(x, weight, targets, delta)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The weight's gradient is rounded once, to the weight's dtype."""
        x, weight, targets, delta = ctx.saved_tensors
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        dx, dweight = loss_backward(grad, x, weight, targets, delta, ctx.ignore_index, needs_dx, needs_dweight)
        return dx if needs_dx else None, dweight.to(ctx.dtype) if needs_dweight else None, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """As `reference.linear_cross_entropy`."""
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index, keep)
