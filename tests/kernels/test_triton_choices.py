"""Which implementation runs, and how it is described."""

import pytest
import torch

import kernels
from kernels import gpu, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

CPU = torch.device("cpu")


def test_triton_is_refused_with_the_reason_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match=r"cannot run on mps: they need an NVIDIA or AMD GPU$"):
        kernels.use("triton", torch.device("mps"))
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"cannot run on cpu: .*TRITON_INTERPRET=1"):
        kernels.use("triton", CPU)
    monkeypatch.setattr(kernels, "gpu", None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        kernels.use("triton", torch.device("cuda"))
    with pytest.raises(ValueError, match="'cuda' are none of auto, triton, torch, reference"):
        kernels.use("cuda", CPU)
    assert kernels.implementation(torch.device("cuda")) is reference
    assert kernels.describe(torch.device("cuda")) == "plain PyTorch (Triton is not installed)"


def test_triton_needs_a_recent_gpu_and_a_c_compiler(monkeypatch):
    cuda = torch.device("cuda", 1)
    cases = ((7, 5), "gcc", "8.0"), ((9, 0), None, "C compiler"), ((9, 0), "gcc", None)
    for capability, compiler, words in cases:
        kernels.cached_gpu_obstacle.cache_clear()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(kernels.shutil, "which", lambda name, found=compiler: found)
        assert kernels.implementation(cuda) is (gpu if words is None else reference)
        assert (words or "Triton") in kernels.describe(cuda)
    kernels.cached_gpu_obstacle.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_torch_compile_traces_the_choice_on_a_gpu_without_tracing_how_it_was_made(monkeypatch, capability):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("CC", raising=False)  # so that a C compiler is searched for
    monkeypatch.setattr(kernels, "_on_gpu", None)  # as when nothing was chosen yet
    kernels.cached_gpu_obstacle.cache_clear()

    def function(x):
        return x + 1 if kernels.implementation(cuda) is gpu else x - 1

    found = torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(3))
    assert torch.equal(found, torch.full((3,), 1.0 if capability >= (8, 0) else -1.0))
    kernels.cached_gpu_obstacle.cache_clear()
    torch.compiler.reset()


def test_the_chosen_implementation_runs_and_is_described(triton, monkeypatch):
    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(kernels, "find_gpu_obstacle", lambda device: None)
    assert kernels.implementation(CPU) is kernels.implementation(cuda) is gpu
    assert kernels.describe(CPU) == "Triton, interpreted (slow)"
    kernels.use("torch", cuda)
    assert kernels.implementation(cuda) is reference and kernels.describe(cuda) == "plain PyTorch"
    assert kernels.describe(CPU) == "plain PyTorch with CPU functions"
    kernels.use("reference", cuda)
    assert kernels.implementation(cuda) is kernels.implementation(CPU) is reference
    kernels.use("auto", cuda)
    assert kernels.implementation(cuda) is gpu and kernels.implementation(CPU) is kernels.cpu
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert kernels.describe(cuda) == "Triton"
