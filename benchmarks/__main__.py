"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints a table for each comparison, and the record last. Exit status 1: a program did not run.
"""

import argparse
import sys
from pathlib import Path

from errors import exit_on_user_error


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models and one turn, to see that all of it runs")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    arguments = parser.parse_args()

    from benchmarks import decoding, timing, training  # here, so that Ctrl-C at any time ends in one line

    shapes, dtypes, config, batch = ["15m", "26m", "135m"], ["float32", "bfloat16", "int8"], "small", (8, 256)
    ours, device = "CPU functions", timing.default_device()
    if device.type == "cuda":
        shapes, dtypes, config, batch = ["1b"], ["float32", "bfloat16"], "124m", (32, 1024)
        ours = "Triton and torch.compile"
    turns, tokens = 5, 64
    if arguments.quick:
        shapes, config, batch, turns, tokens = ["260k"], "tiny", (2, 128), 1, 8
    memory = timing.memory_rate(device)
    cases = decoding.all_cases(shapes, [1], [1, 8], dtypes, tokens, arguments.llama2c)
    tables = [decoding.compare(case, decoding.USUAL, turns, memory) for case in cases]
    for dtype in ("float32", "bfloat16"):
        changes = {"dtype": dtype, "batch_size": batch[0], "sequence_length": batch[1]}
        tables.append(training.compare(config, changes, ["rms"], [training.TRANSFORMERS, ours], ["step"], turns))
    return timing.finish(timing.results(device, tables, memory_bytes_per_second=memory))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
