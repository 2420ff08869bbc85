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
    "rms": lambda x, config, tensors: x / (mean_square(x) + config.norm_eps).sqrt(),
    "layer": lambda x, config, tensors: layer_norm(x, config.norm_eps),
    "center": lambda x, config, tensors: x - x.mean(-1, keepdim=True),
    "srms": lambda x, config, tensors: x / (mean_square(x) + config.norm_eps).sqrt(),
    "offset": lambda x, config, tensors: (1 + tensors["offset"]) * x / (mean_square(x) + config.norm_eps).sqrt(),
    "prms": lambda x, config, tensors: x / (mean_square(x[..., :3]) + config.norm_eps).sqrt(),  # 3 is 48 / 16
    "l2": lambda x, config, tensors: x / ((x**2).sum(-1, keepdim=True).sqrt() + config.norm_eps),
    "group": lambda x, config, tensors: torch.cat(
        [layer_norm(slice, config.norm_eps) for slice in x.split(6, -1)],  # 6 is 48 / 8
        dim=-1,
    ),
    "batch": lambda x, config, tensors: (
        (x - tensors["running_mean"]) / (tensors["running_var"] + config.norm_eps).sqrt()  # in evaluation
    ),
    "dyt": lambda x, config, tensors: 1 - 2 / (1 + (2 * tensors["alpha"] * x).exp()),
    "derf": lambda x, config, tensors: torch.erf(tensors["alpha"] * x + tensors["shift"]),
    "none": lambda x, config, tensors: x,
}

assert NORM_FORMULAS.keys() <= NORMS.keys()


@pytest.fixture
def norm_formula() -> Callable[..., torch.Tensor]:
    """The configured norm of float64 rows (..., 48), from the norm's tensors by name: independent of model/norm.py."""

    def norm(x: torch.Tensor, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if config.norm not in NORM_FORMULAS:
            pytest.skip(f"{config.norm} has no formula in tests/model/conftest.py")
        return NORM_FORMULAS[config.norm](x, config, tensors) * tensors.get("weight", 1) + tensors.get("bias", 0)

    return norm
