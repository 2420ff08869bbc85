"""The shape of a decoder: one dataclass, checked when it is made, and what follows from it by arithmetic alone.

Imports no torch, so that `--help` and `--dry-run` answer at once. The field names are those of the ecosystem's
config.json, and the sentence under a field is its help text on the command line.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from errors import UserError


@dataclass(frozen=True)
class NormParameter:
    """One learned parameter of a norm."""

    name: str
    """Its name in the module and, after the norm's own name, in files."""
    initial: float
    """The value that every element starts with."""
    per_channel: bool = True
    """Whether it has shape (D,), one element per channel of the residual stream, or is a scalar of shape ()."""


# To add a norm: a row here with its learned parameters, and a function of the same name in model/norm.py.
# Initialization, parameter counts, freezing, files and norm conversion follow from the row. `bias` is left out when
# `norm_bias` is False.
WEIGHT, BIAS = NormParameter("weight", initial=1.0), NormParameter("bias", initial=0.0)
NORMS: dict[str, tuple[NormParameter, ...]] = {
    "rms": (WEIGHT,),
    "layer": (WEIGHT, BIAS),
    "center": (WEIGHT, BIAS),
    "prms": (WEIGHT,),
    "l2": (WEIGHT,),
    "group": (WEIGHT, BIAS),
    "batch": (WEIGHT, BIAS),
    "dyt": (NormParameter("alpha", initial=0.5, per_channel=False), WEIGHT, BIAS),
    "none": (),
}
PLACEMENTS = {"pre": 2, "post": 2, "sandwich": 4}  # norms in a layer, by where they stand
GATED, PLAIN = ("swiglu", "geglu", "reglu", "glu"), ("relu", "gelu")  # MLPs of three matrices, and of two
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: grouped-query attention with rotary positions; by default pre-norm, with RMSNorm and a SwiGLU MLP."""

    vocab_size: int = 4096
    """Number of tokens that the tokenizer knows."""
    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 704
    """Width of the MLP between its gate and its down projection; 8/3 of the hidden size is usual."""
    num_hidden_layers: int = 4
    """Number of layers, each an attention block and an MLP."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int = 2
    """Number of key and value heads; each is shared by an equal number of query heads."""
    head_dim: int | None = None
    """Width of a head; by default the hidden size divided by the number of query heads."""
    max_position_embeddings: int = 1024
    """Longest context in tokens: the length of the tables of rotary positions."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies; longer contexts use larger ones."""
    rope_scaling: Annotated[dict | None, tyro.conf.Suppress] = None  # not a flag: it comes with loaded weights
    """Llama 3's stretching of the rotary frequencies, as checkpoints of that family carry it."""
    norm: Literal[*NORMS] = "rms"
    """The norm around every block and before the head; nothing else changes with it. rms: RMSNorm. layer: LayerNorm.
    The others are for comparisons, and slower. center: x minus its mean. prms: RMSNorm whose mean square is that of
    the first sixteenth of the channels. l2: x divided by its length. group: GroupNorm, LayerNorm within norm_groups
    slices of the channels. batch: BatchNorm, which also sees other tokens, later ones among them. none: no norm.
    dyt: DyT, tanh(alpha x) with a learned scalar alpha."""
    norm_placement: Literal[*PLACEMENTS] = "pre"
    """pre: before each block. post: after each addition, as in the Transformer of 2017, and none before the head.
    sandwich: before each block and on its output."""
    norm_groups: int = 8
    """Slices of the row for the norm `group`."""
    norm_bias: bool = True
    """Whether LayerNorm has a bias beside its gain; RMSNorm has none either way."""
    norm_eps: float = 1e-5
    """Added to the mean square (the variance for LayerNorm) inside the root."""
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have biases, as in Qwen2."""
    qk_norm: bool = False
    """Whether each head of the queries and keys goes through an RMSNorm of its own, as in Qwen3."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding matrix itself."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; o_proj and down_proj start smaller by 1/sqrt(2 layers)."""
    mlp: Literal[*GATED, *PLAIN] = "swiglu"
    """Activation of the MLP: gated by silu, gelu, relu or sigmoid, or a plain MLP of relu or gelu, which is half as
    wide again and so has as many parameters."""

    def __post_init__(self) -> None:
        check(self)
        if self.head_dim is not None and self.head_dim * self.num_attention_heads == self.hidden_size:
            object.__setattr__(self, "head_dim", None)  # one spelling, so that equal models have equal configurations

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def norm_parameters(self) -> tuple[NormParameter, ...]:
        """The learned parameters of each norm."""
        return tuple(parameter for parameter in NORMS[self.norm] if parameter.name != "bias" or self.norm_bias)

    @property
    def num_norms(self) -> int:
        """Norms that `norm` is about: those of the layers, and one before the head unless they are `post`."""
        return self.num_hidden_layers * PLACEMENTS[self.norm_placement] + (self.norm_placement != "post")


def check(config: ModelConfig) -> None:
    """Raise `UserError` for shapes that cannot be built, with the mend."""
    whole = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*whole, "num_key_value_heads", "head_dim", "max_position_embeddings", "norm_groups"):
        value = getattr(config, name)
        if name == "head_dim" and value is None:
            continue
        if type(value) is not int or value < 1:
            raise UserError(f"{name} is {value!r} and must be a whole number of at least 1.")
    for name in ("rope_theta", "norm_eps", "initializer_range"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise UserError(f"{name} is {value!r} and must be a number greater than 0.")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            f"use one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)} key/value heads."
        )
    if config.head_dim is None and config.hidden_size % heads:
        raise UserError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}; "
            f"use {config.hidden_size + -config.hidden_size % (2 * heads)}, other heads, or give head_dim."
        )
    if config.resolved_head_dim % 2:
        raise UserError(
            f"heads are {config.resolved_head_dim} wide, but rotary positions turn pairs of elements; "
            f"choose hidden_size, num_attention_heads or head_dim so that a head is even."
        )
    for name in ("norm_bias", "attention_bias", "qk_norm", "tie_word_embeddings"):
        if not isinstance(getattr(config, name), bool):
            raise UserError(f"{name} is {getattr(config, name)!r} and must be true or false.")
    for name, allowed in {"norm": [*NORMS], "norm_placement": [*PLACEMENTS], "mlp": [*GATED, *PLAIN]}.items():
        value = getattr(config, name)
        if value not in allowed:  # lists, because a file may hold something that no dict can look up
            raise UserError(f"{name} is {value!r} and must be {', '.join(allowed[:-1])} or {allowed[-1]}.")
    if config.norm == "group" and config.hidden_size % config.norm_groups:
        raise UserError(f"hidden_size {config.hidden_size} is not a multiple of norm_groups {config.norm_groups}.")
    if config.mlp in PLAIN and config.intermediate_size % 2:
        raise UserError(f"intermediate_size {config.intermediate_size} must be even for the plain MLP {config.mlp}.")
    check_rope_scaling(config.rope_scaling)


def check_rope_scaling(scaling: dict | None) -> None:
    """Raise `UserError` unless `scaling` is None or whole and of Llama 3's type."""
    if scaling is None:
        return
    if not isinstance(scaling, dict):
        raise UserError(f"rope_scaling is {scaling!r} and must be a table of Llama 3's numbers.")
    if scaling.get("rope_type") != "llama3":
        raise UserError(f"rope_scaling of type {scaling.get('rope_type')!r} is not known here; only llama3 is.")
    for key in LLAMA3_ROPE_KEYS:
        value = scaling.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise UserError(f"rope_scaling has {key} {value!r}; llama3 needs a number greater than 0.")
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise UserError("rope_scaling needs a high_freq_factor above its low_freq_factor.")


def num_parameters(config: ModelConfig, embedding: bool = True) -> int:
    """Number of parameters; `embedding` False leaves out the embedding and an untied head (Kaplan et al. 2020)."""
    head_dim = config.resolved_head_dim
    attention = 2 * head_dim if config.qk_norm else 0
    if config.attention_bias:
        attention += (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    total = config.num_hidden_layers * (layer_matrices(config) + attention) + num_norm_parameters(config)
    if embedding:
        total += config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return total


def num_norm_parameters(config: ModelConfig) -> int:
    """Number of learned parameters in all norms that `norm` chooses, the norms of q and k not among them."""
    return config.num_norms * sum(config.hidden_size if p.per_channel else 1 for p in config.norm_parameters)


def layer_matrices(config: ModelConfig) -> int:
    """Number of weights in one layer's matrix products."""
    heads = config.num_attention_heads + config.num_key_value_heads  # q and o; k and v
    return config.hidden_size * (2 * heads * config.resolved_head_dim + 3 * config.intermediate_size)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of training on one token, forward and backward: 6 N + 12 L H d T (Chowdhery et al. 2022, appendix B).

    N counts the weights of the matrix products, the head's among them and the embedding's lookup not; the second term
    is attention over T tokens, without a discount for causality. Recomputed activations do not count.
    """
    products = config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size
    heads = config.num_attention_heads * config.resolved_head_dim
    return 6 * products + 12 * config.num_hidden_layers * heads * sequence_length
