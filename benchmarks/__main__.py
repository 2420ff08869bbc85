"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints a table for each comparison. Exit status 1: a program did not run. The kernels: `python -m benchmarks.kernels`.
"""

if __name__ == "__main__":
    from errors import run_main

    run_main("benchmarks.__main__")

from pathlib import Path
from typing import Annotated

from benchmarks import decoding, timing, training
from flags import optional


def main(llama2c: Annotated[Path | None, optional("PATH")] = None) -> int:
    """Decoding and training beside other programs. One kernel: python -m benchmarks.kernels --only 'rms norm'

    Args:
        llama2c: llama2.c's program, built with `make runomp`.
    """
    if timing.default_device().type == "cuda":
        shapes = ("1b",)
        config, changes = "124m", {}
        variants = (training.TRANSFORMERS, "Triton and torch.compile")
    else:
        shapes = ("15m", "26m", "135m")
        config, changes = "small", {"batch_size": 8, "sequence_length": 256}
        variants = (training.TRANSFORMERS, "CPU functions")
    tables = decoding.measure(shapes=shapes, turns=5, tokens=64, llama2c=llama2c)
    for dtype in ("float32", "bfloat16"):
        tables.append(training.compare(config, changes | {"dtype": dtype}, ["rms"], variants, turns=5))
    return timing.finish(tables)
