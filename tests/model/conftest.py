"""A formula for every norm."""

from collections.abc import Callable

import pytest
import torch

from model.config import NORMS, ModelConfig


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(-1, keepdim=True)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (mean_square(centered) + eps).sqrt()


# Each norm of float64 rows x, before weight and bias. Tests by a formula skip a norm that somebody has added and that
# has none here; one of ours that is renamed fails below.
NORM_FORMULAS = {
    "rms": lambda x, eps, tensors: x / (mean_square(x) + eps).sqrt(),
    "layer": lambda x, eps, tensors: layer_norm(x, eps),
    "center": lambda x, eps, tensors: x - x.mean(-1, keepdim=True),
    "srms": lambda x, eps, tensors: x / (mean_square(x) + eps).sqrt(),
    "offset": lambda x, eps, tensors: (1 + tensors["offset"]) * x / (mean_square(x) + eps).sqrt(),
    "prms": lambda x, eps, tensors: x / (mean_square(x[..., :3]) + eps).sqrt(),  # 3 is 48 / 16
    "l2": lambda x, eps, tensors: x / ((x**2).sum(-1, keepdim=True).sqrt() + eps),
    "group": lambda x, eps, tensors: torch.cat([layer_norm(slice, eps) for slice in x.split(6, -1)], -1),  # 6 is 48 / 8
    # In evaluation.
    "batch": lambda x, eps, tensors: (x - tensors["running_mean"]) / (tensors["running_var"] + eps).sqrt(),
    "dyt": lambda x, eps, tensors: 1 - 2 / (1 + (2 * tensors["alpha"] * x).exp()),
    "derf": lambda x, eps, tensors: torch.erf(tensors["alpha"] * x + tensors["shift"]),
    "none": lambda x, eps, tensors: x,
}

assert NORM_FORMULAS.keys() <= NORMS.keys()


@pytest.fixture
def norm_formula() -> Callable[..., torch.Tensor]:
    """The configured norm of float64 rows (..., 48), from the norm's tensors by name: independent of model/norm.py."""

    def norm(x: torch.Tensor, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if config.norm not in NORM_FORMULAS:
            pytest.skip(f"{config.norm} has no formula in tests/model/conftest.py")
        y = NORM_FORMULAS[config.norm](x, config.norm_eps, tensors)
        return y * tensors.get("weight", 1) + tensors.get("bias", 0)

    return norm
