"""The Triton SwiGLU beyond the tests of all implementations: sizes, dtypes, gate and up in one kernel, what is kept.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import kernels
from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from triton.compiler.errors import CompilationError
    from triton.runtime import _allocation
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


@pytest.mark.parametrize(("rows", "width"), [(3, 704), (1, 8), (2, 1030), (5, 2824), (70, 40), (33, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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


FAILURES = {
    "its tiles need 147,512 of this GPU's 101,376 (shared memory)": lambda: OutOfResources(
        147512, 101376, "shared memory"
    ),
    "Triton raised RuntimeError: Triton Error [CUDA]: invalid argument": lambda: RuntimeError(
        "Triton Error [CUDA]: invalid argument"
    ),
    "Triton raised CompilationError: unsupported": lambda: CompilationError(None, None, "unsupported"),
    "Triton raised NotImplementedError: no message": NotImplementedError,
}
OBSTACLES = {
    "it needs sizes divisible by 8, and the hidden size is 64, the MLP's 84": (64, 84),
    "it needs sizes divisible by 8, and the hidden size is 60, the MLP's 88": (60, 88),
    "it needs an input and a weight that begin at a multiple of 16 bytes": (64, 88),
    **dict.fromkeys(FAILURES, (64, 88)),
}


@pytest.mark.parametrize("reason", OBSTACLES)
@pytest.mark.parametrize("shifted", ["x", "weight"])
def test_where_one_kernel_cannot_run_two_do_and_one_line_says_why(
    fused_gate_up, draw, mlp_inputs, monkeypatch, capsys, reason, shifted
):
    x, gate_up, down = mlp_inputs(*OBSTACLES[reason])
    if "multiple of 16 bytes" in reason:

        def shift(tensor):
            return torch.cat((torch.zeros(1), tensor.flatten()))[1:].view_as(tensor)

        x, gate_up = (shift(x), gate_up) if shifted == "x" else (x, shift(gate_up))
    launches = []
    if reason in FAILURES:

        class Failing:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    launches.append(options)
                    raise FAILURES[reason]()

                return launch

        monkeypatch.setattr(swiglu, "gate_up_kernel", Failing())
    upstream = draw(*x.shape)
    for _ in range(2):
        found = run(kernels.swiglu_mlp, (x, gate_up, down), upstream)
        assert all(map(torch.equal, found, run(gpu.swiglu_mlp, (x, gate_up, down), upstream)))
        with torch.no_grad():
            assert torch.equal(kernels.swiglu_mlp(x, gate_up, down), found[0])
    line = f"fused_gate_up: {reason}; a matrix product and the activation kernel run instead of one kernel.\n"
    assert capsys.readouterr().err == line
    assert len(launches) == (2 if reason in FAILURES else 0)  # once with and once without keeping the products
    kernels.use("triton", CPU, fused_gate_up=True)
    assert not swiglu.fused_gate_up_failures


def test_the_allocator_of_the_descriptors_is_that_of_one_launch(fused_gate_up, draw, monkeypatch):
    """The interpreter needs none. Without one, a GPU launches no kernel that writes descriptors."""
    seen = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *arguments, **options: seen.append(_allocation._allocator.get())

    before = _allocation._allocator.get()
    monkeypatch.setattr(swiglu, "gate_up_kernel", Launch())
    swiglu.swiglu_gate_up(draw(5, 64), draw(16, 64), True)
    (allocator,) = seen
    assert _allocation._allocator.get() is before is not allocator
    buffer = allocator(768, 128, None)
    assert buffer.nbytes == 768 and buffer.device == CPU


@pytest.mark.parametrize("learned", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(draw, mlp_inputs, learned, fused):
    inputs, upstream = mlp_inputs(64, 88), draw(1, 1, 64).expand(2, 5, 64)
    function = gpu.swiglu_mlp_fused_gate_up if fused else gpu.swiglu_mlp
    _, *expected = run(function, inputs, upstream)
    some = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(inputs, learned, strict=True)]
    function(*some).backward(upstream)
    for tensor, needed, gradient in zip(some, learned, expected, strict=True):
        assert torch.equal(tensor.grad, gradient) if needed else tensor.grad is None


def test_compiled_code_gives_equal_bits_from_one_graph_for_all_token_counts(draw, mlp_inputs):
    """opcheck compares no values."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return aot_eager(module, inputs)

    weights = [weight.requires_grad_() for weight in mlp_inputs(32, 24)[1:]]
    compiled = torch.compile(gpu.swiglu_mlp, fullgraph=True, backend=backend)
    for length in (7, 5, 16, 33, 8, 64):
        x, upstream = draw(2, length, 35)[..., 1:33].requires_grad_(), draw(2, length, 35)[..., 2:34]
        torch._dynamo.mark_dynamic(x, 1)  # of this tensor: a detached one would not be marked
        found = []
        for function in (gpu.swiglu_mlp, compiled):
            y = function(x, *weights)
            found.append((y, *torch.autograd.grad(y, (x, *weights), upstream)))
        assert all(map(torch.equal, *found))
    assert len(graphs) == 1


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]
