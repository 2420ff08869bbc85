"""The weight files of a checkpoint directory, and the tensors that their headers list. Nothing is ever unpickled."""

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from safetensors import safe_open

from errors import UserError, reading
from files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
DOWNLOAD = "download or save it again, in a clone with `git lfs pull`"
PICKLED = "pickled weights, which can run code and are never opened; save them with transformers as safetensors"
# The first four bytes of a file -> what a directory without safetensors has, and what to do.
OTHER_FORMATS = {
    b"GGUF": "GGUF weights, which can be written here but not read; give the model that they were made from",
    b"PK\3\4": PICKLED,
    b"\x80\2\x8a\n": PICKLED,  # by torch.save before 2020
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    file: safe_open  # mapped into memory as long as one of its tensors is in use
    key: str  # its name in the file
    shape: tuple[int, ...]
    dtype: str  # F32, BF16, ...

    def read(self) -> "torch.Tensor":  # noqa: F821 - torch is imported when a file is opened
        """The tensor, in the pages of its mapped file: it is not in memory before it is used."""
        with reading(self.path, DOWNLOAD):
            return self.file.get_tensor(self.key)


def has_weights(directory: Path) -> bool:
    """Whether a directory has the weights of a model as safetensors."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def check_format(directory: Path) -> None:
    """`UserError` for an adapter, and for weights in another format alone."""
    if (directory / ADAPTER_CONFIG).is_file():
        raise UserError(f"{directory} is an adapter; make it a model: python generate.py '{directory}' --merge NEW")
    if has_weights(directory):
        return
    for path in sorted(directory.iterdir()):
        if path.suffix in (".gguf", ".bin", ".pt", ".pth") and path.is_file():
            with path.open("rb") as file:
                other_format = f"{path.name}, whose format is not read; give safetensors"
                raise UserError(f"{directory} has {OTHER_FORMATS.get(file.read(4), other_format)}.")


def find_weight_files(directory: Path, single: str = SINGLE) -> list[Path]:
    """The safetensors files of a directory: one, or the shards that its index names."""
    index = directory / f"{single}.index.json"
    if (directory / single).is_file():
        return [directory / single]
    if not index.is_file():
        raise UserError(f"{directory} has no {single}; download or save the checkpoint again.")
    with reading(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
        for name in names:  # PureWindowsPath knows / and \ and drives
            if PureWindowsPath(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{name} is not beside it")
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory, under the names that they have in a model with a head; opens each file once."""
    tensors = {}
    for path in find_weight_files(directory):
        with reading(path, DOWNLOAD):
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 - it is no dict
                header = file.get_slice(key)
                tensors[key] = StoredTensor(path, file, key, tuple(header.get_shape()), header.get_dtype())
    if "embed_tokens.weight" in tensors:  # saved from a base model, without its head
        return {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in tensors.items()}
    return tensors
