"""The rows of `benchmarks.kernels` are times of what they name."""

import pytest
import torch

import kernels
from benchmarks.cases import mlp, run_fused_gate_up
from benchmarks.kernels import measure, table
from kernels import gpu, reference

CPU = torch.device("cpu")


@pytest.mark.skipif(gpu is None, reason="Triton is not installed")
def test_the_row_of_the_fused_mlp_runs_it_and_fails_where_another_path_would_run(draw, relative):
    x, gate_up, down = draw(6, 64), draw(2 * 88, 64, std=0.2), draw(64, 88, std=0.2)
    expected = reference.swiglu_mlp(x.double(), gate_up, down)
    assert relative(run_fused_gate_up(CPU, x, gate_up, down), expected) < 1e-6
    with pytest.raises(RuntimeError, match="sizes divisible by 8"):
        run_fused_gate_up(CPU, x, gate_up[:168], down[:, :84])
    assert kernels.implementation(CPU) is kernels.cpu  # as before


def test_a_baseline_that_fails_is_reported_as_not_run_and_the_others_are_measured():
    case = mlp(CPU, 4, 16, 24, torch.bfloat16)

    def fail(*inputs):
        raise RuntimeError("not on this GPU")

    case.baselines = {"ours": case.baselines["ours"], "fails": fail}
    found = measure(case, CPU, 5)
    assert found["fails"] == {"not_run": "not on this GPU"} and found["ours"]["both"] > 0
    assert "| fails | not run: not on this GPU | | | | | |" in table(case, found, 1e9, 1e12)
