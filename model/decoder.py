"""The decoder: embedding, layers, final norm, head, and the initial values of their parameters.

Comments give shapes in these letters:

    B  sequences in the batch     H  query heads            F  intermediate_size, width inside the MLP
    T  tokens in a sequence       K  key/value heads        V  vocab_size, number of different tokens
    D  hidden_size                d  head_dim               L  layers

A textbook writes a pre-norm layer as

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

`Layer` computes the same sums, but defers each addition to the norm that follows it: `x` is the output of the last
block, `residual` is the residual stream without it, and `x, residual = norm(x, residual)` adds the two and normalizes
the sum; the final norm does the last addition. Addition and norm are then one kernel, which reads and writes the
residual stream once instead of twice.

Parameters are float32 master weights; activations and matrix products have `compute_dtype`. Parameters with the same
name, shape and seed start bit-equal in any two decoders, so that two runs differ only in the setting that differs.
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
from model.config import ModelConfig
from model.linear import Linear
from model.mlp import MLP
from model.norm import Norm, is_norm_parameter
from model.rope import Rope

BLOCK_OUTPUTS = ("o_proj.weight", "down_proj.weight")  # the last matrix of each block


class Layer(nn.Module):
    """Attention block and MLP block, with norms before, after or around them (`norm_placement`)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.placement = config.norm_placement
        on_stream = self.placement != "output"
        on_block_output = self.placement in ("sandwich", "output")
        self.input_layernorm = Norm(config) if on_stream else None
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = Norm(config) if on_stream else None
        self.mlp = MLP(config)
        self.attention_output_layernorm = Norm(config) if on_block_output else None
        self.mlp_output_layernorm = Norm(config) if on_block_output else None

    def forward(
        self, x: Tensor, residual: Tensor | None,
        cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Take and return the output of the last block and the residual stream without it, (B, T, D) each.

        A `residual` of None stands for zeros: before the first layer, and always with `post` and `output`.
        """
        if self.placement == "post":  # x = norm(x + attention(x)); x = norm(x + mlp(x))  (Vaswani et al. 2017)
            x, _ = self.input_layernorm(self.self_attn(x, cos, sin, mask, cache), x)
            x, _ = self.post_attention_layernorm(self.mlp(x), x)
            return x, None
        if self.placement == "output":  # x = x + norm(attention(x)); x = x + norm(mlp(x))  (OLMo 2, arXiv 2501.00656)
            y, _ = self.attention_output_layernorm(self.self_attn(x, cos, sin, mask, cache))
            x = x + y
            y, _ = self.mlp_output_layernorm(self.mlp(x))
            return x + y, None
        x, residual = self.input_layernorm(x, residual)  # residual += x; x = norm(residual)
        x = self.self_attn(x, cos, sin, mask, cache)
        if self.placement == "sandwich":
            x, _ = self.attention_output_layernorm(x)
        x, residual = self.post_attention_layernorm(x, residual)  # residual += x; x = norm(residual)
        x = self.mlp(x)
        if self.placement == "sandwich":
            x, _ = self.mlp_output_layernorm(x)
        return x, residual


class Decoder(nn.Module):
    """The language model. With `seed` None the parameters are not initialized, because weights will be loaded."""

    def __init__(self, config: ModelConfig, *, seed: int | None = 0, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = False
        self.lora: dict | None = None  # r, lora_alpha, base_model_name_or_path, as in PEFT's files
        self.lora_base = ""  # `adapters.fingerprint` of the weights that an adapter is trained for
        # A Linear, since a tied embedding is also the head; torch's own Embedding would draw from the global generator.
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = None if config.norm_placement == "post" else Norm(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.rope = Rope(config)
        if seed is not None:
            initialize(self, seed)

    @property
    def head(self) -> Linear:
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None,
        *, token_weight: Tensor | None = None,
        cache: KeyValueCache | None = None, padding: Tensor | None = None, last_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Logits of tokens (B, T) int64: float32 (B, T, V), or (B, 1, V) of the last position with `last_only`.

        targets (B, T) int64: return the losses instead, in nats, float32 (B, T), 0 where a target is `IGNORED`.
        token_weight, float32, 0-dimensional: return the sum of the losses times it, which is cheaper to train on.
        documents (B, T) int64, not with a cache: an id of each token's document, the only one that the token sees. Its
        rotary position is still its place in the row, since attention depends on differences of positions.
        cache: earlier keys and values of the same sequences; the tokens follow them and are appended.
        padding (B,) int64: number of padding positions at the start of each sequence. A token's rotary position is its
        cache position minus the padding, and must be below max_position_embeddings.
        """
        length = tokens.shape[1]
        start = 0 if cache is None else cache.length
        # With padding, only the device knows the positions; indexing fails there for those beyond the tables of `Rope`.
        if padding is None and start + length > self.config.max_position_embeddings:
            raise ValueError(f"{start + length} tokens exceed the context of {self.config.max_position_embeddings}")
        cos, sin = self.rope(start, length, padding)
        mask = attention_mask(start, length, tokens.device, padding=padding, documents=documents)
        x = F.embedding(tokens, self.embed_tokens.weight).to(self.compute_dtype)  # (B, T, D)
        residual = None
        for layer in self.layers:
            inputs = x, residual, cos, sin, mask, cache
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, residual = layer(*inputs)
        if cache is not None:
            cache.length += length
        if last_only:
            x = x[:, -1:]
            residual = None if residual is None else residual[:, -1:]
        if self.norm is not None:
            x, _ = self.norm(x, residual)
        if targets is None:
            return self.head(x).float()
        losses = kernels.linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten(), token_weight)
        return losses.view_as(targets) if token_weight is None else losses


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> None:
    """Fill every parameter: matrices normal, norms as their row in `NORMS` says, biases 0."""
    # The residual stream sums 2L block outputs; so its variance does not grow with depth (Radford et al. 2019, 2.3).
    block_scale = 1 / math.sqrt(2 * decoder.config.num_hidden_layers)
    norm_initial = {parameter.name: parameter.initial for parameter in decoder.config.norm_parameters}
    for name, parameter in decoder.named_parameters():
        if is_norm_parameter(name):
            parameter.fill_(norm_initial[name.rpartition(".")[2]])
        elif parameter.ndim < 2:  # biases; weights of the norms of q and k
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            scale = block_scale if name.endswith(BLOCK_OUTPUTS) else 1.0
            normal = torch.randn(parameter.shape, generator=generator_for(seed, name))
            parameter.copy_(normal * (decoder.config.initializer_range * scale))


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends only on the seed and the parameter's name: not on other parameters or the device."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


@torch.no_grad()
def attend_to_previous_token(decoder: Decoder) -> None:
    """Set biases of q and k so that the first head of the first layer attends to the token before each token.

    Induction heads need such a head below them (Olsson et al. 2022, arXiv 2209.11895). In the six fastest pairs k gets
    (a, 0), and q that turned back by one position. At distance n, without `qk_norm`, which rescales q and k:

        score(n) = a^2 sum_i cos((n - 1) theta_i) / sqrt(d)
        score(1) - score(0) = 4  =>  a^2 = 4 sqrt(d) / sum_i (1 - cos theta_i)
    """
    head_dim = decoder.config.resolved_head_dim
    attention = decoder.layers[0].self_attn
    biases = attention.qkv_proj.bias.view(-1, 2, head_dim // 2)[..., :6]  # (H + 2K, 2, 6 pairs or all of a narrow head)
    cos, sin = decoder.rope.cos[1, :6], decoder.rope.sin[1, :6]
    a = (4.0 * math.sqrt(head_dim) / (1 - cos).sum()).sqrt()
    biases[0] = torch.stack((a * cos, -a * sin))  # the first head of q
    biases[attention.heads, 0] = a  # the first head of k


@torch.no_grad()
def center_residual_writers(decoder: Decoder) -> None:
    """Change all weights that write to the residual stream so that the mean of what they write is 0 over the channels.

    A pre-norm decoder with LayerNorm, which subtracts the mean anyway, computes the same function as before. So does
    RMSNorm with LayerNorm's weight and bias (Jiang et al. 2023, arXiv 2305.14858, section 3.1). A tied embedding stays
    as it is, because centering row v would change the logit of token v: there RMSNorm only approximates LayerNorm.
    """
    if decoder.config.norm_placement != "pre":
        raise ValueError(f"norms placed {decoder.config.norm_placement} write to the residual stream themselves")
    endings = (*BLOCK_OUTPUTS, "o_proj.bias")  # (D, H d), (D, F), (D,)
    writers = [parameter for name, parameter in decoder.named_parameters() if name.endswith(endings)]
    if decoder.lm_head is not None:
        writers.append(decoder.embed_tokens.weight.T)  # (D, V)
    for weight in writers:
        weight.sub_(weight.double().mean(0).to(weight.dtype))
