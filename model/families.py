"""config.json <-> ModelConfig: which Hugging Face model_type a model is written as, and which models can be read.

A model is written as a Hugging Face family only when that family computes exactly the same function. All others are
written as `model_type: prenorm`, which transformers refuses instead of computing something else. Reading refuses what
this decoder cannot represent. Imports no torch.
"""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from errors import UserError
from model.config import LLAMA3_ROPE_KEYS, ModelConfig


@dataclass(frozen=True)
class Family:
    """How one Hugging Face model_type expresses a `ModelConfig` in config.json."""

    architecture: str
    """The class of transformers that loads it."""
    norm: Literal["rms", "layer"]
    """The norm that it has."""
    qkv_bias: str | bool
    """The key that says whether q, k and v have biases; True or False where the family always or never has them."""
    output_bias: bool = False
    """Whether `qkv_bias` gives o_proj a bias too. This decoder has none: zeros are written, and required on reading."""
    qk_norm: bool = False
    """Whether each head of q and k has an RMSNorm."""
    eps: str = "rms_norm_eps"
    """The key of norm_eps."""
    heads: Literal["any", "divide", "fill"] = "any"
    """The heads that it allows. any: every number of heads of every head_dim. divide: every head_dim, but
    num_attention_heads must divide hidden_size. fill: the query heads fill hidden_size, head_dim being
    hidden_size / num_attention_heads."""
    constants: tuple[tuple[str, object], ...] = ()
    """Keys of this family that are always written, with these values."""
    written: bool = True
    """Whether models are written as this family; if not, they are only read."""
    defaults: tuple[tuple[str, object], ...] = ()
    """The meaning of a missing key, where it differs from that in other families."""


# The only table that decides how models are written and which are read. Nothing is written as qwen2 or mistral: with
# model_type qwen2, transformers would choose a tokenizer class that encodes with other token ids.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "rms",
        "attention_bias",
        output_bias=True,
        heads="divide",
        constants=(("mlp_bias", False),),
    ),
    "qwen3": Family("Qwen3ForCausalLM", "rms", "attention_bias", output_bias=True, qk_norm=True),
    "stablelm": Family(
        "StableLmForCausalLM",
        "layer",
        "use_qkv_bias",
        eps="layer_norm_eps",
        heads="fill",
        constants=(("partial_rotary_factor", 1.0), ("use_parallel_residual", False), ("qk_layernorm", False)),
        defaults=(("partial_rotary_factor", 0.25), ("layer_norm_eps", 1e-5)),
    ),
    "qwen2": Family("Qwen2ForCausalLM", "rms", qkv_bias=True, written=False),
    "mistral": Family("MistralForCausalLM", "rms", qkv_bias=False, written=False, defaults=(("sliding_window", 4096),)),
}
FORMAT = 2  # of config.json with model_type prenorm, and of settings.toml; see `from_json`
SHAPE_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# The values of config.json that this decoder can represent; the first is what a missing key means.
REQUIRED_VALUES = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "use_parallel_residual": (False, None),
    "qk_layernorm": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}
EXPECTED_TYPES = {  # or null
    "rope_scaling": dict,
    "rope_parameters": dict,
    "prenorm": dict,
    "layer_types": list,
    "sliding_window": int,
    "max_window_layers": int,
}


def choose_model_type(config: ModelConfig) -> str:
    """The model_type that a model is written as."""
    heads_allowed = {
        "any": True,
        "divide": config.hidden_size % config.num_attention_heads == 0,
        "fill": config.resolved_head_dim * config.num_attention_heads == config.hidden_size,
    }
    for model_type, family in FAMILIES.items():
        same = family.norm == config.norm and family.qk_norm == config.qk_norm
        same = same and (config.norm_placement, config.mlp) == ("pre", "swiglu")
        same = same and (family.norm == "layer" or not config.has_norm_bias)  # no family has RMSNorm with a bias
        if family.written and same and heads_allowed[family.heads]:
            return model_type
    return "prenorm"


def to_json(config: ModelConfig, *, dtype: str, bos_token_id: int | None, eos_token_id: int | None) -> dict:
    """The contents of config.json, readable by transformers 4 (`rope_theta`, `torch_dtype`) and 5."""
    model_type = choose_model_type(config)
    common = {
        "model_type": model_type,
        "bos_token_id": bos_token_id,  # null where there is none: a missing key means a default
        "eos_token_id": eos_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model_type == "prenorm":
        return {"architectures": ["PrenormForCausalLM"], **common, "format": FORMAT, **dataclasses.asdict(config)}
    family = FAMILIES[model_type]
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    fields = {
        "architectures": [family.architecture],
        **common,
        **{key: getattr(config, key) for key in SHAPE_FIELDS},
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.resolved_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        family.eps: config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        **dict(family.constants),
    }
    if isinstance(family.qkv_bias, str):
        fields[family.qkv_bias] = config.attention_bias
    if config.norm_bias is False:
        fields["prenorm"] = {"norm_bias": False}  # our own key: the zero biases in the file are dropped on reading
    return fields


def read_json(directory: Path) -> dict:
    """The contents of a directory's config.json."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise UserError(f"{directory} is not a directory; give one that has config.json and *.safetensors.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} has no config.json; give the directory of a model.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); download or save the checkpoint again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object; download or save the checkpoint again.")
    return fields


def load_config(directory: Path | str) -> ModelConfig:
    """The configuration of a model's directory, ours or Hugging Face's; `UserError` if it cannot be represented."""
    fields, path = read_json(Path(directory)), Path(directory) / "config.json"
    try:
        return from_json(fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def from_json(fields: dict) -> ModelConfig:
    """The configuration that the contents of a config.json describe."""
    model_type = fields.get("model_type")
    if model_type == "prenorm":
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        check_required_keys(fields, names)
        config = ModelConfig(**{name: fields[name] for name in names})
        # Files without a format have norm_bias = true for every norm; it added no bias then: it meant the default.
        return config if "format" in fields or not config.norm_bias else dataclasses.replace(config, norm_bias=None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, "prenorm"])
        raise UserError(f"model_type {model_type!r} cannot be read; supported are {known}.")
    for key, expected in EXPECTED_TYPES.items():
        if not isinstance(fields.get(key), expected | None):
            raise UserError(f"{key} is {fields[key]!r} and must be of type {expected.__name__}, or null.")
    family = FAMILIES[model_type]
    fields = dict(family.defaults) | fields
    required = [*SHAPE_FIELDS, "max_position_embeddings"]
    if model_type != "llama":  # the first LLaMA had no grouped queries: there a missing key means as many as heads
        required.append("num_key_value_heads")
    if model_type == "qwen3":
        required.append("head_dim")
    check_required_keys(fields, required)
    rope = read_rope(fields)
    check_required_values(fields | {"partial_rotary_factor": rope.get("partial_rotary_factor")})
    heads = fields["num_attention_heads"]
    qkv_bias = fields.get(family.qkv_bias, False) if isinstance(family.qkv_bias, str) else family.qkv_bias
    config = ModelConfig(
        **{key: fields[key] for key in SHAPE_FIELDS},
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim"),
        max_position_embeddings=fields["max_position_embeddings"],
        rope_theta=rope["rope_theta"],
        rope_scaling=None
        if rope["rope_type"] == "default"
        else {k: rope.get(k) for k in ("rope_type", *LLAMA3_ROPE_KEYS)},
        norm=family.norm,
        norm_bias=(fields.get("prenorm") or {}).get("norm_bias"),
        norm_eps=fields.get(family.eps, 1e-6),
        attention_bias=bool(qkv_bias),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        initializer_range=fields.get("initializer_range", 0.02),
    )
    if family.heads == "fill" and config.head_dim is not None:
        raise UserError(
            f"head_dim {config.head_dim} is not hidden_size / num_attention_heads, and {model_type} ignores it."
        )
    check_full_attention(fields, config)
    return config


def check_required_keys(fields: dict, names: Iterable[str]) -> None:
    """Raise `UserError` when config.json lacks some of `names`."""
    missing = [name for name in names if name not in fields]
    if missing:
        raise UserError(f"{', '.join(missing)} is missing.")


def read_rope(fields: dict) -> dict:
    """The rotary parameters from either of the keys that transformers 4 and 5 use, completed with defaults."""
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
    rope.setdefault("partial_rotary_factor", fields.get("partial_rotary_factor"))
    rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
    if rope["rope_type"] not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"rotary positions of type {rope['rope_type']!r} ({rope}) are not supported; default and llama3 are."
        )
    return rope


def check_required_values(fields: dict) -> None:
    """Raise `UserError` for a model that computes another function than this decoder."""
    for key, allowed in REQUIRED_VALUES.items():
        value = fields.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{key} is {value!r}, which this decoder cannot represent; it needs {allowed[0]!r}.")


def check_full_attention(fields: dict, config: ModelConfig) -> None:
    """Raise `UserError` for attention with a sliding window shorter than the context."""
    window = fields.get("sliding_window")
    layer_types = fields.get("layer_types") or []
    if fields["model_type"] in ("qwen2", "qwen3"):
        slides = bool(fields.get("use_sliding_window")) and window is not None
        slides = slides and (fields.get("max_window_layers") or 0) < config.num_hidden_layers
    else:
        slides = window is not None
    slides = slides and window < config.max_position_embeddings
    if slides or any(kind != "full_attention" for kind in layer_types):
        raise UserError(f"attention has a sliding window of {window} tokens, which this decoder cannot represent.")
