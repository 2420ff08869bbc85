"""The decoder: embedding, layers, final norm, head, and how their parameters start.

Training, sampling and files are elsewhere. Parameters are float32 master weights; activations and matrix products have
`compute_dtype`. Parameters with the same name, shape and seed start bit-equal in any two decoders, so that what
differs between two runs is the setting that differs.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernels
from model.attention import Attention, attention_mask
from model.cache import KeyValueCache
from model.config import PLAIN, ModelConfig
from model.linear import Linear
from model.mlp import MLP, PlainMLP
from model.norm import Norm
from model.rope import Rope

BRANCH_OUTPUTS = ("o_proj.weight", "down_proj.weight")  # what each layer adds to the residual stream


class Layer(nn.Module):
    """Attention and MLP, each behind a norm. The residual addition belongs to the norm that comes next.

    With the norms after the additions (post) or on both sides of each block (sandwich) the order alone is another.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.position = config.norm_placement
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = Norm(config)
        self.mlp = PlainMLP(config) if config.mlp in PLAIN else MLP(config)
        if self.position == "sandwich":
            self.attention_output_layernorm, self.mlp_output_layernorm = Norm(config), Norm(config)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Take and return the output of the last block (B, T, D) and the residual stream it is yet to be added to."""
        if self.position == "post":  # the stream is normalized itself (Vaswani et al. 2017, section 3.1)
            x, _ = self.input_layernorm(self.self_attn(x, cos, sin, mask, cache), x)
            x, _ = self.post_attention_layernorm(self.mlp(x), x)
            return x, None
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos, sin, mask, cache)
        if self.position == "sandwich":
            x, _ = self.attention_output_layernorm(x)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        if self.position == "sandwich":
            x, _ = self.mlp_output_layernorm(x)
        return x, residual


class Decoder(nn.Module):
    """The language model. `seed` None leaves the parameters unfilled, for weights that are loaded."""

    def __init__(self, config: ModelConfig, *, seed: int | None = 0, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = False
        # A Linear with weight (V, D), whose rows are looked up: tied, it is the head too and is called as such. Torch's
        # own Embedding would draw from the global generator.
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = None if config.norm_placement == "post" else Norm(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.rope = Rope(config)
        if seed is not None:
            initialize(self, seed)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        padding: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits, or with targets the loss, of tokens (B, T) int64.

        targets (B, T) int64, -100 where there is nothing to predict: returns the loss of each token in nats, float32
        (B, T), 0 where ignored. Without targets: returns float32 logits (B, T, V), or (B, 1, V) with `last_only`.
        cache: the tokens take the cache positions after those that are filled.
        padding (B,) int64: positions at the left of each sequence that hold no token. A token's rotary position is its
        cache position minus the padding, and must be below max_position_embeddings.
        """
        length = tokens.shape[1]
        start = 0 if cache is None else cache.length
        # With padding, the positions are known on the device alone; Rope's indexing fails for those beyond its tables.
        if padding is None and start + length > self.config.max_position_embeddings:
            raise ValueError(f"{start + length} tokens exceed the context of {self.config.max_position_embeddings}")
        cos, sin = self.rope(start, length, padding)
        mask = attention_mask(start, length, padding, tokens.device)
        x, residual = F.embedding(tokens, self.embed_tokens.weight).to(self.compute_dtype), None  # (B, T, D)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                inputs = (x, residual, cos, sin, mask, cache)
                x, residual = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, residual = layer(x, residual, cos, sin, mask, cache)
        if cache is not None:
            cache.length += length
        if last_only:
            x, residual = x[:, -1:], None if residual is None else residual[:, -1:]
        if self.norm is not None:
            x, _ = self.norm(x, residual)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if targets is None:
            return head(x).float()
        return kernels.linear_cross_entropy(x.flatten(0, 1), head.weight, targets.flatten()).view_as(targets)

    def num_parameters(self, embedding: bool = True) -> int:
        """Number of parameters; `embedding` False leaves out the embedding and an untied head."""
        vocabulary = ("embed_tokens.", "lm_head.")
        return sum(p.numel() for name, p in self.named_parameters() if embedding or not name.startswith(vocabulary))


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> None:
    """Fill every parameter: matrices normal, those that end a branch smaller, gains 1, biases 0.

    The residual stream sums 2L branch outputs; dividing each by sqrt(2L) keeps its variance from growing with depth
    (Radford et al. 2019, section 2.3).
    """
    branch_scale = 1 / math.sqrt(2 * decoder.config.num_hidden_layers)
    for name, parameter in decoder.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        scale = branch_scale if name.endswith(BRANCH_OUTPUTS) else 1.0
        drawn = torch.randn(parameter.shape, generator=generator_for(seed, name))
        parameter.copy_(drawn * (decoder.config.initializer_range * scale))


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the parameter's name alone, on no other parameter and no device."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
