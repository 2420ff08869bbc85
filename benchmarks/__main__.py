"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints a table for each comparison. Exit status 1: a program did not run. The kernels: `python -m benchmarks.kernels`.
"""

from pathlib import Path

from benchmarks import decoding, timing, training

TURNS = 5


def measure(llama2c: Path | None = None) -> tuple[list[dict], dict[str, float]]:
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


if __name__ == "__main__":
    timing.run(measure, "benchmarks")
