"""The weight files of a checkpoint directory: which they are, and the tensors that their headers list.

Nothing is ever unpickled. Imports no torch before a file is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

from safetensors import safe_open

from errors import UserError, read_json, reading

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWNLOAD = "download or save it again, in a clone with `git lfs pull`"
# The small files that belong to a checkpoint: configurations, tokenizers and chat templates.
SIDE_FILES = ("*.json", "*.model", "*.jinja", "merges.txt")
OTHER_FORMATS = {  # a file of a directory without model.safetensors -> what the directory has, and what to do
    "adapter_config.json": "an adapter and no model; make it one: python generate.py ADAPTER --merge NEW",
    "*.gguf": "GGUF weights, which are only written here; give the model that they were made from",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth"),
        "pickled weights, which can run code and are never opened; save them with transformers as safetensors",
    ),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    file: safe_open
    """The open file, mapped into memory as long as one of its tensors is in use."""
    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """F32, BF16, ..."""

    def read(self) -> Tensor:
        """The tensor, in the pages of its mapped file: it is not in memory before it is used."""
        with reading(self.path, DOWNLOAD):
            return self.file.get_tensor(self.key)


def check_format(directory: Path) -> None:
    """Raise `UserError` for a directory that has weights, but in another format than safetensors."""
    names = {path.name for path in directory.iterdir()}
    for pattern, advice in OTHER_FORMATS.items():
        if not names & {SINGLE, INDEX} and any(fnmatch(name, pattern) for name in names):
            raise UserError(f"{directory} has {advice}.")


def find_weight_files(directory: Path, single: str = SINGLE) -> list[Path]:
    """The safetensors files of a directory: one, or the shards that its index names."""
    index = directory / f"{single}.index.json"
    if (directory / single).is_file():
        return [directory / single]
    if not index.is_file():
        check_format(directory)
        raise UserError(f"{directory} has no {single}; download or save the checkpoint again.")
    with reading(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
        if outside := [name for name in names if PureWindowsPath(name).name != name]:  # knows / and \ and drives
            raise ValueError(f"{outside[0]} is not beside it")
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory, under the names that they have in a model with a head; opens each file once."""
    tensors = {}
    for path in find_weight_files(directory):
        with reading(path, DOWNLOAD):
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 - it is no dict
                part = file.get_slice(key)
                tensors[key] = StoredTensor(path, file, key, tuple(part.get_shape()), part.get_dtype())
    if "embed_tokens.weight" in tensors:  # saved from a base model, without its head
        return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in tensors.items()}
    return tensors
