"""config.json <-> ModelConfig: which Hugging Face model_type a model is written as, and which models can be read.

A model is written as a family that computes exactly the same function, else as `model_type: prenorm`, which
transformers refuses. Reading refuses what changes the function there, and ignores other keys. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checkpoints.weights import StoredTensor, check_format, has_weights, stored_tensors
from errors import UserError, note, reading
from files import read_json
from model.config import ROPE_SCALING, ModelConfig
from model.count import num_parameters


@dataclass(frozen=True)
class Family:
    """How one Hugging Face model_type expresses a `ModelConfig` in config.json."""

    architecture: str | None  # the class in transformers; None: nothing is written as this family
    norm: Literal["rms", "layer"]
    qkv_bias: str | bool  # the key that says whether q, k and v have biases, or the same answer for all models
    output_bias: bool = False  # whether that key gives o_proj a bias too, in the file zeros if the decoder has none
    qk_norm: bool = False  # whether each head of q and k has an RMSNorm
    eps: str = "rms_norm_eps"  # the key of norm_eps
    any_head_dim: bool = True  # whether heads may be wider or narrower than hidden_size / num_attention_heads
    heads_divide_hidden: bool = False  # whether num_attention_heads must divide hidden_size
    constants: dict[str, object] = field(default_factory=dict)  # keys that are always written, with their values
    defaults: dict[str, object] = field(default_factory=dict)  # values of missing keys where `DEFAULTS` has others


QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False}

# The only table that decides how models are written and which are read. Nothing is written as qwen2 or mistral: with
# model_type qwen2, transformers would choose a tokenizer class that encodes with other token ids; with mistral, it
# would warn of wrong ids, and change them if it is told to.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", "rms", "attention_bias", output_bias=True, heads_divide_hidden=True,
        constants={"mlp_bias": False}, defaults={"max_position_embeddings": 2048},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "rms", "attention_bias", output_bias=True, qk_norm=True,
        defaults=QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "stablelm": Family(
        "StableLmForCausalLM", "layer", "use_qkv_bias", eps="layer_norm_eps", any_head_dim=False,
        constants={"partial_rotary_factor": 1.0, "use_parallel_residual": False, "qk_layernorm": False},
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
    ),
    "qwen2": Family(None, "rms", qkv_bias=True, defaults=QWEN_DEFAULTS),
    "mistral": Family(
        None, "rms", qkv_bias=False,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
}  # fmt: skip
# Keys that every config.json has, under the names of `ModelConfig`.
SHAPE_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Reading: the meaning of a missing key, from the configuration classes of transformers.
DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5,
    "attention_bias": False, "use_qkv_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
    "sliding_window": None, "use_sliding_window": True, "layer_types": None,
}  # fmt: skip
# Reading: keys that change what a model computes, with the values under which they do not. Others are refused.
HARMLESS: dict[str, tuple] = {
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "per_layer_config": ({}, None),
    **dict.fromkeys(("quantization_config", "quantization", "attention_chunk_size"), (None,)),
    **dict.fromkeys(("mlp_bias", "use_parallel_residual", "qk_layernorm"), (False, None)),
    **dict.fromkeys(("use_bidirectional_attention", "rope_interleaved", "use_mrope"), (False, None)),
}
# Reading: the keys that rope_scaling or rope_parameters may have. Others are refused.
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", "finetuned"}
ROPE_KEYS.update(*ROPE_SCALING.values())
ORIGINAL_CONTEXT = "original_max_position_embeddings"


def choose_model_type(config: ModelConfig) -> str:
    rms_with_bias = config.norm == "rms" and config.has_norm_bias
    only_o_proj_bias = config.attention_output_bias and not config.attention_bias
    if rms_with_bias or only_o_proj_bias or not config.is_plain:
        return "prenorm"
    for model_type, family in FAMILIES.items():
        same_norms = (family.norm, family.qk_norm) == (config.norm, config.qk_norm)
        bias_fits = family.output_bias or not config.attention_output_bias
        head_dim_fits = family.any_head_dim or config.head_dim is None
        heads_fit = not family.heads_divide_hidden or config.hidden_size % config.num_attention_heads == 0
        if family.architecture and same_norms and bias_fits and head_dim_fits and heads_fit:
            return model_type
    return "prenorm"


def to_json(config: ModelConfig, *, dtype: str, bos_token_id: int | None, eos_token_id: int | None) -> dict:
    """The contents of config.json, readable by transformers 4 (`rope_theta`, `torch_dtype`) and 5."""
    model_type = choose_model_type(config)
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}  # or null: a missing key means a default
    common = {"model_type": model_type, **ids, "dtype": dtype, "torch_dtype": dtype}
    if model_type == "prenorm":
        return {"architectures": ["PrenormForCausalLM"], **common, **dataclasses.asdict(config)}
    family = FAMILIES[model_type]
    fields = {
        "architectures": [family.architecture],
        **common,
        **{key: getattr(config, key) for key in (*SHAPE_FIELDS, "num_key_value_heads")},
        "head_dim": config.resolved_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        family.eps: config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_dropout": 0.0,
        **family.constants,
    }
    if isinstance(family.qkv_bias, str):
        fields[family.qkv_bias] = config.attention_bias
    if config.norm_bias is False:
        fields["prenorm"] = {"norm_bias": False}  # our own key: transformers needs biases, which are zeros in the file
    return fields


def load_config(directory: Path | str, tensors: Mapping[str, StoredTensor] | None = None) -> ModelConfig:
    """The configuration of a directory; `UserError` if this decoder cannot compute such a model. Its tensors, given if
    they are open already, must fit, and say which biases are not zeros."""
    path = Path(directory) / "config.json"
    if tensors is None:
        check_format(path.parent)
        tensors = stored_tensors(path.parent) if has_weights(path.parent) else {}
    if not path.is_file():
        raise UserError(f"{directory} has no config.json; give the directory of a model.")
    fields = read_json(path)
    with reading(path, "give another model"):
        try:
            config = from_json(fields)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from None
        layers = len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")})
        parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
        # Before modules are built, which may need more memory than there is; twice, as files may lack a head.
        if tensors and (layers != config.num_hidden_layers or num_parameters(config) > 2 * parameters):
            raise ValueError("the weights beside it have other numbers of layers or parameters")
    context = config.max_position_embeddings
    if context < fields.get("max_position_embeddings", 0):
        note(f"{path} has a sliding window, which is the context here: {context} tokens")
    biases = (tensors[name].read() for name in zero_biases(config, fields["model_type"]) if name in tensors)
    if any(bias.any() for bias in biases):  # transformers has trained them, so the decoder gets them
        trained = "norm_bias" if config.norm == "layer" else "attention_output_bias"
        config = dataclasses.replace(config, **{trained: True})
    return config


def zero_biases(config: ModelConfig, model_type: str | None = None) -> list[str]:
    """Biases, zeros in files, that a family (default: the one it is written as) has and the decoder lacks."""
    family = FAMILIES.get(model_type or choose_model_type(config))
    layers = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    if family and family.output_bias and config.attention_bias and not config.attention_output_bias:
        return [f"{layer}.self_attn.o_proj.bias" for layer in layers]
    if family and family.norm == "layer" and not config.has_norm_bias:
        norms = [f"{layer}.{norm}_layernorm" for layer in layers for norm in ("input", "post_attention")]
        return [f"{norm}.bias" for norm in [*norms, "model.norm"]]
    return []


def from_json(fields: dict) -> ModelConfig:
    """The configuration that the contents of a config.json describe; any exception if there is none."""
    model_type = fields.get("model_type")
    if model_type == "prenorm":  # it has every field, under the same name
        return ModelConfig(**{field.name: fields[field.name] for field in dataclasses.fields(ModelConfig)})
    if model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}, and supported are {', '.join([*FAMILIES, 'prenorm'])}")
    family = FAMILIES[model_type]
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}  # the name in transformers 4, and in 5
    fields = DEFAULTS | family.defaults | fields
    scaling = read_rope_scaling(rope, fields)
    fields |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    for key, value in fields.items():  # with defaults: stablelm rotates a quarter of a head
        if key in HARMLESS and value not in HARMLESS[key]:
            raise ValueError(f"{key} is {value!r}, which this decoder cannot represent")
    layer_types = set(fields["layer_types"] or ())
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {', '.join(sorted(unknown))}, which this decoder cannot represent")
    context = fields["max_position_embeddings"]
    window = fields["sliding_window"]
    uses_window = fields["use_sliding_window"] or model_type == "mistral"  # which ignores use_sliding_window
    if window is not None and (uses_window or "sliding_attention" in layer_types):
        context = min(context, window)  # up to the length of its window, such a layer attends to all tokens
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    attention_bias = fields[family.qkv_bias] if isinstance(family.qkv_bias, str) else family.qkv_bias
    shape_fields = (*SHAPE_FIELDS, "num_key_value_heads", "head_dim")
    config = ModelConfig(
        **{key: fields[key] for key in (*shape_fields, "initializer_range", "rope_theta")},
        max_position_embeddings=context,
        rope_scaling=scaling,
        norm=family.norm,
        norm_bias=(fields.get("prenorm") or {}).get("norm_bias"),
        norm_eps=fields[family.eps],
        attention_bias=attention_bias or False,  # null is false
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields["tie_word_embeddings"] or False,
    )
    if not family.any_head_dim and config.head_dim is not None:
        raise ValueError(f"head_dim is {config.head_dim}, and {model_type} has only hidden_size / num_attention_heads")
    return config


def read_rope_scaling(rope: dict, fields: dict) -> dict | None:
    """`rope_scaling` as `ModelConfig` has it, from the object that config.json has for it, and its other fields."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *ROPE_SCALING) or not ROPE_KEYS.issuperset(rope):
        raise ValueError(f"rotary positions are {rope}, and only default, {', '.join(ROPE_SCALING)} are supported")
    if kind == "default":
        return None
    scaling = {"rope_type": kind, **{key: rope.get(key) for key in ROPE_SCALING[kind]}}
    context = fields["max_position_embeddings"]
    if ORIGINAL_CONTEXT in scaling:  # the key outside `rope` counts first
        scaling[ORIGINAL_CONTEXT] = fields.get(ORIGINAL_CONTEXT, rope.get(ORIGINAL_CONTEXT, context))
    if kind == "yarn":  # what is missing has transformers' values
        scaling["beta_fast"] = rope.get("beta_fast") or 32
        scaling["beta_slow"] = rope.get("beta_slow") or 1
        scaling["truncate"] = bool(rope.get("truncate", True))
        if "factor" in rope and rope["factor"] is None:
            scaling["factor"] = context / scaling[ORIGINAL_CONTEXT]
        factor = scaling["factor"]
        if scaling["attention_factor"] is None and isinstance(factor, int | float):  # Peng et al. 2023, equation 22
            scaling["attention_factor"] = 0.1 * math.log(max(factor, 1.0)) + 1
    return scaling
