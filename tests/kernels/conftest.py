"""Every test of a kernel runs on each implementation of it."""

import pytest
import torch

from kernels import cpu, reference


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
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
