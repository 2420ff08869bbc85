"""Decoding on a CPU: the new tokens of each sequence through all layers, in plain loops that Numba compiles.

A step of a small model should take as long as reading its weights does. So each matrix is read once, in the form in
which it is stored: float32, the 16 bits of bfloat16, or 8 bits with a scale for each row; everything else is float32.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.compiled import compiled, to_array, use_threads_of_torch, widen
from model.cache import KeyValueCache
from model.decoder import Decoder, Layer
from model.linear import Linear


class Matrix(NamedTuple):
    """A linear layer: W = values * scales[:, None], with its bias."""

    values: np.ndarray  # (out_features, in_features) float32, int8, or uint16: the bits of bfloat16
    scales: np.ndarray  # (out_features,) float32
    bias: np.ndarray  # (out_features,) float32, zeros if there is none


class LayerWeights(NamedTuple):
    """What a step needs of a layer, and its part of the cache. A norm is two rows: weight, and bias or zeros."""

    attention_norm: np.ndarray  # (2, D)
    qkv: Matrix  # ((H + 2K) d, D)
    head_norms: np.ndarray  # norm weights of q and k, (2, 2, d); (0, 2, d) if the model has none
    o: Matrix  # (D, H d)
    mlp_norm: np.ndarray  # (2, D)
    gate_up: Matrix  # (2F, D)
    down: Matrix  # (D, F)
    keys: np.ndarray  # (B, K, max_length, d) float32
    values: np.ndarray  # the same


@functools.partial(compiled, parallel=True)
def add_product(out, matrix, x):
    """out += W x + bias for each row of x (B, in_features) and out (B, out_features)."""
    for row in prange(len(matrix.values)):
        for b in range(len(x)):
            total = np.float32(0)
            for i in range(x.shape[1]):
                total += widen(matrix.values[row, i]) * x[b, i]
            out[b, row] += matrix.scales[row] * total + matrix.bias[row]


@compiled
def normalize(x, norm, is_layer_norm, eps):
    """LayerNorm or RMSNorm of each row of x (B, D); norm (2, D): its weight and bias."""
    out = np.empty_like(x)
    for b in range(len(x)):
        row = x[b]
        mean, square = np.float32(0), np.float32(0)
        if is_layer_norm:
            for i in range(len(row)):
                mean += row[i]
            mean /= np.float32(len(row))
        for i in range(len(row)):
            square += (row[i] - mean) ** 2
        scale = np.float32(1 / math.sqrt(square / len(row) + eps))
        for i in range(len(row)):
            out[b, i] = (row[i] - mean) * scale * norm[0, i] + norm[1, i]
    return out


@compiled
def rotate(head, cos, sin):
    """Rotate the pairs (i, i + d/2) of one head by the angles of its position."""
    half = len(cos)
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i], head[half + i] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@functools.partial(compiled, parallel=True)
def attend(qkv, keys, values, padding, position):
    """Attention of the queries in qkv (B T, (H + 2K) d) to the cache up to their own positions: (B T, H d)."""
    batch, kv_heads, _, width = keys.shape
    rows, count = len(qkv), len(qkv) // batch
    heads = qkv.shape[1] // width - 2 * kv_heads
    out = np.zeros((rows, heads * width), np.float32)
    all_scores = np.empty((rows * heads, position + count), np.float32)
    for task in prange(rows * heads):
        row, h = task // heads, task % heads
        b, kv = row // count, h // (heads // kv_heads)
        first = padding[b]
        end = position + row % count + 1
        q = qkv[row, h * width : (h + 1) * width]
        y = out[row, h * width : (h + 1) * width]
        scores = all_scores[task]
        largest, total = np.float32(-np.inf), np.float32(0)
        for s in range(first, end):
            score = np.float32(0)
            for i in range(width):
                score += q[i] * keys[b, kv, s, i]
            scores[s] = score * np.float32(1 / math.sqrt(width))
            largest = max(largest, scores[s])
        for s in range(first, end):
            p = math.exp(scores[s] - largest)
            total += p
            for i in range(width):
                y[i] += p * values[b, kv, s, i]
        y /= total
    return out


@compiled
def run_layer(layer, x, cos, sin, padding, position, is_layer_norm, eps):
    """Add the outputs of a layer's two blocks to the residual stream x (B T, D): T tokens from `position` on."""
    batch, kv_heads, _, width = layer.keys.shape
    rows, count = len(x), len(x) // batch
    qkv = np.zeros((rows, len(layer.qkv.bias)), np.float32)
    add_product(qkv, layer.qkv, normalize(x, layer.attention_norm, is_layer_norm, eps))
    heads = qkv.shape[1] // width - 2 * kv_heads
    for row in range(rows):
        b, place = row // count, position + row % count
        parts = qkv[row].reshape(-1, width)  # of q, k and v, a row for each head
        q, k, v = parts[:heads], parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        if len(layer.head_norms):
            q[:] = normalize(q, layer.head_norms[0], False, eps)
            k[:] = normalize(k, layer.head_norms[1], False, eps)
        for h in range(heads + kv_heads):
            rotate(parts[h], cos[place - padding[b]], sin[place - padding[b]])
        for h in range(kv_heads):
            for i in range(width):
                layer.keys[b, h, place, i] = k[h, i]
                layer.values[b, h, place, i] = v[h, i]
    add_product(x, layer.o, attend(qkv, layer.keys, layer.values, padding, position))
    gate_up = np.zeros((rows, len(layer.gate_up.bias)), np.float32)
    add_product(gate_up, layer.gate_up, normalize(x, layer.mlp_norm, is_layer_norm, eps))
    hidden = np.empty((rows, gate_up.shape[1] // 2), np.float32)
    for row in range(rows):
        for i in range(hidden.shape[1]):
            gate, up = gate_up[row, i], gate_up[row, hidden.shape[1] + i]
            hidden[row, i] = gate / (np.float32(1) + math.exp(-gate)) * up  # silu(gate) up
    add_product(x, layer.down, hidden)


def weight_and_bias(weight: Tensor, bias: Tensor | None = None) -> np.ndarray:
    """The weight of a norm and its bias, or zeros: (2, D) float32."""
    bias = torch.zeros_like(weight) if bias is None else bias
    return to_array(torch.stack([weight, bias]).float())


def to_matrix(linear: Linear, dtype: torch.dtype) -> Matrix:
    """The matrix of a linear layer in `dtype`, or in int8 if `quantize_matrices` has made one."""
    values, scales = linear.int8 or (linear.weight.to(dtype), torch.ones(len(linear.weight)))
    bias = torch.zeros(len(scales)) if linear.bias is None else linear.bias.float()
    return Matrix(to_array(values), to_array(scales), to_array(bias))


def layer_weights(layer: Layer, keys: np.ndarray, values: np.ndarray, dtype: torch.dtype) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    head_norms = [weight_and_bias(norm.weight) for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return LayerWeights(
        attention_norm=weight_and_bias(before.weight, before.bias),
        qkv=to_matrix(attention.qkv_proj, dtype),
        head_norms=np.array(head_norms, np.float32).reshape(-1, 2, keys.shape[-1]),
        o=to_matrix(attention.o_proj, dtype),
        mlp_norm=weight_and_bias(after.weight, after.bias),
        gate_up=to_matrix(mlp.gate_up_proj, dtype),
        down=to_matrix(mlp.down_proj, dtype),
        keys=keys,
        values=values,
    )


class CpuDecodeStep:
    """Computes the logits that follow each new token of every sequence in a float32 cache.

    The logits after a token have the same bits whatever the number of tokens in a call.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache):
        self.cache = cache
        config = decoder.config
        use_threads_of_torch()
        self.dtype = decoder.compute_dtype
        self.embedding = decoder.embed_tokens.weight.detach()
        self.is_layer_norm = config.norm == "layer"
        self.eps = config.norm_eps
        layers = zip(decoder.layers, cache.keys.numpy(), cache.values.numpy(), strict=True)
        self.layers = [layer_weights(layer, keys, values, self.dtype) for layer, keys, values in layers]
        self.norm = weight_and_bias(decoder.norm.weight, decoder.norm.bias)
        self.head = to_matrix(decoder.head, self.dtype)
        decoder.rope.grow(cache.max_length)
        self.cos, self.sin = decoder.rope.cos.numpy(), decoder.rope.sin.numpy()

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, T) int64 to the cache and return float32 logits (B, T, V)."""
        position, (batch, count) = self.cache.length, tokens.shape
        assert position + count <= self.cache.max_length, "the cache is full"
        padding = np.zeros(batch, np.int64) if padding is None else padding.numpy()
        x = self.embedding[tokens.flatten()].to(self.dtype).float().numpy()
        for layer in self.layers:
            run_layer(layer, x, self.cos, self.sin, padding, position, self.is_layer_norm, self.eps)
        logits = np.zeros((batch * count, len(self.embedding)), np.float32)
        add_product(logits, self.head, normalize(x, self.norm, self.is_layer_norm, self.eps))
        self.cache.length += count
        return torch.from_numpy(logits).view(batch, count, -1)
