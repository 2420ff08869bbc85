"""The cases of `benchmarks.kernels` on small shapes on a CPU: what they compute, and what their rows are times of."""

import json
import sys

import pytest
import torch

from benchmarks import cases, timing
from benchmarks import kernels as benchmark
from benchmarks.cases import Case

CPU = torch.device("cpu")


def small_cases(device: torch.device = CPU) -> list[Case]:
    norms = [cases.norm(device, kind, 6, 64, after) for kind in ("rms", "layer") for after in (False, True)]
    rotaries = [cases.rotary(device, 16, 2, 1, 16, normed) for normed in (False, True)]
    return [*norms, *rotaries, cases.mlp(device, 6, 64, 32), cases.loss(device, 6, 16, 40)]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: None)  # for the rest of the tests
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**12)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cpu", 16)


def test_every_case_is_measured_and_printed_with_its_share_of_the_limit(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "cases", small_cases)
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", "--repeats", "2"])
    assert benchmark.main() == 0
    tables = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]
    expected = {case.name: case for case in small_cases()}
    assert [table["title"] for table in tables] == [*expected] and len(expected) == 8
    for table in tables:
        assert list(table["seconds"]) == list(expected[table["title"]].baselines)
        for name, parts in table["seconds"].items():
            assert tuple(parts) == benchmark.PARTS and set(table["limits"][name]) <= set(parts)
            assert all(len(values) == benchmark.TURNS and min(values) > 0 for values in parts.values())


def test_the_baselines_of_a_case_compute_what_ours_does():
    for case in small_cases():
        inputs = case.make()
        exact, *others = (benchmark.as_tuple(run(*inputs))[0].double() for run in case.baselines.values())
        assert len(others) >= 2
        assert all((other - exact).norm() / exact.norm() < 2e-2 for other in others), case.name


def test_the_bytes_of_a_pass_are_those_of_the_tensors():
    for case in (case for case in small_cases() if case.forward_bytes):
        inputs = case.make()
        outputs = benchmark.as_tuple(case.baselines["ours"](*inputs))
        elements = sum(one.numel() for one in (*inputs, *outputs) if one.dtype == torch.bfloat16)
        if case.name.startswith("rotary"):  # v could be a view; the packed input and the angles are counted as they are
            elements -= 2 * outputs[2].numel()
        assert 2 * elements == case.forward_bytes, case.name
    found = {case.name: case.backward_bytes for case in small_cases()}
    assert found["rms norm, 6 x 64"] == 6 * 6 * 64 and found["layer norm after addition, 6 x 64"] == 8 * 6 * 64
    # 2 + 1 heads read, 1 of v too, and the packed gradient of all 4 written; with the norms, q and k read again.
    assert found["rotary, 16 tokens, 2 + 1 heads of 16"] == 16 * 16 * 2 * (4 + 4)
    assert found["rotary with norms of heads, 16 tokens, 2 + 1 heads of 16"] == 16 * 16 * 2 * (4 + 4 + 3)
