"""Decoding beside other programs: each runs in a process of its own, and the table says what was measured."""

import json
import sys

import pytest

from benchmarks import __main__ as everything
from benchmarks import decoding, programs, training
from benchmarks.programs import COMPILED, DECODER, LLAMA2C, OURS, PEER, PROGRAMS, Case, is_possible

SMALL = Case("260k", 3, 2, OURS, "float32", tokens=4)


@pytest.mark.parametrize(("name", "dtype"), [(OURS, "int8"), (DECODER, "bfloat16"), (PEER, "bfloat16")])
def test_every_program_runs_as_often_as_it_is_told(name, dtype):
    run = PROGRAMS[name](SMALL._replace(program=name, dtype=dtype))
    assert 0 < run() < 60 and 0 < run() < 60


def test_llama_cpp_decodes_several_sequences_of_our_export():
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
    run = PROGRAMS["llama.cpp"](SMALL._replace(program="llama.cpp", tokens=16))
    assert 0 < run() < 60 and 0 < run() < 60


def test_ours_and_transformers_have_as_many_parameters():
    theirs = sum(parameter.numel() for parameter in programs.transformers_model(SMALL.config).parameters())
    assert theirs == programs.our_decoder(SMALL).num_parameters() == 260_032


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    """The program here prints a line like the last one of llama2.c's run.c; with that one, it was tried by hand."""
    program = tmp_path / "run"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "print('achieved tok/s:', float(os.path.getsize(sys.argv[1])), file=sys.stderr)\n"
    )
    program.chmod(0o755)
    run = programs.decode_llama2c(Case("260k", 1, 1, LLAMA2C, "float32", path=program))
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert run() == 1 / (4 * (7 + 260_032 + tables))


def test_the_time_of_a_step_is_that_between_the_first_and_the_last_new_token():
    assert programs.Clock([0.0, 5.0, 6.0, 8.0]).seconds_per_step(3) == 1.5  # the prompt came at 0


def test_a_row_has_the_median_the_ratios_within_turns_and_the_share_of_the_rate():
    def row(program, seconds, dtype="float32"):
        read = decoding.bytes_read(Case("15m", 1, 1, program, dtype, tokens=0))
        return {"program": program, "dtype": dtype, "seconds": seconds, "peak_bytes": 2_000_000} | {
            "sequences": 1,
            "bytes": read,
        }

    ours, theirs = row(OURS, [0.01, 0.02, 0.04]), row(PEER, [0.02, 0.06, 0.04])
    speeds = ["20.00", "50", "2.00 (1.00 to 3.00)"]
    # 15.2 million weights of 4 bytes in 20 ms are 3.04 GB/s, 30% of 10 GB/s
    assert decoding.cells(ours, [ours, theirs], 1e10) == [*speeds, "3.0 GB/s, 30%", "2"]
    # int8, with a scale of four bytes for each of 49,856 rows, beside the fastest transformers
    int8, slower = row(OURS, [0.01, 0.02, 0.04], "int8"), row(COMPILED, [0.03, 0.07, 0.05], "bfloat16")
    assert decoding.cells(int8, [int8, slower, theirs], 1e10) == [*speeds, "0.8 GB/s, 8%", "2"]
    assert decoding.cells(ours | {"not_run": "why"}, [], 1e10)[0] == "not run: why"


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_are_written_with_the_machines_name(capsys, monkeypatch, tmp_path):
    arguments = ["--quick", "--out", str(tmp_path), "--llama2c", str(tmp_path / "missing")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    for name in ("keep_freed_memory", "read_rate"):
        monkeypatch.setattr(everything, name, lambda: 1e10)
    assert everything.main() == 1  # llama2.c is not there
    (path,) = tmp_path.glob("cpu-*-quick.json")
    results = json.loads(path.read_text())
    rows, text = results["decoding"]["rows"], capsys.readouterr().out
    assert {row["program"]: len(row["seconds"]) for row in rows if row["program"] != "llama.cpp"} == {
        **{OURS: 1, DECODER: 1, PEER: 1, LLAMA2C: 0}
    }
    assert sum(is_possible(Case("260k", 1, n, PEER, "float32")) for n in (1, 8)) == 2
    assert [(timing["variant"], timing["arm"]) for timing in results["training"]["timings"]] == [
        (variant, dtype) for dtype in ("float32", "bfloat16") for variant in (training.PEER, "CPU functions")
    ]
    assert "not run: FileNotFoundError" in text and "| 260k | 1 | 8 | transformers | float32 | " in text
