"""Memory does not grow with the text."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.packing import ENCODE_CHARACTERS

# Not resource.getrusage: its peak counts the memory of the process that started this one, too.
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
ROOT = Path(__file__).parents[2]
MB = 1_000_000


def write_text(path: Path, size: int, seed: int = 0) -> None:
    """Lines of random words: one document as .txt, documents of 2 kB in rows as .jsonl and .parquet."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(3000)]
    lines = [" ".join(generator.choices(words, k=10)) + "\n" for _ in range(3000)]
    documents = ("".join(generator.choices(lines, k=40)) for _ in range(size // 2350))
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": list(documents)}), path)  # one row group: the hardest to stream
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)


def peak_memory(path: Path, folder: Path, encode_characters: int, **arguments) -> float:
    """MB at the peak of a process that prepares the file, encoding `encode_characters` at a time."""
    code = (
        "import json, sys\nfrom data import packing, tokens\npacking.ENCODE_CHARACTERS = int(sys.argv[4])\n"
        "tokens.prepare([sys.argv[1]], cache_dir=sys.argv[2], **json.loads(sys.argv[3]))\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(path), str(folder), json.dumps(arguments), str(encode_characters)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1]) / 1000


def test_more_text_takes_no_more_memory(tmp_path, tokenizer_file):
    steps = [{"a.txt": 1, "b.parquet": 4}, {"c.txt": 5, "d.parquet": 5, "e.jsonl": 5}]  # MB: 5, then 20
    peaks = []
    for number, step in enumerate(steps):
        for name, size in step.items():
            write_text(tmp_path / name, size * MB, seed=number)
        # The same bytes of validation text each time: xz, which reads it, takes memory in proportion up to 4 MB.
        fraction = (0.04, 0.01)[number]
        arguments = dict(tokenizer=str(tokenizer_file), validation_fraction=fraction)
        peaks.append(peak_memory(tmp_path, tmp_path / "cache", encode_characters=200_000, **arguments))
    print(f"peak {peaks[0]:.0f} MB for 5 MB of text, {peaks[1]:.0f} MB for 20 MB")
    assert peaks[1] - peaks[0] < 10, "15 MB more text, held anywhere, would be 15 MB or more"


@pytest.mark.slow  # about 5 minutes each on two idle cores: python -m pytest tests/data/test_memory.py -m slow -s
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_gigabyte_of_text_is_prepared_under_a_gigabyte_of_memory(tmp_path, suffix):
    large = tmp_path / f"large{suffix}"
    write_text(large, 1000 * MB)
    began = time.perf_counter()
    peak = peak_memory(large, tmp_path / "cache", encode_characters=ENCODE_CHARACTERS)
    print(f"\n1 GB {suffix}: {time.perf_counter() - began:.0f} s, peak {peak:.0f} MB")
    shutil.rmtree(tmp_path)  # pytest would keep the gigabytes of its last runs
    assert peak < 1000
