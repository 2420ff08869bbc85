"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints a table for each comparison. Exit status 1: a program did not run. The kernels: `python -m benchmarks.kernels`.
"""

import sys

if __name__ == "__main__":  # so that Ctrl-C in the slow imports below is one line: see generate.py
    from errors import exit_on_user_error

    with exit_on_user_error():
        from benchmarks.__main__ import main

        sys.exit(main())

import argparse
from pathlib import Path

from benchmarks import decoding, timing, training

TURNS = 5


def main() -> int:
    """Measure; returns the exit status."""
    short = "One kernel: python -m benchmarks.kernels --only 'rms norm'"
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0], epilog=short)
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    arguments = parser.parse_args()

    if timing.default_device().type == "cuda":
        shapes, dtypes, config, changes = ["1b"], ["float32", "bfloat16"], "124m", {}
        ours = "Triton and torch.compile"
    else:
        shapes, dtypes, config, ours = ["15m", "26m", "135m"], [*decoding.WEIGHT_BYTES], "small", "CPU functions"
        changes = {"batch_size": 8, "sequence_length": 256}
    tables, memory = decoding.measure(shapes, [1], [1, 8], dtypes, decoding.USUAL, TURNS, 64, arguments.llama2c)
    for dtype in ("float32", "bfloat16"):
        variants = [training.TRANSFORMERS, ours]
        tables.append(training.compare(config, changes | {"dtype": dtype}, ["rms"], variants, TURNS))
    return timing.finish(tables, memory_bytes_per_second=memory)
