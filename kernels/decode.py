"""One new token for each of a few texts: five launches a layer, whose time is that of reading the weights once.

With one token every product is a matrix times a vector. The norm in front of it costs nothing there: each program reads
the whole row anyway, so it computes the statistics itself. What follows the product is done where it is: rotation and
cache, silu and product, residual addition.

    1 qkv          s -> norm -> W_qkv -> norm of each head -> rotation -> q, and k and v into the cache
    2 attention    q and the cache -> parts of the weighted sum of v, for SPLITS ranges of columns
    3 project      the parts together -> W_o -> + s
    4 gate_up      s -> norm -> W_gate, W_up -> silu and product
    5 project      -> W_down -> + s

s (B, D) is the residual stream and is updated in place. All arithmetic is float32; weights may have any dtype.
Positions are read from tensors on the device, so that one CUDA graph of a step serves every position.
Nothing here is differentiable.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import block_of, unit
from kernels.norm_kernels import with_part

SPLITS = 4  # ranges of columns that attention works on at once
ROWS = 4  # of a weight matrix, in a program


@triton.jit
def statistics(s_ptr, width, eps, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Mean (0 for RMSNorm) and reciprocal deviation of a row."""
    mean, squares = 0.0, 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        s = tl.load(s_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        mean, squares = with_part(mean, squares, s, start, width, LAYER, BLOCK)
    return mean, tl.rsqrt(squares / width + tl.cast(eps, tl.float32))


@triton.jit
def normalized(s_ptr, gain_ptr, bias_ptr, column, inside, mean, rstd):
    """Some elements of the normalized row."""
    x = (tl.load(s_ptr + column, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    if gain_ptr is not None:
        x *= tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, x, 0.0)


@triton.jit(do_not_specialize=["width", "cache_batch", "cache_head"])
def qkv_kernel(
    s_ptr, gain_ptr, norm_bias_ptr, weight_ptr, bias_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr,
    column_ptr, padding_ptr, q_ptr, key_ptr, value_ptr,
    width, cache_batch, cache_head, eps, LAYER: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some pairs (i, i + d/2) of one head of one text; all of them where a norm of the head needs them together."""
    width = width * UNIT
    text = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = (tl.program_id(1) // tiles).to(tl.int64)
    pair = tl.program_id(1) % tiles * PAIRS + tl.arange(0, PAIRS)
    real = pair < HALF
    s_ptr += text * width
    mean, rstd = statistics(s_ptr, width, eps, LAYER, BLOCK)
    a = tl.zeros((PAIRS, BLOCK), tl.float32)
    b = tl.zeros((PAIRS, BLOCK), tl.float32)
    row = head * (2 * HALF) + pair
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = normalized(s_ptr, gain_ptr, norm_bias_ptr, column, column < width, mean, rstd)[None, :]
        inside = real[:, None] & (column < width)[None, :]
        tile_ptr = weight_ptr + row[:, None] * width + column[None, :]
        a += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x
        b += tl.load(tile_ptr + HALF * width, mask=inside, other=0.0).to(tl.float32) * x
    a, b = tl.sum(a, 1), tl.sum(b, 1)
    if bias_ptr is not None:
        a += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
        b += tl.load(bias_ptr + row + HALF, mask=real, other=0.0).to(tl.float32)
    place = tl.load(column_ptr)  # int64
    if head < H + K:
        if q_gain_ptr is not None:
            rstd = tl.rsqrt(tl.sum(a * a + b * b) / (2 * HALF) + tl.cast(eps, tl.float32))
            head_gain_ptr = q_gain_ptr if head < H else k_gain_ptr
            a *= rstd * tl.load(head_gain_ptr + pair, mask=real, other=0.0).to(tl.float32)
            b *= rstd * tl.load(head_gain_ptr + pair + HALF, mask=real, other=0.0).to(tl.float32)
        position = place
        if padding_ptr is not None:
            position -= tl.load(padding_ptr + text)
        cos = tl.load(cos_ptr + position * HALF + pair, mask=real, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + pair, mask=real, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    q_ptr += (text * H + head) * (2 * HALF)
    tl.store(q_ptr + pair, a, mask=real & (head < H))
    tl.store(q_ptr + pair + HALF, b, mask=real & (head < H))
    cache_ptr = key_ptr if head < H + K else value_ptr
    cache_ptr += text * (cache_batch * UNIT) + tl.abs(head - H) % K * (cache_head * UNIT) + place * (2 * HALF)
    tl.store(cache_ptr + pair, a, mask=real & (head >= H))
    tl.store(cache_ptr + pair + HALF, b, mask=real & (head >= H))


@triton.jit(do_not_specialize=["cache_batch", "cache_head"])
def attention_kernel(
    q_ptr, key_ptr, value_ptr, column_ptr, padding_ptr, part_ptr, largest_ptr, total_ptr, cache_batch, cache_head,
    UNIT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head over one range of columns: sum of exp(score - largest) v, largest, and sum of exp."""
    text, head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    split = tl.program_id(1)
    element = tl.arange(0, BLOCK)
    real = element < WIDTH
    q = tl.load(q_ptr + (text * H + head) * WIDTH + element, mask=real, other=0.0).to(tl.float32) * (WIDTH**-0.5)
    first = 0
    if padding_ptr is not None:
        first += tl.load(padding_ptr + text).to(tl.int32)
    end = tl.load(column_ptr).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(end - first, COLUMNS), SPLITS) * COLUMNS
    base = text * (cache_batch * UNIT) + (head // (H // K)).to(tl.int64) * (cache_head * UNIT)
    largest, total = float("-inf"), 0.0
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(first + split * share, tl.minimum(end, first + (split + 1) * share), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        offset = base + column[:, None].to(tl.int64) * WIDTH + element[None, :]
        inside = (column < end)[:, None] & real[None, :]
        scores = tl.sum(tl.load(key_ptr + offset, mask=inside, other=0.0).to(tl.float32) * q[None, :], 1)
        scores = tl.where(column < end, scores, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores))
        p = tl.exp(scores - largest)
        v = tl.load(value_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        total = total * tl.exp(before - largest) + tl.sum(p)
        weighted = weighted * tl.exp(before - largest) + tl.sum(p[:, None] * v, 0)
    part = (text * H + head) * SPLITS + split
    tl.store(part_ptr + part * WIDTH + element, weighted, mask=real)
    tl.store(largest_ptr + part, largest)
    tl.store(total_ptr + part, total)


@triton.jit
def joined(part_ptr, largest_ptr, total_ptr, column, inside, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Some elements of attention's output (H d) from the parts of one text; a range without columns weighs nothing."""
    part = (column // WIDTH * SPLITS)[None, :] + tl.arange(0, SPLITS)[:, None]
    largest = tl.load(largest_ptr + part, mask=inside[None, :], other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0)[None, :])
    total = tl.sum(weight * tl.load(total_ptr + part, mask=inside[None, :], other=1.0), 0)
    parts = tl.load(part_ptr + part * WIDTH + (column % WIDTH)[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(weight * parts, 0) / total


@triton.jit(do_not_specialize=["rows", "width"])
def project_kernel(
    x_ptr, largest_ptr, total_ptr, weight_ptr, s_ptr, rows, width,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """s += W x for a few rows of W (rows, width); x is a vector, or attention's parts where SPLITS is not 0."""
    width = width * UNIT
    text = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    x_ptr += text * width * (SPLITS if SPLITS else 1)
    if SPLITS:
        largest_ptr += text * (width // WIDTH * SPLITS)
        total_ptr += text * (width // WIDTH * SPLITS)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        if SPLITS:
            x = joined(x_ptr, largest_ptr, total_ptr, column, column < width, WIDTH, SPLITS)
        else:
            x = tl.load(x_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        tile_ptr = weight_ptr + row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x[None, :]
    s_ptr += text * rows + row
    s = tl.load(s_ptr, mask=row < rows, other=0.0).to(tl.float32) + tl.sum(total, 1)
    tl.store(s_ptr, s.to(s_ptr.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["width", "hidden_size"])
def gate_up_kernel(
    s_ptr, gain_ptr, bias_ptr, weight_ptr, hidden_ptr, hidden_size, width, eps,
    LAYER: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(W_gate norm(s)) * (W_up norm(s)) for a few of its elements; weight (2F, D), hidden (B, F)."""
    hidden_size = hidden_size * UNIT
    width = width * UNIT
    text = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    s_ptr += text * hidden_size
    mean, rstd = statistics(s_ptr, hidden_size, eps, LAYER, BLOCK)
    gate = tl.zeros((ROWS, BLOCK), tl.float32)
    up = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = normalized(s_ptr, gain_ptr, bias_ptr, column, column < hidden_size, mean, rstd)[None, :]
        inside = (row < width)[:, None] & (column < hidden_size)[None, :]
        tile_ptr = weight_ptr + row[:, None].to(tl.int64) * hidden_size + column[None, :]
        up_ptr = tile_ptr + tl.cast(width, tl.int64) * hidden_size
        gate += tl.load(tile_ptr, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptr, mask=inside, other=0.0).to(tl.float32) * x
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + text * width + row, hidden.to(hidden_ptr.dtype.element_ty), mask=row < width)


def block(width: int) -> int:
    """Elements of the row that a program multiplies at once."""
    return min(512, block_of(width))


def qkv(
    s: Tensor,
    norm: tuple[str, Tensor | None, Tensor | None, float],
    weight: Tensor,
    bias: Tensor | None,
    head_gains: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor],
    column: Tensor,
    padding: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Fill q (B, H, d) and column `column` (1,) int64 of keys and values (B, K, S, d) from the stream s (B, D).

    norm: kind, gain, bias and eps; weight ((H + 2K) d, D); tables: cos and sin (positions, d/2); padding (B,) int64:
    columns in front of a text, which positions do not count.
    """
    kind, gain, norm_bias, eps = norm
    (batch, width), (_, heads, head_dim), kv_heads = s.shape, q.shape, keys.shape[1]
    half = head_dim // 2
    pairs = ROWS if head_gains[0] is None else block_of(half)
    size = unit(width, keys.stride(0), keys.stride(1))
    qkv_kernel[batch, (heads + 2 * kv_heads) * triton.cdiv(half, pairs)](
        s, gain, norm_bias, weight, bias, *head_gains, *tables, column, padding, q, keys, values,
        width // size, keys.stride(0) // size, keys.stride(1) // size, eps, LAYER=kind == "layer", UNIT=size,
        H=heads, K=kv_heads, HALF=half, PAIRS=pairs, BLOCK=block(width) if pairs == ROWS else 64, num_warps=4,
    )  # fmt: skip


def attention(
    q: Tensor, keys: Tensor, values: Tensor, column: Tensor, padding: Tensor | None, parts: tuple[Tensor, ...]
) -> None:
    """Fill parts, float32 (B, H, SPLITS, d) and twice (B, H, SPLITS): the query over columns padding .. column."""
    batch, heads, head_dim = q.shape
    size = unit(keys.stride(0), keys.stride(1))
    attention_kernel[batch * heads, SPLITS](
        q, keys, values, column, padding, *parts, keys.stride(0) // size, keys.stride(1) // size, UNIT=size,
        H=heads, K=keys.shape[1], WIDTH=head_dim, SPLITS=SPLITS, COLUMNS=32, BLOCK=block_of(head_dim), num_warps=4,
    )  # fmt: skip


def project(x: Tensor | tuple[Tensor, ...], weight: Tensor, s: Tensor) -> None:
    """s (B, D) += W x for x (B, N), or for attention's parts."""
    rows, width = weight.shape
    size = unit(width)
    of_parts = isinstance(x, tuple)
    parts = x if of_parts else (x, None, None)
    project_kernel[s.shape[0], triton.cdiv(rows, ROWS)](
        *parts, weight, s, rows, width // size, UNIT=size, WIDTH=x[0].shape[-1] if of_parts else 1,
        SPLITS=SPLITS if of_parts else 0, ROWS=ROWS, BLOCK=block(width),
        num_warps=4,
    )  # fmt: skip


def gate_up(s: Tensor, norm: tuple[str, Tensor | None, Tensor | None, float], weight: Tensor, hidden: Tensor) -> None:
    """Fill hidden (B, F) from the stream s (B, D) and the packed weight (2F, D)."""
    kind, gain, bias, eps = norm
    (batch, width), size = hidden.shape, unit(s.shape[1], hidden.shape[1])
    gate_up_kernel[batch, triton.cdiv(width, ROWS)](
        s, gain, bias, weight, hidden, s.shape[1] // size, width // size, eps,
        LAYER=kind == "layer", UNIT=size, ROWS=ROWS, BLOCK=block(s.shape[1]), num_warps=4,
    )  # fmt: skip
