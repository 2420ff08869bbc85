"""Write a model as one GGUF file for llama.cpp: `python -m contrib.gguf RUN OUT.gguf`. See `--help`."""

if __name__ == "__main__":
    from errors import run_main

    run_main("contrib.gguf")

from pathlib import Path
from typing import Annotated, Literal

import tyro

from checkpoints.find import find_checkpoint
from errors import printable


def main(
    run: Annotated[str, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT.gguf"), tyro.conf.Positional],
    dtype: Literal["auto", "float32", "float16", "bfloat16", "q8_0"] = "auto",
) -> None:
    """Write a trained model with its tokenizer as one GGUF file: llama-cli -m OUT.gguf

    Models with RMSNorm are written as llama (qwen3 with --qk-norm), those with LayerNorm as stablelm; llama.cpp has no
    architecture for the other norms, placements and MLPs. For fewer than 8 bits, quantize the file with llama-quantize.

    Whether other programs read the same model from the file: python -m contrib.same RUN --with OUT.gguf

    Args:
        run: A run folder, a checkpoint or an adapter, as for generate.py.
        out: The file to write; an existing file is kept.
        dtype: Dtype of the matrices; auto: as stored. Norms and biases are always float32.
    """
    from contrib.gguf_file import write_gguf  # --help does not need the package gguf

    write_gguf(find_checkpoint(run), out, dtype, name=Path(run).absolute().name)
    print(printable(f"written: {out}"))
