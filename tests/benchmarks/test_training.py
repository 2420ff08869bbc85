"""The benchmark of training steps: every norm, variant and part, all timed equally often."""

import dataclasses
import json
import sys

import pytest
import torch

import kernels
from ablation.report import read_lines, time_ratios
from benchmarks import training
from benchmarks.programs import TRANSFORMERS
from benchmarks.training import CPU_FUNCTIONS, REFERENCE, make_calls, our_variants
from errors import UserError
from model.config import NORMS, PLACEMENTS, ModelConfig
from training.settings import DataSettings, MachineSettings, OptimizerSettings, Settings

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


@pytest.mark.parametrize(
    ("norm", "placement"), [*((norm, "pre") for norm in NORMS), *(("rms", placement) for placement in PLACEMENTS)]
)
def test_every_norm_and_placement_can_be_timed_and_its_steps_change_the_model(norm, placement):
    of = settings(norm)
    of = dataclasses.replace(of, model=dataclasses.replace(of.model, norm_placement=placement))
    calls = make_calls(of, CPU_FUNCTIONS, CPU)
    first, second = (calls["step"]()[0] for _ in range(2))  # the same batch
    assert 0 < first != second > 0
    assert calls["forward"]().shape == (2, 16) and calls["forward and backward"]() is None


def test_a_variant_runs_with_the_kernels_that_it_names(monkeypatch):
    monkeypatch.setattr(training, "why_not_compile", lambda device: "not in this test")
    assert our_variants(CPU) == [REFERENCE, CPU_FUNCTIONS]
    used = []
    monkeypatch.setattr(training, "train_step", lambda *_: used.append(kernels.implementation(CPU)))
    steps = [make_calls(settings(), variant, CPU)["step"] for variant in (REFERENCE, CPU_FUNCTIONS)]
    for step in (*steps, steps[0]):
        step()
    assert used == [kernels.reference, kernels.cpu, kernels.reference]


def test_the_arms_of_a_plan_are_timed_into_the_file_that_their_report_reads(monkeypatch, tmp_path):
    parts = ("forward", "step")
    monkeypatch.setattr(training, "make_calls", lambda of, *_: dict.fromkeys(parts, lambda: None))
    monkeypatch.chdir(tmp_path)
    timings = read_lines(training.time_arms("norms", [REFERENCE], CPU, 2))
    assert [t["arm"] for t in timings[::2]] == ["layer", "rms", "rms-bias"] and len(timings) == 6
    assert [len(time_ratios(timings, part, "rms", "layer")) for part in parts] == [1, 1]
    assert (tmp_path / "runs" / "ablation-norms" / "timings.jsonl").is_file()
    monkeypatch.setattr(training, "make_calls", lambda of, *_: {}[0])
    with pytest.raises(UserError, match="layer: KeyError"):
        training.time_arms("norms", [REFERENCE], CPU, 2)


def test_every_variant_gets_a_row(monkeypatch, capsys):
    monkeypatch.setattr(training, "load_settings", lambda path: settings())
    monkeypatch.setattr(training, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(training.timing, "product_rate", lambda device, dtype: 1e12)
    flags = ["--turns", "2", "--variants", REFERENCE, TRANSFORMERS, "--norms", "rms", "dyt", "--dtypes", "float32"]
    monkeypatch.setattr(sys, "argv", ["training", "--device", "cpu", *flags])
    training.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert [row for row in rows if row] == [REFERENCE, TRANSFORMERS, REFERENCE]
    tables = json.loads(lines[-1])["tables"]
    assert [("dyt" in table["title"], table["tokens"]) for table in tables] == [(False, 32), (True, 32)]
    assert all(len(parts["step"]) == 2 for table in tables for parts in table["seconds"].values())
