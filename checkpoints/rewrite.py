"""`python -m checkpoints.rewrite IN OUT --dtype bfloat16`: write a checkpoint again, its weights in another dtype.

All names, the configuration, and the tokenizer and template files stay as they are; shards become one file.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from checkpoints.families import read_config
from checkpoints.find import find_checkpoint
from checkpoints.pretrained import open_checkpoint, save_tensors, write_json
from checkpoints.stored_weights import read_weights, stored_tensors
from checkpoints.weight_files import INDEX, SIDE_FILES, SINGLE, read_entries
from errors import UserError, exit_on_user_error, fsync_directory

# Side files that do not fit the copy: config.json is written again, there are no shards, and no training state.
NOT_COPIED = ("config.json", INDEX, "state.json")


@dataclass(frozen=True)
class Settings:
    """Write a checkpoint again with its weights in another dtype: half as large in bfloat16, the same in all else."""

    source: Annotated[str, tyro.conf.arg(metavar="IN"), tyro.conf.Positional]
    """A checkpoint directory, a run folder, or a model on the Hugging Face Hub (org/name or org/name@revision)."""
    target: Annotated[Path, tyro.conf.arg(metavar="OUT"), tyro.conf.Positional]
    """The directory to write. It must not exist: nothing is ever overwritten."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype of the weights in OUT."""


def rewrite(source: str, target: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint `source` as the new directory `target`, which appears only when it is complete.

    Raises `UserError` for a checkpoint that cannot be read, a target that exists, and weights too large for the dtype.
    """
    new = Path(f"{target}.new")
    for path in (target, new):
        if path.exists():
            raise UserError(f"{path} exists, and nothing is overwritten; give another OUT, or delete it first.")
    directory = find_checkpoint(source)
    open_checkpoint(directory)  # compares the files with config.json
    tensors = read_tensors(directory, dtype)
    try:
        new.mkdir(parents=True)
        try:
            copy_side_files(directory, new)
            name = str(dtype).removeprefix("torch.")
            write_json(new / "config.json", read_config(directory) | {"dtype": name, "torch_dtype": name})
            save_tensors(tensors, new / SINGLE)
            fsync_directory(new)
            new.rename(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        fsync_directory(target.parent, files=False)
    except OSError as error:
        raise UserError(f"{target} could not be written ({error}); free some disk space or give another OUT.") from None


def read_tensors(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint, cast; values that the dtype cannot represent are refused."""
    stored = stored_tensors(read_entries(directory))
    tensors = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in stored.items()}
    read_weights(stored, tensors)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{directory}: {name} has values that {dtype} cannot represent (inf or NaN); use bfloat16 or float32."
            )
    return tensors


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, the templates and all configurations but config.json; no device, which might never end."""
    for path in source.iterdir():
        if path.is_file() and path.name not in NOT_COPIED and any(map(path.match, SIDE_FILES)):
            shutil.copyfile(path, target / path.name)


def main() -> None:
    """Parse the command line and write the checkpoint."""
    settings = tyro.cli(Settings, prog="python -m checkpoints.rewrite")
    rewrite(settings.source, settings.target, getattr(torch, settings.dtype))
    size = (settings.target / SINGLE).stat().st_size
    print(f"{settings.target}: {size / 1e6:,.1f} MB of {settings.dtype} weights")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
