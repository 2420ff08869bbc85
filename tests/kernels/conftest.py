"""Every test of a kernel runs on each implementation of it, the Triton kernels in Triton's interpreter."""

import pytest
import torch

from kernels import cpu, gpu, reference

if gpu is not None and gpu.INTERPRETED:
    # The interpreter truncates to bfloat16 where a GPU rounds to nearest, and multiplies bfloat16 matrices as integers.
    # Mended here, so that the tests can demand one rounding and no more.
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self, x, target):
        """`cast_impl`, to nearest."""
        if x.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, x, target)
        bits = torch.tensor(x.data).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), target.scalar)

    def upcasting_dot(self, a, b, *rest):
        """`create_dot` of float32 operands: products of bfloat16 are exact there."""
        wide = [cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounding_cast, upcasting_dot

triton_only = pytest.mark.skipif(gpu is None, reason="Triton is not installed")


@pytest.fixture(params=[reference, cpu, pytest.param(gpu, marks=triton_only)], ids=["reference", "cpu", "triton"])
def kernel(request):
    """A module with the public functions of `kernels`."""
    return request.param


@pytest.fixture
def draw():
    """Random tensors with a mean away from zero, the same ones in every run."""
    generator = torch.Generator().manual_seed(20240617)

    def normal(*shape: int, mean: float = 0.3, std: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)

    return normal
