"""A small text and small settings, so that a complete run takes seconds."""

import random
import shutil
from pathlib import Path

import pytest

from tests.training.runs import settings_of, train_run

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards mix potions beneath an old stone bridge".split()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """A folder of 60 small documents, regular enough for a model to learn."""
    folder = tmp_path_factory.mktemp("text")
    random_words = random.Random(0)
    for number in range(60):
        lines = [" ".join(random_words.choices(WORDS, k=8)) + f", {number} times.\n" for _ in range(30)]
        (folder / f"{number:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """One cache for all tests, so that the tokenizer is trained only once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def flags(text_folder, cache) -> list[str]:
    """Flags of a run that takes well under a second."""
    return [
        *("--data", str(text_folder), "--cache", str(cache), "--vocab-size", "400", "--hidden-size", "32"),
        *("--intermediate-size", "48", "--num-hidden-layers", "2", "--num-attention-heads", "2"),
        *("--num-key-value-heads", "1", "--max-position-embeddings", "32", "--sequence-length", "32"),
        *("--batch-size", "8", "--steps", "40", "--evaluate-every", "10", "--warmup-steps", "5"),
        *("--learning-rate", "3e-3", "--dtype", "float32", "--device", "cpu"),
    ]


@pytest.fixture
def settings(flags):
    return settings_of(*flags)


@pytest.fixture(scope="session")
def finished_run(flags, tmp_path_factory) -> Path:
    """A finished run, which no test changes."""
    return train_run(tmp_path_factory.mktemp("finished") / "run", *flags)


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "run")
