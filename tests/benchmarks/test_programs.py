"""Decoding and training steps beside other programs, and `python -m benchmarks`: what is measured, and of what."""

import importlib
import json
import sys

import pytest
import torch

import kernels
from ablation.settings import replace_settings
from benchmarks import decoding, training
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
    reference, functions = (training.make_step(settings, variant, cpu)["step"] for variant in variants)
    assert reference() > 0 and functions() > 0 and reference() > 0
    assert used[::4] == [kernels.reference, kernels.cpu, kernels.reference]  # a block calls it four times


def test_norms_take_turns_in_every_variant_and_transformers_has_rmsnorm_alone(monkeypatch):
    monkeypatch.setattr(training, "make_step", lambda *_: {"step": lambda: 0.1})
    monkeypatch.setattr(training.timing, "product_rate", lambda *_: 1e12)
    variants = ["transformers", "CPU functions"]
    table = training.compare("tiny", {"dtype": "float32"}, ["rms", "layer"], variants, 2)
    assert [*table["seconds"]] == ["transformers", "CPU functions, rms", "CPU functions, layer"]
    assert table["tokens"] == 8 * 512 and table["title"] == "training tiny, float32"


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_the_record_comes_last(monkeypatch, capsys):
    measure, compare = decoding.measure, training.compare
    tiny = {"batch_size": 2, "sequence_length": 64}
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--llama2c", "missing"])
    monkeypatch.setattr(decoding, "measure", lambda shapes, *rest: measure(["260k"], *rest[:4], 1, 8, rest[-1]))
    monkeypatch.setattr(training, "compare", lambda _, changes, *rest: compare("tiny", changes | tiny, *rest[:2], 1))
    assert importlib.import_module("benchmarks.__main__").main() == 1  # llama2.c did not run
    printed = capsys.readouterr().out
    assert "| llama2.c | not run: FileNotFoundError" in printed
    *of_decoding, _, last = json.loads(printed.splitlines()[-1])["tables"]
    programs = {"transformers", "plain decoder", "ours"}
    measured = {frozenset(table["seconds"]) - {"llama.cpp"} for table in of_decoding}
    assert measured == {frozenset(programs), frozenset(["ours"])}
    assert len(of_decoding) == 6 and [*last["seconds"]] == ["transformers", "CPU functions, rms"]
