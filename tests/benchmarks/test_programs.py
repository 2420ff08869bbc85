"""Decoding and training steps beside other programs, and `python -m benchmarks`: what is measured, and of what."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from ablation.plan import find_plan, load_plan, replace_settings, save_plan
from ablation.report import read_lines, time_ratios
from benchmarks import training
from benchmarks.decoding import Case, bytes_read, llama2c
from training.settings import Settings


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    program = tmp_path / "run"  # prints a line like the last one of llama2.c's run.c, which was tried by hand
    code = "import os, sys; print('achieved tok/s:', float(os.path.getsize(sys.argv[1])), file=sys.stderr)"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert llama2c(Case("260k", 1, 1, "float32", 4, "cpu", program))["step"]() == 1 / (4 * (7 + 260_032 + tables))


def test_the_limit_of_a_step_counts_weights_keys_and_values_in_their_stored_width():
    choices = ("float32", 0), ("float32", 10), ("int8", 0)
    read = [bytes_read(Case("260k", 1, 1, dtype, tokens, "cpu", None)) for dtype, tokens in choices]
    cache = 2 * 5 * 4 * 8 * 4  # of one position
    assert read == [4 * 260_032 + cache, 4 * 260_032 + 6 * cache, 260_032 + cache]


def test_a_variant_runs_with_the_kernels_that_it_names(monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64, "batch_size": 2}
    settings, used, cpu = replace_settings(Settings(), small), [], torch.device("cpu")
    monkeypatch.setattr(training, "train_step", lambda *_: used.append(kernels.implementation(cpu)))
    variants = ("reference, eager", "CPU functions")
    reference, functions = (training.make_blocks(settings, variant, cpu, "step")["step"] for variant in variants)
    assert reference() > 0 and functions() > 0 and reference() > 0
    assert used[::4] == [kernels.reference, kernels.cpu, kernels.reference]  # a block calls it four times


def test_the_arms_of_a_study_are_timed_into_the_file_that_its_report_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "make_blocks", lambda *_: dict.fromkeys(("forward", "step"), lambda: 0.1))
    save_plan(load_plan(find_plan("norms")), tmp_path / "plan.toml")
    for _ in range(2):  # in one process, as if containers had processes with one id
        training.time_arms(tmp_path, ["reference, eager"], torch.device("cpu"), 2)
    timings = read_lines(tmp_path / "timings.jsonl")
    assert [t["arm"] for t in timings[:6:2]] == ["layer", "rms", "rms-bias"] and len(timings) == 2 * 6
    assert [time_ratios(timings, part, "rms", "layer")[0].n for part in ("forward", "step")] == [2, 2]


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_are_written_with_the_machines_name(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", tmp_path / "new", "--llama2c", "missing"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 1 and "| llama2.c | not run: FileNotFoundError" in done.stdout, done.stderr
    (path,) = (tmp_path / "new").glob("*-quick.json")
    decoding, training = (part["tables"] for part in json.loads(path.read_text()).values())
    programs = {"transformers", "plain decoder", "ours"}
    assert {frozenset(table["seconds"]) - {"llama.cpp"} for table in decoding} == {
        frozenset(programs),
        frozenset(["ours"]),
    }
    assert len(decoding) == 6 and [[*table["seconds"]] for table in training] == [["transformers", "CPU functions"]] * 2
