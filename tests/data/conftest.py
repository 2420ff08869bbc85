"""What several tests of the data package need: the default corpus, and small tokenizers of each kind."""

import gzip
from pathlib import Path

import pytest

from data.corpus import read_documents, resolve
from data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def library_text() -> list[str]:
    """Every document of the default corpus."""
    return ["".join(document) for document in read_documents(resolve(["python"]))]


@pytest.fixture(scope="session")
def tokenizer_file(library_text, tmp_path_factory) -> Path:
    """A tokenizer of ours, trained on a part of the default corpus."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(library_text[::8], 2000, path)
    return path


@pytest.fixture(scope="session")
def ours(tokenizer_file):
    return load_tokenizer(tokenizer_file)


@pytest.fixture(scope="session")
def llama(shared):
    """A SentencePiece model of LLaMA's kind: it puts a space in front of every text."""
    return load_tokenizer(shared / "stories260K" / "tok512.model")


@pytest.fixture(scope="session")
def qwen_folder(shared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer.json").write_bytes(gzip.decompress((shared / "qwen2_5/tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((shared / "qwen2_5/tokenizer_config.json").read_bytes())
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder):
    return load_tokenizer(qwen_folder)
