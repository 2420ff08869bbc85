"""The benchmark of training steps: every norm, variant and part, all timed equally often."""

import dataclasses
import gzip
import json
import os
import sys

import pytest
import torch

import kernels
from ablation.report import read_lines, time_ratios
from benchmarks import training
from benchmarks.training import PARTS, PEER, REFERENCE, make_calls, time_together, variants
from errors import UserError
from model.config import NORMS, PLACEMENTS, ModelConfig
from training.settings import DataSettings, MachineSettings, OptimizerSettings, Settings, load_settings

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = ModelConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=16, **SHAPE)


def settings(norm: str = "rms") -> Settings:
    return Settings(
        model=dataclasses.replace(MODEL, norm=norm),
        data=DataSettings(sequence_length=16, batch_size=2),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        machine=MachineSettings(dtype="float32"),
    )


@pytest.fixture
def eager(monkeypatch) -> None:
    """Leave out variants that compile, which takes a minute."""
    monkeypatch.setattr(training, "why_not_compile", lambda device: "not in this test")


@pytest.mark.parametrize(
    ("norm", "placement"), [*((norm, "pre") for norm in NORMS), *(("rms", placement) for placement in PLACEMENTS)]
)
def test_every_norm_and_placement_can_be_timed_and_its_steps_change_the_model(norm, placement):
    of = settings(norm)
    of = dataclasses.replace(of, model=dataclasses.replace(of.model, norm_placement=placement))
    calls = make_calls(of, False, CPU)
    assert tuple(calls) == PARTS
    first, second = (calls["step"]()[0] for _ in range(2))  # the same batch
    assert 0 < first != second > 0
    y, residual = calls["norm forward"]()
    assert y.shape == residual.shape == (2, 16, 32) and torch.isfinite(y).all()
    gradients = calls["norm backward"]()
    assert len(gradients) == 2 + len(of.model.norm_parameters) and all(torch.isfinite(g).all() for g in gradients)
    assert calls["forward"]().shape == (2, 16) and calls["forward and backward"]() is None


@pytest.mark.usefixtures("eager")
def test_every_variant_arm_and_part_is_timed_in_equally_many_blocks():
    assert variants(CPU) == {REFERENCE: ("reference", False), "CPU functions": ("torch", False)}
    entries = {(variant, norm): settings(norm) for variant in variants(CPU) for norm in ("rms", "layer")}
    timings = time_together(entries, ("norm forward", "step"), CPU, 3)
    assert [(t.part, t.variant, t.arm) for t in timings] == [
        (part, *entry) for part in ("norm forward", "step") for entry in entries
    ]
    for timing in timings:
        assert len(timing.seconds) == 3 and all(second > 0 for second in timing.seconds)
        assert timing.process == os.getpid() and timing.peak_bytes is None


@pytest.mark.usefixtures("eager")
def test_a_variant_runs_with_the_kernels_that_it_names(monkeypatch):
    used = {}

    def noting(of: Settings, compiled: bool, device: torch.device, peer: bool):
        def call():
            used.setdefault(of.model.norm, set()).add(kernels.implementation(device))

        return {"step": call}

    monkeypatch.setattr(training, "make_calls", noting)
    entries = {(REFERENCE, "rms"): settings("rms"), ("CPU functions", "layer"): settings("layer")}
    time_together(entries, ("step",), CPU, 2)
    assert used == {"rms": {kernels.reference}, "layer": {kernels.cpu}}


@pytest.mark.usefixtures("eager")
def test_what_cannot_run_is_left_out_with_its_reason_the_others_are_timed_and_the_kernels_are_as_before(monkeypatch):
    def make(of: Settings, compiled: bool, device: torch.device, peer: bool):
        if of.model.norm == "layer":
            raise ZeroDivisionError("none of this\nhere")
        return {"step": lambda: None}

    monkeypatch.setattr(training, "make_calls", make)
    failures = {}
    entries = {(REFERENCE, norm): settings(norm) for norm in ("layer", "rms")}
    timings = time_together(entries, ("step",), CPU, 2, failures=failures)
    assert [timing.arm for timing in timings] == ["rms"] and failures == {
        (REFERENCE, "layer"): "ZeroDivisionError: none of this"
    }
    with pytest.raises(ZeroDivisionError):
        time_together(entries, ("step",), CPU, 2)
    assert kernels.implementation(CPU) is kernels.cpu


@pytest.mark.usefixtures("eager")
def test_the_arms_of_a_plan_are_timed_into_the_file_that_their_report_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "make_calls", lambda of, *_: dict.fromkeys(PARTS, lambda: None))
    monkeypatch.chdir(tmp_path)
    timings = read_lines(training.time_arms("norms", [REFERENCE], CPU, 2))
    assert [t["arm"] for t in timings[:3]] == ["layer", "rms", "rms-bias"] and len(timings) == 3 * len(PARTS)
    assert [len(time_ratios(timings, part, "rms", "layer")) for part in PARTS] == [1] * len(PARTS)
    assert (tmp_path / "runs" / "ablation-norms" / "timings.jsonl").is_file()


@pytest.mark.parametrize("path", sorted(training.config_path("tiny").parent.glob("*.toml")), ids=lambda path: path.stem)
def test_settings_are_those_that_the_command_line_reads(path):
    found, expected = training.read_settings(str(path)), load_settings(path)
    assert dataclasses.replace(found.data, data=tuple(found.data.data)) == expected.data
    assert dataclasses.replace(found, data=expected.data) == expected


@pytest.mark.usefixtures("eager")
def test_a_step_is_traced_and_every_variant_gets_a_row(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(training, "read_settings", lambda name: settings())
    monkeypatch.setattr(training, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(training.timing, "product_rate", lambda device, dtype: 1e12)

    def run(*flags: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["training", "--device", "cpu", "--blocks", "2", *flags])
        training.main()
        return capsys.readouterr().out.splitlines()

    run("--variants", REFERENCE, "--profile", str(tmp_path / "trace.json.gz"))
    assert "aten::mm" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()
    lines = run("--variants", REFERENCE, PEER, "--norms", "rms", "dyt")
    expected = [(REFERENCE, "rms"), (REFERENCE, "dyt"), (PEER, "rms")]
    rows = [tuple(cell.strip() for cell in line.split("|")[2:0:-1]) for line in lines if line.startswith("| ")][1:]
    results = json.loads(lines[-1])
    assert rows == [(timing["variant"], timing["arm"]) for timing in results["timings"]] == expected
    assert all((t["tokens"], len(t["seconds"])) == (32, 2) for t in results["timings"])
    assert all("| 1.00 (1.00 to 1.00) |" in line for line in lines if f"| {REFERENCE}" in line)
    with pytest.raises(UserError, match="--variants other: on this device there are reference"):
        run("--variants", "other")
