"""Every test of a kernel runs on each implementation of it, the Triton kernels in Triton's interpreter."""

import math

import pytest
import torch

from kernels import cpu, gpu, reference

triton_only = pytest.mark.skipif(gpu is None, reason="Triton is not installed")


@pytest.fixture(params=[reference, cpu, pytest.param(gpu, marks=triton_only)], ids=["reference", "cpu", "triton"])
def kernel(request):
    """A module with the public functions of `kernels`."""
    return request.param


@pytest.fixture
def rounding():
    """The maximum relative L2 error of `count` values rounded once to a dtype, after a few float32 roundings.

    Rounding to bfloat16 is wrong by 1.66e-3 in the mean square where mantissas are spread evenly on a logarithmic
    scale, a little more where they are not: 1.75e-3; and by 2^-8 at most. Squared errors of single values
    scatter by about one and a half times their mean: four standard deviations of n of them are 6 / sqrt(n).
    """

    def bound(dtype: torch.dtype, count: int) -> float:
        scale = {torch.float32: 0, torch.float16: 2**-3, torch.bfloat16: 1}[dtype]
        return 1e-6 + scale * min(2**-8, 1.75e-3 * math.sqrt(1 + 6 / math.sqrt(count)))

    return bound


@pytest.fixture
def draw():
    """Random tensors with a mean away from zero, the same ones in every run."""
    generator = torch.Generator().manual_seed(20240617)

    def normal(*shape: int, mean: float = 0.3, std: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)

    return normal


@pytest.fixture
def evaluate():
    """Outputs of a function, then the gradients of its inputs; None among inputs and upstream gradients is left out."""

    def run(function, inputs, upstream):
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [(out, u.to(out.dtype)) for out, u in zip(outputs, upstream, strict=True) if u is not None]
        needed = [t for t in leaves if t is not None]
        heads, grads = zip(*used, strict=True)
        gradients = torch.autograd.grad(heads, needed, grads, materialize_grads=True)
        assert [gradient.dtype for gradient in gradients] == [t.dtype for t in needed]
        return [*(out.detach() for out in outputs), *gradients]

    return run


@pytest.fixture
def assert_exact(evaluate, relative, rounding):
    """Outputs and gradients are those of the definition in float64, within one rounding or as `tolerance` says."""

    def check(function, definition, inputs, upstream, tolerance=rounding):
        ours = evaluate(function, inputs, upstream)
        exact = evaluate(definition, *([t if t is None else t.double() for t in ts] for ts in (inputs, upstream)))
        for i, (actual, expected) in enumerate(zip(ours, exact, strict=True)):
            assert relative(actual, expected) < tolerance(actual.dtype, actual.numel()), i
        return ours

    return check
