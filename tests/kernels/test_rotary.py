"""`rotary` against multiplication by complex numbers of modulus one, in float64.

Tolerances: two products and a sum of float32, 2^-24 each: 2e-7; with float32 tables of their own rounding: 3e-7; with
the per-head norm in front: 5e-7. One rounding to bfloat16 is 1.66e-3: 1.75e-3.
"""

import pytest
import torch

B, T, H, K, D = 2, 7, 6, 3, 16


def tables(positions, theta=10000.0):
    """float64 angles (..., d/2) of positions, computed independently, with powers instead of exponentials."""
    return torch.stack([positions.double() / theta ** (2 * i / D) for i in range(D // 2)], dim=-1)


def rotated(x, angles):
    """Half-split pairs as complex numbers, times e^(i angle)."""
    x = x.double()
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    return torch.cat((z.real, z.imag), dim=-1)


def split(qkv):
    """q (B, T, H, d), k and v (B, T, K, d) of packed rows."""
    q, k, v = qkv[..., : H * D], qkv[..., H * D : (H + K) * D], qkv[..., (H + K) * D :]
    return q.reshape(B, T, H, D), k.reshape(B, T, K, D), v.reshape(B, T, K, D)


@pytest.mark.parametrize("first", [0, 1, 4095, 131071 - T + 1])
def test_queries_and_keys_are_multiplied_by_complex_numbers_at_any_position(kernel, draw, relative, first):
    qkv = draw(B, T, (H + 2 * K) * D)
    angles = tables(torch.arange(first, first + T))
    q, k, v = kernel.rotary(qkv, angles.cos().float(), angles.sin().float(), H, K)
    q64, k64, v64 = split(qkv)
    assert relative(q, rotated(q64, angles)) < 3e-7
    assert relative(k, rotated(k64, angles)) < 3e-7
    assert torch.equal(v, v64)


def test_sequences_may_have_different_positions(kernel, draw, relative):
    qkv = draw(B, T, (H + 2 * K) * D)
    angles = tables(torch.stack((torch.arange(T), torch.arange(T) + 100)))  # (B, T, d/2)
    q, k, _ = kernel.rotary(qkv, angles.cos().float(), angles.sin().float(), H, K)
    q64, k64, _ = split(qkv)
    assert relative(q, rotated(q64, angles)) < 3e-7
    assert relative(k, rotated(k64, angles)) < 3e-7


def test_the_product_of_a_query_and_a_key_depends_only_on_their_distance(kernel, draw):
    vector = draw(1, 1, (1 + 2) * D).expand(1, T, -1)
    products = []
    for first in (0, 1000):
        angles = tables(torch.arange(first, first + T))
        q, k, _ = kernel.rotary(vector, angles.cos().float(), angles.sin().float(), 1, 1)
        products.append(q[0, :, 0] @ k[0, :, 0].T)
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-5)
    assert (products[0][0] - products[0][0, 0]).abs().max() > 0.1  # and it does depend on it


def test_queries_and_keys_are_normalized_per_head_before_the_rotation(kernel, draw, relative):
    qkv, q_weight, k_weight = draw(B, T, (H + 2 * K) * D), draw(D, mean=1.0), draw(D, mean=1.0)
    angles = tables(torch.arange(T))
    q, k, v = kernel.rotary(qkv, angles.cos().float(), angles.sin().float(), H, K, q_weight, k_weight, 1e-3)
    for actual, x, weight in ((q, split(qkv)[0], q_weight), (k, split(qkv)[1], k_weight)):
        x = x.double()
        normalized = weight.double() * x / ((x**2).mean(-1, keepdim=True) + 1e-3).sqrt()
        assert relative(actual, rotated(normalized, angles)) < 5e-7
    assert torch.equal(v, split(qkv)[2])


@pytest.mark.parametrize("with_norm", [False, True])
def test_gradients_equal_those_of_the_float64_definition(kernel, draw, relative, with_norm):
    qkv, weights = draw(B, T, (H + 2 * K) * D), [draw(D, mean=1.0), draw(D, mean=1.0)] if with_norm else []
    angles = tables(torch.stack((torch.arange(50, 50 + T), torch.arange(T))))  # each sequence at its own positions
    upstream = [draw(B, T, H, D), draw(B, T, K, D), draw(B, T, K, D)]

    def definition(qkv, *weights):
        q, k, v = split(qkv)
        if weights:
            q, k = (g * x / ((x**2).mean(-1, keepdim=True) + 1e-3).sqrt() for g, x in zip(weights, (q, k), strict=True))
        return rotated(q, angles), rotated(k, angles), v

    def gradients(function, inputs):
        inputs = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = function(*inputs)
        return torch.autograd.grad(outputs, inputs, [g.to(outputs[0].dtype) for g in upstream])

    def ours(qkv, *weights):
        return kernel.rotary(qkv, angles.cos().float(), angles.sin().float(), H, K, *(weights or (None, None)), 1e-3)

    expected = gradients(definition, [x.double() for x in (qkv, *weights)])
    for actual, gradient in zip(gradients(ours, [qkv, *weights]), expected, strict=True):
        assert relative(actual, gradient) < 1e-6


def test_half_precision_is_rounded_once(kernel, draw, relative):
    qkv = draw(B, T, (H + 2 * K) * D, dtype=torch.bfloat16)
    angles = tables(torch.arange(T) + 1000)
    q, k, _ = kernel.rotary(qkv, angles.cos().float(), angles.sin().float(), H, K)
    assert q.dtype == k.dtype == torch.bfloat16
    # 672 and 336 values: their sample of the rounding error scatters by a few percent around 1.66e-3
    assert relative(q, rotated(split(qkv)[0], angles)) < 1.9e-3
    assert relative(k, rotated(split(qkv)[1], angles)) < 1.9e-3
