"""Small decoders with weights that exercise everything, and the error they are compared by."""

from collections.abc import Callable

import pytest
import torch

from model.config import ModelConfig
from model.decoder import Decoder

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
def tokens() -> torch.Tensor:
    """Two rows of 24 tokens."""
    return torch.randint(0, SHAPE["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(11))
