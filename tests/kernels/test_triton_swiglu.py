"""The Triton SwiGLU beyond the tests of all implementations: sizes, dtypes, gate and up in one kernel, what is kept.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import pytest
import torch

import kernels
from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from triton.runtime.errors import OutOfResources

    from kernels import swiglu

CPU = torch.device("cpu")


def run(function, tensors, upstream):
    """The output and the gradients of all inputs."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, upstream.to(y.dtype))


@pytest.fixture
def mlp_inputs(draw):
    """x and weights of an MLP of a given size, with random numbers."""

    def make(hidden_size: int, width: int, rows: int = 10):
        weights = draw(2 * width, hidden_size, std=0.2, mean=0.02), draw(hidden_size, width, std=0.2, mean=0.02)
        return draw(2, rows // 2, hidden_size), *weights

    return make


@pytest.fixture
def fused_gate_up(triton):
    """Triton with gate, up and activation in one kernel."""
    kernels.use("triton", CPU, fused_gate_up=True)


@pytest.mark.parametrize(("rows", "width"), [(3, 704), (1, 8), (2, 1030), (5, 2824)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_and_product_are_rounded_once_forward_and_backward(draw, relative, rounding, dtype, rows, width):
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)
    wider = draw(rows, 2 * width + 16, dtype=dtype)
    wider[:, :-16] = packed
    doubles = packed.double().requires_grad_()
    gate, up = doubles.chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    (gradient,) = torch.autograd.grad(expected, doubles, upstream.double())
    for x in (packed, wider[:, :-16]):
        hidden = swiglu.swiglu_forward(x)
        dpacked, again = swiglu.swiglu_backward(upstream, x)
        assert torch.equal(hidden, again)
        assert relative(hidden, expected.detach()) < rounding(dtype, hidden.numel())
        assert relative(dpacked, gradient) < rounding(dtype, dpacked.numel())


@pytest.mark.parametrize(("rows", "hidden_size", "width"), [(70, 72, 136), (1, 8, 8), (129, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gate_and_up_in_one_kernel_equal_float64_and_keep_the_products(
    fused_gate_up, draw, relative, rounding, dtype, rows, hidden_size, width
):
    x, weight = draw(rows, hidden_size, dtype=dtype), draw(2 * width, hidden_size, std=0.2, mean=0.02, dtype=dtype)
    products = x.double() @ weight.double().T
    gate, up = products.chunk(2, -1)
    hidden, kept = swiglu.swiglu_gate_up(x, weight, True)
    assert relative(kept, products) < rounding(dtype, kept.numel())
    assert relative(hidden, gate * torch.sigmoid(gate) * up) < rounding(dtype, hidden.numel())
    alone, empty = swiglu.swiglu_gate_up(x, weight, False)
    assert torch.equal(alone, hidden) and not empty.numel()
    assert not swiglu.fused_gate_up_obstacles


def test_fused_gate_up_is_off_unless_use_turns_it_on(triton, mlp_inputs, monkeypatch):
    calls = []
    launch = swiglu.launch_gate_up_kernel
    monkeypatch.setattr(swiglu, "launch_gate_up_kernel", lambda *a: calls.append(a) or launch(*a))
    inputs = mlp_inputs(64, 88)
    kernels.swiglu_mlp(*inputs)
    assert not calls and kernels.describe(CPU) == "Triton, interpreted (slow)"
    kernels.use("triton", CPU, fused_gate_up=True)
    kernels.swiglu_mlp(*inputs)
    assert len(calls) == 1 and kernels.describe(CPU) == "Triton, interpreted (slow), gate and up in one kernel"
    kernels.use("triton", CPU)
    kernels.swiglu_mlp(*inputs)
    assert len(calls) == 1


@pytest.mark.parametrize("choice", ["torch", "reference", "auto"])
def test_fused_gate_up_is_refused_where_triton_does_not_run(choice):
    with pytest.raises(
        ValueError, match=f"fused_gate_up needs 'triton' kernels: '{choice}' does not run Triton on cpu"
    ):
        kernels.use(choice, CPU, fused_gate_up=True)
    assert kernels.implementation(CPU) is kernels.cpu


def test_the_mlp_with_fused_gate_up_and_its_gradients_equal_float64_and_its_compiled_version(
    fused_gate_up, draw, relative, mlp_inputs, capsys
):
    inputs, upstream = mlp_inputs(64, 88), draw(2, 5, 64)
    one = run(kernels.swiglu_mlp, inputs, upstream)
    two = run(gpu.swiglu_mlp, inputs, upstream)
    expected = run(reference.swiglu_mlp, [tensor.double() for tensor in inputs], upstream)
    for a, b, c in zip(one, two, expected, strict=True):
        assert relative(a, c) < 1e-6 and relative(b, c) < 1e-6
    compiled = run(torch.compile(kernels.swiglu_mlp, fullgraph=True, backend="aot_eager"), inputs, upstream)
    assert all(map(torch.equal, one, compiled))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("obstacle", ["sizes", "address", "shared memory"])
def test_where_one_kernel_cannot_run_two_do_and_one_line_says_why(
    fused_gate_up, draw, mlp_inputs, monkeypatch, capsys, obstacle
):
    x, *weights = mlp_inputs(64, 84 if obstacle == "sizes" else 88)
    reason = "it needs sizes divisible by 8, and the hidden size is 64, the MLP's 84"
    if obstacle == "address":
        x = torch.cat((torch.zeros(1), x.flatten()))[1:].view_as(x)
        reason = "it needs an input and a weight that begin at a multiple of 16 bytes"
    if obstacle == "shared memory":

        class TooLarge:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    raise OutOfResources(147512, 101376, "shared memory")

                return launch

        monkeypatch.setattr(swiglu, "gate_up_kernel", TooLarge())
        reason = "its tiles need 147,512 of this GPU's 101,376 (shared memory)"
    upstream = draw(2, 5, 64)
    for _ in range(2):
        found = run(kernels.swiglu_mlp, (x, *weights), upstream)
        assert all(map(torch.equal, found, run(gpu.swiglu_mlp, (x, *weights), upstream)))
        with torch.no_grad():
            assert torch.equal(kernels.swiglu_mlp(x, *weights), found[0])
    line = f"fused_gate_up: {reason}; a matrix product and the activation kernel run instead of one kernel.\n"
    assert capsys.readouterr().err == line


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]
