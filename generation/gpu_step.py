"""Decoding on a GPU: one token for each sequence through all layers in fused kernels, on CUDA replayed as one graph.

Replaying a graph is one call for the host instead of a hundred kernel launches. A graph always reads and writes the
same memory, so the tokens, the position, the padding, the cache and the logits are tensors that stay where they are.
Pre-norm decoders with SwiGLU and RMSNorm or LayerNorm have a step, unless they have a bias of the attention's output.
"""

import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from errors import note
from model.cache import KeyValueCache
from model.decoder import Decoder


class GpuDecodeStep:
    """Computes the logits that follow one new token of every sequence in a cache.

    If the kernels or the capture of their graph fail, one line on stderr says so, and the decoder itself takes over.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache):
        config, device, dtype = decoder.config, cache.keys.device, decoder.compute_dtype
        batch, heads, head_dim = cache.keys.shape[1], config.num_attention_heads, config.resolved_head_dim
        self._decoder = weakref.ref(decoder)  # the step is kept for as long as the decoder exists, and no longer
        self.cache = cache
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.padding = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # place of the new tokens in the cache
        self.qkv = torch.empty(batch, (heads + 2 * config.num_key_value_heads) * head_dim, device=device)
        splits = batch, heads, kernels.decode.splits_for(cache.max_length)
        # Attention over each split of the cache: the weighted sum of v, the maximum score, and the sum of exp.
        self.partials = tuple(torch.empty(shape, device=device) for shape in ((*splits, head_dim), splits, splits))
        self.attended = torch.empty(batch, heads, head_dim, device=device, dtype=dtype)
        self.hidden = torch.empty(batch, config.intermediate_size, device=device, dtype=dtype)
        decoder.rope.grow(cache.max_length)
        self.rope = decoder.rope.cos, decoder.rope.sin  # a graph keeps reading this memory
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.unavailable_reason: str | None = None  # why the kernels cannot run, known after the first step

    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, 1) int64 to the cache; returns float32 logits (B, 1, V), valid until the next call.

        padding (B,) int64 as in `Decoder.forward`; that rotary positions are in the context is not checked.
        """
        if self.cache.length >= self.cache.max_length:
            raise ValueError(f"the cache has room for {self.cache.max_length} tokens, and it is full")
        if self.unavailable_reason is None:
            try:
                with torch.cuda.device_of(self.tokens):  # graphs are captured on the current device
                    self.compute_logits(tokens, padding)
                self.cache.length += 1
                return self.logits[:, None]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever Triton, ptxas or the driver may raise
                self.unavailable_reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                note(f"fused decoding: {self.unavailable_reason}; the decoder runs without it.")
        # The decoder overwrites this position of the cache, whatever the kernels have left there.
        return self._decoder()(tokens, cache=self.cache, padding=padding, last_only=True)

    def compute_logits(self, tokens: Tensor, padding: Tensor | None) -> None:
        """Copy the inputs into the graph's tensors and run it; leaves the result in `self.logits`.

        The second step captures the graph: compiling kernels and creating cuBLAS's handle would fail meanwhile.
        """
        self.tokens.copy_(tokens[:, 0])
        self.position.fill_(self.cache.length)
        self.padding[:] = 0 if padding is None else padding
        if self.logits is not None and self.graph is None and self.tokens.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records a step, on a stream of its own, and does not run it yet
                self.logits = self.launch()
            self.graph = graph
        if self.graph is not None:
            self.graph.replay()
        else:
            self.logits = self.launch()

    def launch(self) -> Tensor:
        """Launch the kernels of all layers, then the final norm and the head; returns float32 logits (B, V)."""
        decoder, cache, decode = self._decoder(), self.cache, kernels.decode
        s = F.embedding(self.tokens, decoder.embed_tokens.weight).to(decoder.compute_dtype)  # (B, D), the stream
        for index, layer in enumerate(decoder.layers):
            block, mlp = layer.self_attn, layer.mlp
            norms = layer.input_layernorm, layer.post_attention_layernorm
            qkv_norm, mlp_norm = ((norm.kind, norm.weight, norm.bias, norm.eps) for norm in norms)
            head_norms = (None, None) if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight)
            caches = cache.keys[index], cache.values[index]
            where = self.rope, self.position, self.padding
            decode.qkv(s, qkv_norm, block.qkv_proj.weight, block.qkv_proj.bias, self.qkv)
            decode.attention(self.qkv, head_norms, block.eps, *where, *caches, self.partials, self.attended)
            decode.project(self.attended.flatten(1), block.o_proj.weight, s)
            decode.gate_up(s, mlp_norm, mlp.gate_up_proj.weight, self.hidden)
            decode.project(self.hidden, mlp.down_proj.weight, s)
        # The head is an ordinary matrix product: it has so many rows that cuBLAS reads them near the memory's rate.
        x, _ = decoder.norm(s)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return head(x).float()
