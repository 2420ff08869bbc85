"""Rotary positions in Triton: q and k in one launch, straight from the packed product, with Qwen3's norm of each head.

The norm is inside because a norm kernel in front would add a rounding (in bfloat16 2.35e-3 instead of 1.66e-3) and, for
heads inside packed rows, a copy. Arithmetic is float32; results are rounded once. The backward pass rotates back by the
same angles and writes the packed gradient of q, k and v in one launch. Formula: `reference.rotary`.

Attention keeps q, k and v for its backward pass. A v that is a view of the packed product would keep all of it, (2H +
3K) d elements of each token. The launch therefore copies v, and (H + 2K) d are kept; with norms the product as well.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.launch import multiprocessors, register_op, tile_width, with_unit_stride

TILE = 2048  # pairs in a tile: eight for each of 256 threads, for loads of 16 bytes and few registers
NUM_WARPS = 8
RESIDENT = 2  # programs of the backward kernel with head norms, of up to 128 registers, on a multiprocessor


@triton.jit
def load_pairs(x_ptr, offset, half, inside):
    """Both elements of each pair in float32."""
    a = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(x_ptr + offset + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(x_ptr, offset, half, inside, a, b):
    """Both elements of each pair, rounded to the tensor's dtype."""
    tl.store(x_ptr + offset, a.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(x_ptr + offset + half, b.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_angles(cos_ptr, sin_ptr, offset, inside, HEADS: tl.constexpr):
    """cos and sin of each pair for each of HEADS heads; those of angle 0, which copies, outside.

    Each thread loads its own, mostly from the cache: one load for all heads would go through shared memory.
    """
    offset = tl.broadcast_to(offset, (offset.shape[0], HEADS, offset.shape[2]))
    return tl.load(cos_ptr + offset, mask=inside, other=1.0), tl.load(sin_ptr + offset, mask=inside, other=0.0)


@triton.jit
def locate_tokens(block, length, TOKENS: tl.constexpr):
    """The sequence of a block of TOKENS tokens, and their positions (TOKENS, 1, 1) in it; 64 bits for products.

    A block never spans two sequences, so the only division is one of 32 bits for the whole block.
    """
    blocks = tl.cdiv(length, TOKENS)  # programs of one sequence
    first = (block % blocks).to(tl.int64) * TOKENS
    return (block // blocks).to(tl.int64), first + tl.arange(0, TOKENS)[:, None, None]


@triton.jit
def locate_heads(tile, H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr):
    """Whether a tile's heads are of q, or of q or k; their places (1, HEADS, 1) in a row of qkv, and in q, k or v."""
    is_q, is_rotated = tile < H // HEADS, tile < (H + K) // HEADS
    packed_head = tile * HEADS + tl.arange(0, HEADS)[None, :, None]
    return is_q, is_rotated, packed_head, packed_head - tl.where(is_q, 0, tl.where(is_rotated, H, H + K))


@triton.jit(do_not_specialize=["length"])
def rotary_forward_kernel(
    qkv_ptr,  # (B, length, (H + 2K) d) with the strides below, 1 in the last dimension
    cos_ptr, sin_ptr,  # float32 (length, d/2), or (B, length, d/2) with angle_stride between sequences
    q_weight_ptr, k_weight_ptr,  # norm weights (d,), or None without the norm of each head
    q_ptr, k_ptr, v_ptr,  # outputs (B, length, H or K, d), contiguous
    length, batch_stride, token_stride, angle_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a sequence and HEADS heads of q, of k or of v, which is copied.

    The tiles of a token are neighbours, so that a row of qkv is read by programs that run at the same time.
    """
    tiles: tl.constexpr = (H + 2 * K) // HEADS
    is_q, is_rotated, packed_head, head = locate_heads(tl.program_id(0) % tiles, H, K, HEADS)
    batch, position = locate_tokens(tl.program_id(0) // tiles, length, TOKENS)
    pair = tl.arange(0, BLOCK)[None, None, :]
    inside = (position < length) & (pair < HALF)
    row = batch * batch_stride + position * token_stride
    a, b = load_pairs(qkv_ptr, row + packed_head * (2 * HALF) + pair, HALF, inside)
    angle = batch * angle_stride + position * HALF + pair
    cos, sin = load_angles(cos_ptr, sin_ptr, angle, inside & is_rotated, HEADS)
    if q_weight_ptr is not None:
        weight_ptr = q_weight_ptr if is_q else k_weight_ptr
        weight_a, weight_b = load_pairs(weight_ptr, pair, HALF, pair < HALF)
        squares = tl.sum(a * a + b * b, 2, keep_dims=True)
        rstd = tl.rsqrt(squares / (2 * HALF) + tl.cast(eps, tl.float32))
        a = tl.where(is_rotated, a * rstd * weight_a, a)
        b = tl.where(is_rotated, b * rstd * weight_b, b)
    out_ptr = q_ptr if is_q else k_ptr
    out_ptr = out_ptr if is_rotated else v_ptr
    target = ((batch * length + position) * tl.where(is_q, H, K) + head) * (2 * HALF) + pair
    store_pairs(out_ptr, target, HALF, inside, a * cos - b * sin, b * cos + a * sin)


@triton.jit(do_not_specialize=["blocks", "length"])
def rotary_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr,  # gradients (B, length, H or K, d) with the strides below, 1 in the last dimension
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,  # from the forward pass; qkv only with the norms
    dqkv_ptr,  # output (B, length, (H + 2K) d), contiguous
    dweight_parts_ptr,  # float32 output (programs of q, 2 d): sums for q and k, only with the norms
    blocks, length, batch_stride, token_stride, angle_stride,
    dq_batch_stride, dq_token_stride, dq_head_stride,
    dk_batch_stride, dk_token_stride, dk_head_stride,
    dv_batch_stride, dv_token_stride, dv_head_stride,
    eps, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every n-th of `blocks` blocks of tokens, for HEADS heads of q, of k or of v, whose gradient is copied.

    With the norm of each head, each program leaves its partial sum of the norm weight's gradient, and STAGES is 3: the
    next tile is loaded while this one is computed (with 2, the compiler has one buffer, and waits for all of it).
    """
    q_tiles: tl.constexpr = H // HEADS
    tiles: tl.constexpr = (H + 2 * K) // HEADS
    program, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    is_q, is_rotated, packed_head, head = locate_heads(tile, H, K, HEADS)
    pair = tl.arange(0, BLOCK)[None, None, :]
    grad_ptr = dk_ptr if is_rotated else dv_ptr
    grad_ptr = dq_ptr if is_q else grad_ptr
    grad_batch_stride = tl.where(is_q, dq_batch_stride, tl.where(is_rotated, dk_batch_stride, dv_batch_stride))
    grad_token_stride = tl.where(is_q, dq_token_stride, tl.where(is_rotated, dk_token_stride, dv_token_stride))
    grad_head_stride = tl.where(is_q, dq_head_stride, tl.where(is_rotated, dk_head_stride, dv_head_stride))
    if q_weight_ptr is not None:
        weight_ptr = q_weight_ptr if is_q else k_weight_ptr
        weight_a, weight_b = load_pairs(weight_ptr, pair, HALF, pair < HALF)
    dweight_a = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    dweight_b = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    for block in tl.range(program, blocks, tl.num_programs(0) // tiles, num_stages=STAGES):
        batch, position = locate_tokens(block, length, TOKENS)
        inside = (position < length) & (pair < HALF)
        source = batch * grad_batch_stride + position * grad_token_stride + head.to(tl.int64) * grad_head_stride + pair
        a, b = load_pairs(grad_ptr, source, HALF, inside)
        if q_weight_ptr is not None:
            row = batch * batch_stride + position * token_stride
            xhat_a, xhat_b = load_pairs(qkv_ptr, row + packed_head * (2 * HALF) + pair, HALF, inside & is_rotated)
        angle = batch * angle_stride + position * HALF + pair
        cos, sin = load_angles(cos_ptr, sin_ptr, angle, inside & is_rotated, HEADS)
        da, db = a * cos + b * sin, b * cos - a * sin
        if q_weight_ptr is not None:
            # The backward pass of RMSNorm over the pairs of a head: see norm_backward_kernel.
            squares = tl.sum(xhat_a * xhat_a + xhat_b * xhat_b, 2, keep_dims=True)
            rstd = tl.rsqrt(squares / (2 * HALF) + tl.cast(eps, tl.float32))
            xhat_a, xhat_b = xhat_a * rstd, xhat_b * rstd
            dweight_a += da * xhat_a
            dweight_b += db * xhat_b
            h_a, h_b = da * weight_a, db * weight_b
            mean_h_xhat = tl.sum(h_a * xhat_a + h_b * xhat_b, 2, keep_dims=True) / (2 * HALF)
            da = tl.where(is_rotated, rstd * (h_a - xhat_a * mean_h_xhat), da)
            db = tl.where(is_rotated, rstd * (h_b - xhat_b * mean_h_xhat), db)
        target = ((batch * length + position) * (H + 2 * K) + packed_head) * (2 * HALF) + pair
        store_pairs(dqkv_ptr, target, HALF, inside, da, db)
    if q_weight_ptr is not None:
        sum_a, sum_b = tl.sum(tl.sum(dweight_a, 0), 0), tl.sum(tl.sum(dweight_b, 0), 0)
        column = tl.arange(0, BLOCK)
        part_ptr = dweight_parts_ptr + (program * q_tiles + tile - tl.where(is_q, 0, q_tiles)) * (4 * HALF)
        store_pairs(part_ptr + tl.where(is_q, 0, 2 * HALF), column, HALF, (column < HALF) & is_rotated, sum_a, sum_b)
        zero = tl.zeros((BLOCK,), tl.float32)  # k has fewer tiles than q has
        store_pairs(part_ptr + 2 * HALF, column, HALF, (column < HALF) & is_q & (tile >= K // HEADS), zero, zero)


def kernel_constants(num_heads: int, num_kv_heads: int, half: int) -> dict[str, int]:
    """Constants of both kernels: the most heads in a tile, up to 4, that divide those of q and those of k."""
    heads, block = math.gcd(num_heads, num_kv_heads, 4), tile_width(half)
    tokens = max(TILE // (heads * block), 1)
    return {"H": num_heads, "K": num_kv_heads, "HALF": half, "HEADS": heads, "TOKENS": tokens, "BLOCK": block}


def sequence_stride(table: Tensor) -> int:
    """The stride between the sequences of a contiguous table of cosines or sines: 0 if all share the same."""
    return table.stride(0) if table.dim() == 3 and len(table) > 1 else 0


def rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
    heads = num_heads, num_kv_heads, num_kv_heads
    return tuple(qkv.new_empty((*qkv.shape[:2], n, 2 * cos.shape[-1])) for n in heads)


@register_op(rotary_forward_fake)
def rotary_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q (B, T, H, d), k and v (B, T, K, d) of packed rows (B, T, (H + 2K) d)."""
    q, k, v = rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
    qkv, cos, sin = with_unit_stride(qkv), cos.contiguous(), sin.contiguous()
    batch, length, _ = qkv.shape
    constants = kernel_constants(num_heads, num_kv_heads, cos.shape[-1])
    tiles = (num_heads + 2 * num_kv_heads) // constants["HEADS"]
    programs = batch * triton.cdiv(length, constants["TOKENS"]) * tiles
    rotary_forward_kernel[(programs,)](
        qkv, cos, sin, q_weight, k_weight, q, k, v,
        length, qkv.stride(0), qkv.stride(1), sequence_stride(cos), eps, **constants, num_warps=NUM_WARPS,
    )  # fmt: skip
    return q, k, v


def rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    rows = (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    dweights = dq.new_empty((2, 0 if q_weight is None else dq.shape[3]), dtype=torch.float32)
    return dq.new_empty((*dq.shape[:2], rows)), dweights


@register_op(rotary_backward_fake)
def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The packed gradient (B, T, (H + 2K) d), and the float32 one (2, d) of both norm weights, empty without norms."""
    dqkv, dweights = rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps)
    grads = [with_unit_stride(grad) for grad in (dq, dk, dv)]
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, length, num_heads, _ = dq.shape
    constants = kernel_constants(num_heads, dk.shape[2], cos.shape[-1])
    tiles = (num_heads + 2 * dk.shape[2]) // constants["HEADS"]
    blocks = batch * triton.cdiv(length, constants["TOKENS"])
    programs, qkv_strides, parts = blocks, (0, 0), None
    if q_weight is not None:
        # As many programs as run at the same time, since each leaves a partial sum of the norm weights' gradients.
        programs = min(blocks, max(1, RESIDENT * multiprocessors(dq.device) // tiles))
        parts = dweights.new_empty(programs * (num_heads // constants["HEADS"]), dweights.numel())
        qkv = with_unit_stride(qkv)
        qkv_strides = qkv.stride(0), qkv.stride(1)
    grad_strides = [grad.stride(axis) for grad in grads for axis in range(3)]
    rotary_backward_kernel[(programs * tiles,)](
        *grads, qkv, cos, sin, q_weight, k_weight, dqkv, parts,
        blocks, length, *qkv_strides, sequence_stride(cos), *grad_strides, eps,
        **constants, STAGES=1 if parts is None else 3, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dqkv, dweights if parts is None else parts.sum(0).view_as(dweights)


class TritonRotary(torch.autograd.Function):
    """See `rotary`. Keeps the tables, and qkv only if the norm of each head needs it again."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
        q, k, v = rotary_forward(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
        ctx.save_for_backward(None if q_weight is None else qkv, cos, sin, q_weight, k_weight)
        ctx.eps = eps
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dqkv, dweights = rotary_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, ctx.eps)
        dq_weight, dk_weight = (None, None) if q_weight is None else dweights.to(q_weight.dtype)
        return dqkv, None, None, None, None, dq_weight, dk_weight, None


def rotary(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight=None, k_norm_weight=None, eps=1e-6):
    """As `reference.rotary`."""
    return TritonRotary.apply(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)
