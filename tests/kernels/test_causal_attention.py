"""`causal_attention` against a loop over positions in float64 with keys and values repeated explicitly.

Tolerances: float32: 1e-6. In bfloat16 the output's rounding (1.66e-3), that of the probabilities (1.66e-3, averaged
over the keys) and on a CPU that of the scores (relative 1.66e-3 of scores of a few units): 5e-3; gradients 1e-2.
"""

import pytest
import torch

B, H, K, T, D = 2, 6, 2, 19, 64  # heads wide enough for the CPU's own path in bfloat16


def definition(q, k, v):
    k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    rows = []
    for t in range(q.shape[2]):
        scores = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1) / D**0.5  # (B, H, t + 1)
        rows.append((torch.softmax(scores, -1)[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize(("dtype", "out", "gradient"), [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 5e-3, 1e-2)])
def test_output_and_gradients_equal_the_float64_definition(kernel, draw, relative, dtype, out, gradient):
    inputs = [draw(B, T, heads, D).to(dtype).transpose(1, 2) for heads in (H, K, K)]
    upstream = draw(B, H, T, D).to(dtype)

    def run(function, tensors):
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        y = function(*tensors)
        return y, torch.autograd.grad(y, tensors, upstream.to(y.dtype))

    y, gradients = run(kernel.causal_attention, inputs)
    y64, gradients64 = run(definition, [tensor.double() for tensor in inputs])
    assert relative(y, y64) < out
    for ours, theirs in zip(gradients, gradients64, strict=True):
        assert relative(ours, theirs) < gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_after_a_position_reaches_it(kernel, draw, dtype):
    q, k, v = (draw(B, heads, T, D).to(dtype) for heads in (H, K, K))
    before = kernel.causal_attention(q, k, v)
    k[:, :, 12:], v[:, :, 12:] = 100.0, -100.0
    after = kernel.causal_attention(q, k, v)
    assert torch.equal(before[:, :, :12], after[:, :, :12])
    assert not torch.equal(before[:, :, 12:], after[:, :, 12:])
