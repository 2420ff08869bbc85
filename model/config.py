"""The configuration of a decoder, validated on construction. Imports no torch, so that `--help` answers at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta
from tyro.conf import DisallowNone, Suppress, arg

from errors import UserError
from flags import OptionalInt, PositiveFloat, PositiveInt, check_fields


@dataclass(frozen=True)
class NormParameter:
    name: str  # in the module and, after the norm's own name, in files
    initial: float  # the value that every element starts with
    per_channel: bool = True  # shape (D,), one element per channel of the residual stream; else a scalar of shape ()
    decays: bool = False  # whether weight decay pulls it towards 0


WEIGHT = NormParameter("weight", initial=1.0)
BIAS = NormParameter("bias", initial=0.0)
ALPHA = NormParameter("alpha", initial=0.5, per_channel=False)
SHIFT = NormParameter("shift", initial=0.0, per_channel=False)
# To add a norm: a row here with its learned parameters, and a row in `FORMULAS` (model/norm.py). All else follows,
# from initialization to files. For the bias the row is only the default: `norm_bias` adds or drops it.
NORMS: dict[str, tuple[NormParameter, ...]] = {
    "rms": (WEIGHT,),
    "layer": (WEIGHT, BIAS),
    "center": (WEIGHT, BIAS),
    "prms": (WEIGHT,),
    "srms": (),
    "offset": (NormParameter("offset", initial=0.0, decays=True),),
    "l2": (WEIGHT,),
    "group": (WEIGHT, BIAS),
    "batch": (WEIGHT, BIAS),
    "dyt": (ALPHA, WEIGHT, BIAS),
    "derf": (ALPHA, SHIFT, WEIGHT, BIAS),
    "none": (),
}
NORMS_WITH_BIAS = ", ".join(norm for norm, parameters in NORMS.items() if BIAS in parameters)
NORM_GROUPS = 8  # slices of the channels for the norm `group`
PLACEMENTS = {"pre": 2, "post": 2, "sandwich": 4, "output": 2}  # where the norms are: how many norms a layer then has
# Types of rope_scaling, and the numbers that each needs; model/rope.py has the formulas.
ROPE_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}
# MLPs, and whether they have a gate: the matrices gate, up and down instead of up and down.
GATED = {"swiglu": True, "geglu": True, "reglu": True, "glu": True, "relu": False, "gelu": False}


# Fields have the names of Hugging Face's config.json; the text under a field is its help on the command line.
@dataclass(frozen=True)
class ModelConfig:
    """A decoder: grouped-query attention with rotary positions; by default pre-norm, with RMSNorm and a SwiGLU MLP."""

    vocab_size: PositiveInt = 4096
    """Number of different tokens: rows of the embedding matrix, and logits per position. A tokenizer of the text has at
    most so many pieces, and fewer where the text has under a million characters; the model then has as many."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream, the vector that each token carries from layer to layer."""
    intermediate_size: PositiveInt = 704
    """Width inside the MLP; about 8/3 of hidden_size is usual."""
    num_hidden_layers: PositiveInt = 4
    """Number of layers, each with an attention block and an MLP."""
    num_attention_heads: PositiveInt = 4
    """Number of query heads."""
    num_key_value_heads: PositiveInt = 2
    """Number of key/value heads. Each is shared by an equal number of query heads; fewer make the KV cache smaller."""
    head_dim: OptionalInt = None
    """Width of a head; by default hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int, Meta(ge=2)] = 1024  # a token, and the one that follows
    """Longest context in tokens."""
    rope_theta: Annotated[float, Meta(gt=1, lt=1e18)] = 10000.0
    """Base of the rotary frequencies; models with longer contexts use larger ones."""
    rope_scaling: Annotated[dict | None, Suppress] = None  # no flag: it comes with loaded weights
    """Scaling of the rotary frequencies for longer contexts: `rope_type`, and the numbers that this type needs
    (`ROPE_SCALING`); yarn also has `truncate`, true or false."""
    norm: Literal[*NORMS] = "rms"
    """The norm around every block and before the head; nothing else changes with it. rms: RMSNorm. layer: LayerNorm.
    The others are for comparisons, and slower. center: x minus its mean. prms: RMSNorm whose mean square is that of
    the first sixteenth of the channels. srms: RMSNorm without a weight. offset: RMSNorm whose weight is 1 plus a
    learned offset that weight decay pulls towards 0. l2: x divided by its length. group: GroupNorm, LayerNorm within
    eight slices of the channels. batch: BatchNorm, which also sees other tokens, later ones among them.
    dyt: DyT, tanh(alpha x) with a learned scalar alpha. derf: Derf, erf(alpha x + shift) with two learned scalars.
    none: no norm."""
    norm_placement: Literal[*PLACEMENTS] = "pre"
    """Where the norms are. pre: before each block, and before the head. post: after each residual addition, as in the
    original Transformer, and none before the head. sandwich: pre, and another norm on the output of each block.
    output: on the output of each block, and before the head, as in OLMo 2."""
    norm_bias: Annotated[bool | None, DisallowNone, arg(help_behavior_hint=f"(default: with {NORMS_WITH_BIAS})")] = None
    """Whether the norms have a bias. srms and none have no parameters, and never a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square (LayerNorm: the variance) under the square root, with l2 to the length, so that nothing
    is divided by zero."""
    attention_bias: bool = False
    """Whether the query, key and value projections have biases, as in Qwen2."""
    attention_output_bias: Annotated[bool, Suppress] = False  # no flag: it comes with loaded weights
    """Whether o_proj has a bias too."""
    qk_norm: bool = False
    """Whether the vector of each query head and key head goes through RMSNorm, as in Qwen3."""
    tie_word_embeddings: bool = True
    """Whether the output head uses the embedding matrix, instead of a matrix of its own."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; o_proj and down_proj get 1/sqrt(2 num_hidden_layers) of it."""
    mlp: Literal[*GATED] = "swiglu"
    """The MLP. swiglu, geglu, reglu, glu: gated, the gate's activation being silu, gelu, relu or sigmoid. relu, gelu:
    not gated, with 3/2 of intermediate_size and so as many parameters."""

    def __post_init__(self) -> None:
        check_fields(self)
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
        if self.head_dim is None and width % heads:
            raise UserError(f"hidden_size {width} is no multiple of {heads} heads; set head_dim.")
        if self.resolved_head_dim % 2:
            raise UserError(f"heads are {self.resolved_head_dim} wide; rotary positions need an even head_dim.")
        if self.norm == "group" and width % NORM_GROUPS:
            raise UserError(f"hidden_size {width} is not a multiple of {NORM_GROUPS}, as --norm group needs.")
        if not GATED[self.mlp] and self.intermediate_size % 2:
            raise UserError(f"intermediate_size {self.intermediate_size} must be even for --mlp {self.mlp}.")
        if self.rope_scaling is not None:
            kind = self.rope_scaling["rope_type"]
            for key in ROPE_SCALING[kind]:
                value = self.rope_scaling.get(key)
                if type(value) not in (int, float) or not 0 < value < 1e9:  # attention scores grow with its square
                    raise UserError(f"rope_scaling has {key} {value!r} and needs a number above 0 and below 1e9.")
            if kind == "llama3" and self.rope_scaling["high_freq_factor"] <= self.rope_scaling["low_freq_factor"]:
                raise UserError("rope_type llama3 needs a high_freq_factor above low_freq_factor.")
            if kind == "yarn" and not isinstance(self.rope_scaling.get("truncate"), bool):
                raise UserError("rope_type yarn needs truncate, true or false.")
        # Equal models must have equal configurations, so a value that changes nothing becomes None, the default.
        if self.head_dim is not None and self.head_dim * heads == width:
            object.__setattr__(self, "head_dim", None)
        is_default = self.norm_bias == (BIAS in NORMS[self.norm])
        if is_default or not NORMS[self.norm]:
            object.__setattr__(self, "norm_bias", None)

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size if GATED[self.mlp] else self.intermediate_size * 3 // 2  # as many parameters

    @property
    def is_plain(self) -> bool:
        """Whether its layers are those that other programs have, and that fast paths compute."""
        return (self.norm_placement, self.mlp) == ("pre", "swiglu") and self.norm in ("rms", "layer")

    @property
    def packed_matrices(self) -> dict[str, dict[str, int]]:
        """Matrices that the decoder holds as one, from top to bottom: their names in files, and their rows."""
        q = self.num_attention_heads * self.resolved_head_dim
        kv = self.num_key_value_heads * self.resolved_head_dim
        packed = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}}
        if GATED[self.mlp]:
            packed["gate_up_proj"] = {"gate_proj": self.mlp_width, "up_proj": self.mlp_width}
        return packed

    @property
    def norm_parameters(self) -> tuple[NormParameter, ...]:
        """The learned parameters of each norm: its row in `NORMS`, with the bias that `norm_bias` asks for."""
        if self.norm_bias is None:
            return NORMS[self.norm]
        without_bias = tuple(parameter for parameter in NORMS[self.norm] if parameter != BIAS)
        return (*without_bias, BIAS) if self.norm_bias else without_bias

    @property
    def has_norm_bias(self) -> bool:
        return BIAS in self.norm_parameters
