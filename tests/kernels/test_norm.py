"""`normalize` against float64 definitions, forward and backward.

Tolerances: a float32 result passes through about six roundings of 2^-24 = 6e-8 (half that in the mean square): 3e-7.
A gradient subtracts sums over the row of the same size, and weight gradients sum over all rows: 1e-6. One rounding to
bfloat16 alone is a relative L2 error of 1.66e-3 and one to float16 an eighth of it: 1.75e-3 and 2.2e-4. One more
rounding, as in many implementations before the weight, would be 2.34e-3.
"""

import pytest
import torch

FLOAT32, GRADIENT, HALF = 3e-7, 1e-6, {torch.bfloat16: 1.75e-3, torch.float16: 2.2e-4}
ROWS, WIDTH, EPS = 37, 96, 1e-3


def definition(s, weight, bias, kind, eps):
    """The textbook formulas in float64."""
    s = s.double()
    if kind == "layer":
        normalized = (s - s.mean(-1, keepdim=True)) / (s.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    else:
        normalized = s / ((s**2).mean(-1, keepdim=True) + eps).sqrt()
    return normalized * weight.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_output_and_all_gradients_equal_the_float64_definition(kernel, draw, relative, kind, with_bias, with_residual):
    x, residual, weight, bias = draw(ROWS, WIDTH), draw(ROWS, WIDTH, mean=-0.7), draw(WIDTH, mean=1.0), draw(WIDTH)
    inputs = [x, weight] + [bias] * with_bias + [residual] * with_residual
    upstream, upstream_stream = draw(ROWS, WIDTH), draw(ROWS, WIDTH)

    def run(function, tensors):
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        rest = tensors[2:]
        b = rest.pop(0) if with_bias else None
        r = rest.pop(0) if with_residual else None
        y, s = function(tensors[0], tensors[1], b, r)
        # with a residual, later blocks also use the stream s, so it has a gradient too
        loss = (y * upstream.to(y.dtype)).sum() + ((s * upstream_stream.to(s.dtype)).sum() if with_residual else 0)
        return y, s, torch.autograd.grad(loss, tensors)

    def expected(x, weight, bias, residual):
        s = x if residual is None else x + residual
        return definition(s, weight, bias, kind, EPS), s

    y, s, gradients = run(lambda *a: kernel.normalize(*a, kind=kind, eps=EPS), inputs)
    y64, s64, gradients64 = run(expected, [tensor.double() for tensor in inputs])
    assert relative(y, y64) < FLOAT32
    assert relative(s, s64) < FLOAT32
    for gradient, gradient64 in zip(gradients, gradients64, strict=True):
        assert relative(gradient, gradient64) < GRADIENT


def test_rms_input_gradient_is_the_closed_formula_with_the_weight_inside_the_sum(kernel, draw, relative):
    x, g, dy = draw(ROWS, WIDTH).requires_grad_(), draw(WIDTH, mean=1.0), draw(ROWS, WIDTH)
    kernel.normalize(x, g, kind="rms", eps=EPS)[0].backward(dy)
    x64, g64, dy64 = x.detach().double(), g.double(), dy.double()
    r = ((x64**2).mean(-1, keepdim=True) + EPS).sqrt()
    coupling = (g64 * dy64 * x64).sum(-1, keepdim=True)  # every element of a row reaches every other
    expected = g64 * dy64 / r - x64 / (WIDTH * r**3) * coupling
    assert relative(x.grad, expected) < GRADIENT
    assert relative(g64 * (dy64 / r - x64 / (WIDTH * r**3) * coupling), expected) > 0.1  # the common wrong one


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_half_precision_output_is_rounded_once(kernel, draw, relative, kind, dtype):
    x, weight, bias = draw(512, WIDTH, dtype=dtype), draw(WIDTH, mean=1.0), draw(WIDTH)
    y, s = kernel.normalize(x, weight, bias, kind=kind, eps=EPS)
    assert y.dtype == dtype
    assert s is x
    assert relative(y, definition(x, weight, bias, kind, EPS)) < HALF[dtype]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_residual_sum_is_rounded_once_and_what_is_normalized_is_the_rounded_sum(kernel, draw, relative, kind):
    x, residual = (draw(512, WIDTH, mean=mean, dtype=torch.bfloat16) for mean in (0.3, -2.0))
    weight = draw(WIDTH, mean=1.0)
    y, s = kernel.normalize(x, weight, None, residual, kind=kind, eps=EPS)
    assert torch.equal(s, (x.double() + residual.double()).bfloat16())
    exact = definition(s, weight, None, kind, EPS).bfloat16()
    # float32 statistics round a few values differently; normalizing the exact sum rounds many differently
    assert (y != exact).float().mean() < 0.002
    unrounded = definition(x.double() + residual.double(), weight, None, kind, EPS).bfloat16()
    assert (unrounded != exact).float().mean() > 0.05


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_eps_is_inside_the_root(kernel, kind):
    x = torch.tensor([[3e-4, -3e-4, 3e-4, -3e-4]])
    y, _ = kernel.normalize(x, torch.ones(4), kind=kind, eps=1e-6)
    torch.testing.assert_close(y, x / (9e-8 + 1e-6) ** 0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_large_half_precision_values_do_not_overflow_in_their_squares(kernel, draw, relative, kind):
    x = draw(512, WIDTH, mean=100.0, std=3e4).clamp(-6e4, 6e4).half()
    y, _ = kernel.normalize(x, torch.ones(WIDTH), kind=kind, eps=EPS)
    assert relative(y, definition(x, torch.ones(WIDTH), None, kind, EPS)) < HALF[torch.float16]


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_three_dimensional_inputs_that_are_not_contiguous_give_the_same(kernel, draw, relative, kind):
    x, weight = draw(5, 2 * WIDTH, 3).transpose(1, 2)[..., ::2], draw(WIDTH, mean=1.0)
    assert not x.is_contiguous()
    assert (
        relative(kernel.normalize(x, weight, kind=kind, eps=EPS)[0], definition(x, weight, None, kind, EPS)) < FLOAT32
    )


def test_the_weight_may_be_none_or_in_half_precision(kernel, draw, relative):
    x, weight = draw(ROWS, WIDTH), draw(WIDTH, mean=1.0, dtype=torch.bfloat16)
    for given in (None, weight):
        expected = definition(x, torch.ones(WIDTH) if given is None else given, None, "rms", EPS)
        assert relative(kernel.normalize(x, given, kind="rms", eps=EPS)[0], expected) < FLOAT32
