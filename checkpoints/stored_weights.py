"""The tensors in a checkpoint's files: compared with its config.json by their headers, then read to where they belong.

Reading needs little memory besides the weights themselves: a tensor is read a few MB at a time, cast, and stored where
the model has it. (The pages of a mapped file would stay in memory beside the weights.)
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoints.families import read_config, zero_biases
from checkpoints.weight_files import TensorEntry, check_sizes, join_names, read_entries
from errors import UserError
from model.config import ModelConfig

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 2**20  # elements that are read at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    entry: TensorEntry
    shape: torch.Size
    dtype: torch.dtype

    def chunks(self, memory: Tensor | None = None) -> Iterator[Tensor]:
        """Its elements in order, in one dimension and a few MB at a time; each chunk overwrites the one before.

        memory: what `chunk_memory` gave, for many tensors one after another.
        """
        count, path = math.prod(self.shape), self.entry.path
        buffer = (chunk_memory() if memory is None else memory).view(self.dtype)
        try:
            with path.open("rb") as file:
                file.seek(self.entry.offset)
                for start in range(0, count, CHUNK):
                    chunk = buffer[: min(CHUNK, count - start)]
                    if file.readinto(chunk.view(torch.uint8).numpy()) != chunk.nbytes:
                        raise OSError("it has become shorter")
                    yield chunk
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error}); download or save it again.") from None


def chunk_memory() -> Tensor:
    """Memory for a chunk of any dtype."""
    return torch.empty(CHUNK, dtype=torch.float64)


def read_weights(stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]) -> None:
    """Copy each stored tensor into the contiguous target of the same name and shape, in that one's dtype.

    Reads in the order of the files. Shows a progress bar in a terminal when that takes more than two seconds.
    """
    memory = chunk_memory()  # one for all: the allocator would not always reuse what was freed
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in stored.values())
    with tqdm(
        desc="reading the weights", total=total, unit="B", unit_scale=True, delay=2, leave=False, disable=None
    ) as progress:
        for name, tensor in stored.items():
            target, start = targets[name].view(-1), 0
            for chunk in tensor.chunks(memory):
                target[start : start + len(chunk)].copy_(chunk)
                start += len(chunk)
                progress.update(chunk.nbytes)


def stored_dtype(directory: Path | str) -> torch.dtype:
    """The dtype of a directory's largest tensor."""
    stored = stored_tensors(read_entries(Path(directory)))
    largest = max(stored.values(), key=lambda tensor: math.prod(tensor.shape), default=None)
    return torch.float32 if largest is None else largest.dtype


def stored_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    """The tensors of headers; quantized ones are a `UserError`."""
    stored = {}
    for name, entry in entries.items():
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise UserError(
                f"{entry.path}: {name} has type {entry.dtype}, not a float: quantized weights are not read."
            )
        stored[name] = StoredTensor(entry, torch.Size(entry.shape), dtype)
    return stored


def stored_weights(directory: Path | str, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a directory that our model has parameters or buffers for; see `drop_redundant`.

    Sizes that do not fit `config` are refused by the headers alone, before anything is allocated.
    """
    entries = read_entries(Path(directory))
    check_sizes(config, entries, directory)
    stored = stored_tensors(entries)
    if not config.tie_word_embeddings and "lm_head.weight" not in stored:
        raise UserError(
            f"{directory} has no head (lm_head.weight), and its config.json has tie_word_embeddings false; "
            f"save the model with its head, or set it to true if the embedding is the head."
        )
    return drop_redundant(stored, directory, config)


def drop_redundant(
    stored: dict[str, StoredTensor], directory: Path | str, config: ModelConfig
) -> dict[str, StoredTensor]:
    """Drop what our model does not need: zero biases, a copy of a tied head, rotary tables of old files.

    Raises `UserError` when such a head is not a copy; `load_config` has checked that the biases are zero.
    """
    dropped = {*zero_biases(read_config(directory)["model_type"], config)}
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None:
        pairs = zip(head.chunks(), embedding.chunks(), strict=True) if embedding else ()
        if embedding is None or head.shape != embedding.shape or not all((a == b).all() for a, b in pairs):
            raise UserError(
                f"{directory} has tie_word_embeddings true but an lm_head that differs from the embedding; "
                f"set it to false in config.json."
            )
        dropped.add("lm_head.weight")
    dropped |= {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    return {name: tensor for name, tensor in stored.items() if name not in dropped}


def check_match(expected: Mapping[str, torch.Size], stored: Mapping[str, StoredTensor], directory: Path | str) -> None:
    """Raise one `UserError` that lists missing and unexpected tensors and wrong shapes."""
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    wrong = [
        f"{name} is {tuple(stored[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong}
    found = "; ".join(f"{problem}: {join_names(names)}" for problem, names in problems.items() if names)
    if found:
        raise UserError(f"the tensors of {directory} are not those that its config.json describes; {found}.")
