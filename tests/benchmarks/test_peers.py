"""The benchmark beside other programs: each runs in a process of its own, and the table says what was measured."""

import json
import sys

import pytest

from benchmarks import peers
from benchmarks.peers import LLAMA2C, PEER, PROGRAMS, Case, table_row


@pytest.mark.parametrize(("name", "dtype"), [("ours", "int8"), (PEER, "bfloat16")])
def test_every_program_runs_as_often_as_it_is_told(monkeypatch, name, dtype):
    monkeypatch.setattr(peers, "NEW_TOKENS", 4)
    run = PROGRAMS[name](Case(name, "260k", 2, dtype))
    assert 0 < run() < 60 and 0 < run() < 60


def test_ours_and_transformers_have_as_many_parameters():
    shape = peers.SHAPES["260k"]
    theirs = sum(parameter.numel() for parameter in peers.transformers_model(shape).parameters())
    assert theirs == peers.Decoder(shape).num_parameters() == 260_032


@pytest.mark.slow
def test_programs_take_turns_in_processes_of_their_own(capsys, monkeypatch):
    arguments = ["--shapes", "260k", "--sequences", "1", "--dtypes", "float32", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["peers", *arguments])
    monkeypatch.setattr(peers, "copy_rate", lambda device: 1e10)
    peers.main()
    *_, table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)
    assert [(row["program"], len(row["seconds"])) for row in results["rows"]] == [("ours", 2), (PEER, 2)]
    assert all(0 < seconds < 60 for row in results["rows"] for seconds in row["seconds"])
    assert all(row["peak_bytes"] is None or row["peak_bytes"] > 1e8 for row in results["rows"])
    assert table.startswith("| 260k | 1 | transformers | float32 | ") and " 1.00 (1.00 to 1.00) | " in table


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    """The program here prints a line like the last one of llama2.c's run.c; with that one, it was tried by hand."""
    program = tmp_path / "run"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "print('achieved tok/s:', float(os.path.getsize(sys.argv[1])), file=sys.stderr)\n"
    )
    program.chmod(0o755)
    run = peers.decode_llama2c(Case(LLAMA2C, "260k", 1, "float32", program))
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert run() == 1 / (4 * (7 + 260_032 + tables))


def test_a_row_has_the_median_the_ratios_within_turns_and_the_share_of_the_rate():
    def row(program, seconds, dtype="float32"):
        case = Case(program, "15m", 1, dtype)
        return case._asdict() | {"seconds": seconds, "peak_bytes": 2_000_000}

    ours, theirs = row("ours", [0.01, 0.02, 0.04]), row(PEER, [0.02, 0.06, 0.04])
    speeds = ["20.00", "50", "2.00 (1.00 to 3.00)"]
    # 15.2 million weights of 4 bytes in 20 ms are 3.04 GB/s, 30% of 10 GB/s
    found = table_row(ours, [ours, theirs], 1e10)
    assert found == ["15m", 1, "ours", "float32", *speeds, "3.0 GB/s, 30%", "2"]
    # int8, with a scale of two bytes for each of 49,856 rows, beside the fastest transformers
    int8, slower = row("ours", [0.01, 0.02, 0.04], "int8"), row(PEER, [0.03, 0.07, 0.05], "bfloat16")
    found = table_row(int8, [int8, slower, theirs], 1e10)
    assert found == ["15m", 1, "ours", "int8", *speeds, "0.8 GB/s, 8%", "2"]
