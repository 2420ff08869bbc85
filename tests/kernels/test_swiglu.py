"""`swiglu` and the MLP against float64, forward and backward.

Tolerances: float32 takes a few roundings: 1e-6; half precision one more (`rounding` in conftest.py). On a CPU silu is
rounded before its product with up, and in the backward pass the product of the upstream gradient and up: twice that.
"""

import pytest
import torch

from kernels import cpu, gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = [(F32, 3, 704), (BF16, 1, 8), (F16, 2, 1030), (BF16, 5, 2824), (F16, 70, 40), (F32, 33, 7)]


def definition(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize(("dtype", "rows", "width"), SIZES)
def test_silu_and_product_are_rounded_once_in_both_passes(kernel, draw, assert_exact, rounding, dtype, rows, width):
    """In Triton narrow rows share a program. Strides may be odd, 0, or 2 in the last dimension."""
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)
    packed[0, 0] = -100  # exp(100) is infinite in float32, and silu(-100) is 0

    def spread(t, stride, step=1):
        """The same numbers in a wider tensor."""
        return torch.zeros(rows, stride, dtype=dtype)[:, 1 : 1 + step * t.shape[1] : step].copy_(t)

    def tolerance(dtype, count):
        return rounding(dtype, count) * (2 if kernel is cpu else 1)

    for gate_up, dhidden in (
        (packed, upstream),
        (spread(packed, 2 * width + 3), spread(upstream, width + 4)),
        (spread(packed, 4 * width + 1, step=2), spread(upstream, 2 * width + 1, step=2)),
        (packed[None], upstream[:1].expand(1, rows, -1)),  # one gradient for all rows
    ):
        assert_exact(kernel.swiglu, definition, (gate_up,), (dhidden,), tolerance)


# Float32 sums of about a hundred products, twice: 1e-6. In bfloat16 the two products, that of gate and up and on a CPU
# silu are rounded, each 1.66e-3, and each output adds the errors of three of them: 5e-3.
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-6), (BF16, 5e-3)])
def test_the_mlp_equals_float64_and_keeps_no_hidden_elements(kernel, draw, evaluate, relative, dtype, tolerance):
    inputs = draw(3, 11, 64).to(dtype), draw(176, 64, mean=0.02, std=0.2), draw(64, 88, mean=0.02, std=0.2)
    upstream, saved = draw(3, 11, 64).to(dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = evaluate(kernel.swiglu_mlp, inputs, (upstream,))
    assert results[0].dtype == dtype
    assert kernel is not gpu or {t.shape for t in saved if t.ndim == 3} == {(3, 11, 64), (3, 11, 176)}
    rounded = [tensor.to(dtype).double() for tensor in inputs]
    mlp = lambda x, gate_up, down: definition(x @ gate_up.T) @ down.T  # noqa: E731
    expected = evaluate(mlp, rounded, (upstream.double(),))
    assert all(relative(ours, exact) < tolerance for ours, exact in zip(results, expected, strict=True))
