"""Rotary positions in Triton: q and k in one launch, straight from the packed product, with Qwen3's norm of each head.

The tables are float32 and so is the arithmetic; the result is rounded once. The backward pass turns back by the same
angles and writes the packed gradient of q, k and v in one launch. Formula: Su et al. 2021, equation 34, in the
half-split convention; see `reference.rotary`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import launch
from kernels.launch import block_of, operator, unit
from kernels.norms import column_sum

TILE = 32  # heads of tokens in a tile


@triton.jit
def load_halves(x_ptr, offset, half, inside):
    """Both elements of each pair in float32."""
    a = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(x_ptr + offset + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_halves(x_ptr, offset, half, inside, a, b):
    """Both elements of each pair, rounded to the tensor's dtype."""
    tl.store(x_ptr + offset, a.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(x_ptr + offset + half, b.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_angles(cos_ptr, sin_ptr, token, length, angle_stride, pair, half, inside):
    """cos and sin (tokens, 1, pairs); rows of a batch share them when angle_stride is 0."""
    offset = token // length * angle_stride + token % length * half + pair
    cos = tl.load(cos_ptr + offset, mask=inside, other=0.0)
    return cos, tl.load(sin_ptr + offset, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "length", "stride", "angle_stride"])
def forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr,
    tokens, length, stride, angle_stride, eps, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and heads, those of q first and then those of k; q (tokens, H, d) and k (tokens, K, d)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    pair = tl.arange(0, BLOCK)[None, None, :]
    cos, sin = load_angles(
        cos_ptr, sin_ptr, token, length, angle_stride * UNIT, pair, HALF, (token < tokens) & (pair < HALF)
    )
    q_tiles: tl.constexpr = H // HEADS
    of_q = tl.program_id(1) < q_tiles
    head = (tl.program_id(1) - tl.where(of_q, 0, q_tiles)) * HEADS + tl.arange(0, HEADS)[None, :, None]
    count = tl.where(of_q, H, K)
    inside = (token < tokens) & (head < count) & (pair < HALF)
    source = token * (stride * UNIT) + (head + tl.where(of_q, 0, H)) * (2 * HALF) + pair
    a, b = load_halves(qkv_ptr, source, HALF, inside)
    if q_weight_ptr is not None:
        squares = tl.sum(a * a + b * b, 2, keep_dims=True)
        rstd = tl.rsqrt(squares / (2 * HALF) + tl.cast(eps, tl.float32))
        weight_ptr = q_weight_ptr if of_q else k_weight_ptr
        first, second = load_halves(weight_ptr, pair, HALF, pair < HALF)
        a, b = a * rstd * first, b * rstd * second
    out_ptr = q_ptr if of_q else k_ptr
    target = (token * count + head) * (2 * HALF) + pair
    store_halves(out_ptr, target, HALF, inside, a * cos - b * sin, b * cos + a * sin)


@triton.jit(
    do_not_specialize=["tokens", "length", "stride", "angle_stride"]
    + [f"{name}_{axis}" for name in "qkv" for axis in ("batch", "token", "head")]
)
def backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, dqkv_ptr, q_gain_ptr, k_gain_ptr,
    tokens, length, stride, angle_stride,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    eps, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of tokens in turn, for some heads of q, of k or of v, whose gradient passes unchanged.

    With the norm of each head, qkv is read again and each program leaves its part of the gains' gradients.
    """
    pair = tl.arange(0, BLOCK)[None, None, :]
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = H // HEADS
    k_tiles: tl.constexpr = K // HEADS
    of_q, turned = tile < q_tiles, tile < q_tiles + k_tiles
    first = tl.where(of_q, 0, tl.where(turned, q_tiles, q_tiles + k_tiles))
    head = (tile - first) * HEADS + tl.arange(0, HEADS)[None, :, None]
    grad_ptr = dk_ptr if turned else dv_ptr
    grad_ptr = dq_ptr if of_q else grad_ptr
    batch_stride = tl.where(of_q, q_batch, tl.where(turned, k_batch, v_batch)) * UNIT
    token_stride = tl.where(of_q, q_token, tl.where(turned, k_token, v_token)) * UNIT
    head_stride = tl.where(of_q, q_head, tl.where(turned, k_head, v_head)) * UNIT
    if q_weight_ptr is not None:
        weight_ptr = q_weight_ptr if of_q else k_weight_ptr
        wa, wb = load_halves(weight_ptr, pair, HALF, pair < HALF)
    gain_a = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    gain_b = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    for index in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tl.cast(index, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
        inside = (token < tokens) & (head >= 0) & (pair < HALF)
        source = token // length * batch_stride + token % length * token_stride + head * head_stride + pair
        a, b = load_halves(grad_ptr, source, HALF, inside)
        cos, sin = load_angles(
            cos_ptr, sin_ptr, token, length, angle_stride * UNIT, pair, HALF, (token < tokens) & (pair < HALF)
        )
        da = tl.where(turned, a * cos + b * sin, a)
        db = tl.where(turned, b * cos - a * sin, b)
        packed_head = (first * HEADS + head) * (2 * HALF) + pair
        if q_weight_ptr is not None:
            xa, xb = load_halves(qkv_ptr, token * (stride * UNIT) + packed_head, HALF, inside)
            rstd = tl.rsqrt(tl.sum(xa * xa + xb * xb, 2, keep_dims=True) / (2 * HALF) + tl.cast(eps, tl.float32))
            xa, xb = xa * rstd, xb * rstd
            gain_a += da * xa
            gain_b += db * xb
            ha, hb = da * wa, db * wb
            along = tl.sum(ha * xa + hb * xb, 2, keep_dims=True) / (2 * HALF)
            da = tl.where(turned, rstd * (ha - xa * along), da)
            db = tl.where(turned, rstd * (hb - xb * along), db)
        target = token * ((H + 2 * K) * 2 * HALF) + packed_head
        store_halves(dqkv_ptr, target, HALF, inside, da, db)
    if q_weight_ptr is not None:
        gain_ptr = q_gain_ptr if of_q else k_gain_ptr
        part = tl.program_id(0) * tl.where(of_q, q_tiles, k_tiles) + tile - first
        offset = part * (2 * HALF) + tl.arange(0, BLOCK)
        inside_head = (tl.arange(0, BLOCK) < HALF) & turned
        store_halves(gain_ptr, offset, HALF, inside_head, tl.sum(tl.sum(gain_a, 0), 0), tl.sum(tl.sum(gain_b, 0), 0))


def geometry(num_heads: int, num_kv_heads: int, half: int) -> dict[str, int]:
    """Constants of both kernels: as many heads in a tile as divide those of q and of k."""
    heads = math.gcd(num_heads, num_kv_heads, 4)
    return {"H": num_heads, "K": num_kv_heads, "HALF": half, "HEADS": heads, "TOKENS": TILE // heads}


def warps_of(half: int) -> int:
    """Eight pairs for each thread: loads of 16 bytes, and few registers."""
    return TILE * block_of(half) // (8 * 32)


def rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
    """Shapes of `rotary_forward`."""
    return tuple(qkv.new_empty((*qkv.shape[:2], n, 2 * cos.shape[-1])) for n in (num_heads, num_kv_heads))


@operator(
    "rotary_forward(Tensor qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, Tensor? q_weight,"
    " Tensor? k_weight, float eps) -> (Tensor q, Tensor k)",
    rotary_forward_fake,
)
def rotary_forward(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps):
    """q (B, T, H, d) and k (B, T, K, d) of packed rows (B, T, (H + 2K) d)."""
    q, k = rotary_forward_fake(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
    qkv, cos, sin, stride, angle_stride = prepared(qkv, cos, sin)
    tokens, half = qkv.shape[0] * qkv.shape[1], cos.shape[-1]
    sizes = geometry(num_heads, num_kv_heads, half)
    size = unit(stride, angle_stride)
    if tokens:
        grid = triton.cdiv(tokens, sizes["TOKENS"]), (num_heads + num_kv_heads) // sizes["HEADS"]
        forward_kernel[grid](
            qkv, cos, sin, q_weight, k_weight, q, k, tokens, qkv.shape[1], stride // size, angle_stride // size, eps,
            **sizes, UNIT=size, BLOCK=block_of(half), num_warps=warps_of(half),
        )  # fmt: skip
    return q, k


def rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    """Shapes of `rotary_backward`."""
    rows = (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    gains = [dq.new_empty(0 if q_weight is None else dq.shape[3], dtype=torch.float32) for _ in range(2)]
    return dq.new_empty((*dq.shape[:2], rows)), *gains


@operator(
    "rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor cos, Tensor sin, Tensor? q_weight,"
    " Tensor? k_weight, float eps) -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)",
    rotary_backward_fake,
)
def rotary_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps):
    """The packed gradient (B, T, (H + 2K) d) and, with the norm of each head, the float32 gradients of its gains."""
    dqkv, dq_weight, dk_weight = rotary_backward_fake(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps)
    grads = [grad if grad.stride(3) == 1 else grad.contiguous() for grad in (dq, dk, dv)]
    batch, length, num_heads, _ = dq.shape
    num_kv_heads, tokens, half = dk.shape[2], batch * length, cos.shape[-1]
    qkv, cos, sin, stride, angle_stride = prepared(dqkv if qkv is None else qkv, cos, sin)
    sizes = geometry(num_heads, num_kv_heads, half)
    heads = sizes["HEADS"]
    tiles = triton.cdiv(tokens, sizes["TOKENS"])
    normed = q_weight is not None
    if normed:  # few programs, each of which leaves one partial sum for the gains
        tiles = min(tiles, 2 * launch.properties(dq.device).multiprocessors)
    parts = [dq_weight.new_empty(tiles * n // heads, 2 * half) for n in (num_heads, num_kv_heads)]
    strides = [stride, angle_stride, *(grad.stride(axis) for grad in grads for axis in range(3))]
    size = unit(*strides)
    if tokens:
        stride, angle_stride, *of_grads = (stride // size for stride in strides)
        backward_kernel[tiles, (num_heads + 2 * num_kv_heads) // heads](
            *grads, qkv, cos, sin, q_weight, k_weight, dqkv, *parts, tokens, length, stride, angle_stride,
            *of_grads, eps, **sizes, UNIT=size, BLOCK=block_of(half), num_warps=warps_of(half),
        )  # fmt: skip
    return (dqkv, *map(column_sum, parts)) if normed else (dqkv, dq_weight, dk_weight)


def prepared(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Tensors as the kernels read them, the stride from one packed row to the next, and from one row of angles."""
    if qkv.stride(2) != 1 or qkv.stride(0) != qkv.shape[1] * qkv.stride(1):
        qkv = qkv.contiguous()
    angle_stride = cos.shape[-2] * cos.shape[-1] if cos.dim() == 3 else 0
    return qkv, cos.contiguous(), sin.contiguous(), qkv.stride(1), angle_stride


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
        """Keeps the tables, and qkv only where a norm of each head needs it again."""
        q, k = rotary_forward(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, eps)
        ctx.save_for_backward(None if q_weight is None else qkv, cos, sin, q_weight, k_weight)
        ctx.eps = eps
        return q, k, qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))[:, :, num_heads + num_kv_heads :]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        """One packed gradient from three."""
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dqkv, dq_weight, dk_weight = rotary_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, ctx.eps)
        gains = None, None
        if q_weight is not None:
            gains = dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype)
        return dqkv, None, None, None, None, *gains, None


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
