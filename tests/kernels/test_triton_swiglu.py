"""The Triton SwiGLU beyond the tests of all implementations: sizes, dtypes, what is kept.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import swiglu


@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [
        (torch.float32, 3, 704),
        (torch.bfloat16, 1, 8),
        (torch.float16, 2, 1030),
        (torch.bfloat16, 5, 2824),
        (torch.float16, 70, 40),
        (torch.float32, 33, 7),
    ],
)
def test_silu_and_product_are_rounded_once_forward_and_backward(draw, relative, rounding, dtype, rows, width):
    """Narrow rows share a program, wide ones have several; strides may be odd, 0, or 2 in the last dimension."""
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)

    def spread(t, stride, step=1):
        """The same numbers in a wider tensor."""
        return torch.zeros(rows, stride, dtype=dtype)[:, 1 : 1 + step * t.shape[1] : step].copy_(t)

    layouts = [
        (packed, upstream),
        (spread(packed, 2 * width + 3), spread(upstream, width + 4)),
        (spread(packed, 2 * width // 8 * 8 + 16), spread(upstream, width // 8 * 8 + 16)),  # 8 divides the strides
        (spread(packed, 4 * width + 1, step=2), spread(upstream, 2 * width + 1, step=2)),
        (packed, upstream[:1].expand(rows, -1)),  # one gradient for all rows
    ]
    for gate_up, dhidden in layouts:
        doubles = packed.double().requires_grad_()
        gate, up = doubles.chunk(2, -1)
        expected = gate / (1 + torch.exp(-gate)) * up
        (gradient,) = torch.autograd.grad(expected, doubles, dhidden.double())
        hidden = swiglu.swiglu_forward(gate_up)
        dgate_up, again = swiglu.swiglu_backward(dhidden, gate_up)
        assert torch.equal(hidden, again)
        assert relative(hidden, expected.detach()) < rounding(dtype, hidden.numel())
        for ours, exact in zip(dgate_up.chunk(2, -1), gradient.chunk(2, -1), strict=True):
            assert relative(ours, exact) < rounding(dtype, ours.numel())


def test_gates_far_from_zero_saturate():
    gate_up = torch.tensor([[-80.0, -30.0, 30.0, 80.0, 2.0, 2.0, 2.0, 2.0]])
    assert torch.equal(swiglu.swiglu_forward(gate_up)[0, 2:], torch.tensor([60.0, 160.0]))
    dgate_up, _ = swiglu.swiglu_backward(torch.ones(1, 4), gate_up)
    expected = torch.tensor([[0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 30.0, 80.0]])  # silu' is 0 or 1, times up; and silu
    torch.testing.assert_close(dgate_up, expected, rtol=0, atol=1e-10)


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]
