"""The functions of `reference.py` for a CPU, each as one autograd function of few passes over memory.

On a CPU a small model spends its time moving data: every operation reads and writes whole tensors, and autograd keeps
float32 copies of what the reference upcasts. Here each function keeps only what its backward pass needs, in the
activations' dtype, and writes in place where it owns the memory. Norms and rotations are loops that Numba compiles:
one pass over memory. docs/lab/training-cpu.md has the measurements. torch.ops.mkldnn is no public interface;
tests/kernels finds out when it changes.
"""

import functools
import math

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels import reference
from kernels.compiled import call, compiled, store, widen

LOOP_DTYPES = torch.float32, torch.bfloat16
CHUNKS = 64  # of rows, whose sums are added in this order: equal bits with any number of threads

# Rows of logits: in one product, which is slower with fewer; and in one softmax, few enough to stay in the cache.
PRODUCT_ROWS = 1024
SOFTMAX_ROWS = 64
ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of a (..., K) and b (N, K), contiguous or the transpose of a contiguous matrix.

    In float32 by oneDNN instead of MKL, which does not use all of the instructions of processors that are not Intel's.
    """
    if ONEDNN and a.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return F.linear(a, b)


class CpuLinear(torch.autograd.Function):
    """See `linear`, without a bias. x (..., in_features), weight (out_features, in_features)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The gradient of W is torch's own product: oneDNN would have to copy x or grad to be as fast."""
        x, weight = ctx.saved_tensors
        dx = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return dx, dweight


def linear(x, weight, bias=None):
    """As `reference.linear`. Without gradients it calls that: generation has few rows, for which oneDNN is slower."""
    if x.dtype != torch.float32 or not torch.is_grad_enabled():
        return reference.linear(x, weight, bias)
    y = CpuLinear.apply(x, weight.to(x.dtype))
    return y if bias is None else y + bias


@functools.partial(compiled, parallel=True)
def norm_forward(x, residual, adds, weight, bias, is_layer_norm, eps, s, y, statistics):
    """s = x + residual, or x unless `adds`, and y = norm(s), all (rows, D).

    statistics (rows, 2): the mean, 0 for RMSNorm, and the scale.
    """
    width = x.shape[1]
    for row in prange(len(x)):
        mean, square = np.float32(0), np.float32(0)
        if adds:
            for i in range(width):
                store(s[row], i, widen(x[row, i]) + widen(residual[row, i]))
        if is_layer_norm:
            for i in range(width):
                mean += widen(s[row, i])
            mean /= np.float32(width)
        for i in range(width):
            square += (widen(s[row, i]) - mean) ** 2
        scale = np.float32(1 / math.sqrt(square / np.float32(width) + eps))
        for i in range(width):
            store(y[row], i, (widen(s[row, i]) - mean) * scale * weight[i] + bias[i])
        statistics[row, 0], statistics[row, 1] = mean, scale


@functools.partial(compiled, parallel=True)
def norm_backward(dy, ds, adds, s, weight, is_layer_norm, statistics, dx, sums):
    """dx = ds + scale (h - mean(h) - xhat mean(h xhat)), with h = dy weight and xhat = (s - mean) scale.

    RMSNorm has no mean(h); ds counts if `adds`. sums (chunks of rows, 2, D): parts of the gradients of weight and bias.
    """
    rows, width = s.shape
    for chunk in prange(len(sums)):
        for row in range(chunk * rows // len(sums), (chunk + 1) * rows // len(sums)):
            mean, scale = statistics[row, 0], statistics[row, 1]  # Numba makes no vectors of what is unpacked
            mean_h, mean_hx = np.float32(0), np.float32(0)
            for i in range(width):
                xhat = (widen(s[row, i]) - mean) * scale
                grad = widen(dy[row, i])
                sums[chunk, 0, i] += grad * xhat
                sums[chunk, 1, i] += grad
                mean_h += grad * weight[i]
                mean_hx += grad * weight[i] * xhat
            mean_h = mean_h / np.float32(width) if is_layer_norm else np.float32(0)
            mean_hx /= np.float32(width)
            for i in range(width):
                xhat = (widen(s[row, i]) - mean) * scale
                h = widen(dy[row, i]) * weight[i]
                from_y = scale * (h - mean_h - xhat * mean_hx)
                store(dx[row], i, widen(ds[row, i]) + from_y if adds else from_y)


class CpuNorm(torch.autograd.Function):
    """See `normalize`. x and residual (rows, D) of one dtype; without a residual the second output is None."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, is_layer_norm, eps):
        y, statistics = torch.empty(x.shape, dtype=x.dtype), torch.empty(len(x), 2)
        x, adds = x.contiguous(), residual is not None
        s = torch.empty_like(x) if adds else x
        residual = residual if adds else x  # not read then; Numba needs an array
        # Copies: the storage of a tensor that was an array keeps its size, and --shard frees weights.
        weight, bias = weight.clone(), torch.zeros_like(weight) if bias is None else bias.clone()
        call(norm_forward, x, residual, adds, weight, bias, is_layer_norm, eps, s, y, statistics)
        ctx.save_for_backward(s, weight, statistics)
        ctx.is_layer_norm = is_layer_norm
        ctx.set_materialize_grads(False)
        return y, s if adds else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        s, weight, statistics = ctx.saved_tensors
        dx, sums = torch.empty_like(s), torch.zeros(CHUNKS, 2, s.shape[1])
        dy = torch.zeros_like(s) if dy is None else dy
        adds = ds is not None
        ds = ds if adds else dy  # as in the forward pass
        call(norm_backward, dy, ds, adds, s, weight, ctx.is_layer_norm, statistics, dx, sums)
        gradients = dx, *sums.sum(0), dx, None, None
        return tuple(g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=True))


def normalize(x, weight=None, bias=None, residual=None, *, kind, eps):
    """As `reference.normalize`, for float32 vectors and one dtype of x and residual; the reference handles others."""
    is_usual = weight is not None and weight.dtype == torch.float32 and x.dtype in LOOP_DTYPES
    is_usual = is_usual and (bias is None or bias.dtype == torch.float32)
    if not is_usual or (residual is not None and residual.dtype != x.dtype):
        return reference.normalize(x, weight, bias, residual, kind=kind, eps=eps)
    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(rows.shape)
    y, s = CpuNorm.apply(rows, weight, bias, residual_rows, kind == "layer", eps)
    return y.view(x.shape), x if residual is None else s.view(x.shape)


@functools.partial(compiled, parallel=True)
def rotate(packed, first, cos, sin, separate, is_backward):
    """separate (B, N, T, d) = the heads of packed (B, T, H + 2K, d) from `first` on, rotated; backward, the reverse.

    (x, y) -> (x cos - y sin, y cos + x sin) for the pairs (i, i + d/2); cos and sin (B or 1, T, d/2).
    """
    batch, heads, length, width = separate.shape
    for task in prange(batch * length):
        b, t = task // length, task % length
        c, s = cos[b % len(cos), t], sin[b % len(sin), t]
        for h in range(heads):
            if is_backward:
                source, target = separate[b, h, t], packed[b, t, first + h]
            else:
                source, target = packed[b, t, first + h], separate[b, h, t]
            for i in range(width // 2):
                x, y = widen(source[i]), widen(source[width // 2 + i])
                store(target, i, x * c[i] - y * s[i])
                store(target, width // 2 + i, y * c[i] + x * s[i])


class CpuRotary(torch.autograd.Function):
    """See `rotary`. heads (B, T, H + 2K, d); q, k and v lie in memory as attention reads them: (B, H or K, T, d)."""

    @staticmethod
    def forward(ctx, heads, cos, sin, num_heads, num_kv_heads):
        ctx.save_for_backward(cos, sin)
        batch, length, _, width = heads.shape
        q = torch.empty(batch, num_heads, length, width, dtype=heads.dtype)
        k = torch.empty(batch, num_kv_heads, length, width, dtype=heads.dtype)
        call(rotate, heads, 0, cos, sin, q, False)
        call(rotate, heads, num_heads, cos, sin, k, False)
        v = heads[:, :, num_heads + num_kv_heads :].transpose(1, 2).contiguous()
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        """Rotate back: the transpose of a rotation is the rotation by the opposite angle."""
        cos, sin = ctx.saved_tensors
        opposite = -sin
        batch, length, num_heads, width = dq.shape
        num_kv_heads = dk.shape[2]
        heads = torch.empty(batch, length, num_heads + 2 * num_kv_heads, width, dtype=dq.dtype)
        call(rotate, heads, 0, cos, opposite, dq.transpose(1, 2), True)
        call(rotate, heads, num_heads, cos, opposite, dk.transpose(1, 2), True)
        heads[:, :, num_heads + num_kv_heads :] = dv
        return heads, None, None, None, None


def rotary(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight=None, k_norm_weight=None, eps=1e-6):
    """As `reference.rotary`. Normalized heads are float32 until they are rotated."""
    if qkv.dtype not in LOOP_DTYPES:
        return reference.rotary(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # (B, T, H + 2K, d)
    if q_norm_weight is not None:
        q, k, v = heads.float().split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
        q, _ = normalize(q, q_norm_weight, kind="rms", eps=eps)
        k, _ = normalize(k, k_norm_weight, kind="rms", eps=eps)
        heads = torch.cat((q, k, v), dim=-2)
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return tuple(x.to(qkv.dtype) for x in CpuRotary.apply(heads, cos, sin, num_heads, num_kv_heads))


def keeps_probabilities(dtype, length, width):
    """Whether `attention` of so many tokens and channels of a head keeps a probability for each pair of tokens."""
    return dtype == torch.bfloat16 and 1 < length <= 512 and width >= 64


def attention(q, k, v, mask=None):
    """As `reference.attention`, 2 to 4 times as fast for short sequences of wide heads in bfloat16 without a cache.

    The price is one more rounding: scores are bfloat16 before the softmax (relative error 3.3e-3 instead of 2.0e-3).
    """
    batch, heads, length, width = q.shape
    if k.shape[2] > length or not keeps_probabilities(q.dtype, length, width):  # more keys than queries: a cache
        return reference.attention(q, k, v, mask)
    groups = heads // k.shape[1]
    if mask is None:  # (G T, T)
        mask_bias = torch.full((length, length), float("-inf"), dtype=q.dtype).triu_(1).repeat(groups, 1)
    else:  # (B K, G T, T)
        hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        mask_bias = hidden.repeat(batch // len(mask), k.shape[1], groups, 1).flatten(0, 1)
    # Plain products; the query heads of a group are rows of one product, so keys are never repeated.
    q = q.reshape(-1, groups * length, width)  # (B K, G T, d)
    k, v = k.reshape(-1, length, width), v.reshape(-1, length, width)  # (B K, T, d)
    scores = torch.baddbmm(mask_bias, q, k.transpose(1, 2), alpha=width**-0.5)  # (B K, G T, T)
    return torch.bmm(torch.softmax(scores, -1), v).view(batch, heads, length, width)  # the softmax is float32 inside


def swiglu(gate_up):
    """As `reference.swiglu`, with silu rounded to the dtype before the product with up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.contiguous()) * up.contiguous()


def swiglu_mlp(x, gate_up_weight, down_weight):
    """As `reference.swiglu_mlp`. Two products: elementwise operations on halves of rows would take twice as long."""
    gate_weight, up_weight = gate_up_weight.to(x.dtype).chunk(2)
    gate, up = linear(x, gate_weight), linear(x, up_weight)
    return linear(F.silu(gate) * up, down_weight)


class CpuCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. x and weight of one dtype."""

    @staticmethod
    def forward(ctx, x, weight, targets, needs_gradients):
        """Loss of each token, chunk by chunk; for gradients also softmax - onehot, rounded as a gradient would be."""
        counted = targets != reference.IGNORED
        target = targets.masked_fill(~counted, 0)[:, None]
        loss = torch.empty(len(x), dtype=torch.float32)
        delta = x.new_empty(len(x) if needs_gradients else 0, len(weight))
        buffer = torch.empty(SOFTMAX_ROWS, len(weight), dtype=torch.float32)
        minus_one = torch.full((SOFTMAX_ROWS, 1), -1.0)
        for start in range(0, len(x), PRODUCT_ROWS):
            logits = product(x[start : start + PRODUCT_ROWS], weight)
            for first in range(0, len(logits), SOFTMAX_ROWS):
                chunk = logits[first : first + SOFTMAX_ROWS]
                rows, p = slice(start + first, start + first + len(chunk)), buffer[: len(chunk)]
                largest = p.copy_(chunk).amax(-1)
                torch.softmax(p, -1, out=p)
                # logsumexp = the largest logit - log of its probability, which is never too small for a logarithm
                loss[rows] = largest - p.amax(-1).log_() - chunk.gather(1, target[rows])[:, 0]
                if needs_gradients:
                    p.scatter_add_(1, target[rows], minus_one[: len(chunk)])  # before the rounding
                    delta[rows] = p
        if needs_gradients:
            ctx.save_for_backward(x, weight, delta, counted)
        return loss.masked_fill_(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The loss's gradient scales rows, which commutes with both products: it is applied to the narrower matrix."""
        x, weight, delta, counted = ctx.saved_tensors
        grad = grad.masked_fill(~counted, 0.0)[:, None]
        dx = product(delta, weight.t()).mul_(grad) if ctx.needs_input_grad[0] else None
        dweight = delta.t() @ (x * grad).to(x.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None


def linear_cross_entropy(x, weight, targets, token_weight=None):
    """As `reference.linear_cross_entropy`, without float32 logits of all tokens."""
    needs_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    losses = CpuCrossEntropy.apply(x, weight.to(x.dtype), targets, needs_gradients)
    return losses if token_weight is None else (losses * token_weight.detach()).sum()
