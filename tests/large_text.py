"""The time to open a prepared text of so many tokens, and the memory of its batches: `tests/large_text.py open 1e9`."""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from data import corpus
from data.batches import batch
from data.settings import DataSettings
from data.split import DOCUMENT

LENGTH = 1000  # tokens of a document


def prepare(text: Path) -> corpus.Corpus:
    return corpus.prepare(DataSettings(data=(str(text),), cache=str(text.parent / "cache")), vocab_size=400)


def make(text: Path, tokens: int) -> None:
    """Prepare a small text, and make its ids as many as `tokens`."""
    text.write_text("".join(f"line {n} of {n * n}\n" for n in range(3000)))
    prepare(text)
    (table,) = (text.parent / "cache" / "units").glob("*.docs")
    documents = np.zeros(tokens // LENGTH, DOCUMENT)
    documents["hash"] = np.random.default_rng(0).integers(0, 2**63, len(documents))
    documents["bytes"], documents["tokens"] = 3 * LENGTH, LENGTH
    table.write_bytes(documents.tobytes())
    os.truncate(table.with_suffix(".bin"), tokens * 2)


with tempfile.TemporaryDirectory() as name:
    text = Path(name) / "text.txt"
    if os.fork() == 0:  # the memory that this takes is not in the figures
        make(text, int(float(sys.argv[2])))
        os._exit(0)
    assert os.wait()[1] == 0
    began = time.perf_counter()
    opened = prepare(text)
    seconds = time.perf_counter() - began
    for step in range(1000):
        batch(opened.train, seed=1, first=8 * step, size=8, sequence_length=512)
    memory = psutil.Process().memory_full_info().uss / 1e6
    print(f"{len(opened.train):,} tokens: {seconds:.2f} s to open, {memory:.1f} MB of private memory")
