"""The Triton SwiGLU beyond the tests of all implementations: sizes, dtypes, what is kept.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import swiglu


@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [
        (torch.float32, 3, 704),
        (torch.bfloat16, 1, 8),
        (torch.float16, 2, 1030),
        (torch.bfloat16, 5, 2824),
        (torch.float16, 70, 40),
        (torch.float32, 33, 7),
    ],
)
def test_silu_and_product_are_rounded_once_forward_and_backward(draw, relative, rounding, dtype, rows, width):
    """Narrow rows share a program, wide ones have several; strides may be odd, 0, or 2 in the last dimension."""
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)
    layouts = {"contiguous": (packed, upstream)}
    for gap in (16, 3):
        widths = [t.shape[1] + gap + i for i, t in enumerate((packed, upstream))]
        if gap == 16:
            widths = [-(-w // 8) * 8 for w in widths]  # strides that 8 divides, of rows that it may not
        wider = [torch.zeros(rows, w, dtype=dtype) for w in widths]
        layouts[f"{gap} elements between rows"] = [
            w[:, 1 : 1 + t.shape[1]] for w, t in zip(wider, (packed, upstream), strict=True)
        ]
    layouts["elements apart"] = [torch.zeros(*t.shape, 2, dtype=dtype)[..., 0] for t in (packed, upstream)]
    for pair in list(layouts.values())[1:]:
        for view, t in zip(pair, (packed, upstream), strict=True):
            view.copy_(t)
    layouts["one gradient for all rows"] = packed, upstream[:1].expand(rows, -1)
    for gate_up, dhidden in layouts.values():
        doubles = packed.double().requires_grad_()
        gate, up = doubles.chunk(2, -1)
        expected = gate / (1 + torch.exp(-gate)) * up
        (gradient,) = torch.autograd.grad(expected, doubles, dhidden.double())
        hidden = swiglu.swiglu_forward(gate_up)
        dgate_up, again = swiglu.swiglu_backward(dhidden, gate_up)
        assert torch.equal(hidden, again)
        assert relative(hidden, expected.detach()) < rounding(dtype, hidden.numel())
        for ours, exact in zip(dgate_up.chunk(2, -1), gradient.chunk(2, -1), strict=True):
            assert relative(ours, exact) < rounding(dtype, ours.numel())
    assert torch.equal(layouts["elements apart"][0], packed)


def test_gates_far_from_zero_saturate():
    gate_up = torch.tensor([[-80.0, -30.0, 30.0, 80.0, 2.0, 2.0, 2.0, 2.0]])
    assert torch.equal(swiglu.swiglu_forward(gate_up)[0, 2:], torch.tensor([60.0, 160.0]))
    dgate_up, _ = swiglu.swiglu_backward(torch.ones(1, 4), gate_up)
    expected = torch.tensor([[0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 30.0, 80.0]])  # silu' is 0 or 1, times up; and silu
    torch.testing.assert_close(dgate_up, expected, rtol=0, atol=1e-10)


def test_what_is_frozen_gets_no_gradient_and_changes_no_other(draw):
    inputs, upstream = (draw(2, 5, 64), draw(176, 64, std=0.2), draw(64, 88, std=0.2)), draw(1, 1, 64).expand(2, 5, 64)
    found = []
    for learned in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        some = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(inputs, learned, strict=True)]
        gpu.swiglu_mlp(*some).backward(upstream)
        found.append([tensor.grad for tensor in some])
    for i, (expected, *others) in enumerate(zip(*found, strict=True)):
        assert torch.equal(others[i], expected) and others[i - 1] is others[i - 2] is None


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]
