"""The CPU's linear layer, and that all implementations have one interface."""

import inspect

import pytest

import kernels
from kernels import cpu, reference


def test_every_public_function_takes_the_arguments_of_its_reference():
    def arguments(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    for name in ("normalize", "rotary", "attention", "linear", "swiglu", "linear_cross_entropy"):
        for module in filter(None, (kernels, cpu, kernels.gpu)):
            assert arguments(getattr(module, name)) == arguments(getattr(reference, name))


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 24), (2, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layer_and_its_gradients_equal_the_float64_definition(draw, assert_exact, shape, transposed):
    weight = draw(shape[-1], 56).t() if transposed else draw(56, shape[-1])

    def twice(function):  # its gradient is not contiguous
        return lambda *inputs: function(*inputs).transpose(0, -1) * 2

    inputs, upstream = (draw(*shape), weight, draw(56)), draw(*shape[:-1], 56).transpose(0, -1)
    assert_exact(twice(cpu.linear), twice(lambda x, weight, bias: x @ weight.T + bias), inputs, (upstream,))
