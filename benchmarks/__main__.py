"""The benchmarks for this machine, in about a quarter of an hour: `python -m benchmarks`.

On a CPU: decoding beside other programs, then training beside transformers in float32 and bfloat16. Prints the tables
of docs/generate.md and docs/kernels.md, and writes what was measured as JSON. On a GPU: runs `benchmarks/gpu.sh`.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import decoding, training
from benchmarks.programs import COMPILED, DTYPES, PROGRAMS, SHAPES, Case
from benchmarks.timing import machine, read_rate
from errors import exit_on_user_error
from model.device import keep_freed_memory

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
TRAINING_SHARE = 0.3  # of the minutes, for training; the rest is for decoding


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=14, help="after that no fourth turn begins (default: 14)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few turns, to see that all of it runs")
    parser.add_argument("--compiled", action="store_true", help=f"also {COMPILED}: many minutes more")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    parser.add_argument(
        "--out", type=Path, default=FOLDER / "results", help="the folder of the JSON (default: results)"
    )
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        environment = os.environ | {"LIMIT": str(int(60 * arguments.minutes)), "PYTHON": sys.executable}
        return subprocess.run(["bash", FOLDER / "gpu.sh"], env=environment).returncode
    start, about = time.monotonic(), machine(CPU)
    print(f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, Python {about['python']}\n")
    shapes, tokens = (["260k"], 8) if arguments.quick else (["15m", "26m", "135m"], 64)
    settings = itertools.product(shapes, (1, 8), DTYPES, PROGRAMS)
    path = arguments.llama2c and arguments.llama2c.resolve()
    cases = [Case(shape, 1, n, program, dtype, tokens, "cpu", path) for shape, n, dtype, program in settings]
    cases = [case for case in cases if arguments.compiled or case.program != COMPILED]
    rate, turns, end = read_rate(), 1 if arguments.quick else 7, start + 60 * arguments.minutes
    print(f"## Decoding, {tokens} tokens; memory is read at {rate / 1e9:.1f} GB/s\n")
    rows = decoding.compare(cases, turns, rate, end - 60 * arguments.minutes * TRAINING_SHARE)
    print(f"\n## Training, the {'260k' if arguments.quick else '26m'} shape, 8 sequences\n")
    keep_freed_memory()  # as train.py does; here, so that it does not change the programs above
    steps = training.compare(training_entries(arguments.quick, arguments.compiled), CPU, turns, end)
    name = re.sub(r"\W+", "-", f"cpu {about['processor']} {about['threads']} threads").lower()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{name}{'-quick' if arguments.quick else ''}.json"
    results = {"machine": about, "decoding": {"read_bytes_per_second": rate, "rows": rows}, "training": steps}
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes; written: {path}")
    return int(bool(steps["failures"]) or any("not_run" in row for row in rows))


def training_entries(quick: bool, compiled: bool) -> dict[tuple[str, str], training.Settings]:
    """transformers and our model of one shape, in both dtypes: settings by (variant, arm)."""
    settings = training.read_settings("small")
    data = dataclasses.replace(settings.data, batch_size=8, sequence_length=16 if quick else 256)
    settings = dataclasses.replace(settings, model=SHAPES["260k" if quick else "26m"], data=data)
    peers = [name for name, (_, compiles) in training.PEERS.items() if compiled or not compiles]
    return {
        (variant, dtype): dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, dtype=dtype))
        for dtype in ("float32", "bfloat16")
        for variant in (*peers, "CPU functions")
    }


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
