"""The launches of a decoding step against float64, each alone.

Tolerances: sums of about a thousand float32 products: 1e-6 (`rounding`); half precision adds the result's rounding.
Whatever a kernel must not read is NaN, and whatever it must not write is compared afterwards.
"""

from types import SimpleNamespace

import pytest
import torch

from kernels import decode, gpu
from tests.kernels import test_norm, test_rotary

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

EPS = 0.3  # as large as the squares that it is added to, so that a missing or misplaced eps is seen
NORMS = {"rms": (True, False), "layer": (True, True), "layer without parameters": (False, False)}


def guarded(tensor):
    """The same tensor with NaN before and behind it in memory."""
    storage = torch.full((tensor.numel() + 4096,), float("nan"), dtype=tensor.dtype)
    storage[2048:-2048] = tensor.flatten()
    return storage[2048:-2048].view(tensor.shape)


def intact(tensor):
    """Whether nothing was written before or behind a guarded tensor."""
    storage = tensor.as_strided((tensor.numel() + 4096,), (1,), tensor.storage_offset() - 2048)
    return storage[:2048].isnan().all() and storage[-2048:].isnan().all()


def empty(*shape, dtype=torch.float32):
    return guarded(torch.full(shape, float("nan"), dtype=dtype))


def normalized(s, norm):
    """In float64."""
    return test_norm.definition(s.double(), norm.weight, norm.bias, kind=norm.kind, eps=norm.eps)[0]


# Batches of one, an odd number and all; rows that the rows of a program do not divide; widths that 8 divides and not
# 16, that nothing divides, and that take one and two turns of the loop.
PRODUCTS = [
    (torch.float32, "rms", 1, 7, 520, "few rows"),
    (torch.float32, "layer", 3, 10, 1304, "many rows"),
    (torch.float16, "layer without parameters", 8, 9, 131, "few rows"),
    (torch.bfloat16, "rms", 8, 6, 1304, "few rows"),
    (torch.bfloat16, "layer", 5, 13, 48, "many rows"),
    (torch.float16, "layer", 1, 5, 2200, "many rows"),  # two turns of the loop that sums the mean
]


@pytest.mark.parametrize(("dtype", "name", "batch", "rows", "width", "geometry"), PRODUCTS)
def test_norm_and_bias_or_activation_or_residual_addition_are_in_the_launch_of_a_product(
    draw, relative, rounding, monkeypatch, dtype, name, batch, rows, width, geometry
):
    choose = decode.product_geometry
    if geometry == "many rows":  # these matrices are small
        monkeypatch.setattr(decode, "product_geometry", lambda rows, width: choose(10000, width))

    def assert_equal(result, expected):
        assert intact(result)
        for ours, row in zip(result, expected, strict=True):
            assert relative(ours, row) < rounding(result.dtype, rows)

    s = guarded(draw(batch, width, mean=0.7, dtype=dtype))
    vectors = [guarded(draw(width, mean=1.0)) if present else None for present in NORMS[name]]
    norm = SimpleNamespace(kind=name.split()[0], weight=vectors[0], bias=vectors[1], eps=EPS)
    weight = guarded(draw(2 * rows, width, std=0.1, mean=0.01, dtype=dtype))
    gate, up = (normalized(s, norm) @ weight.double().T).chunk(2, -1)
    hidden = empty(batch, rows, dtype=dtype)
    decode.gate_up(s, norm, weight, hidden)
    assert_equal(hidden, gate * torch.sigmoid(gate) * up)

    weight = guarded(weight[:rows])
    for bias in (None, guarded(draw(rows, mean=1.0, dtype=dtype))):
        out = empty(batch, rows)
        decode.qkv(s, norm, weight, bias, out)
        assert_equal(out, gate + (0 if bias is None else bias.double()))

    weight = guarded(draw(rows, width, std=3 * width**-0.5, dtype=dtype))  # a product larger than the stream
    stream = guarded(draw(batch, rows, dtype=dtype))
    expected = stream.double() + s.double() @ weight.double().T
    decode.project(s, weight, stream)
    assert_equal(stream, expected)


def test_layernorm_keeps_the_digits_of_a_small_deviation_from_a_large_mean(draw, relative):
    """A mean near 1,000 is rounded by up to 2^-15 = 3e-5 in float32; weights with mean 0 do not enlarge that."""
    s, weight = draw(2, 520, mean=1000.0), draw(6, 520, std=0.1, mean=0.0)
    norm, out = SimpleNamespace(kind="layer", weight=None, bias=None, eps=1e-5), empty(2, 6)
    decode.qkv(s, norm, weight, None, out)
    assert relative(out, normalized(s, norm) @ weight.double().T) < 6e-5


# Fillings of the cache before the new position, counted in positions that a program reads at once (a turn) and one more
# or less, so that the last turn of a range, the last range and empty ranges all occur; in one batch, since each
# sequence may have its own padding.
TURN = {20: 128, 24: 128, 64: 64, 128: 32}
HEADS = [
    # dtype, head width, query and key/value heads, head norms, ranges
    (torch.float32, 24, 6, 2, True, 2),
    (torch.float32, 64, 7, 1, False, 1),
    (torch.bfloat16, 128, 2, 1, True, 4),
    (torch.float16, 20, 9, 1, True, 2),
    (torch.bfloat16, 24, 2, 2, False, 2),
]


@pytest.mark.parametrize(("dtype", "width", "heads", "kv_heads", "head_norms", "splits"), HEADS)
def test_attention_over_every_filling_of_the_cache(
    draw, relative, rounding, monkeypatch, dtype, width, heads, kv_heads, head_norms, splits
):
    monkeypatch.setattr(decode, "splits_for", lambda positions: splits)
    turn = TURN[width]
    fillings = [0, turn - 1, turn, turn + 1, 2 * turn * (splits - 1), 2 * turn * (splits - 1) + 1]
    position = max(fillings) + 3
    padding = torch.tensor([position - filling for filling in fillings])
    batch, size = len(fillings), position + 5
    # q and k point away from each other: exp(score) is 0 unless the maximum is subtracted. The ranges' maxima differ.
    far = 180 / width**0.5
    head_weights = (None, None)
    if head_norms:
        head_weights = guarded(draw(width, mean=1.2, std=0.2)), guarded(draw(width, mean=1.2 * far, std=0.2 * far))
    new_k = draw(batch, kv_heads * width, mean=-1.0, std=0.2) * (1 if head_norms else far)
    new_v = draw(batch, kv_heads * width)
    qkv = guarded(torch.cat((draw(batch, heads * width, mean=1.0, std=0.2), new_k, new_v), 1))
    heights = torch.where(torch.arange(size) // turn % 2 == 0, -far, -1.02 * far)[:, None]
    room = [torch.full((batch, kv_heads + 1, size + 2, width), float("nan"), dtype=dtype) for _ in range(2)]
    keys, values = (cache[:, :kv_heads, 1 : size + 1] for cache in room)  # strides other than those of its shape
    keys.copy_(heights + draw(batch, kv_heads, size, width, mean=0.0))
    values.copy_(draw(batch, kv_heads, size, width))
    for cache in (keys, values):
        for b, pad in enumerate(padding):
            cache[b, :, :pad], cache[b, :, position:] = float("nan"), float("nan")
    before = [cache.clone() for cache in room]
    angles = guarded(draw(position + 1, width // 2, mean=0.0, std=0.3))
    tables = guarded(angles.cos()), guarded(angles.sin())
    partials = empty(batch, heads, splits, width), empty(batch, heads, splits), empty(batch, heads, splits)
    out = empty(batch, heads, width, dtype=dtype)
    decode.attention(qkv, head_weights, EPS, tables, torch.tensor([position]), padding, keys, values, partials, out)

    tables = [table[position - padding] for table in tables]
    _, definition = test_rotary.pair(None, None, heads, kv_heads, tables, EPS)
    q, k, v = definition(qkv.double(), *(head_weights if head_norms else ()))
    assert relative(keys[:, :, position], k) < rounding(dtype, k.numel())
    assert torch.equal(values[:, :, position], v.to(dtype))
    expected, largest = torch.empty(out.shape, dtype=torch.float64), 0.0
    for b, pad in enumerate(padding):
        filled_k, filled_v = (
            cache[b, :, pad : position + 1].double().repeat_interleave(heads // kv_heads, 0) for cache in (keys, values)
        )
        scores = (filled_k @ q[b, :, :, None])[..., 0] / width**0.5
        expected[b] = (torch.softmax(scores, -1)[:, None] @ filled_v)[:, 0]
        assert scores.max() < -110
        largest = max(largest, -scores.min().item())
    # A score in float32 is wrong by a few units in its last place, and exp(score) by that much relatively.
    assert relative(out, expected) < rounding(dtype, out.numel()) + 4 * 2**-24 * largest
    for cache, copy, view in zip(room, before, (keys, values), strict=True):  # no other position changes
        view[:, :, position] = copy[:, :kv_heads, 1 + position]
        assert torch.equal(cache.nan_to_num(7.0), copy.nan_to_num(7.0))
    assert intact(out) and all(map(intact, partials))
