"""`swiglu_mlp` against float64.

Tolerances: float32 sums of about a hundred products, twice: 1e-6. In bfloat16 the two products, the product of gate
and up and (on a CPU) silu are rounded, each 1.66e-3, and each output adds the errors of three of them: 5e-3.
"""

import pytest
import torch

B, T, D, F = 3, 11, 64, 88


def definition(x, gate_up, down):
    gate, up = x @ gate_up[:F].T, x @ gate_up[F:].T
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_output_and_gradients_equal_the_float64_definition(kernel, draw, relative, dtype, tolerance):
    x, gate_up, down = draw(B, T, D).to(dtype), draw(2 * F, D, mean=0.02, std=0.2), draw(D, F, mean=0.02, std=0.2)
    upstream = draw(B, T, D).to(dtype)

    def run(function, inputs):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, upstream.to(y.dtype))

    rounded = [x.double(), gate_up.to(dtype).double(), down.to(dtype).double()]
    expected = run(definition, rounded)
    actual = run(kernel.swiglu_mlp, [x, gate_up, down])
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, torch.float32, torch.float32]
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative(ours, theirs) < tolerance


def test_the_first_rows_are_the_gate_and_the_last_rows_the_up_projection(kernel):
    x = torch.tensor([[2.0]])
    gate_up, down = torch.tensor([[-1.0], [3.0]]), torch.tensor([[1.0]])  # gate -2, up 6
    expected = -2 / (1 + torch.e**2) * 6
    assert kernel.swiglu_mlp(x, gate_up, down).item() == pytest.approx(expected, rel=1e-6)
