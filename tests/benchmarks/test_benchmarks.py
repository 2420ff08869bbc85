"""Benchmarks: the timing harness, small cases, beside other programs; and what a machine with a GPU alone needs."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from ablation.plan import replace_settings
from benchmarks import decoding, timing, training
from benchmarks import kernels as kernel_benchmarks
from benchmarks.decoding import Case, bytes_read, llama2c
from errors import UserError
from flags import call_with_flags
from generation.cpu_step import CpuDecodeStep
from tests.conftest import ROOT, run_python
from training.settings import Settings

CPU = torch.device("cpu")


def test_blocks_take_turns_in_an_order_that_reverses_after_every_turn():
    order = []

    def make(name):
        return {part: lambda part=part: order.append(name + part) or len(order) for part in "12"}

    seconds, failures = timing.measure({name: lambda name=name: make(name) for name in "abc"}, 4)
    warm_up, timed = order[:6], "".join(order[6:])
    assert warm_up == ["a1", "a2", "b1", "b2", "c1", "c2"] and timed[::4] == "cbaabccbaabc" and not failures
    assert seconds["c"] == {"1": [7, 17, 19, 29], "2": [8, 18, 20, 30]} and list(seconds) == list("abc")


def limit():
    """A limit of one unit a second."""
    return {"bytes": lambda: 1.0}


def test_what_cannot_run_is_left_out_with_its_reason_and_the_others_are_measured(capsys):
    def fail():
        raise ZeroDivisionError("none of this\nhere")

    makers = {"fails": fail, "late": lambda: {"part": fail}, "runs": lambda: {"part": lambda: 0.5}}
    table = timing.compare("title", makers, {"part": 0.1}, limit, 2)
    assert table.seconds == {"runs": {"part": [0.5, 0.5]}}
    assert table.not_run == dict.fromkeys(("fails", "late"), "ZeroDivisionError: none of this")
    lines = capsys.readouterr().out.splitlines()
    assert "| late, not run: ZeroDivisionError: none of this |  |  |  |" in lines


def test_a_row_has_medians_tokens_per_second_share_of_the_limit_and_ratios_within_turns(capsys):
    values = {"a": iter([9, 0.02, 0.06, 0.04]), "b": iter([9, 0.01, 0.02, 0.04])}
    makers = {name: lambda name=name: {"step": lambda: next(values[name])} for name in values}
    table = timing.compare("title", makers, {"step": 0.01}, limit, 3, tokens=8)
    assert table.seconds["b"] == {"step": [0.01, 0.02, 0.04]}
    lines = capsys.readouterr().out.splitlines()
    assert "|  | step, ms | tokens/s | of the limit | speed, times a |" in lines
    assert "| b | 20.0 | 400 | 50% | 2.00 (1.00 to 3.00) |" in lines


def test_nothing_measured_and_plain_pytorch_in_the_place_of_ours_are_errors(monkeypatch):
    with pytest.raises(UserError, match="nothing was measured"):
        timing.finish([])
    monkeypatch.setattr(timing.kernels, "cpu", None)
    with pytest.raises(UserError, match=r"do not run here: plain PyTorch \(without Numba\)"):
        timing.use_kernels("auto", CPU)


def test_published_records_look_like_what_a_benchmark_prints_today(capsys):
    table = timing.compare("title", {"a": lambda: {"step": lambda: 0.1}}, {"step": 0.1}, limit, 1)
    assert timing.finish([table]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for path in (ROOT / "speed").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record.keys() >= printed.keys() - {"command"}
        assert record["machine"].keys() >= printed["machine"].keys() - {"commit"}
        assert all(measured.keys() | {"rates"} == printed["tables"][0].keys() for measured in record["tables"]), path


def test_the_limit_is_measured_in_the_turns_of_the_programs_and_is_the_median_of_all():
    order = []
    values = iter([9.0, 1.0, 2.0, 4.0])  # seconds of a byte; the first call warms up
    makers = {"a": lambda: {"step": lambda: order.append("a") or 0.5}}
    turns = {"bytes": lambda: order.append("limit") or next(values)}
    table = timing.compare("title", makers, {"step": 3.0}, lambda: turns, 3)
    assert order[2:] == ["limit", "a", "a", "limit", "limit", "a"]
    assert (table.limits, table.rates, [*table.seconds]) == ({"step": 6.0}, {"bytes": 0.5}, ["a"])


def test_the_baselines_of_a_case_compute_what_ours_does_and_are_timed_in_all_parts(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    shapes = {"NORMS": (6, 64), "MLPS": (6, 64, 32), "ROTARIES": (16, 2, 1, 16), "LOSSES": (6, 16, 40)}
    for name, shape in shapes.items():
        monkeypatch.setitem(getattr(kernel_benchmarks, name), "cpu", [shape])
    monkeypatch.setattr(timing, "block", lambda calls, *_: [call() for call in calls] and 0.5)
    monkeypatch.setattr(timing, "copying", lambda _: {"bytes": lambda: 1.0})
    monkeypatch.setattr(timing, "multiplying", lambda *_: {"FLOP": lambda: 0.5})
    cases = kernel_benchmarks.all_cases(CPU)
    assert len(cases) == 8
    for case in cases:
        inputs = case.make()
        exact, *others = (run(*inputs)[0].double() for run in case.variants.values())
        assert all((other - exact).norm() / exact.norm() < 2e-2 for other in others) and len(others) >= 2, case.name
        table = kernel_benchmarks.compare(case, CPU)
        assert table.limits["both"] == (case.flops / 2 if case.flops else sum(case.moved))
        parts = dict.fromkeys(("forward", "backward", "both"), [0.5] * 5)
        assert table.seconds == dict.fromkeys(case.variants, parts)
    # 2 + 1 heads read and written; then the same read, 1 of v too, and the packed gradient of all 4 written. With the
    # norms, q and k are read again.
    size, head = 2 * 6 * 64, 2 * 16 * 16  # bytes of the rows of a norm, and of a head of all tokens
    norm, after_addition, *_, rotary, normed = (case.moved for case in cases if not case.flops)
    assert norm == (2 * size, 3 * size) and after_addition == (4 * size, 4 * size)
    assert rotary == (6 * head, 8 * head) and normed == (6 * head, 11 * head)


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    program = tmp_path / "run"  # prints a line like the last one of llama2.c's run.c, which was tried by hand
    code = "import os, sys; print('achieved tok/s:', float(os.path.getsize(sys.argv[1])), file=sys.stderr)"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert llama2c(Case("260k", 1, 1, "float32", 4, "cpu", program))["step"]() == 1 / (4 * (7 + 260_032 + tables))


def test_a_step_is_computed_for_each_token_without_drafts(monkeypatch):
    calls, compute = [], CpuDecodeStep.__call__
    monkeypatch.setattr(CpuDecodeStep, "__call__", lambda *inputs: calls.append(1) or compute(*inputs))
    assert decoding.prenorm(Case("260k", 1, 1, "float32", 40, "cpu", None))["step"]() > 0 and len(calls) == 40


def test_the_limit_of_a_step_counts_weights_keys_and_values_in_their_stored_width():
    choices = ("float32", 0), ("float32", 10), ("int8", 0)
    read = [bytes_read(Case("260k", 1, 1, dtype, tokens, "cpu", None)) for dtype, tokens in choices]
    cache = 2 * 5 * 4 * 8 * 4  # of one position
    assert read == [4 * 260_032 + cache, 4 * 260_032 + 6 * cache, 260_032 + cache]


def test_a_variant_runs_with_the_kernels_that_it_names(monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64, "batch_size": 2}
    settings, used = replace_settings(Settings(), small), []
    monkeypatch.setattr(training, "train_step", lambda *_: used.append(kernels.implementation(CPU)))
    variants = (training.VARIANTS[name] for name in ("reference, eager", "CPU functions"))
    reference, functions = (training.make_step(settings, variant, CPU)["step"] for variant in variants)
    assert reference() > 0 and functions() > 0 and reference() > 0
    assert used[::4] == [kernels.reference, kernels.cpu, kernels.reference]  # a block calls it four times


def test_norms_take_turns_in_every_variant_and_transformers_has_rmsnorm_alone(monkeypatch):
    monkeypatch.setattr(training, "make_step", lambda *_: {"step": lambda: 0.1})
    monkeypatch.setattr(timing, "multiplying", lambda *_: {"FLOP": lambda: 1e-12})
    variants = ["transformers", "CPU functions"]
    table = training.compare("tiny", {"dtype": "float32", "optimizer": "muon"}, ["rms", "layer"], variants, 2)
    assert [*table.seconds] == ["transformers", "CPU functions, rms", "CPU functions, layer"]
    assert table.tokens == 8 * 512 and table.title == "training tiny, adamw, float32"  # transformers has no Muon
    table = training.compare("tiny", {"dtype": "float32", "optimizer": "muon"}, ["rms"], variants[1:], 2)
    assert table.title == "training tiny, muon, float32"


def test_a_program_that_is_not_there_and_a_single_token_are_refused_before_anything_is_measured(tmp_path):
    few = "--tokens is 1: it must be at least 2"
    for mistake, reason in (({"llama2c": tmp_path}, "is no program"), ({"tokens": 1}, few)):
        with pytest.raises(UserError, match=reason):
            decoding.measure(**mistake)


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_the_record_comes_last(monkeypatch, capsys, tmp_path):
    measure, compare = decoding.measure, training.compare
    tiny = {"batch_size": 2, "sequence_length": 64}
    program = tmp_path / "run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    smaller = {"shapes": ["260k"], "turns": 1, "tokens": 8}
    monkeypatch.setattr(decoding, "measure", lambda **named: measure(**named | smaller))
    monkeypatch.setattr(training, "compare", lambda _, changes, *rest, turns: compare("tiny", changes | tiny, *rest, 1))
    assert importlib.import_module("benchmarks.__main__").main(program) == 1  # llama2.c did not run
    printed = capsys.readouterr().out
    assert "| llama2.c, not run: TypeError" in printed
    *of_decoding, _, last = json.loads(printed.splitlines()[-1])["tables"]
    programs = {"transformers", "plain decoder", "ours"}
    measured = {frozenset(table["seconds"]) - {"llama.cpp"} for table in of_decoding}
    assert measured == {frozenset(programs), frozenset(["ours"])}
    assert len(of_decoding) == 6 and [*last["seconds"]] == ["transformers", "CPU functions, rms"]


NEEDS_BASH = pytest.mark.skipif(not all(map(shutil.which, ("bash", "timeout"))), reason="needs bash and timeout")


def test_benchmarks_import_on_a_machine_made_for_torch_and_triton():
    absent = "scipy xdist pandas matplotlib tokenizers numba jinja2".split()
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.kernels, benchmarks.training"
    assert run_python("-c", code).returncode == 0


def run_script(folder: Path, *steps: str, failing: str = "nothing") -> subprocess.CompletedProcess:
    """Run gpu.sh with a Python that prints its arguments and an object, and fails where they contain `failing`."""
    python = f"printf 'ran:'; printf ' %q' \"$@\"; echo; echo '{{}}'; [[ $* != *'{failing}'* ]]"
    for name, code in (("python", python), ("nvidia-smi", "echo NVIDIA H200")):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"OUT": str(folder / "out"), "PYTHON": str(folder / "python")}
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(["bash", ROOT / "benchmarks/gpu.sh", *steps], capture_output=True, text=True, env=environment)


def steps_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^== (\S+), after", done.stdout, re.MULTILINE)


@NEEDS_BASH
def test_commands_of_the_script_are_understood_and_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    done = run_script(tmp_path, failing=" 1b ")
    assert steps_of(done)[:4] == ["smoke", "train-rms", "train-layer", "124m-rms"]
    failed = "decoding-1b decoding-1b-4000 1b-rms 1b-plain 1b-layer"
    assert f"failed: {failed}" in done.stdout and done.returncode == 1
    out = tmp_path / "out"
    texts = {(out / f"{name}.json").read_text() for name in ("norms-nvidia-h200", "1b-rms-nvidia-h200.partial")}
    assert texts == {"{}\n"}
    assert not (out / "1b-rms-nvidia-h200.json").exists()
    commands = [shlex.split(line) for line in re.findall(r"^ran: -m (benchmarks.*)$", done.stdout, re.MULTILINE)]
    assert len(commands) == 12
    for name, *flags in commands:
        monkeypatch.setattr(sys, "argv", [name, *flags, "--help"])  # which is only reached after flags that are right
        with pytest.raises(SystemExit, match="0"):
            call_with_flags(importlib.import_module(name).measure)
    patterns = "|".join(command[-1] for command in commands if command[0] == "benchmarks.kernels")
    assert all(re.search(patterns, case.name) for case in kernel_benchmarks.all_cases(CPU))


@NEEDS_BASH
def test_the_script_runs_the_chosen_steps_and_then_those_without_a_result(tmp_path):
    chosen = run_script(tmp_path, "loss", "norms")
    assert chosen.returncode == 0 and steps_of(chosen) == ["norms", "loss"]
    assert (tmp_path / "out" / "norms-nvidia-h200.json").read_text() == "{}\n"
    rest = run_script(tmp_path, failing=" -m smoke")
    assert not {"norms", "loss"} & {*steps_of(rest)} and "failed: smoke\n" in rest.stdout and rest.returncode == 1
    again = run_script(tmp_path)
    assert steps_of(again) == ["smoke"] and again.returncode == 0
    assert run_script(tmp_path, "nonsense").returncode == 1
