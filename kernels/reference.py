"""The reference: each function in a few lines of plain PyTorch, differentiated by autograd.

Statistics, sines and the loss are float32 for inputs of any dtype, and each result is rounded once, at the end.
Speed is not the aim here; a faster version of a function must agree with the one in this file.
Shapes: B batch, T tokens, D hidden size, H query heads, K key/value heads, d head size, F MLP size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the target that no loss counts


def normalize(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    *, kind: str, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize the rows of `x`, or of `x + residual`; return the rows for the next block and the residual stream.

    kind "rms":   y = w s / sqrt(mean(s^2) + eps) + b        (Zhang and Sennrich 2019, equation 4, eps inside the root)
    kind "layer": y = w (s - mean(s)) / sqrt(var(s) + eps) + b, the variance over D    (Ba et al. 2016, equation 4)

    x, residual (..., D); weight w and bias b (D,) or None, of any float dtype. s is `x` itself without a residual, else
    the sum, added in float32 and rounded to the residual's dtype: what is normalized is what the next block adds to.
    Returns y in x's dtype and s.
    """
    s = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    y = s.float()
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)  # LayerNorm is RMSNorm of the centered row: one code path for both
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype), s


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    q_norm_weight: Tensor | None = None, k_norm_weight: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split packed rows into q, k and v, and rotate q and k by their positions (Su et al. 2021, equation 34).

    Element i of a head and element i + d/2 are one pair (the half-split convention), rotated by the angle of column i:
    (a, b) -> (a cos - b sin, b cos + a sin). With the two weights (d,), q and k first go through RMSNorm per head.

    qkv (B, T, (H + 2K) d), in this order; cos, sin float32 (T, d/2), or (B, T, d/2) when positions differ by sequence.
    Returns q (B, T, H, d), k (B, T, K, d) and v (B, T, K, d) in qkv's dtype.
    """
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # (B, T, H + 2K, d)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one angle for all heads

    def rotate(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.float()
        if weight is not None:
            x, _ = normalize(x, weight, kind="rms", eps=eps)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)

    return rotate(q, q_norm_weight), rotate(k, k_norm_weight), v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in x's dtype: x (..., in_features), weight (out_features, in_features) -> (..., out_features)."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of packed rows (..., 2F), gate before up (Shazeer 2020, equation 6): (..., F) in their dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def swiglu_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """The gated MLP W_down (silu(W_gate x) * W_up x) (Shazeer 2020, equation 6).

    x (..., D); gate_up_weight (2F, D), the rows of the gate and then those of up; down_weight (D, F). Matrix products
    run in x's dtype, silu and the product with up in float32. Returns (..., D) in x's dtype.
    """
    return linear(swiglu(linear(x, gate_up_weight)), down_weight)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, token_weight: Tensor | None = None) -> Tensor:
    """The loss -log softmax(W x)[target] of each token, in nats; 0 where the target is IGNORED.

    x (N, D); weight (V, D); targets (N,) int64. Product in x's dtype, softmax in float32. Returns float32 (N,).
    token_weight, float32 and 0-dimensional: return the sum of the losses times it instead. Training wants this one
    number: a GPU computes its gradients without the logits of all tokens in memory. No gradient flows to the weight.
    """
    logits = linear(x, weight).float()  # (N, V)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return losses if token_weight is None else (losses * token_weight.detach()).sum()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v (Vaswani et al. 2017, equation 1), each key/value head shared by H/K query heads.

    q (B, H, T, d); k and v (B, K, S, d); mask bool (B or 1, 1, T, S), True where a query sees a position. Without a
    mask each position sees itself and those before it (T = S), or a single query sees every position (T = 1).
    Returns (B, H, T, d).
    """
    batch, heads, length, width = q.shape
    groups = heads // k.shape[1]
    if mask is None and length > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    # Query heads of one group become more query rows of their key/value head: nothing is repeated in memory, and the
    # fused attention kernels take it (with a mask or for one query, enable_gqa sends many of them to a slow path).
    q = q.reshape(batch, -1, groups * length, width)
    mask = None if mask is None else mask.repeat(1, 1, groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(batch, heads, length, width)
