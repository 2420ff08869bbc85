"""Every test of a kernel runs on each implementation of it, the Triton kernels in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch

import kernels
from kernels import cpu, gpu, reference

if gpu is not None and gpu.INTERPRETED:
    # The interpreter truncates to bfloat16 where a GPU rounds to nearest, and multiplies bfloat16 matrices as integers.
    # Fixed here, so that the tests can demand one rounding and no more.
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self, x, target):
        """`cast_impl`, to nearest, and ten times faster."""
        between = x.dtype.scalar, target.scalar
        if between == (tl.float32, tl.bfloat16):
            return TensorHandle(torch.tensor(x.data).bfloat16().view(torch.uint16).numpy(), target.scalar)
        if between == (tl.bfloat16, tl.float32):
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), target.scalar)
        return cast(self, x, target)

    def upcasting_dot(self, a, b, *rest):
        """`create_dot` of float32 operands: products of bfloat16 are exact there."""
        wide = [rounding_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounding_cast, upcasting_dot

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
def triton():
    """Triton kernels for `kernels`' functions."""
    kernels.use("triton", torch.device("cpu"))
    yield
    kernels.use("auto", torch.device("cpu"))
