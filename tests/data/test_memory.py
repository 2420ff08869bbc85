"""Memory does not grow with the text, nor with the length of a line: here the text is one."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

# Not resource.getrusage: its peak counts the memory of the process that started this one, too.
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
ROOT = Path(__file__).parents[2]
CODE = """
import sys
from data import corpus, units
units.BATCH = 200_000
corpus.prepare([sys.argv[1]], cache_dir=sys.argv[2], tokenizer=sys.argv[3], validation_fraction=float(sys.argv[4]))
print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])
"""


def test_more_text_takes_no_more_memory(tmp_path, tokenizer_file):
    generator, peaks = random.Random(0), []
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(3000)]
    text = "".join(word + " " for word in generator.choices(words, k=300_000))
    for size in (len(text), 4 * len(text)):  # 2 and 8 MB in one document; the same bytes for validation each time
        (tmp_path / f"{size}.txt").write_text(text * (size // len(text)), newline="")
        arguments = [tmp_path / f"{size}.txt", tmp_path / "cache", tokenizer_file, 200_000 / size]
        command = [sys.executable, "-c", CODE, *map(str, arguments)]
        peaks.append(int(subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL)) / 1000)
    assert peaks[1] - peaks[0] < 4, f"{peaks} MB: 6 MB more text, held anywhere, would be 6 MB or more"
