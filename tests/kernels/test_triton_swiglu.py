"""The Triton SwiGLU where the general tests do not go: sizes, dtypes, the one-kernel MLP, what is kept.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import swiglu


@pytest.mark.parametrize(("rows", "width"), [(3, 704), (1, 8), (2, 1030), (5, 2824)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_and_product_are_rounded_once_forward_and_backward(draw, relative, rounding, dtype, rows, width):
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)
    wider = draw(rows, 2 * width + 16, dtype=dtype)
    wider[:, :-16] = packed
    doubles = packed.double().requires_grad_()
    gate, up = doubles.chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    (gradient,) = torch.autograd.grad(expected, doubles, upstream.double())
    for x in (packed, wider[:, :-16]):
        hidden = swiglu.swiglu_forward(x)
        dpacked, again = swiglu.swiglu_backward(upstream, x)
        assert torch.equal(hidden, again)
        assert relative(hidden, expected.detach()) < rounding(dtype, hidden.numel())
        assert relative(dpacked, gradient) < rounding(dtype, dpacked.numel())


@pytest.mark.parametrize(("rows", "hidden_size", "width"), [(70, 72, 136), (1, 8, 8), (129, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mlp_in_one_kernel_equals_float64_and_keeps_the_products(
    draw, relative, rounding, dtype, rows, hidden_size, width
):
    x, weight = draw(rows, hidden_size, dtype=dtype), draw(2 * width, hidden_size, std=0.2, mean=0.02, dtype=dtype)
    products = x.double() @ weight.double().T
    gate, up = products.chunk(2, -1)
    hidden, kept = swiglu.swiglu_gate_up(x, weight, True)
    assert relative(kept, products) < rounding(dtype, kept.numel())
    assert relative(hidden, gate * torch.sigmoid(gate) * up) < rounding(dtype, hidden.numel())
    alone, nothing = swiglu.swiglu_gate_up(x, weight, False)
    assert torch.equal(alone, hidden) and not nothing.numel()


def test_the_mlp_takes_the_one_kernel_where_it_was_measured_to_win_and_gives_the_same_gradients(
    draw, relative, monkeypatch
):
    inputs = draw(2, 5, 64), draw(2 * 88, 64, std=0.2, mean=0.02), draw(64, 88, std=0.2, mean=0.02)
    upstream = draw(2, 5, 64)

    def run(function, tensors):
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        y = function(*tensors)
        return y.detach(), *torch.autograd.grad(y, tensors, upstream.to(y.dtype))

    assert not swiglu.one_kernel_wins(10, 64, 88)
    two = run(gpu.swiglu_mlp, inputs)
    monkeypatch.setattr(swiglu, "WINS", ((10, 64),))
    assert swiglu.one_kernel_wins(10, 64, 88)
    assert not (swiglu.one_kernel_wins(11, 64, 88) or swiglu.one_kernel_wins(10, 72, 88))
    assert not swiglu.one_kernel_wins(10, 64, 84)  # not a size that descriptors take
    one = run(gpu.swiglu_mlp, inputs)
    expected = run(reference.swiglu_mlp, [tensor.double() for tensor in inputs])
    for a, b, c in zip(one, two, expected, strict=True):
        assert relative(a, c) < 1e-6 and relative(b, c) < 1e-6


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]
