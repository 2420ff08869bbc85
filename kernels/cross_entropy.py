"""The head's loss, -log softmax(W x)[target], without the logits of all tokens; cuBLAS computes the products.

Tokens are processed in chunks whose logits fit in WORKSPACE bytes. A kernel turns a chunk's logits, as the product
rounded them, into losses and, in place, into the gradient softmax - onehot. Two products make dx and dweight from it,
in float32, rounded once at the end. The next chunk reuses the memory of the logits.

With the weight of a token, the forward pass computes both gradients of the weighted sum: 3 products, the minimum.
The losses of single tokens have gradients that need the upstream gradient first: where they are needed, the reference
runs, with the logits of all tokens in memory. The host never waits for a result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.launch import max_warps, multiprocessors, register_op, tile_width

WORKSPACE = 2**30  # bytes of logits at once
IGNORED = tl.constexpr(reference.IGNORED)


@triton.jit(do_not_specialize=["rows", "width"])
def cross_entropy_kernel(
    logits_ptr,  # (rows, stride), of which the columns from `width` are -inf; overwritten with GRADIENT
    target_ptr, loss_ptr,  # (rows,) each: int64, and float32 output
    rows, width, stride, BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th row: loss = log sum exp(logits) - logits[target].

    With GRADIENT, softmax - onehot overwrites the logits, rounded once. Ignored rows are not read; they get loss 0 and
    gradient 0. A target that is no column gives NaN for both.

    Each 8 columns that a thread reads at once have their own maximum and sum, rescaled whenever a larger logit appears
    (Milakov and Gimelshein 2018, algorithm 3): threads meet at the end of a row only. No barrier is needed before the
    logits are replaced: a thread replaces what it has read itself, and the target's logit is in its registers.
    """
    offset = 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        row_ptr = logits_ptr + row * stride
        target = tl.load(target_ptr + row)
        counted = target != IGNORED
        valid = (target >= 0) & (target < width)
        column = tl.where(counted & valid, target, -1).to(tl.int32)
        end = tl.where(counted, stride, 0)
        # The lowest number and not -inf: columns that are all -inf would rescale by exp(-inf + inf), NaN.
        largest = tl.full((BLOCK // 8,), -3.4028234663852886e38, tl.float32)
        total, chosen = tl.zeros((BLOCK // 8,), tl.float32), tl.zeros((BLOCK // 8,), tl.float32)
        following = tl.load(row_ptr + offset, mask=offset < end, other=float("-inf"), eviction_policy="evict_last")
        for start in range(0, end, BLOCK):
            after = start + BLOCK
            logits = following.to(tl.float32)
            following = tl.load(  # on its way while this block is summed
                row_ptr + after + offset, mask=offset < end - after, other=float("-inf"), eviction_policy="evict_last"
            )
            if (column >= start) & (column < after):
                chosen = tl.sum(tl.where(offset == column - start, logits, 0.0), axis=1)
            before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1))
            total = total * tl.exp(before - largest) + tl.sum(tl.exp(logits - largest[:, None]), axis=1)
        highest = tl.max(largest)
        normalizer = tl.sum(total * tl.exp(largest - highest))
        loss = tl.where(valid, highest + tl.log(normalizer) - tl.sum(chosen), float("nan"))
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        if GRADIENT:
            scale = tl.where(counted, tl.where(valid, 1.0 / normalizer, float("nan")), 0.0)
            for start in range(0, stride, BLOCK):
                inside = offset < end - start
                logits = tl.load(
                    row_ptr + start + offset, mask=inside, other=float("-inf"), eviction_policy="evict_first"
                )
                delta = tl.exp(logits.to(tl.float32) - highest) * scale
                if (column >= start) & (column < start + BLOCK):
                    delta -= tl.where(offset == column - start, 1.0, 0.0)
                delta = delta.to(logits_ptr.dtype.element_ty)
                tl.store(row_ptr + start + offset, delta, mask=offset < stride - start)


def cross_entropy(logits: Tensor, targets: Tensor, loss: Tensor, *, gradient: bool) -> None:
    """Write losses (n,) of logits (n, V); with `gradient`, that of their sum overwrites the logits.

    Rows of logits have a stride divisible by 16, and what follows a row up to the next is -inf. A row is read twice,
    and should be in the cache the second time. A multiprocessor therefore works on few rows at once, with 1,024 threads
    of 8 elements: rows of 16 blocks are 256 KB of bfloat16; an H100's L2 cache has 380 KB for each multiprocessor.
    """
    rows, width = logits.shape
    block = min(max(tile_width(width) // 16, 256), 8192)
    programs = min(rows, multiprocessors(logits.device) * (8192 // block))
    cross_entropy_kernel[(programs,)](
        logits, targets, loss, rows, width, logits.stride(0),
        BLOCK=block, GRADIENT=gradient, num_warps=min(block // 256, max_warps(logits.device)),
    )  # fmt: skip


def allocate_logits(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """Uninitialized rows of V rounded up to a multiple of 16: 16-byte accesses and aligned products for any V."""
    return like.new_empty(rows, triton.cdiv(vocabulary, 16) * 16)


def chunk_rows(rows: int, vocabulary: int, itemsize: int) -> int:
    """Tokens in a chunk: all if their logits fit in WORKSPACE, else the multiple of 128 that fits, at least 128."""
    fitting = WORKSPACE // (vocabulary * itemsize)
    return rows if rows <= fitting else max(fitting // 128 * 128, 128)


def multiply(a: Tensor, b: Tensor, total: Tensor, *, beta: int) -> None:
    """total = beta total + a @ b, in float32 for a and b of any dtype; only CUDA has such 16-bit products."""
    if a.dtype == torch.float32 or a.device.type == "cpu" or torch.version.hip:
        torch.addmm(total, a.float(), b.float(), beta=beta, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, out=total)


def loss_gradients_fake(x, weight, targets, needs_dx, needs_dweight):
    shapes = x.shape[:1], x.shape if needs_dx else (0,), weight.shape if needs_dweight else (0,)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


@register_op(loss_gradients_fake)
def loss_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, needs_dx: bool, needs_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (N,), and the gradients of their sum that are needed, as x and weight but float32; others are empty.

    The caller multiplies them by the weight of a token: 1/N times a small probability would vanish in float16, and -1
    of -onehot needs no rounding, whereas -1/N would be rounded in the same direction for all tokens.
    """
    loss, dx, dweight = loss_gradients_fake(x, weight, targets, needs_dx, needs_dweight)
    rows, vocabulary = x.shape[0], weight.shape[0]
    if rows == 0:
        return loss, dx, dweight.zero_()
    chunk = min(chunk_rows(rows, vocabulary, x.element_size()), rows)
    targets = targets.contiguous()
    buffer = allocate_logits(chunk, vocabulary, x)
    for start in range(0, rows, chunk):
        tokens = slice(start, start + chunk)
        logits = buffer[: rows - start, :vocabulary]
        torch.mm(x[tokens], weight.t(), out=logits)
        if vocabulary % 16:
            buffer[:, vocabulary:] = float("-inf")  # classes without probability: the kernel needs no other mask
        cross_entropy(logits, targets[tokens], loss[tokens], gradient=needs_dx or needs_dweight)
        if needs_dx:
            multiply(logits, weight, dx[tokens], beta=0)
        if needs_dweight:
            multiply(logits.t(), x[tokens], dweight, beta=0 if start == 0 else 1)
    return loss, dx, dweight


def rescale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 gradient times a factor (1,), rounded once to a dtype, in one pass over memory."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


class TritonCrossEntropy(torch.autograd.Function):
    """The weighted sum of the losses; the forward pass makes the gradients. See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx, x, weight, targets, token_weight, *needs):
        losses, dx, dweight = loss_gradients(x, weight.to(x.dtype), targets, *needs)
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(dx, dweight, token_weight)
        return (losses * token_weight).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Scaled out of place: what was saved must serve a second backward pass (retain_graph)."""
        dx, dweight, token_weight = ctx.saved_tensors
        factor = (grad * token_weight)[None]
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        dx = rescale(dx, factor, ctx.dtypes[0]) if needs_dx else None
        dweight = rescale(dweight, factor, ctx.dtypes[1]) if needs_dweight else None
        return dx, dweight, None, None, None, None


def linear_cross_entropy(x, weight, targets, token_weight=None):
    """As `reference.linear_cross_entropy`. It calls that for gradients of the losses of single tokens.

    A target that is no class gives a NaN loss and NaN gradients.
    """
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    if token_weight is not None:
        return TritonCrossEntropy.apply(x, weight, targets, token_weight.detach(), *needs)
    if any(needs):
        return reference.linear_cross_entropy(x, weight, targets)
    return loss_gradients(x, weight.to(x.dtype), targets, False, False)[0]
