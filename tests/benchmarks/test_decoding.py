"""Decoding beside other programs, and `python -m benchmarks`: the tables say what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import decoding
from benchmarks.decoding import PROGRAMS, Case

ROOT = Path(__file__).parents[2]
SMALL = Case("260k", 3, 2, "float32", 4, "cpu", None)


def test_ours_and_transformers_have_as_many_parameters():
    theirs = sum(parameter.numel() for parameter in decoding.transformers_model(SMALL.config).parameters())
    assert theirs == decoding.our_decoder(SMALL).num_parameters() == 260_032


def test_llama2c_gets_a_checkpoint_of_the_right_size_and_its_tokens_per_second_are_read(tmp_path):
    """The program here prints a line like the last one of llama2.c's run.c; with that one, it was tried by hand."""
    program = tmp_path / "run"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "print('achieved tok/s:', float(os.path.getsize(sys.argv[1])), file=sys.stderr)\n"
    )
    program.chmod(0o755)
    run = PROGRAMS["llama2.c"](SMALL._replace(prompt=1, sequences=1, llama2c=program))
    tables = 512 * 8  # of cosines and sines, which the program skips
    assert run() == 1 / (4 * (7 + 260_032 + tables))


def test_the_time_of_a_step_is_that_between_the_first_and_the_last_new_token():
    clock = decoding.Clock()
    clock.times = [0.0, 5.0, 6.0, 8.0]  # the prompt came at 0
    assert clock.seconds_per_step(3) == 1.5


def test_the_limit_of_a_step_counts_weights_keys_and_values_in_their_stored_width():
    def read(dtype: str, tokens: int = 0) -> int:
        return decoding.bytes_read(Case("15m", 1, 1, dtype, tokens, "cpu", None))

    cache = 2 * 6 * 288 * 4  # of one position
    assert read("float32", 10) - read("float32") == 5 * cache
    assert (
        read("float32") - cache
        == 4 * decoding.our_decoder(Case("15m", 1, 1, "float32", 0, "cpu", None)).num_parameters()
    )
    assert read("float32") - read("bfloat16") == read("bfloat16") - cache


def test_llama_cpp_decodes_several_sequences_of_our_export():
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
    run = PROGRAMS["llama.cpp"](SMALL._replace(tokens=16))
    assert 0 < run() < 60 and 0 < run() < 60


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_are_written_with_the_machines_name(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", tmp_path / "new" / "folder"]
    done = subprocess.run([*command, "--llama2c", tmp_path / "missing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # llama2.c is not there
    (path,) = (tmp_path / "new" / "folder").glob("*-quick.json")
    results = json.loads(path.read_text())
    for table in results["decoding"]["tables"]:
        names = {"ours"} if "int8" in table["title"] else {"transformers", "plain decoder", "ours"}
        assert names == {*table["seconds"]} - {"llama.cpp"}
    assert len(results["decoding"]["tables"]) == 6
    assert [[*table["seconds"]] for table in results["training"]["tables"]] == [["transformers", "CPU functions"]] * 2
    assert "| llama2.c | not run: FileNotFoundError" in done.stdout and "8 sequences after 1 tokens" in done.stdout
