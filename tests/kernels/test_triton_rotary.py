"""The Triton rotary positions beyond the tests of all implementations: any heads, norms of heads, strides.

Tolerances: a few float32 roundings: 1e-6; half precision adds one (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = {  # heads of q and of k, width of a head, sequences, length: blocks of tokens end inside sequences
    "one token of one head": (1, 1, 64, 1, 1),
    "one tile of k for three of q": (3, 1, 80, 2, 37),
    "two tiles of q, several blocks for each program": (8, 4, 128, 2, 19),
    "half a head is no power of two": (6, 2, 96, 2, 17),
    "half a head is not divisible by 8": (4, 2, 20, 3, 65),
    "as many heads of k as of q": (3, 3, 32, 2, 5),
}
CASES = [*zip(SHAPES, [False, True] * 3, [F32, F32, F16, F16, BF16, BF16], strict=True)]  # norms of heads, dtypes


@pytest.fixture
def strided(draw):
    """Random tensors whose strides and first address are all odd and, thanks to `gap`, all different."""

    def make(*shape: int, gap: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
        *outer, last = shape
        wide = draw(*(n + 2 for n in outer), last + last % 2 + gap, dtype=dtype, **options)
        return wide[(*(slice(1, -1) for _ in outer), slice(1, last + 1))]

    return make


def float64_rotary(qkv, cos, sin, heads, kv_heads, q_weight, k_weight, eps):
    """The definition, in the dtype of its inputs."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=-2)

    def rotate(x, weight):
        if weight is not None:
            x = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        a, b = x.chunk(2, -1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return rotate(q, q_weight), rotate(k, k_weight), v


def run(function, tensors, tables, heads, kv_heads, upstream):
    """Outputs of qkv and perhaps norm weights, and their gradients; outputs whose upstream is None are not used."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    weights = tensors[1:] or [None, None]
    out = function(tensors[0], *tables, heads, kv_heads, *weights, 1e-3)
    used = [(o, u.to(o.dtype)) for o, u in zip(out, upstream, strict=True) if u is not None]
    outputs, upstream = zip(*used, strict=True)
    return out, torch.autograd.grad(outputs, tensors, upstream, materialize_grads=True)


def assert_equals_float64(relative, rounding, tensors, tables, heads, kv_heads, upstream):
    before = [tensor.clone() for tensor in (*tensors, *tables)]
    out, gradients = run(gpu.rotary, tensors, tables, heads, kv_heads, upstream)
    doubles = [tensor.double() for tensor in tensors], [table.double() for table in tables]
    out64, gradients64 = run(float64_rotary, *doubles, heads, kv_heads, upstream)
    for ours, exact in zip((*out, *gradients), (*out64, *gradients64), strict=True):
        assert relative(ours, exact) < rounding(ours.dtype, ours.numel())
    assert [g.dtype for g in gradients] == [t.dtype for t in tensors]
    assert all(map(torch.equal, (*tensors, *tables), before))


@pytest.mark.parametrize(("shape", "head_norms", "dtype"), CASES)
def test_rotation_and_its_gradients_are_rounded_once_for_any_heads(draw, relative, rounding, shape, head_norms, dtype):
    heads, kv_heads, width, batch, length = SHAPES[shape]
    angles = draw(length, width // 2, mean=500.0, std=300.0, dtype=torch.float64)
    tables = angles.cos().float(), angles.sin().float()
    tensors = [draw(batch, length, (heads + 2 * kv_heads) * width, dtype=dtype)]
    tensors += [draw(width, mean=1.0) for _ in range(2 * head_norms)]
    # as from attention: heads before positions
    upstream = [draw(batch, n, length, width, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    assert_equals_float64(relative, rounding, tensors, tables, heads, kv_heads, upstream)


@pytest.mark.parametrize(("shape", "head_norms"), [*zip([*SHAPES][1::2], [False, True, True], strict=True)])
def test_all_tensors_may_have_strides_of_their_own_that_8_does_not_divide(
    draw, strided, relative, rounding, shape, head_norms
):
    heads, kv_heads, width, batch, length = SHAPES[shape]
    angles = strided(batch, length, width // 2, gap=5, mean=500.0, std=300.0, dtype=torch.float64)
    cos, sin = strided(*angles.shape, gap=3), strided(*angles.shape, gap=7)  # of sequences with their own positions
    cos.copy_(angles.cos())
    sin.copy_(angles.sin())
    tensors = [strided(batch, length, (heads + 2 * kv_heads) * width, gap=9)]
    tensors += [draw(width, mean=1.0).bfloat16() for _ in range(2 * head_norms)]
    upstream = [strided(batch, length, n, width, gap=gap) for n, gap in ((heads, 3), (kv_heads, 5), (kv_heads, 7))]
    for gradients in (upstream, [gradient.transpose(2, 3).contiguous().transpose(2, 3) for gradient in upstream]):
        assert_equals_float64(relative, rounding, tensors, (cos, sin), heads, kv_heads, gradients)


@pytest.mark.parametrize(("expanded", "head_norms"), [((0, 1), False), ((2,), True), ((0, 1, 2, 3), True)])
def test_gradients_may_be_expanded(draw, relative, rounding, expanded, head_norms):
    tensors = [draw(2, 9, 8 * 32), *(draw(32, mean=1.0) for _ in range(2 * head_norms))]
    angles = draw(1, 9, 16, std=100.0, dtype=torch.float64)  # one table for both sequences
    upstream = []
    for n in (4, 2, 2):
        shape = 2, 9, n, 32
        upstream.append(draw(*(1 if axis in expanded else size for axis, size in enumerate(shape))).expand(shape))
    tables = angles.cos().float(), angles.sin().float()
    assert_equals_float64(relative, rounding, tensors, tables, 4, 2, upstream)
