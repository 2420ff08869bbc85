"""Of every function: any input may be frozen and any output unused, and nothing given is written to; and `linear`."""

import pytest
import torch

from kernels import cpu

ANGLES, TARGETS, TOKEN_WEIGHTS = torch.linspace(-2, 3, 40).view(5, 8), torch.arange(10), torch.linspace(-1, 2, 10)
CALLS = {  # a call, and the shapes of its inputs
    "norm": (
        lambda kernel, x, weight, bias, residual: kernel.normalize(x, weight, bias, residual, kind="layer", eps=1e-5),
        [(2, 5, 16), (16,), (16,), (2, 5, 16)],
    ),
    "rotary": (lambda kernel, qkv: kernel.rotary(qkv, ANGLES.cos(), ANGLES.sin(), 2, 1), [(1, 5, 64)]),
    "rotary with norms of heads": (
        lambda kernel, qkv, *weights: kernel.rotary(qkv, ANGLES.cos(), ANGLES.sin(), 2, 1, *weights, 1e-3),
        [(1, 5, 64), (16,), (16,)],
    ),
    "attention": (lambda kernel, q, k, v: kernel.attention(q, k, v), [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]),
    "swiglu": (lambda kernel, gate_up: kernel.swiglu(gate_up), [(2, 5, 48)]),
    "mlp": (lambda kernel, x, gate_up, down: kernel.swiglu_mlp(x, gate_up, down), [(2, 5, 16), (48, 16), (16, 24)]),
    "linear": (lambda kernel, x, weight, bias: kernel.linear(x, weight, bias), [(2, 5, 16), (24, 16), (24,)]),
    "losses": (lambda kernel, x, weight: kernel.linear_cross_entropy(x, weight, TARGETS), [(10, 16), (50, 16)]),
    "weighted loss": (
        lambda kernel, x, weight: kernel.linear_cross_entropy(x, weight, TARGETS, token_weights=TOKEN_WEIGHTS),
        [(10, 16), (50, 16)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_frozen_or_unused_has_no_gradient_and_changes_no_other(kernel, draw, name):
    function, shapes = CALLS[name]
    inputs = [draw(*shape) for shape in shapes]
    outputs = function(kernel, *inputs)
    upstream = [draw(*out.shape) for out in (outputs if isinstance(outputs, tuple) else [outputs])]
    given = [*inputs, *upstream]
    before = [tensor.clone() for tensor in given]

    def gradients(needed, upstream):
        some = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(inputs)]
        outputs = function(kernel, *some)
        pairs = zip(outputs if isinstance(outputs, tuple) else [outputs], upstream, strict=True)
        used = [(out, u) for out, u in pairs if u is not None and out.requires_grad]
        torch.autograd.backward(*zip(*used, strict=True))
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in some]

    everything = range(len(inputs))
    expected = gradients(everything, upstream)
    assert all(gradient.any() for gradient in expected)
    for i in everything:
        found = gradients([i], upstream)
        assert [bool(gradient.any()) for gradient in found] == [i == j for j in everything]
        assert torch.equal(found[i], expected[i])
    for j in range(len(upstream)):
        used = [u if i == j else None for i, u in enumerate(upstream)]
        zeros = [u if i == j else torch.zeros_like(u) for i, u in enumerate(upstream)]
        assert all(map(torch.equal, gradients(everything, used), gradients(everything, zeros)))
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 24), (2, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layer_and_its_gradients_equal_the_float64_definition(draw, assert_exact, shape, transposed):
    weight = draw(shape[-1], 56).t() if transposed else draw(56, shape[-1])

    def twice(function):  # its gradient is not contiguous
        return lambda *inputs: function(*inputs).transpose(0, -1) * 2

    inputs, upstream = (draw(*shape), weight, draw(56)), draw(*shape[:-1], 56).transpose(0, -1)
    assert_exact(twice(cpu.linear), twice(lambda x, weight, bias: x @ weight.T + bias), inputs, (upstream,))
