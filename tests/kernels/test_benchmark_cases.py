"""The cases of `benchmarks.kernels` on small shapes on a CPU: what they compute, and what their rows are times of."""

import json
import sys

import pytest
import torch

import kernels
from benchmarks import cases, timing
from benchmarks import kernels as benchmark
from benchmarks.cases import BACKENDS, ONE_KERNEL, SHAPES, NormShape, Shapes, mlp, run_fused_gate_up
from benchmarks.kernels import measure, table
from kernels import gpu, reference

CPU = torch.device("cpu")
triton_only = pytest.mark.skipif(gpu is None, reason="Triton is not installed")
SMALL = Shapes(
    norms=(
        NormShape("rms", 6, 64, mixed=True),
        NormShape("layer", 6, 64, after_addition=True),
        NormShape("layer", 6, 64),
    ),
    activations=((6, 64),),
    gate_ups=((6, 64, 32),),
    mlps=((6, 64, 32),),
    rotaries=((16, 2, 1, 16),),
    losses=((6, 16, 40),),
    attentions=((2, 8, 2, 1, 16),),
    decodings=((2, 8, 2, 1, 16),),
)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: None)  # for the rest of the tests
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**12)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cpu", 16)


@triton_only
def test_every_case_is_measured_and_its_baselines_compute_what_ours_does(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "cpu", SMALL)
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", "--repeats", "2"])
    benchmark.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {case.name: case for case in cases.cases(CPU)}
    assert [case["name"] for case in results["cases"]] == [*expected] and len(expected) == 12
    for name, found in ((case["name"], case["baselines"]) for case in results["cases"]):
        parts = benchmark.parts_of(expected[name])
        assert list(found) == list(expected[name].baselines)
        not_run = {baseline: one["not_run"] for baseline, one in found.items() if "not_run" in one}
        # A CPU has no fused gate and up for this shape, and only one of the three backends of attention.
        assert all(baseline in [ONE_KERNEL, *(b.name for b in BACKENDS)] for baseline in not_run), not_run
        for one in (one for one in found.values() if "not_run" not in one):
            assert all(one[part] > 0 for part in parts) and set(one["share_of_limit"]) <= set(parts)
    monkeypatch.setattr(sys, "argv", ["kernels", "--only", "nothing"])
    with pytest.raises(benchmark.UserError, match="no case matches"):
        benchmark.main()


@triton_only
def test_the_bytes_of_a_forward_pass_are_those_of_the_tensors():
    for case in (case for case in cases.cases(CPU, SMALL) if case.forward_bytes):
        inputs = case.make()
        outputs = benchmark.as_tuple(case.baselines["ours"](*inputs))
        elements = sum(one.numel() for one in (*inputs, *outputs) if one.dtype == torch.bfloat16)
        if case.name.startswith("rotary"):  # v could be a view; the packed input and the angles are counted as they are
            elements -= 2 * outputs[2].numel()
        if case.name.startswith("attention"):  # one query
            elements -= inputs[0].numel() + outputs[0].numel()
        assert 2 * elements == case.forward_bytes, case.name


def test_the_bytes_of_a_backward_pass_are_those_of_the_tensors():
    """6 bytes for each element of a norm, 8 with the addition, 12 of SwiGLU, which writes hidden again."""
    elements = 6 * 64
    assert cases.norm(CPU, NormShape("rms", 6, 64)).backward_bytes == 6 * elements
    assert cases.norm(CPU, NormShape("layer", 6, 64, after_addition=True)).backward_bytes == 8 * elements
    assert cases.activation(CPU, 6, 64).backward_bytes == 12 * elements
    # 2 + 1 heads read, 1 of v too, and the packed gradient of all 4 written; with the norms, q and k read again.
    assert cases.rotary(CPU, 16, 2, 1, 8, normed=False).backward_bytes == 16 * 8 * 2 * (4 + 4)
    assert cases.rotary(CPU, 16, 2, 1, 8, normed=True).backward_bytes == 16 * 8 * 2 * (4 + 4 + 3)


def test_inputs_take_turns_beyond_the_cache_and_memory_is_that_of_forward_and_backward(monkeypatch):
    case = mlp(CPU, 4, 16, 24, torch.bfloat16)
    case.baselines = {"ours": case.baselines["ours"]}
    size = 2 * sum(tensor.numel() for tensor in case.make())
    monkeypatch.setattr(benchmark, "BEYOND_CACHE", 3.2 * size)
    assert len(benchmark.make_inputs(case, torch.device("cuda"))) == 4 and len(benchmark.make_inputs(case, CPU)) == 2
    monkeypatch.setattr(benchmark, "peak_bytes", lambda call, device: len(call()))
    monkeypatch.setattr(benchmark, "host_seconds", lambda call, device: len(call()))
    ours = measure(case, CPU, 1)["ours"]
    assert ours["peak_bytes"] == ours["host"] == 3  # a gradient of each input


@triton_only
def test_the_row_of_the_fused_mlp_runs_it_and_fails_where_another_path_would_run(draw, relative):
    x, gate_up, down = draw(6, 64), draw(2 * 88, 64, std=0.2), draw(64, 88, std=0.2)
    expected = reference.swiglu_mlp(x.double(), gate_up, down)
    assert relative(run_fused_gate_up(CPU, x, gate_up, down), expected) < 1e-6
    with pytest.raises(RuntimeError, match="sizes divisible by 8"):
        run_fused_gate_up(CPU, x, gate_up[:168], down[:, :84])
    assert kernels.implementation(CPU) is kernels.cpu  # as before


@triton_only
def test_the_row_of_gate_and_up_in_one_kernel_fails_where_two_would_run():
    case = cases.gate_up(CPU, 6, 64, 84)
    case.baselines = {name: case.baselines[name] for name in ("ours", ONE_KERNEL)}
    found = measure(case, CPU, 2)
    assert "sizes divisible by 8" in found[ONE_KERNEL]["not_run"] and found["ours"]["forward"] > 0


def test_a_baseline_that_fails_or_differs_is_reported_and_the_others_are_measured():
    case = mlp(CPU, 4, 16, 24, torch.bfloat16)
    ours = case.baselines["ours"]

    def fail(*inputs):
        raise RuntimeError("not on this GPU")

    case.baselines = {"ours": ours, "fails": fail, "differs": lambda *inputs: ours(*inputs) * 1.1, "again": ours}
    found = measure(case, CPU, 5)
    assert found["fails"] == {"not_run": "not on this GPU"} and found["ours"]["both"] > 0 and found["again"]["both"] > 0
    assert found["differs"]["not_run"].startswith("its result and that of ours differ by 1.0e-01")
    assert "| fails | not run: not on this GPU | | | | | | |" in table(case, found, 1e9, 1e12)
