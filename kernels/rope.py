"""Rotary positions in Triton: q and k in one launch, straight from the packed product, with Qwen3's norm of each head.

The tables are float32 and so is the arithmetic; the result is rounded once. The backward pass rotates back by the same
angles and writes the packed gradient of q, k and v in one launch. Formula: Su et al. 2021, equation 34, in the
half-split convention: elements i and i + d/2 of a head are one pair (`reference.rotary`).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import alignment, register_op, tile_width
from kernels.norm import column_sum

TILE = 32  # (token, head) pairs in a tile


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
def load_angles(cos_ptr, sin_ptr, token, length, angle_stride, pair, half, inside):
    """cos and sin (tokens, 1, pairs); the sequences of a batch share them if angle_stride is 0."""
    offset = token // length * angle_stride + token % length * half + pair
    cos = tl.load(cos_ptr + offset, mask=inside, other=0.0)
    return cos, tl.load(sin_ptr + offset, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "length", "stride", "angle_stride"])
def rotary_forward_kernel(
    qkv_ptr,  # (tokens, (H + 2K) d), rows `stride` apart
    cos_ptr, sin_ptr,  # float32 (length, d/2), or (B, length, d/2) with angle_stride between sequences
    q_weight_ptr, k_weight_ptr,  # norm weights (d,), or None without the norm of each head
    q_ptr, k_ptr,  # outputs (tokens, H, d) and (tokens, K, d), contiguous
    tokens, length, stride, angle_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of TOKENS tokens and HEADS heads, those of q first and then those of k."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    pair = tl.arange(0, BLOCK)[None, None, :]
    cos, sin = load_angles(
        cos_ptr, sin_ptr, token, length, angle_stride * ALIGNMENT, pair, HALF, (token < tokens) & (pair < HALF)
    )
    q_tiles: tl.constexpr = H // HEADS
    is_q = tl.program_id(1) < q_tiles
    head = (tl.program_id(1) - tl.where(is_q, 0, q_tiles)) * HEADS + tl.arange(0, HEADS)[None, :, None]
    count = tl.where(is_q, H, K)
    inside = (token < tokens) & (head < count) & (pair < HALF)
    source = token * (stride * ALIGNMENT) + (head + tl.where(is_q, 0, H)) * (2 * HALF) + pair
    a, b = load_pairs(qkv_ptr, source, HALF, inside)
    if q_weight_ptr is not None:
        squares = tl.sum(a * a + b * b, 2, keep_dims=True)
        rstd = tl.rsqrt(squares / (2 * HALF) + tl.cast(eps, tl.float32))
        weight_ptr = q_weight_ptr if is_q else k_weight_ptr
        weight_a, weight_b = load_pairs(weight_ptr, pair, HALF, pair < HALF)
        a, b = a * rstd * weight_a, b * rstd * weight_b
    out_ptr = q_ptr if is_q else k_ptr
    target = (token * count + head) * (2 * HALF) + pair
    store_pairs(out_ptr, target, HALF, inside, a * cos - b * sin, b * cos + a * sin)


@triton.jit(
    do_not_specialize=["tokens", "length", "stride", "angle_stride"]
    + [f"{name}_{axis}_stride" for name in ("dq", "dk", "dv") for axis in ("batch", "token", "head")]
)
def rotary_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr,  # gradients (B, length, H or K, d) with the strides below, 1 in the last dimension
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,  # of the forward pass; qkv is read only with the norms
    dqkv_ptr,  # output (tokens, (H + 2K) d), contiguous
    dq_weight_parts_ptr, dk_weight_parts_ptr,  # float32 outputs (programs, d), written only with the norms
    tokens, length, stride, angle_stride,
    dq_batch_stride, dq_token_stride, dq_head_stride,
    dk_batch_stride, dk_token_stride, dk_head_stride,
    dv_batch_stride, dv_token_stride, dv_head_stride,
    eps, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of tokens, for HEADS heads of q, of k or of v, whose gradient is copied.

    With the norm of each head, each program leaves its partial sum of the norm weight's gradient.
    """
    pair = tl.arange(0, BLOCK)[None, None, :]
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = H // HEADS
    k_tiles: tl.constexpr = K // HEADS
    is_q, is_rotated = tile < q_tiles, tile < q_tiles + k_tiles
    first_tile = tl.where(is_q, 0, tl.where(is_rotated, q_tiles, q_tiles + k_tiles))
    head = (tile - first_tile) * HEADS + tl.arange(0, HEADS)[None, :, None]
    grad_ptr = dk_ptr if is_rotated else dv_ptr
    grad_ptr = dq_ptr if is_q else grad_ptr
    batch_stride = tl.where(is_q, dq_batch_stride, tl.where(is_rotated, dk_batch_stride, dv_batch_stride)) * ALIGNMENT
    token_stride = tl.where(is_q, dq_token_stride, tl.where(is_rotated, dk_token_stride, dv_token_stride)) * ALIGNMENT
    head_stride = tl.where(is_q, dq_head_stride, tl.where(is_rotated, dk_head_stride, dv_head_stride)) * ALIGNMENT
    if q_weight_ptr is not None:
        weight_ptr = q_weight_ptr if is_q else k_weight_ptr
        weight_a, weight_b = load_pairs(weight_ptr, pair, HALF, pair < HALF)
    dweight_a = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    dweight_b = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    for index in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tl.cast(index, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        inside = (token < tokens) & (head >= 0) & (pair < HALF)
        source = token // length * batch_stride + token % length * token_stride + head * head_stride + pair
        a, b = load_pairs(grad_ptr, source, HALF, inside)
        cos, sin = load_angles(
            cos_ptr, sin_ptr, token, length, angle_stride * ALIGNMENT, pair, HALF, (token < tokens) & (pair < HALF)
        )
        da = tl.where(is_rotated, a * cos + b * sin, a)
        db = tl.where(is_rotated, b * cos - a * sin, b)
        packed_head = (first_tile * HEADS + head) * (2 * HALF) + pair
        if q_weight_ptr is not None:
            # The backward pass of RMSNorm over the pairs of a head: see norm_backward_kernel.
            xhat_a, xhat_b = load_pairs(qkv_ptr, token * (stride * ALIGNMENT) + packed_head, HALF, inside)
            squares = tl.sum(xhat_a * xhat_a + xhat_b * xhat_b, 2, keep_dims=True)
            rstd = tl.rsqrt(squares / (2 * HALF) + tl.cast(eps, tl.float32))
            xhat_a, xhat_b = xhat_a * rstd, xhat_b * rstd
            dweight_a += da * xhat_a
            dweight_b += db * xhat_b
            h_a, h_b = da * weight_a, db * weight_b
            mean_h_xhat = tl.sum(h_a * xhat_a + h_b * xhat_b, 2, keep_dims=True) / (2 * HALF)
            da = tl.where(is_rotated, rstd * (h_a - xhat_a * mean_h_xhat), da)
            db = tl.where(is_rotated, rstd * (h_b - xhat_b * mean_h_xhat), db)
        target = token * ((H + 2 * K) * 2 * HALF) + packed_head
        store_pairs(dqkv_ptr, target, HALF, inside, da, db)
    if q_weight_ptr is not None:
        parts_ptr = dq_weight_parts_ptr if is_q else dk_weight_parts_ptr
        part = tl.program_id(0) * tl.where(is_q, q_tiles, k_tiles) + tile - first_tile
        offset = part * (2 * HALF) + tl.arange(0, BLOCK)
        inside_head = (tl.arange(0, BLOCK) < HALF) & is_rotated
        sum_a, sum_b = tl.sum(tl.sum(dweight_a, 0), 0), tl.sum(tl.sum(dweight_b, 0), 0)
        store_pairs(parts_ptr, offset, HALF, inside_head, sum_a, sum_b)


def kernel_constants(num_heads: int, num_kv_heads: int, half: int) -> dict[str, int]:
    """Constants of both kernels: the most heads in a tile, up to 4, that divide those of q and those of k."""
    heads = math.gcd(num_heads, num_kv_heads, 4)
    return {"H": num_heads, "K": num_kv_heads, "HALF": half, "HEADS": heads, "TOKENS": TILE // heads}


def num_warps(half: int) -> int:
    """Warps of a tile: eight pairs per thread, for loads of 16 bytes and few registers."""
    return TILE * tile_width(half) // (8 * 32)


def contiguous_inputs(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Contiguous rows of qkv, cos and sin; the stride of qkv's rows; that of the angles between sequences, or 0."""
    if qkv.stride(2) != 1 or qkv.stride(0) != qkv.shape[1] * qkv.stride(1):
        qkv = qkv.contiguous()
    angle_stride = cos.shape[-2] * cos.shape[-1] if cos.dim() == 3 else 0
    return qkv, cos.contiguous(), sin.contiguous(), qkv.stride(1), angle_stride


def rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
    return tuple(qkv.new_empty((*qkv.shape[:2], n, 2 * cos.shape[-1])) for n in (num_heads, num_kv_heads))


@register_op(
    "rotary_forward(Tensor qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, Tensor? q_weight,"
    " Tensor? k_weight, float eps) -> (Tensor q, Tensor k)",
    rotary_forward_fake,
)
def rotary_forward(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
    """q (B, T, H, d) and k (B, T, K, d) of packed rows (B, T, (H + 2K) d)."""
    q, k = rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
    qkv, cos, sin, stride, angle_stride = contiguous_inputs(qkv, cos, sin)
    tokens, half = qkv.shape[0] * qkv.shape[1], cos.shape[-1]
    constants = kernel_constants(num_heads, num_kv_heads, half)
    align = alignment(stride, angle_stride)
    if tokens:
        grid = triton.cdiv(tokens, constants["TOKENS"]), (num_heads + num_kv_heads) // constants["HEADS"]
        rotary_forward_kernel[grid](
            qkv, cos, sin, q_weight, k_weight, q, k,
            tokens, qkv.shape[1], stride // align, angle_stride // align, eps,
            **constants, ALIGNMENT=align, BLOCK=tile_width(half), num_warps=num_warps(half),
        )  # fmt: skip
    return q, k


def rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    rows = (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    dweights = [dq.new_empty(0 if q_weight is None else dq.shape[3], dtype=torch.float32) for _ in range(2)]
    return dq.new_empty((*dq.shape[:2], rows)), *dweights


@register_op(
    "rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor cos, Tensor sin, Tensor? q_weight,"
    " Tensor? k_weight, float eps) -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)",
    rotary_backward_fake,
)
def rotary_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    """The packed gradient (B, T, (H + 2K) d), and float32 ones (d,) of the norm weights, empty without the norms."""
    dqkv, dq_weight, dk_weight = rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps)
    grads = [grad if grad.stride(3) == 1 else grad.contiguous() for grad in (dq, dk, dv)]
    batch, length, num_heads, _ = dq.shape
    num_kv_heads, tokens, half = dk.shape[2], batch * length, cos.shape[-1]
    qkv, cos, sin, stride, angle_stride = contiguous_inputs(dqkv if qkv is None else qkv, cos, sin)
    constants = kernel_constants(num_heads, num_kv_heads, half)
    heads = constants["HEADS"]
    programs = triton.cdiv(tokens, constants["TOKENS"])
    head_norms = q_weight is not None
    if head_norms:  # few programs, since each leaves a partial sum of the norm weights' gradients
        programs = min(programs, 2 * launch.device_limits(dq.device).multiprocessors)
    parts = [dq_weight.new_empty(programs * n // heads, 2 * half) for n in (num_heads, num_kv_heads)]
    strides = [stride, angle_stride, *(grad.stride(axis) for grad in grads for axis in range(3))]
    align = alignment(*strides)
    if tokens:
        stride, angle_stride, *grad_strides = (stride // align for stride in strides)
        rotary_backward_kernel[programs, (num_heads + 2 * num_kv_heads) // heads](
            *grads, qkv, cos, sin, q_weight, k_weight, dqkv, *parts, tokens, length, stride, angle_stride,
            *grad_strides, eps, **constants, ALIGNMENT=align, BLOCK=tile_width(half), num_warps=num_warps(half),
        )  # fmt: skip
    return (dqkv, *map(column_sum, parts)) if head_norms else (dqkv, dq_weight, dk_weight)


class Rotary(torch.autograd.Function):
    """See `rotary`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps the tables, and qkv only if the norm of each head needs it again."""
        q, k = rotary_forward(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
        ctx.save_for_backward(None if q_weight is None else qkv, cos, sin, q_weight, k_weight)
        ctx.eps = eps
        return q, k, qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))[:, :, num_heads + num_kv_heads :]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """Packs three gradients into one."""
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dqkv, dq_weight, dk_weight = rotary_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, ctx.eps)
        if q_weight is None:
            return dqkv, None, None, None, None, None, None, None
        return dqkv, None, None, None, None, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.rotary`."""
    return Rotary.apply(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)
