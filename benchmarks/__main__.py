"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints a table for each comparison. Exit status 1: a program did not run. The kernels: `python -m benchmarks.kernels`.
"""

from errors import exit_on_user_error

if __name__ == "__main__":  # Ctrl-C is one line in the slow imports below, too
    with exit_on_user_error():
        from benchmarks import timing
        from benchmarks.__main__ import measure

        timing.run(measure, "benchmarks")

from pathlib import Path
from typing import Annotated

from benchmarks import decoding, timing, training
from flags import optional

TURNS = 5


def measure(llama2c: Annotated[Path | None, optional("PATH")] = None) -> tuple[list[dict], dict[str, float]]:
    """Decoding and training beside other programs. One kernel: python -m benchmarks.kernels --only 'rms norm'

    Args:
        llama2c: llama2.c's program, built with `make runomp`.
    """
    if timing.default_device().type == "cuda":
        shapes, dtypes = ["1b"], ["float32", "bfloat16"]
        config, changes = "124m", {}
        ours = "Triton and torch.compile"
    else:
        shapes, dtypes = ["15m", "26m", "135m"], [*decoding.WEIGHT_BYTES]
        config, changes = "small", {"batch_size": 8, "sequence_length": 256}
        ours = "CPU functions"
    tables, rates = decoding.measure(shapes, [1], [1, 8], dtypes, decoding.USUAL, TURNS, 64, llama2c)
    for dtype in ("float32", "bfloat16"):
        variants = [training.TRANSFORMERS, ours]
        tables.append(training.compare(config, changes | {"dtype": dtype}, ["rms"], variants, TURNS))
    return tables, rates
