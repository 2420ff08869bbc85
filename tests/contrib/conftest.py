"""A small model with a tokenizer and a chat template; and tokenizers that the tests of data/ have too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints.pretrained import save_pretrained
from data.chat import add_chat_template
from data.train_tokenizer import train_tokenizer
from tests.data.conftest import library_text, llama, ours, qwen, qwen_folder, tokenizer_file  # noqa: F401 - fixtures


@pytest.fixture
def chat_model(make_decoder, tmp_path) -> Callable[..., tuple[torch.nn.Module, Path]]:
    """Save a small decoder of 300 ids with the given changes, whose tokenizer has 290; returns it and its directory."""

    def make(name: str = "model", dtype: torch.dtype = torch.float32, **changes) -> tuple[torch.nn.Module, Path]:
        decoder, directory = make_decoder(**{"vocab_size": 300} | changes).to(dtype), tmp_path / name
        save_pretrained(decoder, directory, bos_token_id=1, eos_token_id=2)
        text = "the quick brown fox jumps over the lazy dog and runs  away"
        add_chat_template(train_tokenizer([text] * 20, 290)).save(directory)
        return decoder, directory

    return make
