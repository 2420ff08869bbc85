"""The Triton rotary positions beyond the tests of all implementations: any heads, norms of heads, strides.

Tolerances: a few float32 roundings: 1e-6; half precision adds one (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import rope


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 4), (6, 2)])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
@pytest.mark.parametrize("head_norms", [False, True])
def test_rotation_and_its_gradients_are_rounded_once_for_any_heads(
    draw, relative, rounding, heads, kv_heads, width, head_norms
):
    angles = draw(2, 5, width // 2, mean=500.0, std=300.0, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    head_weights = [draw(width, mean=1.0) for _ in range(2)] if head_norms else []
    for dtype in (torch.float32, torch.bfloat16):
        qkv = draw(2, 5, (heads + 2 * kv_heads) * width, dtype=dtype)
        before = qkv.clone()
        # as from attention: heads before positions; and v with gaps
        upstream = [draw(2, n, 5, width, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads)]
        upstream.append(draw(2, 5, kv_heads, 2 * width, dtype=dtype)[..., ::2])

        def run(function, tensors, tables, upstream=upstream):
            tensors = [tensor.detach().requires_grad_() for tensor in tensors]
            weights = tensors[1:] or [None, None]
            out = function(tensors[0], *tables, heads, kv_heads, *weights, 1e-3)
            return out, torch.autograd.grad(out, tensors, [u.to(o.dtype) for u, o in zip(upstream, out, strict=True)])

        out, gradients = run(gpu.rotary, [qkv, *head_weights], (cos, sin))
        doubles = [t.double() for t in (qkv, *head_weights)]
        out64, gradients64 = run(float64_rotary, doubles, (cos.double(), sin.double()))
        for ours, exact in zip((*out, *gradients), (*out64, *gradients64), strict=True):
            assert relative(ours, exact) < rounding(ours.dtype, ours.numel())
        assert torch.equal(qkv, before)


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


def test_the_backward_rotation_undoes_the_forward_rotation(draw, relative):
    qkv, angles = draw(1, 7, 3 * 64), draw(7, 32, std=100.0)
    cos, sin = angles.cos(), angles.sin()
    q, k = rope.rotary_forward(qkv, cos, sin, 1, 1, None, None, 0.0)
    v = qkv[..., 128:].unflatten(-1, (1, 64))
    back, *_ = rope.rotary_backward(q, k, v, None, cos, sin, None, None, 0.0)
    assert relative(back, qkv.double()) < 3e-7
