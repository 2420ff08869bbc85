"""One new token for each of a few sequences, in five launches per layer.

For one sequence, the time is about that of reading the weights once.

With one token every product is a matrix times a vector. The norm in front of it is almost free: each program reads the
whole row anyway, so it computes the statistics itself. What follows a product is computed in the same launch: rotation
and cache, silu and product, residual addition.

    1 qkv          s -> norm -> W_qkv -> norm of each head -> rotation -> q, and k and v into the cache
    2 attention    q and the cache -> partial results, for SPLITS ranges of the cache
    3 project      combine the partial results -> W_o -> + s
    4 gate_up      s -> norm -> W_gate, W_up -> silu and product
    5 project      -> W_down -> + s

s (B, D) is the residual stream and is updated in place. All arithmetic is float32; weights may have any dtype.
A position is a slot of the KV cache. It is read from a tensor on the device, so that one CUDA graph of a step serves
every position. Nothing here is differentiable. Sizes and strides are in units of ALIGNMENT (`launch.alignment`).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import alignment, tile_width
from kernels.norm import combine_moments

SPLITS = 4  # ranges of the cache that programs attend to in parallel
ROWS = 4  # rows of a weight matrix in a program


@triton.jit
def norm_statistics(s_ptr, width, eps, LAYER_NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Mean (0 for RMSNorm) and reciprocal standard deviation of a row."""
    mean, squares = 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        s = tl.load(s_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        mean, squares = combine_moments(mean, squares, s, start, width, LAYER_NORM, BLOCK)
    return mean, tl.rsqrt(squares / width + tl.cast(eps, tl.float32))


@triton.jit
def load_normalized(s_ptr, weight_ptr, bias_ptr, column, inside, mean, rstd):
    """The normalized row at some columns, 0 outside."""
    x = (tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, x, 0.0)


@triton.jit(do_not_specialize=["width", "cache_batch_stride", "cache_head_stride"])
def decode_qkv_kernel(
    s_ptr, norm_weight_ptr, norm_bias_ptr,  # (B, D) and (D,); norm weight and bias may be None
    weight_ptr, bias_ptr,  # ((H + 2K) d, D) and ((H + 2K) d,); bias may be None
    q_norm_weight_ptr, k_norm_weight_ptr,  # (d,), or None without the norm of each head
    cos_ptr, sin_ptr,  # float32 (max positions, d/2)
    position_ptr, padding_ptr,  # int64 (1,) and (B,); padding may be None
    q_ptr, key_ptr, value_ptr,  # outputs (B, H, d) and, at one position, (B, K, S, d)
    width, cache_batch_stride, cache_head_stride, eps, LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PAIRS pairs (i, i + d/2) of one head of one sequence; all pairs if the norm of each head needs them together."""
    width = width * ALIGNMENT
    sequence = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = (tl.program_id(1) // tiles).to(tl.int64)
    pair = tl.program_id(1) % tiles * PAIRS + tl.arange(0, PAIRS)
    inside_head = pair < HALF
    s_ptr += sequence * width
    mean, rstd = norm_statistics(s_ptr, width, eps, LAYER_NORM, BLOCK)
    a = tl.zeros((PAIRS, BLOCK), tl.float32)
    b = tl.zeros((PAIRS, BLOCK), tl.float32)
    row = head * (2 * HALF) + pair
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_normalized(s_ptr, norm_weight_ptr, norm_bias_ptr, column, column < width, mean, rstd)[None, :]
        inside = inside_head[:, None] & (column < width)[None, :]
        tile_ptr = weight_ptr + row[:, None] * width + column[None, :]
        a += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x
        b += tl.load(tile_ptr + HALF * width, mask=inside, other=0.0).to(tl.float32) * x
    a, b = tl.sum(a, 1), tl.sum(b, 1)
    if bias_ptr is not None:
        a += tl.load(bias_ptr + row, mask=inside_head, other=0.0).to(tl.float32)
        b += tl.load(bias_ptr + row + HALF, mask=inside_head, other=0.0).to(tl.float32)
    position = tl.load(position_ptr)  # int64
    if head < H + K:
        if q_norm_weight_ptr is not None:
            rstd = tl.rsqrt(tl.sum(a * a + b * b) / (2 * HALF) + tl.cast(eps, tl.float32))
            head_weight_ptr = q_norm_weight_ptr if head < H else k_norm_weight_ptr
            a *= rstd * tl.load(head_weight_ptr + pair, mask=inside_head, other=0.0).to(tl.float32)
            b *= rstd * tl.load(head_weight_ptr + pair + HALF, mask=inside_head, other=0.0).to(tl.float32)
        rotary_position = position  # without the padding in front of the sequence
        if padding_ptr is not None:
            rotary_position -= tl.load(padding_ptr + sequence)
        cos = tl.load(cos_ptr + rotary_position * HALF + pair, mask=inside_head, other=0.0)
        sin = tl.load(sin_ptr + rotary_position * HALF + pair, mask=inside_head, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    q_ptr += (sequence * H + head) * (2 * HALF)
    tl.store(q_ptr + pair, a, mask=inside_head & (head < H))
    tl.store(q_ptr + pair + HALF, b, mask=inside_head & (head < H))
    cache_ptr = key_ptr if head < H + K else value_ptr
    cache_ptr += sequence * (cache_batch_stride * ALIGNMENT) + tl.abs(head - H) % K * (cache_head_stride * ALIGNMENT)
    cache_ptr += position * (2 * HALF)
    tl.store(cache_ptr + pair, a, mask=inside_head & (head >= H))
    tl.store(cache_ptr + pair + HALF, b, mask=inside_head & (head >= H))


@triton.jit(do_not_specialize=["cache_batch_stride", "cache_head_stride"])
def decode_attention_kernel(
    q_ptr, key_ptr, value_ptr,  # (B, H, d) and the cache (B, K, S, d)
    position_ptr, padding_ptr,  # int64 (1,) and (B,); padding may be None
    weighted_ptr, max_ptr, total_ptr,  # float32 outputs (B, H, SPLITS, d) and twice (B, H, SPLITS)
    cache_batch_stride, cache_head_stride,
    ALIGNMENT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head over one range of the cache: sum of exp(score - max) v, max, and total = sum of exp."""
    sequence, head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    split = tl.program_id(1)
    element = tl.arange(0, BLOCK)
    inside_head = element < HEAD_DIM
    q = tl.load(q_ptr + (sequence * H + head) * HEAD_DIM + element, mask=inside_head, other=0.0).to(tl.float32)
    q *= HEAD_DIM**-0.5
    first = 0
    if padding_ptr is not None:
        first += tl.load(padding_ptr + sequence).to(tl.int32)
    end = tl.load(position_ptr).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(end - first, POSITIONS), SPLITS) * POSITIONS
    base = sequence * (cache_batch_stride * ALIGNMENT)
    base += (head // (H // K)).to(tl.int64) * (cache_head_stride * ALIGNMENT)
    maximum, total = float("-inf"), 0.0
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(first + split * share, tl.minimum(end, first + (split + 1) * share), POSITIONS):
        position = start + tl.arange(0, POSITIONS)
        offset = base + position[:, None].to(tl.int64) * HEAD_DIM + element[None, :]
        inside = (position < end)[:, None] & inside_head[None, :]
        scores = tl.sum(tl.load(key_ptr + offset, mask=inside, other=0.0).to(tl.float32) * q[None, :], 1)
        scores = tl.where(position < end, scores, float("-inf"))
        before, maximum = maximum, tl.maximum(maximum, tl.max(scores))
        p = tl.exp(scores - maximum)
        v = tl.load(value_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        total = total * tl.exp(before - maximum) + tl.sum(p)
        weighted = weighted * tl.exp(before - maximum) + tl.sum(p[:, None] * v, 0)
    index = (sequence * H + head) * SPLITS + split
    tl.store(weighted_ptr + index * HEAD_DIM + element, weighted, mask=inside_head)
    tl.store(max_ptr + index, maximum)
    tl.store(total_ptr + index, total)


@triton.jit
def combine_splits(weighted_ptr, max_ptr, total_ptr, column, inside, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Some columns of attention's output (H d) from one sequence's partial results; an empty range has max -inf."""
    index = (column // HEAD_DIM * SPLITS)[None, :] + tl.arange(0, SPLITS)[:, None]
    maxima = tl.load(max_ptr + index, mask=inside[None, :], other=0.0)
    scale = tl.exp(maxima - tl.max(maxima, 0)[None, :])
    total = tl.sum(scale * tl.load(total_ptr + index, mask=inside[None, :], other=1.0), 0)
    weighted = tl.load(weighted_ptr + index * HEAD_DIM + (column % HEAD_DIM)[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(scale * weighted, 0) / total


@triton.jit(do_not_specialize=["rows", "width"])
def decode_project_kernel(
    x_ptr, max_ptr, total_ptr,  # (B, width) and None, or attention's partial results if SPLITS is not 0
    weight_ptr,  # (rows, width)
    s_ptr,  # (B, rows), updated in place
    rows, width,
    ALIGNMENT: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """s += W x for ROWS rows of W and one sequence."""
    width = width * ALIGNMENT
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    x_ptr += sequence * width * (SPLITS if SPLITS else 1)
    if SPLITS:
        max_ptr += sequence * (width // HEAD_DIM * SPLITS)
        total_ptr += sequence * (width // HEAD_DIM * SPLITS)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        if SPLITS:
            x = combine_splits(x_ptr, max_ptr, total_ptr, column, column < width, HEAD_DIM, SPLITS)
        else:
            x = tl.load(x_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        tile_ptr = weight_ptr + row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x[None, :]
    s_ptr += sequence * rows + row
    s = tl.load(s_ptr, mask=row < rows, other=0.0).to(tl.float32) + tl.sum(total, 1)
    tl.store(s_ptr, s.to(s_ptr.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["width", "hidden_size"])
def decode_gate_up_kernel(
    s_ptr, norm_weight_ptr, norm_bias_ptr,  # (B, D) and (D,); norm weight and bias may be None
    weight_ptr,  # (2F, D): rows of W_gate, then of W_up
    hidden_ptr,  # output (B, F)
    hidden_size, width, eps,
    LAYER_NORM: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(W_gate norm(s)) * (W_up norm(s)) for ROWS of its elements and one sequence."""
    hidden_size = hidden_size * ALIGNMENT
    width = width * ALIGNMENT
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    s_ptr += sequence * hidden_size
    mean, rstd = norm_statistics(s_ptr, hidden_size, eps, LAYER_NORM, BLOCK)
    gate = tl.zeros((ROWS, BLOCK), tl.float32)
    up = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load_normalized(s_ptr, norm_weight_ptr, norm_bias_ptr, column, column < hidden_size, mean, rstd)[None, :]
        inside = (row < width)[:, None] & (column < hidden_size)[None, :]
        tile_ptr = weight_ptr + row[:, None].to(tl.int64) * hidden_size + column[None, :]
        up_ptr = tile_ptr + tl.cast(width, tl.int64) * hidden_size
        gate += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptr, mask=inside, other=0.0).to(tl.float32) * x
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + sequence * width + row, hidden.to(hidden_ptr.dtype.element_ty), mask=row < width)


def columns_at_once(width: int) -> int:
    """Columns of a weight matrix that a program multiplies at once."""
    return min(512, tile_width(width))


def qkv(
    s: Tensor,
    norm: tuple[str, Tensor | None, Tensor | None, float],
    weight: Tensor,
    bias: Tensor | None,
    head_norm_weights: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor],
    position: Tensor,
    padding: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Fill q (B, H, d) and, at `position` (1,) int64, keys and values (B, K, S, d) from the stream s (B, D).

    norm: kind, weight, bias and eps; weight ((H + 2K) d, D); head_norm_weights: of q and k, (d,) or None; tables: cos
    and sin (max positions, d/2); padding (B,) int64: positions in front of each sequence that hold no token.
    """
    kind, norm_weight, norm_bias, eps = norm
    (batch, width), (_, heads, head_dim), kv_heads = s.shape, q.shape, keys.shape[1]
    half = head_dim // 2
    head_norms = head_norm_weights[0] is not None
    pairs = tile_width(half) if head_norms else ROWS
    align = alignment(width, keys.stride(0), keys.stride(1))
    decode_qkv_kernel[batch, (heads + 2 * kv_heads) * triton.cdiv(half, pairs)](
        s, norm_weight, norm_bias, weight, bias, *head_norm_weights, *tables, position, padding, q, keys, values,
        width // align, keys.stride(0) // align, keys.stride(1) // align, eps,
        LAYER_NORM=kind == "layer", ALIGNMENT=align, H=heads, K=kv_heads, HALF=half, PAIRS=pairs,
        BLOCK=64 if head_norms else columns_at_once(width), num_warps=4,
    )  # fmt: skip


def attention(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, padding: Tensor | None, partials: tuple[Tensor, ...]
) -> None:
    """Attend from each q (B, H, d) to positions padding .. position of its sequence's keys and values (B, K, S, d).

    Fills partials, for SPLITS ranges: weighted values (B, H, SPLITS, d), maxima and totals (B, H, SPLITS), float32.
    """
    batch, heads, head_dim = q.shape
    align = alignment(keys.stride(0), keys.stride(1))
    decode_attention_kernel[batch * heads, SPLITS](
        q, keys, values, position, padding, *partials, keys.stride(0) // align, keys.stride(1) // align,
        ALIGNMENT=align, H=heads, K=keys.shape[1], HEAD_DIM=head_dim, SPLITS=SPLITS, POSITIONS=32,
        BLOCK=tile_width(head_dim), num_warps=4,
    )  # fmt: skip


def project(x: Tensor | tuple[Tensor, ...], weight: Tensor, s: Tensor) -> None:
    """s (B, D) += W x, where x is (B, N), or attention's partial results."""
    rows, width = weight.shape
    align = alignment(width)
    combine = isinstance(x, tuple)
    inputs = x if combine else (x, None, None)
    decode_project_kernel[s.shape[0], triton.cdiv(rows, ROWS)](
        *inputs, weight, s, rows, width // align,
        ALIGNMENT=align, HEAD_DIM=x[0].shape[-1] if combine else 1, SPLITS=SPLITS if combine else 0, ROWS=ROWS,
        BLOCK=columns_at_once(width), num_warps=4,
    )  # fmt: skip


def gate_up(s: Tensor, norm: tuple[str, Tensor | None, Tensor | None, float], weight: Tensor, hidden: Tensor) -> None:
    """Fill hidden (B, F) from the stream s (B, D) and the packed weight (2F, D)."""
    kind, norm_weight, norm_bias, eps = norm
    (batch, width), hidden_size = hidden.shape, s.shape[1]
    align = alignment(hidden_size, width)
    decode_gate_up_kernel[batch, triton.cdiv(width, ROWS)](
        s, norm_weight, norm_bias, weight, hidden, hidden_size // align, width // align, eps,
        LAYER_NORM=kind == "layer", ALIGNMENT=align, ROWS=ROWS, BLOCK=columns_at_once(hidden_size), num_warps=4,
    )  # fmt: skip
