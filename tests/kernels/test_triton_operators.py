"""The Triton kernels as torch operators: their registration, and one graph for torch.compile."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import kernels
from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")


def operators():
    """Each operator with valid arguments."""
    x, s, head, qkv = (torch.randn(*shape) for shape in ((6, 16), (6, 16), (9, 16), (1, 6, 4 * 16)))
    weight, bias, cos, sin, statistics = (torch.randn(*shape) for shape in ((16,), (16,), (6, 8), (6, 8), (2, 6)))
    heads, targets = [torch.randn(1, 6, n, 16) for n in (2, 1, 1)], torch.arange(6)
    ops = torch.ops.prenorm
    return {
        "norm_forward": (ops.norm_forward, (x, s, weight, bias, "layer", 1e-5)),
        "norm_forward of rms": (ops.norm_forward, (x, None, weight, None, "rms", 1e-5)),
        "norm_backward": (ops.norm_backward, (x, s, s.clone(), weight, statistics, "layer", True, True)),
        "norm_backward of rms": (ops.norm_backward, (x, None, s, weight, statistics[:1], "rms", True, False)),
        "swiglu_forward": (ops.swiglu_forward, (x,)),
        "swiglu_backward": (ops.swiglu_backward, (s[:, :8], x)),
        "rotary_forward": (ops.rotary_forward, (qkv, cos, sin, 2, 1, None, None, 1e-5)),
        "rotary_forward with head norms": (ops.rotary_forward, (qkv, cos, sin, 2, 1, weight, bias, 1e-5)),
        "rotary_backward": (ops.rotary_backward, (*heads, None, cos, sin, None, None, 1e-5)),
        "rotary_backward with head norms": (ops.rotary_backward, (*heads, qkv, cos, sin, weight, bias, 1e-5)),
        "loss_gradients without weights": (ops.loss_gradients, (x, head, targets, None, False, False)),
        "loss_gradients": (ops.loss_gradients, (x, head, targets, torch.randn(6), True, True)),
        "loss_gradients of x": (ops.loss_gradients, (x, head, targets, torch.randn(6), True, False)),
    }


@pytest.mark.parametrize("name", operators() if gpu is not None else ())
def test_every_operator_passes_torch_library_opcheck(name):
    """Tracing with any number of tokens is what the last test does."""
    operator, arguments = operators()[name]
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator.default, arguments, test_utils=checks)


def test_every_operator_is_checked():
    registered = {name for name in dir(torch.ops.prenorm) if not name.startswith("_")} - {"name"}
    assert {name.partition(" ")[0] for name in operators()} == registered


def test_all_kernels_compile_into_one_graph_for_any_number_of_tokens_with_equal_bits(triton, draw):
    """opcheck compares no values. Without mark_dynamic, torch.compile compiles the first number for itself."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def model(x, weight, bias, qkv_weight, gate_up, down, head, cos, sin, targets, token_weights):
        y, s = kernels.normalize(x, weight, kind="rms", eps=1e-5)
        packed, q_weight, k_weight = y @ qkv_weight.T, weight[:16], weight[16:]
        q, k, v = kernels.rotary(packed, cos, sin, 2, 1, q_weight, k_weight, 1e-5)
        q = kernels.rotary(packed, cos, sin, 2, 1)[0] + q
        a = kernels.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)
        y, s = kernels.normalize(a, weight, bias, s, kind="layer", eps=1e-5)
        y, _ = kernels.normalize(kernels.swiglu(y @ gate_up.T) @ down.T, weight, None, s, kind="rms", eps=1e-5)
        return kernels.linear_cross_entropy(y.flatten(0, 1), head, targets, token_weights=token_weights)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    weights = [draw(*shape).requires_grad_() for shape in ((32,), (32,), (64, 32), (96, 32), (32, 48), (9, 32))]
    for length in (7, 16):
        x, angles = draw(2, length, 32).requires_grad_(), draw(length, 8)
        inputs = x, *weights, angles.cos(), angles.sin(), torch.arange(2 * length) % 9, draw(2 * length)
        for tensor, axis in ((x, 1), *((tensor, 0) for tensor in inputs[7:])):
            torch._dynamo.mark_dynamic(tensor, axis)
        found = []
        for run in (model, compiled):
            loss = run(*inputs)
            found.append((loss.detach(), *torch.autograd.grad(loss, (x, *weights))))
        assert all(map(torch.equal, *found))
    assert len(graphs) == 1
