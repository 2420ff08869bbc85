"""What several tests of the data package need: the default corpus, and small tokenizers of each kind."""

import gzip
import random
from pathlib import Path

import pytest

from data.readers import read_documents
from data.settings import DataSettings
from data.sources import resolve
from data.tokenizer import load_tokenizer
from data.train_tokenizer import train_tokenizer


def read(*sources: str | Path, field: str = "text") -> list[str]:
    """The documents of the sources."""
    files = resolve(DataSettings(data=tuple(map(str, sources)), text_field=field, cache="nowhere"))
    return [*filter(None, ("".join(document) for file in files for document in read_documents(file)))]


@pytest.fixture(scope="session")
def library_text() -> list[str]:
    """Every document of the default corpus."""
    return read("python")


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> list[str]:
    """A folder of small documents of random words; a duplicate and lines of all lengths among them."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("etaoin shrdlué😀\n", k=generator.randint(1, 7))) for _ in range(400)]
    texts = [" ".join(generator.choices(words, k=generator.randint(5, 300))) for _ in range(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate([*texts, texts[3]]):
        (folder / f"{i:03}.txt").write_bytes(text.encode("utf-8"))
    return texts


@pytest.fixture(scope="session")
def tokenizer_file(library_text, tmp_path_factory) -> Path:
    """A tokenizer of ours, trained on a part of the default corpus."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer(library_text[::8], 2000).files["tokenizer.model"])
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
