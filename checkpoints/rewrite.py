"""`python -m checkpoints.rewrite IN OUT --dtype bfloat16`: write a checkpoint again, its weights in another dtype.

All names, the configuration, and the tokenizer and template files stay as they are; shards become one file.
"""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from checkpoints.find import find_checkpoint
from checkpoints.pretrained import open_checkpoint, save_tensors, write_json
from checkpoints.weights import INDEX, SIDE_FILES, SINGLE, stored_tensors
from errors import UserError, exit_on_user_error, fsync_directory, read_json


def rewrite(
    source: Annotated[str, tyro.conf.arg(metavar="IN"), tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.arg(metavar="OUT"), tyro.conf.Positional],
    dtype: Literal["float32", "bfloat16", "float16"],
) -> None:
    """Write a checkpoint again with its weights in another dtype: half as large in bfloat16, the same in all else.

    Args:
        source: A checkpoint directory, a run folder, or a model on the Hugging Face Hub (org/name or
            org/name@revision).
        target: The directory to write, which appears only when it is complete. It must not exist.
        dtype: Dtype of the weights in OUT.
    """
    new, directory = Path(f"{target}.new"), find_checkpoint(source)
    if target.exists() or new.exists():
        raise UserError(f"{target} or {new} exists, and nothing is overwritten; give another OUT.")
    open_checkpoint(directory)  # compares the files with config.json
    tensors = {key: tensor.read().to(getattr(torch, dtype)) for key, tensor in stored_tensors(directory).items()}
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{directory}: {key} has inf or NaN in {dtype}; use bfloat16 or float32.")
    new.mkdir(parents=True)
    try:
        for path in directory.iterdir():
            if any(map(path.match, SIDE_FILES)) and path.name not in ("config.json", INDEX, "state.json"):
                shutil.copyfile(path, new / path.name)
        write_json(new / "config.json", read_json(directory / "config.json") | {"dtype": dtype, "torch_dtype": dtype})
        save_tensors(tensors, new / SINGLE)
        fsync_directory(new)
        new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    fsync_directory(target.parent, files=False)
    print(f"{target}: {(target / SINGLE).stat().st_size / 1e6:,.1f} MB of {dtype} weights")


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(rewrite, prog="python -m checkpoints.rewrite")
