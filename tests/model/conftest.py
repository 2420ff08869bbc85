"""Small decoders with weights that exercise everything, and directories of them to change."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig
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
    """Models this small wait for their threads, much longer beside other programs than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> dict[str, int]:
    """The fields of a small configuration, under the ecosystem's names."""
    return dict(SHAPE)


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """A small configuration with the given fields changed."""
    return lambda **changes: ModelConfig(**(SHAPE | changes))


@pytest.fixture
def make_decoder(make_config) -> Callable[..., Decoder]:
    """A small decoder none of whose parameters is at its initial value: gains near 1, biases and weights off zero."""

    def make(seed: int = 5, **changes) -> Decoder:
        decoder = Decoder(make_config(**changes), seed=None)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in decoder.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.data = drawn * (0.3 if parameter.ndim == 1 else 0.12) + (1.0 if gain else 0.02)
        return decoder

    return make


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
