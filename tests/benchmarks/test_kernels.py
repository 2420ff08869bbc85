"""The cases of `benchmarks.kernels` on small shapes: what they compute, and what their rows are times of."""

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks import timing

CPU = torch.device("cpu")


@pytest.fixture
def cases(monkeypatch) -> list[benchmark.Case]:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for name, shape in (
        ("NORMS", (6, 64)),
        ("MLPS", (6, 64, 32)),
        ("ROTARIES", (16, 2, 1, 16)),
        ("LOSSES", (6, 16, 40)),
    ):
        monkeypatch.setitem(getattr(benchmark, name), "cpu", [shape])
    return benchmark.all_cases(CPU)


def test_the_baselines_of_a_case_compute_what_ours_does_and_are_timed_in_all_parts(cases, monkeypatch):
    monkeypatch.setattr(timing, "block", lambda calls, *_: [call() for call in calls] and 0.5)
    assert len(cases) == 8
    for case in cases:
        inputs = case.make()
        exact, *others = (run(*inputs)[0].double() for run in case.baselines.values())
        assert all((other - exact).norm() / exact.norm() < 2e-2 for other in others) and len(others) >= 2, case.name
        table = benchmark.compare(case, CPU, copy=1.0, product=2.0)
        assert table["limits"]["both"] == (case.flops / 2 if case.flops else sum(case.moved))
        parts = dict.fromkeys(("forward", "backward", "both"), [0.5] * 5)
        assert table["seconds"] == dict.fromkeys(case.baselines, parts)
    # 2 + 1 heads read and written; then the same read, 1 of v too, and the packed gradient of all 4 written. With the
    # norms, q and k are read again.
    size, head = 2 * 6 * 64, 2 * 16 * 16  # bytes of the rows of a norm, and of a head of all tokens
    norm, after_addition, *_, rotary, normed = (case.moved for case in cases if not case.flops)
    assert norm == (2 * size, 3 * size) and after_addition == (4 * size, 4 * size)
    assert rotary == (6 * head, 8 * head) and normed == (6 * head, 11 * head)
