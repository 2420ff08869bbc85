"""One new token for each of up to 8 sequences: five or six launches per layer, which read every weight once for all.

With one token per sequence a product takes as long as reading its matrix. What precedes or follows it is computed in
the same launch: norm, bias, activation, residual addition.

    1 qkv          s -> norm -> W_qkv + bias
    2 attention    norm of each head -> rotation -> the new k and v into the cache, q over SPLITS ranges of the cache
      combine      the results of the ranges; only in a cache that has several
    3 project      -> W_o -> + s
    4 gate_up      s -> norm -> W_gate, W_up -> silu and product
    5 project      -> W_down -> + s

s (B, D) is the residual stream, updated in place. All arithmetic is float32; weights may have any dtype. The position,
a slot of the KV cache, is read from a tensor on the device, so that one CUDA graph serves every position. A sequence's
result has the same bits in a batch of any size, at any place in it: the order of its sums depends on the model and on
the number of positions that the cache has room for. Nothing here is differentiable.
"""

from types import SimpleNamespace

import triton
import triton.language as tl

from kernels.launch import tile_width

POSITIONS_PER_SPLIT, MAX_SPLITS = 128, 32  # 32 ranges and 8 key/value heads fill the 132 multiprocessors of an H100
MEAN_BLOCK = tl.constexpr(2048)  # columns of x that are read at once for LayerNorm's mean
MAX_HEADS_PER_PROGRAM = 8
NO_NORM = SimpleNamespace(kind=None, weight=None, bias=None, eps=0.0)
LOWEST = tl.constexpr(-1e30)  # the maximum of no score: finite, so that the difference of two of them is not NaN


@triton.jit
def multiply_rows(
    x_ptr, norm_weight_ptr, norm_bias_ptr,  # (B, width) and (width,); norm weight and bias may be None
    weight_ptr, row, inside_rows,  # (rows, width), and which of them: (ROWS,)
    width, eps, KIND: tl.constexpr, SEQUENCES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """W norm(x) for some rows of W: a tuple of (ROWS,) for each sequence. KIND is "rms", "layer" or, for W x, None.

    W norm(x) = rstd W diag(g) (x - mean) + W b, with g and b the norm's weight and bias. RMSNorm has mean 0. So x is
    read once: one loop sums the products and the squares of x - mean, and rstd multiplies the products at the end.
    Order of each sum: first the 8 columns of a thread, then the turns of the loop, then the groups.
    """
    groups: tl.constexpr = BLOCK // 8
    column = tl.arange(0, BLOCK)
    weight_ptr += row[:, None].to(tl.int64) * width + column[None, :]
    # A tile is loaded one turn before it is multiplied: it is on its way while the program computes. It leaves the
    # cache first, because no program reads it again; all programs read x.
    in_tile = inside_rows[:, None] & (column < width)[None, :]
    tile = tl.load(weight_ptr, mask=in_tile, other=0.0, eviction_policy="evict_first")
    # One of each sequence. Triton has no lists, so each turn of a loop builds new tuples.
    means, totals, squares = (), (), ()
    for _ in tl.static_range(SEQUENCES):
        means += (tl.cast(0.0, tl.float32),)
        totals += (tl.zeros((ROWS, groups), tl.float32),)
        squares += (tl.zeros((1, groups), tl.float32),)
    if KIND == "layer":
        wide_column = tl.arange(0, MEAN_BLOCK)
        for start in range(0, width, MEAN_BLOCK):
            new_means = ()
            for i in tl.static_range(SEQUENCES):
                x = tl.load(x_ptr + i * width + start + wide_column, mask=start + wide_column < width, other=0.0)
                new_means += (means[i] + tl.sum(x.to(tl.float32)) / width,)
            means = new_means
    bias_total = tl.zeros((ROWS, groups), tl.float32)
    for start in range(0, width, BLOCK):
        in_tile = inside_rows[:, None] & (start + BLOCK + column < width)[None, :]
        next_tile = tl.load(weight_ptr + start + BLOCK, mask=in_tile, other=0.0, eviction_policy="evict_first")
        rows = tl.reshape(tile.to(tl.float32), (ROWS, groups, 8))
        inside = start + column < width
        if norm_bias_ptr is not None:
            norm_bias = tl.load(norm_bias_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
            bias_total += tl.sum(rows * tl.reshape(norm_bias, (1, groups, 8)), 2)
        if norm_weight_ptr is not None:  # a factor of W rather than of x: once for all sequences
            norm_weight = tl.load(norm_weight_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
            rows *= tl.reshape(norm_weight, (1, groups, 8))
        new_totals, new_squares = (), ()
        for i in tl.static_range(SEQUENCES):
            x = tl.load(x_ptr + i * width + start + column, mask=inside, other=0.0).to(tl.float32)
            if KIND == "layer":
                x = tl.where(inside, x - means[i], 0.0)
            x = tl.reshape(x, (1, groups, 8))
            if KIND is not None:
                new_squares += (squares[i] + tl.sum(x * x, 2),)
            new_totals += (totals[i] + tl.sum(rows * x, 2),)
        totals = new_totals
        if KIND is not None:
            squares = new_squares
        tile = next_tile
    results = ()
    for i in tl.static_range(SEQUENCES):
        y = tl.sum(totals[i], 1)
        if KIND is not None:
            y *= tl.rsqrt(tl.sum(squares[i]) / width + tl.cast(eps, tl.float32))
        if norm_bias_ptr is not None:
            y += tl.sum(bias_total, 1)
        results += (y,)
    return results


@triton.jit(do_not_specialize=["outputs"])
def decode_product_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr,  # (B, D) and (D,); norm weight and bias may be None
    weight_ptr, bias_ptr,  # (outputs, D) and (outputs,); bias may be None
    out_ptr,  # (B, outputs), which is updated in place if ADDS
    outputs, width, eps, KIND: tl.constexpr, ADDS: tl.constexpr,
    SEQUENCES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = W norm(x) + bias, or out += that, for ROWS rows of W and all sequences; KIND None: x is not normalized."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    results = multiply_rows(
        x_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, row, row < outputs, width, eps, KIND, SEQUENCES, ROWS, BLOCK
    )
    for i in tl.static_range(SEQUENCES):
        y = results[i]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(tl.float32)
        if ADDS:
            y += tl.load(out_ptr + i * outputs + row, mask=row < outputs, other=0.0).to(tl.float32)
        tl.store(out_ptr + i * outputs + row, y.to(out_ptr.dtype.element_ty), mask=row < outputs)


@triton.jit(do_not_specialize=["outputs"])
def decode_gate_up_kernel(
    s_ptr, norm_weight_ptr, norm_bias_ptr,  # (B, D) and (D,); norm weight and bias may be None
    weight_ptr, hidden_ptr,  # (2F, D), rows of W_gate before those of W_up; output (B, F)
    outputs, width, eps, KIND: tl.constexpr, SEQUENCES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden = silu(W_gate norm(s)) * (W_up norm(s)) for ROWS/2 of its F elements, `outputs`, and all sequences."""
    half: tl.constexpr = ROWS // 2
    first = tl.program_id(0) * half
    place = tl.arange(0, ROWS)
    element = first + place % half  # ROWS 4: first, first + 1, first, first + 1
    row = tl.where(place < half, element, outputs + element)  # of W_gate in the first half, of W_up in the second
    results = multiply_rows(
        s_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, row, element < outputs,
        width, eps, KIND, SEQUENCES, ROWS, BLOCK,
    )  # fmt: skip
    element = first + tl.arange(0, half)
    for i in tl.static_range(SEQUENCES):
        gate, up = tl.split(tl.permute(tl.reshape(results[i], (2, half)), (1, 0)))
        hidden = gate * tl.sigmoid(gate) * up
        tl.store(hidden_ptr + i * outputs + element, hidden.to(hidden_ptr.dtype.element_ty), mask=element < outputs)


@triton.jit
def load_head(head_ptr, weight_ptr, cos, sin, eps, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One head (BLOCK,), normalized if there is a weight (d,), and rotated; cos and sin repeat for the second half."""
    element = tl.arange(0, BLOCK)
    inside, partner = element < 2 * HALF, (element + HALF) % (2 * HALF)
    x = tl.load(head_ptr + element, mask=inside, other=0.0)
    other = tl.load(head_ptr + partner, mask=inside, other=0.0)
    if weight_ptr is not None:
        rstd = tl.rsqrt(tl.sum(x * x) / (2 * HALF) + tl.cast(eps, tl.float32))
        x *= rstd * tl.load(weight_ptr + element, mask=inside, other=0.0).to(tl.float32)
        other *= rstd * tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)
    return x * cos + tl.where(element < HALF, -other, other) * sin


@triton.jit
def decode_attention_kernel(
    qkv_ptr,  # float32 (B, H + 2K, d)
    q_norm_weight_ptr, k_norm_weight_ptr,  # (d,), or None without the norm of each head
    cos_ptr, sin_ptr,  # float32 (max positions, d/2)
    position_ptr, padding_ptr,  # int64 (1,) and (B,)
    key_ptr, value_ptr,  # the cache (B, K, S, d); its slot `position` is filled here
    weighted_ptr, max_ptr, total_ptr,  # outputs (B, H, SPLITS, d) and twice (B, H, SPLITS)
    cache_batch_stride, cache_head_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,  # query heads that share what is loaded of the cache
    LANES: tl.constexpr,  # positions that the threads of a program read at once
    UNROLL: tl.constexpr,  # positions of each lane in a turn of the loop
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some query heads of one key/value head of one sequence, over one range of the filled cache.

    weighted = sum of exp(score - max) v, and total = sum of exp(score - max). With one range it is all of the cache,
    weighted is divided by total, and nothing else is written. The new position is not read from the cache: the first
    range begins with it. Every LANES-th position belongs to the same lane; each lane has a maximum and sums of its own,
    which are combined after the loop, so that threads need not wait for each other in the loop.
    """
    heads: tl.constexpr = H // HEADS_PER_PROGRAM  # programs for a sequence
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads * HEADS_PER_PROGRAM
    kv_head = head // (H // K)
    split = tl.program_id(1)
    lane, element = tl.arange(0, LANES), tl.arange(0, BLOCK)
    in_head = element < 2 * HALF
    position = tl.load(position_ptr)
    padding = tl.load(padding_ptr + sequence)
    angle = (position - padding) * HALF + element % HALF
    cos = tl.load(cos_ptr + angle, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0)
    qkv_ptr += sequence * ((H + 2 * K) * 2 * HALF)
    cache_offset = sequence * cache_batch_stride + kv_head.to(tl.int64) * cache_head_stride
    key_ptr += cache_offset + element
    value_ptr += cache_offset + element
    new_k = load_head(qkv_ptr + (H + kv_head) * (2 * HALF), k_norm_weight_ptr, cos, sin, eps, HALF, BLOCK)
    new_v = tl.load(qkv_ptr + (H + K + kv_head) * (2 * HALF) + element, mask=in_head, other=0.0)
    new_k, new_v = new_k.to(key_ptr.dtype.element_ty), new_v.to(value_ptr.dtype.element_ty)
    writes = in_head & (split == 0) & (head % (H // K) == 0)
    tl.store(key_ptr + position * (2 * HALF), new_k, mask=writes)
    tl.store(value_ptr + position * (2 * HALF), new_v, mask=writes)

    starts = (lane == 0) & (split == 0)  # the lane that begins with the new position
    queries, maxima, totals, weighted = (), (), (), ()
    for i in tl.static_range(HEADS_PER_PROGRAM):
        q = load_head(qkv_ptr + (head + i) * (2 * HALF), q_norm_weight_ptr, cos, sin, eps, HALF, BLOCK)
        q *= (2 * HALF) ** -0.5
        queries += (tl.reshape(q, (1, BLOCK // 8, 8)),)
        maxima += (tl.where(starts, tl.sum(q * new_k.to(tl.float32)), LOWEST),)
        totals += (tl.where(starts, 1.0, 0.0),)
        weighted += (tl.where(starts[:, None], new_v.to(tl.float32)[None, :], 0.0),)
    first, end = padding.to(tl.int32), position.to(tl.int32)
    share = tl.cdiv(tl.cdiv(end - first, UNROLL * LANES), SPLITS) * (UNROLL * LANES)
    for start in range(first + split * share, tl.minimum(end, first + (split + 1) * share), UNROLL * LANES):
        slot = start + tl.arange(0, UNROLL * LANES)
        inside = (slot < end)[:, None] & in_head[None, :]
        row = slot[:, None].to(tl.int64) * (2 * HALF)
        k = tl.load(key_ptr[None, :] + row, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(value_ptr[None, :] + row, mask=inside, other=0.0).to(tl.float32)
        k = tl.reshape(k, (UNROLL * LANES, BLOCK // 8, 8))
        v = tl.reshape(v, (UNROLL, LANES, BLOCK))
        new_maxima, new_totals, new_weighted = (), (), ()
        for i in tl.static_range(HEADS_PER_PROGRAM):
            scores = tl.sum(tl.sum(k * queries[i], 2), 1)
            scores = tl.reshape(tl.where(slot < end, scores, LOWEST), (UNROLL, LANES))
            maximum = tl.maximum(maxima[i], tl.max(scores, 0))
            rescale = tl.exp(maxima[i] - maximum)
            p = tl.where(tl.reshape(slot < end, (UNROLL, LANES)), tl.exp(scores - maximum[None, :]), 0.0)
            new_maxima += (maximum,)
            new_totals += (totals[i] * rescale + tl.sum(p, 0),)
            new_weighted += (weighted[i] * rescale[:, None] + tl.sum(p[:, :, None] * v, 0),)
        maxima, totals, weighted = new_maxima, new_totals, new_weighted
    for i in tl.static_range(HEADS_PER_PROGRAM):
        maximum = tl.max(maxima[i], 0)
        rescale = tl.exp(maxima[i] - maximum)
        total = tl.sum(totals[i] * rescale, 0)
        out = tl.sum(weighted[i] * rescale[:, None], 0)
        index = (sequence * H + head + i) * SPLITS + split
        if SPLITS == 1:
            out /= total
        else:
            tl.store(max_ptr + index, maximum)
            tl.store(total_ptr + index, total)
        tl.store(weighted_ptr + index * (2 * HALF) + element, out.to(weighted_ptr.dtype.element_ty), mask=in_head)


@triton.jit
def combine_splits_kernel(
    weighted_ptr, max_ptr, total_ptr,  # float32 (B, H, SPLITS, d) and twice (B, H, SPLITS)
    out_ptr,  # output (B, H, d)
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. An empty range has the lowest maximum and so counts nothing; the first is not empty."""
    head = tl.program_id(0).to(tl.int64)
    split, element = tl.arange(0, SPLITS), tl.arange(0, BLOCK)[None, :]
    inside = element < HEAD_DIM
    maxima = tl.load(max_ptr + head * SPLITS + split)
    scale = tl.exp(maxima - tl.max(maxima, 0))
    total = tl.sum(scale * tl.load(total_ptr + head * SPLITS + split), 0)
    weighted_ptr += (head * SPLITS + split[:, None]) * HEAD_DIM + element
    weighted = tl.load(weighted_ptr, mask=inside, other=0.0)
    out = tl.sum(scale[:, None] * weighted, 0, keep_dims=True) / total
    tl.store(out_ptr + head * HEAD_DIM + element, out.to(out_ptr.dtype.element_ty), mask=inside)


def splits_for(positions: int) -> int:
    """Ranges of a cache of `positions` to attend to in parallel, a power of two; combining them is a launch."""
    if positions <= 2 * POSITIONS_PER_SPLIT:
        return 1
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(positions, POSITIONS_PER_SPLIT)))


def product_geometry(rows: int, width: int) -> dict[str, int]:
    """The rows and columns of W that a program multiplies at once, and its warps. Not a function of the batch.

    One warp adds up its sums without waiting for another. Matrices with fewer rows give programs more warps, so that
    enough bytes are on their way. A warp reads 256 columns at once, 16 bytes of bfloat16 in each thread.
    """
    warps = 1 if rows >= 6144 else 2 if rows >= 3072 else 4
    return {"ROWS": 4, "BLOCK": min(256 * warps, tile_width(width)), "num_warps": warps}


def launch_product(kernel, x, norm, weight, others, outputs, **options):
    """Launch a kernel that multiplies norm(x) by weight (N, width). outputs: N, or for gate and up half of it."""
    geometry = product_geometry(*weight.shape)
    options |= {"eps": norm.eps, "KIND": norm.kind, "SEQUENCES": len(x)} | geometry
    grid = (triton.cdiv(len(weight), geometry["ROWS"]),)
    kernel[grid](x, norm.weight, norm.bias, weight, *others, outputs, weight.shape[1], **options)


def qkv(s, norm, weight, bias, out):
    """Fill out (B, N) float32 with W norm(s) + bias, from the stream s (B, D), weight (N, D) and bias (N,) or None.

    norm: an object with `kind`, "rms" or "layer"; `weight` and `bias`, each (D,) or None; and `eps`.
    """
    launch_product(decode_product_kernel, s, norm, weight, (bias, out), len(weight), ADDS=False)


def attention(packed, head_norm_weights, eps, tables, position, padding, keys, values, partials, out):
    """Fill `position` (1,) int64 of keys and values (B, K, S, d), and out (B, H, d) with attention over them.

    packed (B, (H + 2K) d): q, k and v, float32. head_norm_weights: of q and k, (d,) or None each. tables: cos and sin
    (max positions, d/2). padding (B,) int64: positions in front of each sequence that hold no token. partials, float32,
    are overwritten: weighted values (B, H, n, d), maxima and totals (B, H, n), where n is `splits_for(S)`.
    """
    batch, heads, head_dim = out.shape
    kv_heads, splits, width = keys.shape[1], splits_for(keys.shape[2]), tile_width(head_dim)
    weighted, maxima, totals = partials
    group = heads // kv_heads
    heads_per_program = max(n for n in range(1, MAX_HEADS_PER_PROGRAM + 1) if group % n == 0)
    lanes = 1024 // min(width, 256)  # positions that 128 threads read at once, 16 bytes of bfloat16 each
    decode_attention_kernel[batch * heads // heads_per_program, splits](
        packed, *head_norm_weights, *tables, position, padding, keys, values,
        out if splits == 1 else weighted, maxima, totals, keys.stride(0), keys.stride(1), eps,
        H=heads, K=kv_heads, HALF=head_dim // 2, SPLITS=splits,
        HEADS_PER_PROGRAM=heads_per_program, LANES=lanes, UNROLL=4, BLOCK=width, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        combine_splits_kernel[(batch * heads,)](
            weighted, maxima, totals, out, HEAD_DIM=head_dim, SPLITS=splits, BLOCK=width, num_warps=4
        )


def project(x, weight, s):
    """s (B, D) += W x, of x (B, N) and weight (D, N)."""
    launch_product(decode_product_kernel, x, NO_NORM, weight, (None, s), len(weight), ADDS=True)


def gate_up(s, norm, weight, hidden):
    """Fill hidden (B, F) from the stream s (B, D) and the packed weight (2F, D). norm: as for `qkv`."""
    launch_product(decode_gate_up_kernel, s, norm, weight, (hidden,), hidden.shape[1])
