"""The benchmark of training steps: every norm, variant and part, all timed equally often."""

import json

import pytest
import torch

import kernels
from ablation.plan import load_plan, replace_settings, save_plan
from ablation.report import read_lines, time_ratios
from benchmarks import training
from benchmarks.training import make_blocks, time_arms
from errors import UserError
from model.config import NORMS
from training.settings import Settings

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"vocab_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 16}
SMALL = replace_settings(Settings(), SHAPE | {"sequence_length": 16, "batch_size": 2, "dtype": "float32"})


@pytest.mark.slow
@pytest.mark.parametrize("change", [*({"norm": norm} for norm in NORMS), {"norm_placement": "post"}])
def test_every_norm_can_be_timed_in_all_parts(change):
    blocks = make_blocks(replace_settings(SMALL, change), "CPU functions", CPU)
    assert [*blocks] == ["forward", "forward and backward", "step"]
    assert all(0 < block() < 60 for block in blocks.values())


def test_a_variant_runs_with_the_kernels_that_it_names(monkeypatch):
    used = []
    monkeypatch.setattr(training, "train_step", lambda *_: used.append(kernels.implementation(CPU)))
    steps = [make_blocks(SMALL, variant, CPU)["step"] for variant in ("reference, eager", "CPU functions")]
    for step in (*steps, steps[0]):
        step()
    assert used[::4] == [kernels.reference, kernels.cpu, kernels.reference]  # a block calls it four times


def test_the_arms_of_a_study_are_timed_into_the_file_that_its_report_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "make_blocks", lambda *_: dict.fromkeys(("forward", "step"), lambda: 0.1))
    monkeypatch.setattr("os.getpid", lambda: 7)  # as in containers
    save_plan(load_plan("norms"), tmp_path / "plan.toml")
    for _ in range(2):
        time_arms(tmp_path, ["reference, eager"], CPU, 2)
    timings = read_lines(tmp_path / "timings.jsonl")
    assert [t["arm"] for t in timings[:6:2]] == ["layer", "rms", "rms-bias"] and len(timings) == 2 * 6
    assert [time_ratios(timings, part, "rms", "layer")[0].n for part in ("forward", "step")] == [2, 2]
    monkeypatch.setattr(training, "make_blocks", lambda *_: {}[0])
    with pytest.raises(UserError, match="layer: KeyError"):
        time_arms(tmp_path, ["reference, eager"], CPU, 2)


@pytest.mark.slow
def test_every_variant_gets_a_row(monkeypatch, capsys):
    monkeypatch.setattr(training, "load_settings", lambda path: SMALL)
    monkeypatch.setattr(training, "keep_freed_memory", lambda: None)  # for the rest of the tests
    monkeypatch.setitem(training.timing.PRODUCT_SIZE, "cpu", 16)
    flags = [
        "--device",
        "cpu",
        "--turns",
        "2",
        "--norms",
        "rms",
        "dyt",
        "--variants",
        "reference, eager",
        "transformers",
    ]
    results = training.main(flags)
    assert [[*table["seconds"]] for table in results["tables"]] == [
        ["reference, eager", "transformers"],
        ["reference, eager"],
    ]
    assert [("dyt" in table["title"], table["tokens"]) for table in results["tables"]] == [(False, 32), (True, 32)]
    assert training.timing.finish(results) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
