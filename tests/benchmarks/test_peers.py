"""The benchmark beside other programs: each runs in a process of its own, and the table says what was measured."""

import itertools
import json
import os
import sys

import pytest
import torch

from benchmarks import peers, timing
from benchmarks.peers import LLAMA2C, PEER, Case, list_cases, table_row, take_turns
from errors import UserError

RESULTS = {"read_bytes_per_second": 1e10, "product_flops": {"float32": 1e11, "bfloat16": 1e12}}


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """In this process; those that are started decode all 128."""
    monkeypatch.setattr(peers, "NEW_TOKENS", 4)
    monkeypatch.setattr(peers, "TRAINED", (2, 16))
    monkeypatch.setattr(peers, "keep_freed_memory", lambda: None)  # for the rest of the tests


@pytest.mark.parametrize(
    ("task", "name", "dtype"),
    [
        *itertools.product(["decoding", "training"], ["ours", PEER], ["float32", "bfloat16"]),
        ("decoding", "ours", "int8"),
    ],
)
def test_every_program_runs_as_often_as_it_is_told(tmp_path, task, name, dtype):
    run = peers.PREPARE[task, name](Case(task, name, "260k", 2, dtype), tmp_path)
    assert 0 < run() < 60 and 0 < run() < 60


def test_ours_and_transformers_have_as_many_parameters():
    shape = peers.SHAPES["260k"]
    theirs = sum(parameter.numel() for parameter in peers.transformers_model(shape).parameters())
    assert theirs == peers.Decoder(shape).num_parameters() == 260_032


def test_programs_take_turns_in_processes_of_their_own(capsys, monkeypatch):
    arguments = ["decoding", "--shapes", "260k", "--sequences", "1", "--dtypes", "float32", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["peers", *arguments])
    monkeypatch.setattr(peers, "read_rate", lambda device: 1e10)
    peers.main()
    *_, table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)
    assert [(row["label"], len(row["seconds"])) for row in results["rows"]] == [("ours", 2), (PEER, 2)]
    assert all(0 < seconds < 60 for row in results["rows"] for seconds in row["seconds"])
    assert all(row["peak_bytes"] is None or row["peak_bytes"] > 1e8 for row in results["rows"])
    assert table.startswith("| 260k | 1 | transformers | float32 | ") and " 1.00 (1.00 to 1.00) | " in table


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    """The program here prints the line that llama2.c's run.c ends with; built from run.c, it was tried by hand."""
    program = tmp_path / "run"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint('achieved tok/s: 250.000000', file=sys.stderr)\n")
    os.chmod(program, 0o755)
    one = Case("decoding", LLAMA2C, "260k", 1, "float32", path=str(program))
    assert peers.decode_llama2c(one, tmp_path)() == 1 / 250
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert (tmp_path / "model.bin").stat().st_size == 4 * (7 + 260_032 + tables)
    program.write_text(f"#!{sys.executable}\n")
    with pytest.raises(UserError, match="prints no tokens per second"):
        peers.decode_llama2c(one, tmp_path)()


def test_a_process_that_fails_is_a_one_line_error():
    with pytest.raises(UserError, match="ours with float33 failed: AttributeError"):
        take_turns([Case("decoding", "ours", "260k", 1, "float33")], 1, lambda: None)


def test_a_process_that_is_killed_while_it_waits_is_a_one_line_error_and_the_others_end(monkeypatch):
    started, start = [], peers.subprocess.Popen
    monkeypatch.setattr(peers.subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    cases = [Case("decoding", "ours", "260k", count, "float32") for count in (1, 2)]
    with pytest.raises(UserError, match="ours with float32 failed: it printed nothing"):
        take_turns(cases, 2, lambda: started[0].kill())
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_llama2c_decodes_one_sequence_in_float32_and_ours_alone_has_int8_and_both_norms():
    programs = [{"program": "ours"}, {"program": PEER}, {"program": PEER, "compiled": True}, {"program": LLAMA2C}]

    def labels(*arguments):
        return [case.label for case in list_cases(arguments[0], programs, "15m", *arguments[1:])]

    others = [PEER, f"{PEER} compiled"]
    assert labels("decoding", 1, ["float32", "bfloat16"]) == ["ours", *others, "llama2.c", "ours", *others]
    assert labels("decoding", 8, ["float32", "int8"]) == ["ours", *others, "ours"]
    assert labels("decoding", 17, ["float32", "int8"]) == ["ours", *others]
    assert labels("training", 8, ["float32"]) == ["ours, rms", "ours, layer", *others]


def test_a_row_has_the_median_the_ratios_within_turns_and_the_share_of_the_rate():
    def row(label, seconds, task="decoding", dtype="float32"):
        about = {"task": task, "program": label, "label": label, "shape": "15m", "sequences": 1, "dtype": dtype}
        return about | {"seconds": seconds, "peak_bytes": 2_000_000}

    ours, theirs = row("ours", [0.01, 0.02, 0.04]), row(PEER, [0.02, 0.06, 0.04])
    found = table_row(ours, [ours, theirs], RESULTS)
    # 15.2 million weights of 4 bytes in 20 ms are 3.04 GB/s, 30% of 10 GB/s
    assert found == "| 15m | 1 | ours | float32 | 20.00 | 50 | 2.00 (1.00 to 3.00) | 3.0 GB/s, 30% | 2 |"
    assert "| not measured |" in table_row(ours, [ours], RESULTS)
    # int8, with a scale of two bytes for each of 49,856 rows, beside the fastest transformers
    int8, slower = row("ours", [0.01, 0.02, 0.04], dtype="int8"), row(PEER, [0.03, 0.07, 0.05], dtype="bfloat16")
    found = table_row(int8, [int8, slower, theirs], RESULTS)
    assert found == "| 15m | 1 | ours | int8 | 20.00 | 50 | 2.00 (1.00 to 3.00) | 0.8 GB/s, 8% | 2 |"
    assert "of the products' rate" in table_row(row("ours", [1.0], "training"), [], RESULTS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--llama2c", "missing"], "--llama2c missing is no file"),
        (["training", "--dtypes", "int8"], "--dtypes int8 is only for decoding"),
        (["--dtypes", "int8", "--sequences", "17"], "--sequences 17: int8 is for at most 16"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(monkeypatch, flags, message):
    monkeypatch.setattr(sys, "argv", ["peers", *flags])
    monkeypatch.setattr(peers, "read_rate", lambda device: pytest.fail("it measured"))
    with pytest.raises(UserError, match=message):
        peers.main()


def test_the_read_rate_counts_the_bytes_of_the_matrix(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setattr(timing, "times", lambda calls, device, repeats: [0.5 for call in calls if len(call()) == 1024])
    assert timing.read_rate(torch.device("cpu")) == 2**22 / 0.5


def test_programs_that_are_missing_are_left_out_with_a_line_and_compiling_needs_a_compiler(monkeypatch, capsys):
    def found(*flags):
        monkeypatch.setattr(sys, "argv", ["peers", *flags])
        monkeypatch.setattr(peers, "list_cases", lambda task, programs, *rest: pytest.fail(str(programs)))
        peers.main()

    monkeypatch.setattr(peers, "read_rate", lambda device: 1e10)
    with pytest.raises(pytest.fail.Exception, match=r"transformers.*'compiled': True"):
        found("--compiled")
    monkeypatch.setattr(peers, "why_not_compile", lambda device: "no C++ compiler found")
    with pytest.raises(UserError, match="--compiled cannot be measured here: no C"):
        found("--compiled")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"^.{'program': 'ours'}.$"):
        found()
    assert "note: transformers is not installed" in capsys.readouterr().out
