"""A tiny random model, and a tokenizer of each kind that a stream must support."""

import gzip

import pytest
import torch

from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from model.config import ModelConfig
from model.decoder import Decoder

TEXT = [f"def add_{name}(x, y):\n    return x + y  # {name} ☺ é 漢字\n" for name in "abcdefghijklmnop" * 8]
LIMIT = 48


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small spend more time on synchronizing threads than on computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """Random weights, large enough that the most likely token changes from step to step."""
    shape = dict(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=LIMIT
    )
    return Decoder(ModelConfig(**shape, initializer_range=0.5), seed=3).eval()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer that this project trains: SentencePiece BPE with byte fallback."""
    return train_tokenizer(TEXT, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(scope="session")
def stories_tokenizer(shared) -> Tokenizer:
    """SentencePiece with byte fallback. Encoding puts a space in front of every text and decoding removes it."""
    return load_tokenizer(shared / "stories260K" / "tok512.model")


@pytest.fixture(scope="session")
def qwen_tokenizer(shared, tmp_path_factory) -> Tokenizer:
    """Byte-level BPE: a token may contain parts of two characters."""
    directory = tmp_path_factory.mktemp("qwen2_5")
    packed = (shared / "qwen2_5" / "tokenizer.json.gz").read_bytes()
    (directory / "tokenizer.json").write_bytes(gzip.decompress(packed))
    (directory / "tokenizer_config.json").write_bytes((shared / "qwen2_5" / "tokenizer_config.json").read_bytes())
    return load_tokenizer(directory)
