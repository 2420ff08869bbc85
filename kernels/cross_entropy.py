"""The loss of the head, -log softmax(W x)[target], without float32 logits of all tokens: the products are cuBLAS's.

A kernel turns logits, as the product rounded them, into losses and, in place, into what the gradient is made of:
softmax - onehot. Where that fits into WORKSPACE bytes for all tokens it is kept for the backward pass, which then has
two products to do. Else tokens go through in chunks that fit, and the backward pass makes each chunk's logits again: a
third more arithmetic for memory that does not grow with the number of tokens. The weight's gradient is summed in
float32, nothing is read back to the host, and the upstream gradient may differ from token to token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from kernels.launch import operator, unit

WORKSPACE = 2**30  # bytes of logits at once


@triton.jit(do_not_specialize=["width", "ignore_index"])
def loss_kernel(
    logits_ptr, target_ptr, loss_ptr, width, ignore_index,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, REPLACE: tl.constexpr,
):  # fmt: skip
    """One row: loss = log sum exp(logits) - logits[target]; with REPLACE logits become softmax - onehot.

    The sum keeps up with the largest logit so far (Milakov and Gimelshein 2018, algorithm 3). Ignored rows get zeros.
    """
    width = width * UNIT
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


def losses_of(logits: Tensor, targets: Tensor, ignore_index: int, replace: bool) -> Tensor:
    """Losses (N,) of contiguous logits (N, V), which become softmax - onehot with `replace`."""
    rows, width = logits.shape
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    size = unit(width)
    if rows:
        loss_kernel[(rows,)](
            logits, targets, loss, width // size, ignore_index, UNIT=size, BLOCK=4096, REPLACE=replace, num_warps=8
        )
    return loss


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """Tokens in a chunk: all where their logits fit into WORKSPACE, else what fits, in whole tiles of a product."""
    fitting = WORKSPACE // (vocabulary * itemsize)
    return max(rows, 1) if rows <= fitting else max(fitting // 128 * 128, 128)


def loss_forward_fake(x, weight, targets, ignore_index, keep):
    """Shapes of `loss_forward`."""
    whole = keep and chunk_rows(len(x), len(weight), x.element_size()) >= len(x)
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty((len(x), len(weight)) if whole else (0, 0))


@operator(
    "loss_forward(Tensor x, Tensor weight, Tensor targets, int ignore_index, bool keep) -> (Tensor loss, Tensor delta)",
    loss_forward_fake,
)
def loss_forward(x, weight, targets, ignore_index, keep):
    """Losses (N,) and, with `keep` where it fits, softmax - onehot (N, V) in x's dtype."""
    chunk = chunk_rows(len(x), len(weight), x.element_size())
    targets = targets.contiguous()
    if chunk >= len(x):
        logits = F.linear(x, weight)
        loss = losses_of(logits, targets, ignore_index, keep)
        return loss, logits if keep else x.new_empty(0, 0)
    parts = zip(x.split(chunk), targets.split(chunk), strict=True)
    losses = [losses_of(F.linear(rows, weight), labels, ignore_index, False) for rows, labels in parts]
    return torch.cat(losses), x.new_empty(0, 0)


def loss_backward_fake(grad, x, weight, targets, delta, ignore_index, for_x, for_weight):
    """Shapes of `loss_backward`."""
    return x.new_empty(x.shape if for_x else 0), weight.new_empty(
        weight.shape if for_weight else 0, dtype=torch.float32
    )


@operator(
    "loss_backward(Tensor grad, Tensor x, Tensor weight, Tensor targets, Tensor delta, int ignore_index, bool for_x,"
    " bool for_weight) -> (Tensor dx, Tensor dweight)",
    loss_backward_fake,
)
def loss_backward(grad, x, weight, targets, delta, ignore_index, for_x, for_weight):
    """dx (N, D) and float32 dweight (V, D). Row i is scaled by grad[i], which commutes with both products."""
    grad, targets = grad.float()[:, None], targets.contiguous()
    chunk = chunk_rows(len(x), len(weight), x.element_size())
    dx = torch.empty(x.shape if for_x else 0, device=x.device, dtype=x.dtype)
    dweight = torch.zeros(weight.shape if for_weight else 0, device=x.device, dtype=torch.float32)
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        part = delta[rows]
        if not len(delta):
            part = F.linear(x[rows], weight)
            losses_of(part, targets[rows], ignore_index, True)
        if for_x:
            torch.mul(part @ weight, grad[rows], out=dx[rows])
        if for_weight:
            add_product(dweight, part.t(), (x[rows] * grad[rows]).to(x.dtype))
    return dx, dweight


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32, whatever a and b are."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        total.addmm_(a.float(), b.float())
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, keep: bool) -> Tensor:
        """Losses (N,)."""
        ctx.ignore_index, ctx.dtype = ignore_index, weight.dtype
        weight = weight.to(x.dtype)  # in here, so that the float32 gradient is not rounded on its way to the parameter
        loss, delta = loss_forward(x, weight, targets, ignore_index, keep)
        ctx.save_for_backward(x, weight, targets, delta)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what learns, that of the weight rounded once, to its own dtype."""
        x, weight, targets, delta = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        dx, dweight = loss_backward(grad, x, weight, targets, delta, ctx.ignore_index, for_x, for_weight)
        return dx if for_x else None, dweight.to(ctx.dtype) if for_weight else None, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """As `reference.linear_cross_entropy`."""
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index, keep)
