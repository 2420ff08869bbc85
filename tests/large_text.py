"""Texts for the figures of docs/train.md.

python tests/large_text.py write FOLDER 1e9     bytes of text in four files, as jsonl and again as parquet
python tests/large_text.py open 1e9             tokens of a prepared text: the time to open it, memory of its batches
"""

import itertools
import json
import os
import random
import re
import string
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[1]))
from data import corpus
from data.batches import batch
from data.units import DOCUMENT

LENGTH = 1000  # tokens of a document


def write(folder: Path, size: int) -> None:
    """Documents of 3 to 60 sentences of Python's documentation; every second has a new word, as other text would."""
    generator, sentences = random.Random(0), re.split(r"(?<=[.:])\s+", "\n".join(topics.values()))
    for kind, number in itertools.product(("jsonl", "parquet"), range(4)):
        texts, written = [], 0
        while written < size / 4:
            chosen = generator.choices(sentences, k=generator.randint(3, 60))
            chosen[::2] = [f"{one} {''.join(generator.choices(string.ascii_lowercase, k=8))}" for one in chosen[::2]]
            texts.append(" ".join(chosen))
            written += len(texts[-1])
        (folder / kind).mkdir(parents=True, exist_ok=True)
        path = folder / kind / f"{number}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        else:
            parquet.write_table(pyarrow.table({"text": texts}), path)


def private_memory() -> float:
    """MB that this process shares with no other and cannot drop."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1000


def make(text: Path, tokens: int, **arguments) -> None:
    """Prepare a small text, make its unit as long as `tokens`, and split that."""
    text.write_text("".join(f"line {n} of {n * n}\n" for n in range(3000)))
    corpus.prepare([str(text)], **arguments)
    (table,) = (text.parent / "cache" / "units").glob("*.docs")
    documents = np.zeros(tokens // LENGTH, DOCUMENT)
    documents["hash"] = np.random.default_rng(0).integers(0, 2**63, len(documents))
    documents["bytes"], documents["tokens"] = 3 * LENGTH, LENGTH
    table.write_bytes(documents.tobytes())
    os.truncate(table.with_suffix(".bin"), tokens * 2)


def measure(tokens: int) -> None:
    """Print how long the text takes to open, and the memory after a thousand batches."""
    with tempfile.TemporaryDirectory() as name:
        text, arguments = Path(name) / "text.txt", dict(vocab_size=400, cache_dir=Path(name) / "cache")
        if os.fork() == 0:  # the memory that this takes is not in the figures
            make(text, tokens, **arguments)
            os._exit(0)
        assert os.wait()[1] == 0
        began = time.perf_counter()
        opened = corpus.prepare([str(text)], **arguments)
        seconds = time.perf_counter() - began
        for step in range(1000):
            batch(opened.train, seed=1, first=8 * step, size=8, sequence_length=512)
        print(f"{len(opened.train):,} tokens: {seconds:.2f} s to open, {private_memory():.1f} MB of private memory")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), int(float(sys.argv[3])))
    else:
        measure(int(float(sys.argv[2])))
