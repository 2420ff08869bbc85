"""Decoding beside other programs: each runs in a process of its own, and the table says what was measured."""

import json
import sys

import pytest

from benchmarks import __main__ as everything
from benchmarks import decoding, programs
from benchmarks.programs import DECODER, LLAMA2C, OURS, PROGRAMS, TRANSFORMERS, Case, is_possible

SMALL = Case("260k", 3, 2, OURS, "float32", tokens=4)


@pytest.mark.parametrize(("name", "dtype"), [(OURS, "int8"), (DECODER, "bfloat16"), (TRANSFORMERS, "bfloat16")])
def test_every_program_runs_as_often_as_it_is_told(name, dtype):
    run = PROGRAMS[name](SMALL._replace(program=name, dtype=dtype))
    assert 0 < run() < 60 and 0 < run() < 60


def test_llama_cpp_decodes_several_sequences_of_our_export():
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
    run = PROGRAMS["llama.cpp"](SMALL._replace(program="llama.cpp", tokens=16))
    assert 0 < run() < 60 and 0 < run() < 60


def test_our_decoder_is_on_the_device_of_its_case_with_its_tables_of_angles():
    decoder = programs.our_decoder(SMALL._replace(device="meta"))
    assert {tensor.device.type for tensor in [*decoder.parameters(), *decoder.buffers()]} == {"meta"}


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


def test_the_limit_of_a_step_counts_weights_keys_and_values_in_their_stored_width():
    def read(dtype: str, tokens: int = 0) -> int:
        return decoding.bytes_read(Case("15m", 1, 1, OURS, dtype, tokens=tokens))

    cache = 2 * 6 * 288 * 4  # of one position
    assert read("float32", 10) - read("float32") == 5 * cache
    weights = read("float32") - cache
    assert weights > 4 * 15_100_000 and weights / (read("bfloat16") - cache) == pytest.approx(2, rel=1e-3)


@pytest.mark.slow
def test_all_benchmarks_of_a_cpu_run_in_turns_and_are_written_with_the_machines_name(capfd, monkeypatch, tmp_path):
    arguments = ["--quick", "--out", str(tmp_path), "--llama2c", str(tmp_path / "missing")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    assert everything.main() == 1  # llama2.c is not there
    (path,) = tmp_path.glob("cpu-*-quick.json")
    results, text = json.loads(path.read_text()), capfd.readouterr().out
    for table in results["decoding"]["tables"]:
        assert {name: len(parts["step"]) for name, parts in table["seconds"].items() if name != "llama.cpp"} == {
            **(dict.fromkeys((TRANSFORMERS, DECODER, OURS), 1) if "int8" not in table["title"] else {OURS: 1})
        }
    assert sum(is_possible(Case("260k", 1, n, TRANSFORMERS, "float32")) for n in (1, 8)) == 2
    assert [[*table["seconds"]] for table in results["training"]["tables"]] == [[TRANSFORMERS, "CPU functions"]] * 2
    assert "| llama2.c | not run: FileNotFoundError" in text and "8 sequences after 1 tokens, bfloat16" in text
