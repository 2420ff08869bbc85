"""Small decoders with random parameters, a formula for every norm, and checkpoints to edit."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import NORMS, ModelConfig
from model.decoder import Decoder
from model.pretrained import save_pretrained

SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small would spend most of their time waiting for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> dict[str, int]:
    """The fields of a small configuration, under Hugging Face's names."""
    return dict(SHAPE)


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """A small configuration with the given fields changed."""
    return lambda **changes: ModelConfig(**(SHAPE | changes))


@pytest.fixture
def make_decoder(make_config) -> Callable[..., Decoder]:
    """A small decoder with random parameters: matrices, biases, offsets and shifts near 0, all others near 1."""

    def make(seed: int = 5, **changes) -> Decoder:
        decoder = Decoder(make_config(**changes), seed=None)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in decoder.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            near_one = parameter.ndim < 2 and not name.endswith(("bias", "offset", "shift"))
            parameter.data = drawn * (0.3 if parameter.ndim < 2 else 0.12) + (1.0 if near_one else 0.02)
        return decoder

    return make


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(-1, keepdim=True)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (mean_square(centered) + eps).sqrt()


def erf_by_quadrature(z: torch.Tensor) -> torch.Tensor:
    """erf from its definition, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to z; to 1e-14 for |z| < 30."""
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(100))
    t = z[..., None] * (nodes + 1) / 2  # from 0 to z
    return (torch.exp(-(t**2)) * weights).sum(-1) * z / math.sqrt(math.pi)


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
    "derf": lambda x, config, tensors: erf_by_quadrature(tensors["alpha"] * x + tensors["shift"]),
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


@pytest.fixture
def known_norms() -> list[str]:
    """The norms of this project, without those that somebody adds."""
    return [norm for norm in NORMS if norm in NORM_FORMULAS]


@pytest.fixture
def saved(make_decoder, tmp_path) -> Callable[..., Path]:
    """Save a small decoder with the given changes and return its directory."""

    def save(**changes) -> Path:
        save_pretrained(make_decoder(**changes), tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Change fields of a directory's config.json."""

    def edit(directory: Path, *, without: tuple[str, ...] = (), **changes) -> None:
        path = directory / "config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in fields.items() if key not in without}))

    return edit


@pytest.fixture
def edit_weights() -> Callable[[Path, Callable], None]:
    """Change the tensors of a directory's model.safetensors in place."""

    def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 24 tokens."""
    return torch.randint(0, SHAPE["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(11))
