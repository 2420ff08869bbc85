"""Decoding on a CPU: one token for each sequence through all layers, in as few calls as plain PyTorch allows.

A step of a small model takes a few milliseconds, and reading the weights should be all of it. But between two matrix
products each call takes several times as long as in a loop of its own, presumably because a matrix that passes through
the processor's caches evicts everything else. So this step makes few calls: no modules, no autograd, buffers whose
views are made once, and merged operations:

- RMSNorm of s is LayerNorm of (s, -s), whose mean is 0 and whose variance is the mean square of s. The residual stream
  is kept as both, so that either norm is one call of `torch.layer_norm`.
- q and k are rotated with tables as wide as a head, (cos, cos) and (-sin, sin): x times the first, plus x with its
  halves exchanged times the second.

Matrices may be quantized to 8 bits (`model/int8.py`). Residual stream, norms and rotation are float32 whatever the
compute dtype. docs/generate.md has the measurements.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import attention_mask
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.int8 import Int8Matrix
from model.linear import Linear
from model.norm import Norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_SEQUENCES = 16  # the largest batch that was measured
# In float32, W x^T is faster than x W^T from so many sequences and elements of W on; in narrower dtypes always.
MANY_ROWS, LARGE = 5, 2**19


class LayerWeights(NamedTuple):
    """What a step needs of a layer, and its part of the cache. A norm is its weight and bias, float32."""

    input_norm: tuple[Tensor, Tensor | None]
    qkv: Tensor | Int8Matrix  # ((H + 2K) d, D)
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # of q and k, (d,) each
    o: Tensor | Int8Matrix  # (D, H d)
    mlp_norm: tuple[Tensor, Tensor | None]
    gate_up: Tensor | Int8Matrix  # (2F, D)
    down: Tensor | Int8Matrix  # (D, F)
    cache: Tensor  # (2, B, K, max_length, d)


class Product:
    """The products of B rows with matrices of one shape, into one buffer: `rows` (B, out_features)."""

    def __init__(self, weight: Tensor | Int8Matrix, batch: int, dtype: torch.dtype):
        out_features, in_features = weight.shape
        large = batch >= MANY_ROWS and out_features * in_features >= LARGE
        self.weight_first = not isinstance(weight, Int8Matrix) and (dtype != torch.float32 or large)
        self.buffer = torch.empty((out_features, batch) if self.weight_first else (batch, out_features), dtype=dtype)
        self.rows = self.buffer.t() if self.weight_first else self.buffer

    def __call__(self, weight: Tensor | Int8Matrix, x: Tensor) -> None:
        """rows = x W^T for x (B, in_features)."""
        if isinstance(weight, Int8Matrix):
            self.rows.copy_(weight.multiply(x))  # torch's product cannot write into a buffer
        elif len(x) == 1:
            torch.mv(weight, x[0], out=self.rows[0])  # in bfloat16 twice as fast as a product of matrices
        elif self.weight_first:
            torch.mm(weight, x.t(), out=self.buffer)
        else:
            torch.mm(x, weight.t(), out=self.buffer)


class CpuDecodeStep:
    """Computes the logits that follow one new token of every sequence in a cache.

    Only for decoders that are pre-norm, with SwiGLU and rms or layer: `decode_step_for` checks. It holds copies of norm
    weights, and of matrices that are stored in another dtype, so each generation makes a new step.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache):
        config, self.dtype = decoder.config, decoder.compute_dtype
        batch, heads, kv_heads = cache.keys.shape[1], config.num_attention_heads, config.num_key_value_heads
        self.cache, self.windows, self.eps, self.width = cache, decoder.windows, config.norm_eps, config.hidden_size

        self.signs = torch.tensor([[1.0], [-1.0]] if config.norm == "rms" else [[1.0]], dtype=torch.float32)
        self.stream = torch.empty(batch, len(self.signs), self.width, dtype=torch.float32)  # s, or s and -s
        self.stream_rows = self.stream.flatten(1)
        self.row_shape = self.stream_rows.shape[1:]

        def repeated(norm: Norm) -> tuple[Tensor, Tensor | None]:
            parameters = norm.weight, norm.bias
            return tuple(None if p is None else p.detach().float().repeat(len(self.signs)) for p in parameters)

        def matrix(linear: Linear) -> Tensor | Int8Matrix:  # no copy if it is stored in the dtype that it is used in
            return linear.weight.detach().to(self.dtype) if linear.int8 is None else linear.int8

        self.layers = [
            LayerWeights(
                repeated(layer.input_layernorm),
                matrix(layer.self_attn.qkv_proj),
                layer.self_attn.qkv_proj.bias,
                None
                if layer.self_attn.q_norm is None
                else (layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight),
                matrix(layer.self_attn.o_proj),
                repeated(layer.post_attention_layernorm),
                matrix(layer.mlp.gate_up_proj),
                matrix(layer.mlp.down_proj),
                cache.keys_and_values[:, index],
            )
            for index, layer in enumerate(decoder.layers)
        ]
        self.norm = repeated(decoder.norm)
        self.embedding = decoder.embed_tokens.weight.detach()
        self.head = matrix(decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head)

        first = self.layers[0]
        self.qkv, self.o, self.gate_up, self.down, self.logits = (
            Product(weight, batch, self.dtype) for weight in (first.qkv, first.o, first.gate_up, first.down, self.head)
        )
        self.gate, self.up = self.gate_up.rows.chunk(2, dim=-1)  # (B, F) each
        # The rotation's input and result: q, k and v in float32.
        as_float = torch.empty(self.qkv.rows.shape, dtype=torch.float32)
        self.rotated = self.qkv.rows if self.dtype == torch.float32 else as_float
        parts = self.rotated.unflatten(1, (heads + 2 * kv_heads, -1))  # (B, H + 2K, d)
        self.qk = parts[:, :-kv_heads]
        self.q, self.k = self.qk.split((heads, kv_heads), 1)
        self.grouped_q = self.q.unflatten(1, (kv_heads, -1))  # (B, K, H/K, d)
        self.kv = parts[:, heads:].unflatten(1, (2, kv_heads)).transpose(0, 1)  # (2, B, K, d)

        decoder.rope.grow(cache.max_length)
        cos, sin = decoder.rope.cos[: cache.max_length], decoder.rope.sin[: cache.max_length]
        self.cos = torch.cat((cos, cos), -1)[:, None]  # (positions, 1, d)
        self.sin = torch.cat((-sin, sin), -1)[:, None]

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, 1) int64 to the cache and return float32 logits (B, 1, V), valid until the next call.

        padding (B,) int64 as in `Decoder.forward`; the caller keeps rotary positions below max_position_embeddings.
        Raises ValueError if the cache is full.
        """
        position = self.cache.length
        if position >= self.cache.max_length:
            raise ValueError(f"the cache has room for {self.cache.max_length} tokens, and it is full")
        rotary_positions = slice(position, position + 1) if padding is None else (position - padding).clamp(min=0)
        cos, sin = self.cos[rotary_positions], self.sin[rotary_positions]  # (1 or B, 1, d)
        masks = {w: attention_mask(position, 1, padding, tokens.device, w) for w in dict.fromkeys(self.windows)}
        embedded = F.embedding(tokens, self.embedding).to(self.dtype)  # (B, 1, D), rounded as the decoder does
        torch.mul(embedded.float(), self.signs, out=self.stream)
        for layer, window in zip(self.layers, self.windows, strict=True):
            self.qkv(layer.qkv, self.normalize(layer.input_norm))
            self.finish_qkv(layer, cos, sin)
            layer.cache[:, :, :, position] = self.kv
            k, v = layer.cache[:, :, :, : position + 1]  # (B, K, S, d) each
            attended = F.scaled_dot_product_attention(self.grouped_q.to(self.dtype), k, v, attn_mask=masks[window])
            self.o(layer.o, attended.flatten(1))
            self.stream.addcmul_(self.o.rows[:, None], self.signs)
            self.gate_up(layer.gate_up, self.normalize(layer.mlp_norm))
            self.down(layer.down, F.silu(self.gate, inplace=True).mul_(self.up))
            self.stream.addcmul_(self.down.rows[:, None], self.signs)
        self.cache.length += 1
        return self.multiply_head(self.normalize(self.norm))[:, None]

    def normalize(self, norm: tuple[Tensor | None, Tensor | None]) -> Tensor:
        """The norm of the residual stream, (B, D) in the dtype of the products."""
        rows = torch.layer_norm(self.stream_rows, self.row_shape, *norm, self.eps)[:, : self.width]
        return rows if self.dtype == torch.float32 else rows.to(self.dtype)

    def finish_qkv(self, layer: LayerWeights, cos: Tensor, sin: Tensor) -> None:
        """From the product's rows to q, k and v in `rotated`, with bias and norms per head if the model has them."""
        if self.rotated is not self.qkv.rows:
            self.rotated.copy_(self.qkv.rows)
        if layer.qkv_bias is not None:
            self.rotated.add_(layer.qkv_bias)
        if layer.head_norms is not None:
            for part, weight in zip((self.q, self.k), layer.head_norms, strict=True):
                part.copy_(F.rms_norm(part, weight.shape, weight, self.eps))
        exchanged = self.qk.roll(self.qk.shape[-1] // 2, -1)
        self.qk.mul_(cos).addcmul_(exchanged, sin)

    def multiply_head(self, x: Tensor) -> Tensor:
        """Float32 logits (B, V) of x (B, D).

        Where MKL takes its general code, as on processors that are not Intel's, it multiplies one row by this large
        matrix on one core. As a batch of row blocks it uses them all.
        """
        threads = torch.get_num_threads()
        if threads > 1 and len(x) == 1 and self.dtype == torch.float32 and len(self.head) % threads == 0:
            blocks = self.head.view(threads, -1, self.width).transpose(1, 2)
            torch.bmm(x.expand(threads, 1, -1), blocks, out=self.logits.rows.view(threads, 1, -1))
        else:
            self.logits(self.head, x)
        return self.logits.rows.float()
