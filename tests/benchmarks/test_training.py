"""The benchmark of training steps: every norm, variant and part, all timed equally often."""

import dataclasses
import gzip
import json
import os
import sys

import pytest
import torch

import kernels
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


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_can_be_timed_and_its_steps_train(norm):
    calls = make_calls(settings(norm), False, CPU)
    assert tuple(calls) == PARTS
    first, gradient = calls["step"]()
    assert first > 0 and gradient > 0
    losses = [calls["step"]()[0] for _ in range(8)]
    assert losses[-1] < first  # the same batch again and again
    y, residual = calls["norm forward"]()
    assert y.shape == residual.shape == (2, 16, 32) and torch.isfinite(y).all()
    gradients = calls["norm backward"]()
    assert len(gradients) == 2 + len(settings(norm).model.norm_parameters)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert calls["forward"]().shape == (2, 16) and calls["forward and backward"]() is None


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_norm_and_a_step_can_be_timed_in_every_placement(placement):
    of = settings()
    calls = make_calls(
        dataclasses.replace(of, model=dataclasses.replace(of.model, norm_placement=placement)), False, CPU
    )
    assert calls["norm forward"]()[0].shape == (2, 16, 32) and len(calls["norm backward"]()) == 3
    losses = [calls["step"]()[0] for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("eager")
def test_every_variant_arm_and_part_is_timed_in_equally_many_blocks_and_the_kernels_are_as_before():
    assert variants(CPU) == {REFERENCE: ("reference", False), "CPU functions": ("torch", False)}
    entries = {(variant, norm): settings(norm) for variant in variants(CPU) for norm in ("rms", "layer")}
    blocks = []
    timings = time_together(entries, ("norm forward", "step"), CPU, 3, lambda: blocks.append(1))
    assert [(t.part, t.variant, t.arm) for t in timings] == [
        (part, *entry) for part in ("norm forward", "step") for entry in entries
    ]
    for timing in timings:
        assert len(timing.seconds) == 3 and all(second > 0 for second in timing.seconds)
        assert timing.process == os.getpid() and timing.peak_bytes is None
    assert len(blocks) == 6
    assert kernels.implementation(CPU) is kernels.cpu


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
def test_the_kernels_are_as_before_when_a_call_fails(monkeypatch):
    def failing(of: Settings, compiled: bool, device: torch.device, peer: bool):
        raise ZeroDivisionError

    monkeypatch.setattr(training, "make_calls", failing)
    with pytest.raises(ZeroDivisionError):
        time_together({(REFERENCE, "rms"): settings()}, ("step",), CPU, 2)
    assert kernels.implementation(CPU) is kernels.cpu


@pytest.mark.usefixtures("eager")
def test_what_cannot_run_is_left_out_with_its_reason_and_the_others_are_timed(monkeypatch):
    def make(of: Settings, compiled: bool, device: torch.device, peer: bool):
        if of.model.norm == "layer":
            raise ZeroDivisionError("none of this\nhere")
        return {"step": lambda: None}

    monkeypatch.setattr(training, "make_calls", make)
    failures = {}
    entries = {(REFERENCE, norm): settings(norm) for norm in ("layer", "rms")}
    timings = time_together(entries, ("step",), CPU, 2, failures=failures)
    assert [timing.arm for timing in timings] == ["rms"] and failures == {(REFERENCE, "layer"): "none of this"}


@pytest.mark.parametrize("path", sorted(training.config_path("tiny").parent.glob("*.toml")), ids=lambda path: path.stem)
def test_settings_are_those_that_the_command_line_reads(path):
    found, expected = training.read_settings(str(path)), load_settings(path)
    assert dataclasses.replace(found.data, data=tuple(found.data.data)) == expected.data
    assert dataclasses.replace(found, data=expected.data) == expected


@pytest.mark.usefixtures("eager")
def test_a_step_is_traced_and_transformers_trains_beside_ours(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(training, "read_settings", lambda name: settings())
    monkeypatch.setattr(training, "keep_freed_memory", lambda: None)

    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["training", "--device", "cpu", "--blocks", "2", "--variants", *flags])
        training.main()
        return capsys.readouterr().out

    run(REFERENCE, "--profile", str(tmp_path / "trace.json.gz"))
    assert "aten::mm" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()
    timings = json.loads(run(PEER, REFERENCE).splitlines()[-1])["timings"]
    assert [(t["variant"], t["arm"]) for t in timings] == [(PEER, "rms"), (REFERENCE, "rms"), (REFERENCE, "layer")]
    with pytest.raises(UserError, match="--variants other: on this device there are reference"):
        run("other")


@pytest.mark.usefixtures("eager")
def test_the_command_prints_a_row_for_each_variant_and_norm_and_json_last(monkeypatch, capsys):
    monkeypatch.setattr(training, "read_settings", lambda name: settings())
    arguments = ["--norms", "rms", "dyt", "--device", "cpu", "--blocks", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.training", *arguments])
    training.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines if line.startswith("| ")][1:]
    assert rows == [(variant, norm) for variant in variants(CPU) for norm in ("rms", "dyt")]
    results = json.loads(lines[-1])
    assert results["tokens"] == 32 and all(len(timing["seconds"]) == 2 for timing in results["timings"])
    reference = [line for line in lines if line.startswith(f"| {REFERENCE}")]
    assert all("| 1.000 |" in line for line in reference)
