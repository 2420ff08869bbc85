"""A directory on disk <-> a Decoder: weights in *.safetensors under Hugging Face's names, and config.json.

Nothing is ever unpickled. Writing is not atomic: callers write into a new directory and rename it.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from model.decoder import Decoder
from model.families import FAMILIES, SHAPE_FIELDS, choose_model_type, load_config, read_json, to_json
from model.norm import is_norm_parameter

__all__ = ["WeightReport", "load_config", "load_pretrained", "load_weights", "save_pretrained", "unpacked_tensors"]

# Our packed matrix -> Hugging Face's, in the order of the rows. All other names are the same, after "model.".
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Fields that must be equal for the weights of one model to be loaded into another. `norm` need not be.
FIELDS_THAT_MUST_MATCH = (
    *(*SHAPE_FIELDS, "num_key_value_heads", "resolved_head_dim", "attention_bias", "qk_norm", "tie_word_embeddings"),
    *("norm_placement", "mlp"),
)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unpacked_names(name: str) -> list[str]:
    """Hugging Face's names for one of our parameters: several if it is packed, in the order of the rows."""
    name = name if name.startswith("lm_head.") else f"model.{name}"
    for packed, parts in PACKED.items():
        if f".{packed}." in name:
            return [name.replace(f".{packed}.", f".{part}.") for part in parts]
    return [name]


def unpacked_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names, packed ones as views of their rows.

    The views work both ways: saving reads them, loading copies a file's tensors into them.
    """
    q, kv = (n * config.resolved_head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    rows = {3: (q, kv, kv), 2: (config.intermediate_size,) * 2}
    unpacked = {}
    for name, tensor in tensors.items():
        names = unpacked_names(name)
        parts = tensor.split(rows[len(names)]) if len(names) > 1 else [tensor]
        unpacked.update(zip(names, parts, strict=True))
    return unpacked


def zero_tensors(model_type: str, config: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the biases that a family has and our model lacks: zeros in files, the same function."""
    if model_type == "prenorm":
        return {}
    family, names = FAMILIES[model_type], []
    layers = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    if family.output_bias and config.attention_bias:
        names += [f"{layer}.self_attn.o_proj.bias" for layer in layers]
    if family.norm == "layer" and not config.has_norm_bias:
        for layer in layers:
            names += [f"{layer}.input_layernorm.bias", f"{layer}.post_attention_layernorm.bias"]
        names += ["model.norm.bias"]
    return dict.fromkeys(names, torch.Size([config.hidden_size]))


def save_pretrained(
    decoder: Decoder,
    directory: Path | str,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors (weights in their own dtype) into `directory`.

    Raises `OSError` when a file cannot be written, for example on a full disk; the directory is then incomplete.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    dtype = decoder.embed_tokens.weight.dtype
    write_json(directory / "config.json", to_json(decoder.config, dtype=str(dtype).removeprefix("torch."), **ids))
    write_json(directory / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    tensors = unpacked_tensors(decoder.state_dict(), decoder.config)
    for name, shape in zero_tensors(choose_model_type(decoder.config), decoder.config).items():
        tensors[name] = torch.zeros(shape, dtype=dtype)
    path = directory / "model.safetensors"
    try:
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None


def write_json(path: Path, fields: dict) -> None:
    """Write a JSON file as Hugging Face does: indented, UTF-8."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load_pretrained(
    directory: Path | str, *, device: torch.device | str = "cpu", compute_dtype: torch.dtype = torch.float32
) -> Decoder:
    """The decoder of a directory, each weight in the dtype of its file; activations in `compute_dtype`.

    Reads llama, qwen2, qwen3, mistral, stablelm and prenorm, sharded or not. `decoder.float()` makes the float32 master
    weights that training needs; for generation, `decoder.to(dtype)` saves the casts before each product.
    """
    config = load_config(directory)
    with torch.device("meta"):  # shapes without memory
        decoder = Decoder(config, seed=None, compute_dtype=compute_dtype)
    with stored_weights(directory, config) as stored:
        expected = unpacked_tensors(decoder.state_dict(), config)
        check_match({name: tensor.shape for name, tensor in expected.items()}, stored, directory)
        state = {}
        for name, parameter in decoder.state_dict().items():
            dtype = functools.reduce(torch.promote_types, (stored[part].dtype for part in unpacked_names(name)))
            state[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        for name, view in unpacked_tensors(state, config).items():
            view.copy_(stored[name].read())
    decoder.load_state_dict(state, assign=True)
    return decoder.to(device)


@dataclass(frozen=True)
class WeightReport:
    """Which tensors were loaded into a decoder whose norm may differ; names as in files."""

    kept: list[str]
    """In the checkpoint and in the decoder: loaded."""
    new: list[str]
    """Only in the decoder: they keep their initial values."""
    dropped: list[str]
    """Only in the checkpoint: ignored."""


@torch.no_grad()
def load_weights(decoder: Decoder, directory: Path | str) -> WeightReport:
    """Copy a directory's weights into a decoder whose norm may differ; all other tensors must match.

    Norm parameters that both norms have, such as `weight`, are loaded. The decoder keeps its dtypes, so master weights
    stay float32.
    """
    config = load_config(directory)
    check_fields_match(config, decoder.config, directory)
    with stored_weights(directory, config) as stored:
        views = unpacked_tensors(decoder.state_dict(), decoder.config)
        new = [name for name in views if name not in stored and is_norm_parameter(name)]
        dropped = [name for name in stored if name not in views and is_norm_parameter(name)]
        expected = {name: view.shape for name, view in views.items() if name not in new}
        check_match(expected, {name: tensor for name, tensor in stored.items() if name not in dropped}, directory)
        for name in expected:
            views[name].copy_(stored[name].read())
    return WeightReport(kept=list(expected), new=new, dropped=dropped)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file."""

    file: safe_open
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Load the tensor into memory."""
        return self.file.get_tensor(self.name)


@contextlib.contextmanager
def stored_weights(directory: Path | str, config: ModelConfig) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a directory that our model has parameters or buffers for; see `drop_redundant`."""
    stored = {}
    with contextlib.ExitStack() as stack:
        for path in weight_files(Path(directory)):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - a safe_open is not a mapping
                    part = file.get_slice(name)
                    dtype, shape = DTYPES.get(part.get_dtype()), torch.Size(part.get_shape())
                    if dtype is None:
                        raise UserError(
                            f"{path}: {name} has type {part.get_dtype()}, not a float: quantized weights are not read."
                        )
                    stored[name] = StoredTensor(file, name, shape, dtype)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path} is not a complete safetensors file ({error}); download or save it again."
                ) from None
        yield drop_redundant(stored, directory, config)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or the shards that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
            raise UserError(
                f"{directory} has only pickled weights, which can run code; convert them to safetensors first."
            )
        raise UserError(f"{directory} has no model.safetensors; download or save the checkpoint again.")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{index} is not a readable index of shards; download or save the checkpoint again.") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{directory} lacks {join_names(missing)}; download the checkpoint again.")
    return [directory / name for name in names]


def drop_redundant(
    stored: dict[str, StoredTensor], directory: Path | str, config: ModelConfig
) -> dict[str, StoredTensor]:
    """Drop what our model does not need: zero biases, a copy of a tied head, rotary tables of old files.

    Raises `UserError` when such a bias is not zero or such a head is not a copy.
    """
    zeros = zero_tensors(read_json(Path(directory))["model_type"], config)
    shapes = {name: tensor for name, tensor in stored.items() if name in zeros}
    check_match(zeros, shapes, directory)
    for name in zeros:
        if stored[name].read().any():
            raise UserError(f"{directory}: {name} is not zero, and this decoder has no such bias.")
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    dropped = {*zeros}
    if config.tie_word_embeddings and head is not None:
        if embedding is None or head.shape != embedding.shape or not head.read().equal(embedding.read()):
            raise UserError(
                f"{directory} has tie_word_embeddings true but an lm_head that differs from the embedding; "
                f"set it to false in config.json."
            )
        dropped.add("lm_head.weight")
    dropped |= {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    return {name: tensor for name, tensor in stored.items() if name not in dropped}


def check_fields_match(theirs: ModelConfig, ours: ModelConfig, directory: Path | str) -> None:
    """Raise one `UserError` that lists all fields in which a directory's model differs from the model to load it into.

    Comparing tensors would not be enough: other numbers of heads can give the same shapes.
    """
    different = [
        f"{key.removeprefix('resolved_')} {getattr(theirs, key)} instead of {getattr(ours, key)}"
        for key in FIELDS_THAT_MUST_MATCH
        if getattr(theirs, key) != getattr(ours, key)
    ]
    if different:
        raise UserError(
            f"the weights of {directory} do not fit this model: {', '.join(different)}; use the same values."
        )


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


def join_names(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
