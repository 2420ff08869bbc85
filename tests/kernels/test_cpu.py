"""The CPU's norms in bfloat16 against the reference in float64, and that all implementations have one interface.

Tolerance: bfloat16 rounds with a relative error of 1.7e-3, and two roundings are allowed: of the sum with the residual
and the output, and in the backward pass of two gradients and their sum.
"""

import inspect

import pytest
import torch

import kernels
from kernels import cpu, reference

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "bias", "residual", "shape"),
    [
        ("rms", False, True, (3, 5, 64)),
        ("rms", True, False, (2, 100, 256)),
        ("layer", True, True, (1, 1, 37)),
        ("layer", False, False, (4096, 32)),
    ],
)
def test_bfloat16_norms_and_gradients_equal_the_float64_reference(draw, relative, kind, bias, residual, shape):
    x, weight, upstream = draw(*shape, dtype=BF16), draw(shape[-1], mean=1.0), draw(*shape, dtype=BF16)
    rest = [draw(shape[-1]) if bias else None, draw(*shape, mean=-0.2, dtype=BF16) if residual else None]

    def run(function, inputs):
        inputs = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        y, s = function(*inputs, kind=kind, eps=1e-5)
        gradients = torch.autograd.grad((y, s), [t for t in inputs if t is not None], [upstream.to(y.dtype)] * 2)
        return y.detach(), s.detach(), *gradients

    inputs = [x, weight, *rest]
    found = run(cpu.normalize, inputs)
    exact = run(reference.normalize, [None if tensor is None else tensor.double() for tensor in inputs])
    assert [tensor.dtype for tensor in found[2:]] == [tensor.dtype for tensor in inputs if tensor is not None]
    for ours, other in zip(found, exact, strict=True):
        assert relative(ours, other) < 3.6e-3
    if not residual:  # sums over rows are float32; in bfloat16 the error of 4,096 rows is 5e-2
        assert all(relative(ours, other) < 1e-5 for ours, other in zip(found[3:], exact[3:], strict=True))


def test_every_public_function_takes_the_arguments_of_its_reference():
    for name in ("normalize", "rotary", "attention", "swiglu_mlp", "linear_cross_entropy"):
        expected = inspect.signature(getattr(reference, name))
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(cpu, name)) == expected
        assert kernels.gpu is None or inspect.signature(getattr(kernels.gpu, name)) == expected


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 24), (2, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layer_and_its_gradients_equal_the_float64_definition(draw, relative, shape, transposed):
    x, bias, upstream = draw(*shape), draw(56), draw(*shape[:-1], 56)
    weight = draw(shape[-1], 56).t() if transposed else draw(56, shape[-1])

    def run(function, *inputs):
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        y = function(*inputs)
        twice = y.transpose(0, -1) * 2  # its gradient is not contiguous
        return y, *torch.autograd.grad(twice, inputs, upstream.to(y.dtype).transpose(0, -1))

    exact = run(lambda x, weight, bias: x @ weight.T + bias, *(tensor.double() for tensor in (x, weight, bias)))
    for ours, theirs in zip(run(cpu.linear, x, weight, bias), exact, strict=True):
        assert relative(ours, theirs) < 1e-6
