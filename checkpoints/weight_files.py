"""The weight files of a checkpoint directory: which files they are, and what their headers say. Only `is_zero`
reads weights.

A safetensors file is the length of its header in 8 bytes, the header as JSON, and the tensors one after another
(https://github.com/huggingface/safetensors#format). Imports no torch.
"""

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath

from errors import UserError, read_json, reading
from model.config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The small files that belong to a checkpoint: configurations, tokenizers and chat templates.
SIDE_FILES = ("*.json", "*.model", "*.jinja", "merges.txt")
MAX_HEADER = 2**24  # bytes; enough for 130,000 tensors
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of one element

PICKLED = (
    "has pickled weights, which can run code and are never opened; convert them to safetensors first, "
    "for example with transformers: AutoModelForCausalLM.from_pretrained(IN).save_pretrained(OUT)."
)
OTHER_FORMATS = {  # a file of a directory without model.safetensors -> what the directory has, and what to do
    "adapter_config.json": "has a PEFT adapter without its base model; load both with peft, merge them with "
    "merge_and_unload(), write the result with save_pretrained(), and give that directory.",
    "*.gguf": "has GGUF weights, which are only written here, not read; give the directory or the Hub id of the "
    "model that they were made from, with config.json and *.safetensors.",
    "consolidated*": "has weights in their publisher's own format (consolidated.*); "
    "give the version of the model for transformers, with config.json and *.safetensors.",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"), PICKLED),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is."""

    path: Path
    """The safetensors file that has it."""
    dtype: str
    """F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """Its first byte in the file."""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Its first byte and the first after it, from the end of the header."""

    def __post_init__(self) -> None:
        if min((*self.shape, *self.data_offsets)) < 0:
            raise ValueError("a size or an offset is below 0")


def explain_other_format(names: Collection[str]) -> str | None:
    """What weights among the files `names` cannot be read and what to do, or None if model.safetensors is there."""
    if SINGLE in names or INDEX in names:
        return None
    return next((advice for pattern, advice in OTHER_FORMATS.items() if any(fnmatch(n, pattern) for n in names)), None)


def check_format(directory: Path) -> None:
    """Raise `UserError` for a directory that has weights, but in another format than safetensors."""
    advice = explain_other_format({path.name for path in directory.iterdir()})
    if advice is not None:
        raise UserError(f"{directory} {advice}")


def find_weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or the shards that its index names."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not index.is_file():
        check_format(directory)
        raise UserError(f"{directory} has no {SINGLE}; download or save the checkpoint again.")
    with reading(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
    outside = [name for name in names if PureWindowsPath(name).name != name]  # knows / and \ and drives
    if outside:
        raise UserError(
            f"{index} names {join_names(outside)}, but shards must lie beside it; download the checkpoint again."
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory} lacks {join_names(missing)}; download the checkpoint again.")
    return [directory / name for name in names]


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of a directory, in the order of its files, by the names that they have in a model with a head."""
    entries: dict[str, TensorEntry] = {}
    for path in find_weight_files(directory):
        header = read_header(path)
        if twice := header.keys() & entries.keys():
            raise UserError(f"{directory} has {min(twice)} in two of its files; download the checkpoint again.")
        entries |= header
    if "embed_tokens.weight" in entries:  # saved from a base model, without its head
        return {name if name.startswith("lm_head.") else f"model.{name}": entry for name, entry in entries.items()}
    return entries


def is_zero(entry: TensorEntry) -> bool:
    """Whether all elements of a small tensor are 0.0 or -0.0."""
    size = BYTES.get(entry.dtype, 1)  # other types are refused where the weights are read
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        content = bytearray(file.read(math.prod(entry.shape) * size))
    content[size - 1 :: size] = content[size - 1 :: size].replace(b"\x80", b"\0")  # the byte that has the sign
    return not any(content)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, in their order; `UserError` unless they fill the file without gaps."""
    try:
        with path.open("rb") as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(8)
            if start == b"version ":
                raise ValueError("it is a pointer of Git LFS: fetch the file itself with `git lfs pull`")
            length = int.from_bytes(start, "little")
            if length > size - 8:
                raise ValueError("it is truncated")
            if length > MAX_HEADER:
                raise ValueError(f"its header has {length:,} bytes, and at most {MAX_HEADER:,} are read")
            fields = json.loads(file.read(length))
        fields.pop("__metadata__", None)
        entries, end = {}, 0
        header = {name: as_entry(name, field) for name, field in fields.items()}
        for name, field in sorted(header.items(), key=lambda item: item[1].data_offsets):
            (begin, stop), shape, dtype = field.data_offsets, field.shape, field.dtype
            expected = math.prod(shape) * BYTES[dtype] if dtype in BYTES else stop - begin
            if begin != end or stop < begin or stop - begin != expected:
                raise ValueError(f"{name} has other bytes than its shape says")
            entries[name] = TensorEntry(path, dtype, shape, 8 + length + begin)
            end = stop
        if 8 + length + end != size:
            raise ValueError("it is truncated" if size < 8 + length + end else "it has more bytes than its tensors")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}); download or save it again.") from None
    return entries


def as_entry(name: str, field: object) -> HeaderEntry:
    """A tensor of a header; `ValueError` that names it where the types differ."""
    try:
        return HeaderEntry(field["dtype"], tuple(field["shape"]), tuple(field["data_offsets"]))
    except Exception as error:
        raise ValueError(f"{name}: {error}") from None


def check_sizes(config: ModelConfig, entries: Mapping[str, TensorEntry], directory: Path | str) -> None:
    """Raise `UserError` for sizes in config.json that no tensor has: such a model could not be built."""
    largest = max((size for tensor in entries.values() for size in tensor.shape), default=0)
    limits = {
        "num_hidden_layers": (config.num_hidden_layers, len(entries)),
        "vocab_size": (config.vocab_size, largest),
        "hidden_size": (config.hidden_size, largest),
        "intermediate_size": (config.intermediate_size, largest),
        "num_attention_heads times head_dim": (config.num_attention_heads * config.resolved_head_dim, largest),
    }
    wrong = [f"{name} {size}" for name, (size, limit) in limits.items() if size > limit]
    if wrong:
        raise UserError(
            f"the config.json of {directory} says {', '.join(wrong)}, but its {len(entries)} tensors have at most "
            f"{largest} rows or columns; download the checkpoint again."
        )


def join_names(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
