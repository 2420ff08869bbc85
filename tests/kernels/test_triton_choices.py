"""Which implementation runs, and how it is described."""

import pytest
import torch

import kernels
from errors import UserError
from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_triton_is_refused_with_the_reason_where_it_cannot_run(monkeypatch):
    with pytest.raises(UserError, match=r"cannot run on mps: they need an NVIDIA or AMD GPU; use --kernels auto"):
        kernels.use("triton", torch.device("mps"))
    monkeypatch.setattr(kernels, "gpu", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        kernels.use("triton", CUDA)
    assert kernels.implementation(CUDA) is reference
    assert kernels.describe(CUDA) == "plain PyTorch (Triton is not installed)"


@pytest.mark.parametrize(
    ("capability", "compiler", "words"),
    [((7, 5), "gcc", "8.0"), ((9, 0), None, "C compiler"), ((9, 0), "gcc", "Triton")],
)
def test_triton_needs_a_recent_gpu_and_a_c_compiler_and_torch_compile_traces_the_choice(
    monkeypatch, capability, compiler, words
):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: compiler)
    kernels.cached_unavailable_reason.cache_clear()

    def function(x):
        return x + 1 if kernels.implementation(CUDA) is gpu else x - 1

    found = torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(3))
    assert torch.equal(found, torch.full((3,), 1.0 if words == "Triton" else -1.0))
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
