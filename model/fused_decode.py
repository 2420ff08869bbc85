"""Decoding with the fused kernels: one step of the whole decoder, on CUDA replayed as one graph.

A replay costs the host one call instead of a hundred launches. Everything a step reads or writes stands at a fixed
place: the tokens, the column, the cache and the logits.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.norm import Norm

MAX_SEQUENCES = 8  # more texts share a weight's reading better in an ordinary matrix product; border not measured


class DecodeStep:
    """The next token of every text in a cache."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache, padding: Tensor | None):
        config, device, dtype = decoder.config, cache.keys.device, decoder.compute_dtype
        batch, heads, head_dim = cache.keys.shape[1], config.num_attention_heads, config.resolved_head_dim
        self.decoder, self.cache = decoder, cache
        self.padding = None if padding is None else padding.clone()
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.q = torch.empty(batch, heads, head_dim, device=device, dtype=dtype)
        splits = batch, heads, kernels.decode.SPLITS
        self.parts = tuple(torch.empty(shape, device=device) for shape in ((*splits, head_dim), splits, splits))
        self.hidden = torch.empty(batch, config.intermediate_size, device=device, dtype=dtype)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, 1) int64 to the cache; returns float32 logits (B, 1, V), valid until the next call."""
        if self.cache.length >= self.cache.max_length:
            raise ValueError(f"the cache has room for {self.cache.max_length} tokens, and it is full")
        on_its_device = torch.cuda.device(self.tokens.device) if self.tokens.is_cuda else contextlib.nullcontext()
        with on_its_device:  # where kernels are launched and graphs captured, whatever device is current outside
            self.step(tokens, padding)
        self.cache.length += 1
        return self.logits[:, None]

    def step(self, tokens: Tensor, padding: Tensor | None) -> None:
        """Bring the inputs to their places and leave the logits in theirs."""
        self.tokens.copy_(tokens[:, 0])
        self.column.fill_(self.cache.length)
        if padding is not None:
            self.padding.copy_(padding)
        if self.graph is not None:
            self.graph.replay()
        elif self.logits is None or self.column.device.type != "cuda":
            self.logits = self.run()  # the first step compiles the kernels, which cannot be captured
        else:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.run()
            self.graph.replay()

    def run(self) -> Tensor:
        """All launches of a step."""
        decoder, cache = self.decoder, self.cache
        s = F.embedding(self.tokens, decoder.embed_tokens.weight).to(decoder.compute_dtype)  # (B, D)
        for index, layer in enumerate(decoder.layers):
            attention, keys, values = layer.self_attn, cache.keys[index], cache.values[index]
            gains = (None, None) if attention.q_norm is None else (attention.q_norm.weight, attention.k_norm.weight)
            kernels.decode.qkv(
                s,
                arguments(layer.input_layernorm),
                attention.qkv_proj.weight,
                attention.qkv_proj.bias,
                gains,
                (decoder.rope.cos, decoder.rope.sin),
                self.column,
                self.padding,
                self.q,
                keys,
                values,
            )
            kernels.decode.attention(self.q, keys, values, self.column, self.padding, self.parts)
            kernels.decode.project(self.parts, attention.o_proj.weight, s)
            gate_up, down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
            kernels.decode.gate_up(s, arguments(layer.post_attention_layernorm), gate_up, self.hidden)
            kernels.decode.project(self.hidden, down, s)
        x, _ = decoder.norm(s)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return head(x).float()


def arguments(norm: Norm) -> tuple[str, Tensor | None, Tensor | None, float]:
    """A norm as the kernels take it."""
    return norm.kind, norm.weight, norm.bias, norm.eps


def make_decode_step(decoder: Decoder, cache: KeyValueCache, padding: Tensor | None) -> DecodeStep | None:
    """The fused step where the Triton kernels run and the texts are few, else None: call the decoder itself."""
    config = decoder.config
    fused = kernels.gpu is not None and kernels.implementation(cache.keys.device) is kernels.gpu
    fused = fused and (config.norm_placement, config.mlp) == ("pre", "swiglu") and config.norm in kernels.NORM_KINDS
    return DecodeStep(decoder, cache, padding) if fused and cache.keys.shape[1] <= MAX_SEQUENCES else None
