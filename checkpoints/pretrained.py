"""A directory on disk <-> a Decoder: weights in *.safetensors under Hugging Face's names, and config.json."""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from checkpoints import adapters
from checkpoints.families import SHAPE_FIELDS, load_config, to_json, zero_biases
from checkpoints.weights import ADAPTER_CONFIG, SINGLE, StoredTensor, check_format, stored_tensors
from errors import UserError, reading
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import allocate
from model.norm import is_norm_parameter

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Fields that must be equal for the weights of one model to be loaded into another.
FIELDS_THAT_MUST_MATCH = [*SHAPE_FIELDS, "num_key_value_heads", "resolved_head_dim", "attention_bias"]
FIELDS_THAT_MUST_MATCH += ["attention_output_bias", "qk_norm", "tie_word_embeddings", "norm_placement", "mlp"]


def unpacked_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names, packed ones as views of their rows, to be saved or filled."""
    packed_matrices = config.packed_matrices
    unpacked = {}
    for name, tensor in tensors.items():
        name = name if name.startswith("lm_head.") else f"model.{name}"
        packed = next((module for module in name.split(".") if module in packed_matrices), None)
        if packed is None:
            unpacked[name] = tensor
            continue
        rows = packed_matrices[packed]
        views = tensor.chunk(len(rows)) if ".lora_A." in name else tensor.split([*rows.values()])  # of A: r rows each
        for matrix, view in zip(rows, views, strict=True):
            unpacked[name.replace(packed, matrix)] = view
    return unpacked


def save_pretrained(
    decoder: Decoder, directory: Path | str, *, bos_token_id: int | None = None, eos_token_id: int | None = None,
    state: Mapping[str, Tensor] | None = None, file: str = SINGLE,
) -> None:  # fmt: skip
    """Write config.json and the weights, in their dtypes; with LoRA the adapter. Not atomic: callers write into a new
    directory and rename it. A process that writes a share of the weights gives them as `state`, and their `file`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = unpacked_tensors(decoder.state_dict() if state is None else state, decoder.config)
    if decoder.lora is not None:
        tensors = {adapters.PREFIX + name: tensor.cpu() for name, tensor in tensors.items() if ".lora_" in name}
        targets = sorted({name.split(".")[-3] for name in tensors})
        fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": targets}
        write_json(directory / ADAPTER_CONFIG, fields | decoder.lora)
        save_tensors(tensors, directory / adapters.WEIGHTS, base=decoder.lora_base)
        return
    dtype = decoder.embed_tokens.weight.dtype
    dtype_name = str(dtype).removeprefix("torch.")
    fields = to_json(decoder.config, dtype=dtype_name, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    write_json(directory / "config.json", fields)
    for name in zero_biases(decoder.config):
        if name.removesuffix("bias") + "weight" in tensors:
            tensors[name] = torch.zeros(decoder.config.hidden_size, dtype=dtype)
    save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, directory / file)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> None:
    """Write contiguous tensors as a safetensors file; `OSError` when that fails."""
    path.touch()
    permissions = path.stat().st_mode  # the permissions of any new file; the library makes files for their owner only
    try:
        save_file(tensors, path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    path.chmod(permissions)


def write_json(path: Path, fields: dict) -> None:
    """Write a JSON file as Hugging Face does: indented, UTF-8."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Checkpoint:
    """What config.json and the headers of the weight files of a directory say."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]  # what the decoder has, by names in files
    adapter: Path | None = None  # a LoRA adapter to add to them

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return self.common_dtype(["model.embed_tokens.weight"])

    def common_dtype(self, names: Iterable[str]) -> torch.dtype:
        """The smallest dtype that holds the named tensors exactly."""
        with reading(self.directory, "give the unquantized model"):
            return functools.reduce(torch.promote_types, [DTYPES[self.tensors[name].dtype] for name in names])


def open_checkpoint(directory: Path | str, adapter: Path | None = None) -> Checkpoint:
    """The configuration and stored tensors of a directory; `UserError` unless names and shapes are the decoder's."""
    if adapter != directory:  # else it has a model and its adapter
        check_format(Path(directory))
    stored = stored_tensors(Path(directory))
    config = load_config(directory, stored)
    with torch.device("meta"):  # shapes without memory
        decoder = Decoder(config, seed=None)
    shapes = {name: tensor.shape for name, tensor in unpacked_tensors(decoder.state_dict(), config).items()}
    if config.tie_word_embeddings and "lm_head.weight" in stored:  # a copy
        head = stored.pop("lm_head.weight")
        if not torch.equal(stored.setdefault("model.embed_tokens.weight", head).read(), head.read()):
            raise UserError(f"{directory} has a head beside its tied embedding; set tie_word_embeddings to false.")
    unused = {*zero_biases(config), *(name for name in stored if name.endswith("rotary_emb.inv_freq"))}  # of old files
    tensors = {name: tensor for name, tensor in stored.items() if name not in unused}
    mismatches = [f"{name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if tensor.shape != shapes.get(name):
            mismatches.append(f"{name} has shape {tensor.shape}" if name in shapes else f"{name} is unexpected")
    if mismatches:
        more = f" and {len(mismatches) - 8} more" if len(mismatches) > 8 else ""
        raise UserError(f"the tensors of {directory} do not fit its config.json: {', '.join(mismatches[:8])}{more}.")
    return Checkpoint(Path(directory), config, tensors, adapter)


def load_pretrained(
    checkpoint: Checkpoint | Path | str,
    *, device: torch.device | str = "cpu", compute_dtype: torch.dtype = torch.float32, cast: bool = False,
) -> Decoder:  # fmt: skip
    """The decoder of a directory; weights have the dtypes of its files, or with `cast` matrices that of activations."""
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config, seed=None, compute_dtype=compute_dtype)
    parameters = decoder.state_dict()
    sizes = []
    for name, parameter in parameters.items():
        if cast:
            dtype = compute_dtype if parameter.ndim >= 2 else torch.float32
        else:
            dtype = checkpoint.common_dtype(unpacked_tensors({name: parameter}, checkpoint.config))
        sizes.append((parameter.shape, dtype))
    state = dict(zip(parameters, allocate(sizes, torch.device(device)), strict=True))
    weights = unpacked_tensors(state, checkpoint.config)
    copy_tensors(checkpoint.tensors, weights)
    if checkpoint.adapter is not None:
        adapters.add_adapter(weights, checkpoint.adapter, checkpoint.tensors)
    decoder.load_state_dict(state, assign=True)
    return decoder.to(device)


def copy_tensors(stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]) -> None:
    """Copy stored tensors to their targets, if they have one; a progress bar when that takes more than two seconds."""
    for name, tensor in tqdm(stored.items(), "reading the weights", delay=2, leave=False, disable=None):
        if name in targets:
            targets[name].copy_(tensor.read())


@torch.no_grad()
def load_weights(decoder: Decoder, directory: Path | str) -> tuple[list[str], list[str]]:
    """Copy a directory's weights into a decoder, which keeps its dtypes; with LoRA an adapter's, to resume its run.
    Returns two lists of names in files: in the decoder only, in the directory only. Only norms may differ."""
    views = unpacked_tensors(decoder.state_dict(), decoder.config)
    if decoder.lora is not None:
        with reading(directory, "the run cannot be resumed"):
            tensors = load_file(Path(directory, adapters.WEIGHTS))
            for name in [name for name in views if ".lora_" in name]:
                views[name].copy_(tensors[adapters.PREFIX + name].view_as(views[name]))
        return [], []
    checkpoint = open_checkpoint(directory)
    differences = []
    for key in FIELDS_THAT_MUST_MATCH:  # not only shapes, which other numbers of heads may share
        theirs, ours = getattr(checkpoint.config, key), getattr(decoder.config, key)
        if theirs != ours:
            differences.append(f"{key.removeprefix('resolved_')} {theirs} instead of {ours}")
    if differences:
        problem = ", ".join(differences)
        raise UserError(f"the weights of {directory} do not fit this model: {problem}; use the same values.")
    new = [name for name in views if name not in checkpoint.tensors]
    dropped = [name for name in checkpoint.tensors if name not in views]
    assert all(map(is_norm_parameter, [*new, *dropped]))
    copy_tensors(checkpoint.tensors, views)
    return new, dropped
