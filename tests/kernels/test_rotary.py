"""`rotary` against multiplication by complex numbers of modulus one, in float64; the Triton kernels for any heads.

Tolerances: a few float32 roundings of 2^-24: 1e-6; half precision adds one (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu
from tests.kernels.conftest import triton_only

B, T, H, K, D = 2, 7, 6, 3, 16
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def pair(kernel, angles, heads=H, kv_heads=K, tables=None, eps=1e-3):
    """Ours and the definition: RMSNorm per head where there are weights, then half-split pairs times e^(i angle)."""
    cos, sin = (angles.cos().float(), angles.sin().float()) if tables is None else tables

    def ours(qkv, *weights):
        return kernel.rotary(qkv, cos, sin, heads, kv_heads, *(weights or (None, None)), eps)

    def definition(qkv, *weights):
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=-2)
        if weights:
            q, k = (g * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() for g, x in zip(weights, (q, k), strict=True))
        turn = torch.complex(cos.double(), sin.double()).unsqueeze(-2)
        q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
        return *(torch.cat((z.real, z.imag), dim=-1) for z in (q, k)), v

    return ours, definition


@pytest.mark.parametrize(("with_norm", "dtype"), [(False, F32), (True, F32), (False, BF16), (True, BF16)])
def test_heads_are_multiplied_by_complex_numbers_and_so_are_gradients(kernel, draw, assert_exact, with_norm, dtype):
    inputs = [draw(B, T, (H + 2 * K) * D, dtype=dtype), *(draw(D, mean=1.0) for _ in range(2) if with_norm)]
    positions = torch.arange(50, 50 + T)
    if with_norm:  # each sequence at its own positions
        positions = torch.stack((positions, torch.arange(T)))
    upstream = [draw(B, T, heads, D, dtype=dtype) for heads in (H, K, K)]
    angles = torch.stack([positions.double() / 10000.0 ** (2 * i / D) for i in range(D // 2)], dim=-1)  # by powers
    assert_exact(*pair(kernel, angles), inputs, upstream)


SHAPES = {  # heads of q and of k, width of a head, sequences, length: blocks of tokens end inside sequences
    "one token of one head": (1, 1, 64, 1, 1),
    "one tile of k for three of q": (3, 1, 80, 2, 37),
    "two tiles of q, several blocks for each program": (8, 4, 128, 2, 19),
    "half a head is no power of two": (6, 2, 96, 2, 17),
    "half a head is not divisible by 8": (4, 2, 20, 3, 65),
    "as many heads of k as of q": (3, 3, 32, 2, 5),
}
CASES = [*zip(SHAPES, [False, True] * 3, [F32, F32, F16, F16, BF16, BF16], strict=True)]  # norms of heads, dtypes


@triton_only
@pytest.mark.parametrize(("shape", "head_norms", "dtype"), CASES)
def test_triton_results_are_rounded_once_for_all_heads_strides(draw, assert_exact, shape, head_norms, dtype):
    def strided(*shape: int, gap: int, dtype: torch.dtype = F32) -> torch.Tensor:
        """A random tensor whose strides and first address are all odd and, thanks to `gap`, all different."""
        *outer, last = shape
        wide = draw(*(n + 2 for n in outer), last + last % 2 + gap, dtype=dtype)
        return wide[(*(slice(1, -1) for _ in outer), slice(1, last + 1))]

    heads, kv_heads, width, batch, length = SHAPES[shape]
    angles = draw(batch, length, width // 2, mean=500.0, std=300.0, dtype=torch.float64)
    cos, sin = strided(*angles.shape, gap=3), strided(*angles.shape, gap=7)  # each sequence has its own positions
    tables = cos.copy_(angles.cos()), sin.copy_(angles.sin())
    inputs = [strided(batch, length, (heads + 2 * kv_heads) * width, gap=9, dtype=dtype)]
    inputs += [draw(width, mean=1.0, dtype=BF16) for _ in range(2 * head_norms)]
    gaps = (heads, 3), (kv_heads, 5), (kv_heads, 7)
    upstream = [strided(batch, length, n, width, gap=gap, dtype=dtype) for n, gap in gaps]
    q, k, v = upstream  # as from attention, heads before positions; elements before heads; one gradient for all
    other = [x.transpose(i, 2).contiguous().transpose(i, 2) for i, x in ((1, q), (3, k))]
    other.append(v[:1, :1, :1].expand(v.shape))
    for gradients in (upstream, other):
        assert_exact(*pair(gpu, None, heads, kv_heads, tables), inputs, gradients)
