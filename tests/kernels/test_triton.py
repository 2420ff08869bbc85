"""The Triton kernels as torch operators, which implementation runs, and rows more than 2^31 elements apart."""

import mmap
import sys

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import kernels
from errors import UserError
from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)

if gpu is not None:
    from triton.runtime.interpreter import GridExecutor

    from kernels import activation, rope


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
        "loss_gradients without any": (ops.loss_gradients, (x, head, targets, False, False)),
        "loss_gradients": (ops.loss_gradients, (x, head, targets, True, True)),
        "loss_gradients of x": (ops.loss_gradients, (x, head, targets, True, False)),
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

    def model(x, weight, bias, qkv_weight, gate_up, down, head, cos, sin, targets, token_weight):
        y, s = kernels.normalize(x, weight, kind="rms", eps=1e-5)
        packed, q_weight, k_weight = y @ qkv_weight.T, weight[:16], weight[16:]
        q, k, v = kernels.rotary(packed, cos, sin, 2, 1, q_weight, k_weight, 1e-5)
        q = kernels.rotary(packed, cos, sin, 2, 1)[0] + q
        a = kernels.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)
        y, s = kernels.normalize(a, weight, bias, s, kind="layer", eps=1e-5)
        y, _ = kernels.normalize(kernels.swiglu(y @ gate_up.T) @ down.T, weight, None, s, kind="rms", eps=1e-5)
        return kernels.linear_cross_entropy(y.flatten(0, 1), head, targets, token_weight)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    weights = [draw(*shape).requires_grad_() for shape in ((32,), (32,), (64, 32), (96, 32), (32, 48), (9, 32))]
    for length in (7, 16):
        x, angles = draw(2, length, 32).requires_grad_(), draw(length, 8)
        inputs = x, *weights, angles.cos(), angles.sin(), torch.arange(2 * length) % 9, torch.tensor(0.37)
        for tensor, axis in ((x, 1), *((tensor, 0) for tensor in inputs[7:-1])):
            torch._dynamo.mark_dynamic(tensor, axis)
        results = []
        for run in (model, compiled):
            loss = run(*inputs)
            results.append((loss.detach(), *torch.autograd.grad(loss, (x, *weights))))
        assert all(map(torch.equal, *results))
    assert len(graphs) == 1


def test_triton_is_refused_with_the_reason_where_it_cannot_run(monkeypatch):
    with pytest.raises(UserError, match=r"cannot run on mps: they need an NVIDIA or AMD GPU; use --kernels auto"):
        kernels.use("triton", torch.device("mps"))
    monkeypatch.setattr(kernels, "gpu", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        kernels.use("triton", CUDA)
    assert kernels.implementation(CUDA) is reference
    assert kernels.describe(CUDA) == "plain PyTorch (no Triton kernels: Triton is not installed)"
    monkeypatch.setattr(kernels, "cpu", None)
    assert kernels.describe(CPU) == "plain PyTorch (without Numba)"


@pytest.mark.parametrize(
    ("capability", "compiler", "words"),
    [((7, 5), "gcc", "8.0"), ((9, 0), None, "C compiler"), ((9, 0), "gcc", "Triton")],
)
def test_triton_needs_a_recent_gpu_and_a_c_compiler_also_in_a_trace(monkeypatch, capability, compiler, words):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: compiler)
    kernels.cached_unavailable_reason.cache_clear()

    def function(x):
        return x + 1 if kernels.implementation(CUDA) is gpu else x - 1

    traced = torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(3))
    assert torch.equal(traced, torch.full((3,), 1.0 if words == "Triton" else -1.0))
    assert words in kernels.describe(CUDA)
    kernels.cached_unavailable_reason.cache_clear()
    torch.compiler.reset()


def test_the_chosen_implementation_runs_and_is_described(triton, monkeypatch):
    monkeypatch.setattr(kernels, "triton_unavailable_reason", lambda device: None)
    assert kernels.implementation(CPU) is kernels.implementation(CUDA) is gpu
    assert kernels.describe(CPU) == "Triton, interpreted (slow)"
    kernels.use("torch", CUDA)
    assert kernels.implementation(CUDA) is reference and kernels.describe(CUDA) == "plain PyTorch"
    assert kernels.describe(CPU) == "plain PyTorch with CPU functions"
    kernels.use("reference", CUDA)
    assert kernels.implementation(CUDA) is kernels.implementation(CPU) is reference
    kernels.use("auto", CUDA)
    assert kernels.implementation(CUDA) is gpu and kernels.implementation(CPU) is kernels.cpu


def test_a_model_to_compile_never_has_an_operators_arguments_written_out(monkeypatch):
    issue = pytest.importorskip("torch._inductor.exc").OperatorIssue
    monkeypatch.setattr(issue, "operator_str", staticmethod(lambda target, args, kwargs: f"{target} of {args}"))
    kernels.compile_model(torch.nn.Identity())
    assert issue.operator_str("prenorm::loss", ["a long text"], {}) == "prenorm::loss"


@pytest.fixture
def far(monkeypatch):
    """A function that makes rows far apart; only the pages that are accessed take memory."""
    if sys.platform != "linux":
        pytest.skip("needs memory that is mapped and not reserved")
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)  # copies tensors onto themselves

    def spread(rows: torch.Tensor, stride: int) -> torch.Tensor:
        """The same rows (n, width), `stride` elements apart."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
        memory = mmap.mmap(-1, len(rows) * stride * rows.element_size(), flags=flags)
        wide = torch.frombuffer(memory, dtype=rows.dtype).as_strided(rows.shape, (stride, 1))
        return wide.copy_(rows)

    return spread


def test_a_stride_of_2_to_the_27_elements_reaches_beyond_2_to_the_31(far, draw):
    near = [draw(33, 8, dtype=torch.bfloat16) for _ in range(4)]
    results = []
    for x, residual, dy, ds in ([far(tensor, 2**27) for tensor in near], near):
        leaves = x.detach().requires_grad_(), residual.detach().requires_grad_()
        outputs = gpu.normalize(leaves[0], None, None, leaves[1], kind="rms", eps=1e-5)
        alone = gpu.normalize(leaves[0], kind="layer", eps=1e-5)[0]
        gradients = torch.autograd.grad((*outputs, alone), leaves, (dy, ds, dy))
        mlp = activation.swiglu_forward(x), *activation.swiglu_backward(dy[:, :4], x)
        results.append((*outputs, alone, *gradients, *mlp))
    assert all(map(torch.equal, *results))


def test_rotary_reaches_sequences_beyond_2_to_the_31_elements(far, draw):
    """Three of them, 2^30 + 1 elements apart."""
    wide, angles = far(draw(3, 96).bfloat16(), 2**30 + 1), draw(3, 16)
    for qkv, table in ((wide[:, None], angles[:1]), (wide[None], angles)):  # three sequences, then three positions
        gradients = qkv.unsqueeze(2).split(32, dim=-1)  # one head
        for weight in (None, draw(32)):
            for op, tensors, rest in (
                (rope.rotary_forward, [qkv], (table, table, 1, 1, weight, weight, 1e-5)),
                (rope.rotary_backward, [*gradients, qkv], (table, table, weight, weight, 1e-5)),
            ):
                assert all(map(torch.equal, op(*tensors, *rest), op(*(t.contiguous() for t in tensors), *rest)))
