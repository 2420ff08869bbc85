"""Decoding as gpt-fast does it: the plain decoder with a static cache, replayed as one CUDA graph.

This is what `model.fused_decode` has to beat, so nothing of it is used here. Attention reads the whole cache, with a
mask: every tensor keeps its shape and place, and only the position changes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.cache import KeyValueCache
from model.decoder import Decoder


class StaticDecoder:
    """Computes the logits that follow one new token of every sequence in a cache. Not for a sliding window or padding.

    On a GPU the first step compiles and warms up, the second captures the graph. `kernels.use` decides what runs in it.
    It works on a copy of the cache, with a tensor for each layer: torch.compile would copy a tensor of all layers.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache, compiled: bool = False):
        if decoder.config.sliding_window is not None:
            raise ValueError("the mask knows no sliding window")
        self.decoder, self.cache, device = decoder, cache, cache.keys.device
        self.keys, self.values = ([layer.clone() for layer in tensor] for tensor in (cache.keys, cache.values))
        self.tokens = torch.zeros(cache.keys.shape[1], 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.run = torch.compile(self.forward, fullgraph=True, dynamic=False) if compiled else self.forward
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        decoder.rope.grow(cache.max_length)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, 1) int64 at `cache.length`; returns float32 logits (B, 1, V), valid until the next call."""
        self.tokens.copy_(tokens)
        self.position.fill_(self.cache.length)
        if self.logits is not None and self.graph is None and tokens.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.run()
        if self.graph is None:
            self.logits = self.run()
        else:
            self.graph.replay()
        self.cache.length += 1
        return self.logits

    def forward(self) -> Tensor:
        """The decoder's forward pass, with the position as a tensor."""
        decoder, position = self.decoder, self.position
        cos, sin = decoder.rope.cos[position], decoder.rope.sin[position]
        mask = torch.arange(self.keys[0].shape[2], device=position.device) <= position  # (S,)
        x, residual = F.embedding(self.tokens, decoder.embed_tokens.weight).to(decoder.compute_dtype), None
        for layer in decoder.layers:
            x, residual = layer(x, residual, cos, sin, mask[None, None, None], self)
        if decoder.norm is not None:
            x, _ = decoder.norm(x, residual)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return head(x).float()

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `KeyValueCache.update`, but returns all positions: the layers take this object for their cache."""
        self.keys[layer].index_copy_(2, self.position, k)
        self.values[layer].index_copy_(2, self.position, v)
        return self.keys[layer], self.values[layer]
