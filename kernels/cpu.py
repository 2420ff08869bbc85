"""The functions of `reference.py` for a CPU, each as one autograd function of few passes over memory.

On a CPU a small model spends its time moving data: every operation reads and writes whole tensors, and autograd keeps
float32 copies of what the reference upcasts. Here each function keeps only what its backward pass needs, in the
activations' dtype, and writes in place where it owns the memory. docs/lab/training-cpu.md has the measurements.
torch.ops.aten and torch.ops.mkldnn are no public interface; tests/kernels finds out when they change.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels import reference

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


class OneDNNLinear(torch.autograd.Function):
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
    y = OneDNNLinear.apply(x, weight.to(x.dtype))
    return y if bias is None else y + bias


class CpuNorm(torch.autograd.Function):
    """See `normalize`. s (..., D); the result is the normalized s alone."""

    @staticmethod
    def forward(ctx, s, weight, bias, kind, eps):
        """Statistics and affine in float32 on one copy of the rows."""
        rows = s.to(torch.float32, copy=True)
        if kind == "layer":
            mean = rows.mean(-1, keepdim=True)
            rows.sub_(mean)
        else:
            mean = torch.zeros_like(rows[..., :1])  # for the backward pass
        # The norm's square and not square().mean(): one fused pass over the row instead of two.
        rstd = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.shape[-1]).add_(eps).rsqrt_()
        rows.mul_(rstd).mul_(weight)
        if bias is not None:
            rows.add_(bias)
        ctx.save_for_backward(s, weight, bias, mean, rstd)
        ctx.kind = kind
        return rows.to(s.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """torch's LayerNorm kernel, for both kinds, in float32, because it sums over tokens in the dtype of its input.

        It computes ds = rstd (h - mean(h) - xhat mean(h xhat)), with h = grad * weight and xhat = (s - mean) rstd, for
        any mean and rstd it is given. RMSNorm gives it the mean 0, and adds the term rstd mean(h) again.
        """
        s, weight, bias, mean, rstd = ctx.saved_tensors
        width, grad = s.shape[-1], grad.float()
        ds, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad, s.float(), [width], mean, rstd, weight, bias, (True, *ctx.needs_input_grad[1:3])
        )
        if ctx.kind == "rms":
            ds.add_((grad @ weight)[..., None].mul_(rstd).div_(width))
        return ds.to(s.dtype), dweight, dbias, None, None


def normalize(x, weight=None, bias=None, residual=None, *, kind, eps):
    """As `reference.normalize`. Only for float32 weights: the reference handles others."""
    if weight is None or weight.dtype != torch.float32:
        return reference.normalize(x, weight, bias, residual, kind=kind, eps=eps)
    s = x if residual is None else (x + residual).to(residual.dtype)  # torch adds bfloat16 in float32, rounding once
    y = CpuNorm.apply(s, weight, bias, kind, eps)
    return y.to(x.dtype), s


class RotatePairs(torch.autograd.Function):
    """Rotate the pairs (i, i + d/2) of each head of x (B, T, N, d); cos and sin are float32 (T or B, T; 1, d/2)."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        """(a, b) -> (a cos - b sin, b cos + a sin) in float32, rounded once."""
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Rotate back: the transpose of a rotation is the rotation by the opposite angle."""
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) in the last dimension."""
    a, b = x.float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=torch.float32)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out.to(x.dtype)


def rotary(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight=None, k_norm_weight=None, eps=1e-6):
    """As `reference.rotary`. With norms of heads it calls that."""
    if q_norm_weight is not None:
        return reference.rotary(qkv, cos, sin, num_heads, num_kv_heads, q_norm_weight, k_norm_weight, eps)
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # (B, T, H + 2K, d)
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=-2)
    q, k = RotatePairs.apply(qk, cos.unsqueeze(-2), sin.unsqueeze(-2)).split((num_heads, num_kv_heads), dim=-2)
    return q, k, v


def attention(q, k, v, mask=None):
    """As `reference.attention`, 2 to 4 times as fast for short sequences of wide heads in bfloat16 without a cache.

    The price is one more rounding: scores are bfloat16 before the softmax (relative error 3.3e-3 instead of 2.0e-3).
    """
    batch, heads, length, width = q.shape
    has_cache = k.shape[2] > length
    is_short_and_wide = 1 < length <= 512 and width >= 64
    if q.dtype != torch.bfloat16 or has_cache or not is_short_and_wide:
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
    gate, up = (linear(x, weight) for weight in gate_up_weight.to(x.dtype).chunk(2))
    return linear(F.silu(gate) * up, down_weight)


class LinearCrossEntropy(torch.autograd.Function):
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
        grad = (grad * counted)[:, None]
        dx = product(delta, weight.t()).mul_(grad) if ctx.needs_input_grad[0] else None
        dweight = delta.t() @ (x * grad).to(x.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None


def linear_cross_entropy(x, weight, targets, token_weight=None):
    """As `reference.linear_cross_entropy`, without float32 logits of all tokens."""
    needs_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    losses = LinearCrossEntropy.apply(x, weight.to(x.dtype), targets, needs_gradients)
    return losses if token_weight is None else (losses * token_weight.detach()).sum()
