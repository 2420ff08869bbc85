"""The launches of a decoding step against float64, each alone.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds the rounding of the result.
"""

import pytest
import torch

from kernels import decode, gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

B, D, H, K, S, EPS = 2, 520, 4, 2, 11, 1e-3  # rows longer than a tile, and 8 divides them, not 16
DTYPES = [torch.float32, torch.bfloat16]


def normalized(s, kind, weight, bias):
    """The textbook formulas in float64."""
    s = s.double()
    if kind == "layer":
        s = s - s.mean(-1, keepdim=True)
    s = s / (s.square().mean(-1, keepdim=True) + EPS).sqrt()
    return s * weight.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "head_norm", "width"), [("rms", True, 24), ("layer", False, 24), ("layer", True, 20)])
def test_norm_product_rotation_and_cache_are_one_launch(draw, relative, rounding, dtype, kind, head_norm, width):
    s, norm_weight, norm_bias = draw(B, D, dtype=dtype), draw(D, mean=1.0), draw(D) if kind == "layer" else None
    weight, bias = draw((H + 2 * K) * width, D, std=0.1, mean=0.01, dtype=dtype), draw((H + 2 * K) * width)
    head_weights = (draw(width, mean=1.0), draw(width, mean=1.0)) if head_norm else (None, None)
    angles = draw(S, width // 2, std=3.0)
    position, padding = torch.tensor([7]), torch.tensor([0, 3])
    q = torch.full((B, H, width), float("nan"), dtype=dtype)
    keys, values = (draw(B, K, S, width, dtype=dtype) for _ in range(2))
    before = keys.clone(), values.clone()
    tables = angles.cos(), angles.sin()
    norm = kind, norm_weight, norm_bias, EPS
    decode.qkv(s, norm, weight, bias, head_weights, tables, position, padding, q, keys, values)

    packed = normalized(s, kind, norm_weight, norm_bias) @ weight.double().T + bias.double()
    heads = packed.unflatten(-1, (H + 2 * K, width)).split((H, K, K), dim=1)
    rotary_position = 7 - padding
    for found, x, head_weight in ((q, heads[0], head_weights[0]), (keys[:, :, 7], heads[1], head_weights[1])):
        if head_norm:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * head_weight.double()
        cos, sin = (table[rotary_position].double()[:, None] for table in tables)
        a, b = x.chunk(2, -1)
        assert relative(found, torch.cat((a * cos - b * sin, b * cos + a * sin), -1)) < rounding(dtype, found.numel())
    assert relative(values[:, :, 7], heads[2]) < rounding(dtype, B * K * width)
    for cache, copy in zip((keys, values), before, strict=True):  # no other position changes
        cache[:, :, 7] = copy[:, :, 7]
        assert torch.equal(cache, copy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [1, 31, 300])
def test_attention_over_the_cache_and_the_product_after_it_add_to_the_stream(
    draw, relative, rounding, dtype, positions
):
    width, size = 24, 301
    q, keys, values = draw(B, H, width, dtype=dtype), draw(B, K, size, width, dtype=dtype), draw(B, K, size, width)
    values = values.to(dtype)
    first = min(5, positions - 1)
    keys[:, :, positions:], values[0, :, :first] = float("nan"), float("nan")  # these must not be read
    partials = tuple(
        torch.full(shape, float("nan")) for shape in ((B, H, decode.SPLITS, width), *[(B, H, decode.SPLITS)] * 2)
    )
    padding = torch.tensor([first, 0])
    decode.attention(q, keys, values, torch.tensor([positions - 1]), padding, partials)
    weight, s = draw(D, H * width, std=0.1, mean=0.01, dtype=dtype), draw(B, D, dtype=dtype)
    out = s.clone()
    decode.project(partials, weight, out)

    expected = torch.empty(B, H, width, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            k, v = (cache[b, h // (H // K), padding[b] : positions].double() for cache in (keys, values))
            expected[b, h] = torch.softmax(k @ q[b, h].double() / width**0.5, 0) @ v
    expected = s.double() + expected.flatten(1) @ weight.double().T
    assert relative(out, expected) < rounding(dtype, out.numel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_gate_up_and_down_add_to_the_stream(draw, relative, rounding, dtype, kind):
    width = 89  # not a multiple of the rows of a program
    s, norm_weight, bias = draw(B, D, dtype=dtype), draw(D, mean=1.0), draw(D) if kind == "layer" else None
    gate_up, down = (draw(*shape, std=0.1, mean=0.01, dtype=dtype) for shape in ((2 * width, D), (D, width)))
    hidden, out = torch.full((B, width), float("nan"), dtype=dtype), s.clone()
    decode.gate_up(s, (kind, norm_weight, bias, EPS), gate_up, hidden)
    gate, up = (normalized(s, kind, norm_weight, bias) @ gate_up.double().T).chunk(2, -1)
    assert relative(hidden, gate * torch.sigmoid(gate) * up) < rounding(dtype, hidden.numel())
    decode.project(hidden, down, out)
    assert relative(out, s.double() + hidden.double() @ down.double().T) < rounding(dtype, out.numel())
