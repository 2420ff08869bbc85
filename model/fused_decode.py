"""Decoding with the fused kernels: one token for each sequence through all layers, on CUDA replayed as one graph.

Replaying a graph is one call for the host instead of a hundred kernel launches. A graph always reads and writes the
same memory, so the tokens, the position, the padding, the cache and the logits are tensors that stay where they are.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.norm import Norm

# The fused kernels read every weight once per sequence, an ordinary matrix product once per batch. Where the second
# becomes faster has not been measured; 8 is a guess.
MAX_SEQUENCES = 8


class DecodeStep:
    """Computes the logits that follow one new token of every sequence in a cache."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache, padding: Tensor | None):
        config, device, dtype = decoder.config, cache.keys.device, decoder.compute_dtype
        batch, heads, head_dim = cache.keys.shape[1], config.num_attention_heads, config.resolved_head_dim
        self.decoder, self.cache = decoder, cache
        self.padding = None if padding is None else padding.clone()
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the new tokens in the cache
        self.q = torch.empty(batch, heads, head_dim, device=device, dtype=dtype)
        splits = batch, heads, kernels.decode.SPLITS
        # Attention over each split of the cache: the weighted sum of v, the maximum score, and the sum of exp.
        self.partial = tuple(torch.empty(shape, device=device) for shape in ((*splits, head_dim), splits, splits))
        self.hidden = torch.empty(batch, config.intermediate_size, device=device, dtype=dtype)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, 1) int64 to the cache; returns float32 logits (B, 1, V), valid until the next call.

        padding (B,) int64 as in `Decoder.forward`. The kernels do not check the rotary position (cache position minus
        padding): the caller keeps it below max_position_embeddings.
        """
        if self.cache.length >= self.cache.max_length:
            raise ValueError(f"the cache has room for {self.cache.max_length} tokens, and it is full")
        # Kernels are launched and graphs captured on the current device, which need not be the decoder's.
        device = torch.cuda.device(self.tokens.device) if self.tokens.is_cuda else contextlib.nullcontext()
        with device:
            self.step(tokens, padding)
        self.cache.length += 1
        return self.logits[:, None]

    def step(self, tokens: Tensor, padding: Tensor | None) -> None:
        """Copy the inputs into the graph's tensors and run it; leaves the result in `self.logits`."""
        self.tokens.copy_(tokens[:, 0])
        self.position.fill_(self.cache.length)
        if padding is not None:
            self.padding.copy_(padding)
        if self.graph is not None:
            self.graph.replay()
        elif self.logits is None or self.position.device.type != "cuda":
            self.logits = self.run()  # the first step compiles the kernels, which a graph cannot capture
        else:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.run()
            self.graph.replay()

    def run(self) -> Tensor:
        """Launch the kernels of all layers, then the final norm and the head; returns float32 logits (B, V)."""
        decoder, cache = self.decoder, self.cache
        residual = F.embedding(self.tokens, decoder.embed_tokens.weight).to(decoder.compute_dtype)  # (B, D)
        for index, layer in enumerate(decoder.layers):
            attention, keys, values = layer.self_attn, cache.keys[index], cache.values[index]
            qk_norm = (None, None) if attention.q_norm is None else (attention.q_norm.weight, attention.k_norm.weight)
            kernels.decode.qkv(
                residual,
                norm_arguments(layer.input_layernorm),
                attention.qkv_proj.weight,
                attention.qkv_proj.bias,
                qk_norm,
                (decoder.rope.cos, decoder.rope.sin),
                self.position,
                self.padding,
                self.q,
                keys,
                values,
            )
            kernels.decode.attention(self.q, keys, values, self.position, self.padding, self.partial)
            kernels.decode.project(self.partial, attention.o_proj.weight, residual)
            gate_up, down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
            kernels.decode.gate_up(residual, norm_arguments(layer.post_attention_layernorm), gate_up, self.hidden)
            kernels.decode.project(self.hidden, down, residual)
        x, _ = decoder.norm(residual)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return head(x).float()


def norm_arguments(norm: Norm) -> tuple[str, Tensor | None, Tensor | None, float]:
    """A norm in the form that the kernels take: kind, weight, bias, eps."""
    return norm.kind, norm.weight, norm.bias, norm.eps


def make_decode_step(decoder: Decoder, cache: KeyValueCache, padding: Tensor | None) -> DecodeStep | None:
    """A fused step if the Triton kernels are in use and support this model and batch size, else None."""
    config = decoder.config
    triton = kernels.gpu is not None and kernels.implementation(cache.keys.device) is kernels.gpu
    supported = (config.norm_placement, config.mlp) == ("pre", "swiglu") and config.norm in kernels.NORM_KINDS
    small_batch = cache.keys.shape[1] <= MAX_SEQUENCES
    return DecodeStep(decoder, cache, padding) if triton and supported and small_batch else None
