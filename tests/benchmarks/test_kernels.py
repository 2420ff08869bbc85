"""The cases of `benchmarks.kernels` on small shapes on a CPU: what they compute, and what their rows are times of."""

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks import timing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: None)  # for the rest of the tests
    for name, shapes in (("NORMS", [(6, 64)]), ("MLPS", [(6, 64, 32)]), ("ROTARIES", [(16, 2, 1, 16)])):
        monkeypatch.setitem(getattr(benchmark, name), "cpu", shapes)
    monkeypatch.setitem(benchmark.LOSSES, "cpu", [(6, 16, 40)])
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**12)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cpu", 16)


def test_every_case_is_measured_and_printed_with_its_share_of_the_limit(monkeypatch):
    monkeypatch.setattr("sys.argv", ["kernels", "--device", "cpu", "--repeats", "2"])
    tables = benchmark.main()["tables"]
    cases = benchmark.all_cases(CPU)
    assert [table["title"] for table in tables] == [case.name for case in cases] and len(cases) == 8
    for case, table in zip(cases, tables, strict=True):
        assert list(table["seconds"]) == list(case.baselines) and not table["not_run"]
        for name, parts in table["seconds"].items():
            assert [*parts] == ["forward", "backward", "both"] and set(table["limits"][name]) <= set(parts)
            assert all(len(values) == benchmark.TURNS and min(values) > 0 for values in parts.values())


def test_the_baselines_of_a_case_compute_what_ours_does():
    for case in benchmark.all_cases(CPU):
        inputs = case.make()
        exact, *others = (run(*inputs)[0].double() for run in case.baselines.values())
        assert len(others) >= 2
        assert all((other - exact).norm() / exact.norm() < 2e-2 for other in others), case.name


def test_the_bytes_of_a_pass_are_those_of_the_tensors():
    cases = {case.name: case for case in benchmark.all_cases(CPU)}
    for case in (case for case in cases.values() if not case.flops):
        inputs = case.make()
        outputs = case.baselines["ours"](*inputs)
        elements = sum(x.numel() for x in (*inputs, *outputs) if x is not None and x.dtype == torch.bfloat16)
        if case.name.startswith("rotary"):  # v could be a view; the packed input and the angles are counted as they are
            elements -= 2 * outputs[2].numel()
        assert 2 * elements == case.moved[0], case.name
    found = {name: case.moved[1] for name, case in cases.items()}
    assert found["rms norm, 6 x 64"] == 6 * 6 * 64 and found["layer norm after addition, 6 x 64"] == 8 * 6 * 64
    # 2 + 1 heads read, 1 of v too, and the packed gradient of all 4 written; with the norms, q and k read again.
    assert found["rotary, 16 tokens, 2 + 1 heads of 16"] == 16 * 16 * 2 * (4 + 4)
    assert found["rotary with norms of heads, 16 tokens, 2 + 1 heads of 16"] == 16 * 16 * 2 * (4 + 4 + 3)
