"""`python generate.py` as a user runs it: standard output, standard error and exit status."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import generate
from errors import UserError
from tests.conftest import run_python
from tests.generation.conftest import write_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with two runs; the older one is `runs/other`."""
    folder = tmp_path_factory.mktemp("work")
    best = write_chat_model(folder / "runs" / "newest" / "best", "chatml")
    (best / "state.json").write_text("{}")  # the last file of a save
    shutil.copytree(best, folder / "runs" / "other" / "last")
    os.utime(folder / "runs" / "other" / "last", (1_000_000_000, 1_000_000_000))
    return folder


def script(folder, *args, prompt: str = ""):
    """Run the script in `folder` with `prompt` on standard input."""
    return run_python(generate.__file__, *args, cwd=folder, input=prompt.encode(), text=False, timeout=120)


def test_help_answers_within_a_second(folder):
    before = os.times()
    result = script(folder, "--help")
    after = os.times()
    assert result.returncode == 0 and b"--repetition-penalty" in result.stdout and b"runs/NAME" in result.stdout
    # CPU time, which does not depend on other programs; importing torch takes longer
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


def test_standard_input_and_the_newest_run_are_the_default(folder):
    result = script(folder, "--max-new-tokens", "12", "--seed", "7", prompt="def é☺\n")
    assert result.returncode == 0 and len(result.stdout) > 15 and b"\r" not in result.stdout
    assert result.stdout.startswith("def é☺".encode()) and result.stdout.endswith(b"\n")
    note, chat, sampling, last = result.stderr.decode().splitlines()
    assert chat.startswith("this model has a chat template: with --chat it answers")
    assert note == "reading the prompt from standard input"
    assert sampling.startswith("sampling (the flags, else the defaults): repetition_penalty 1, temperature 0.8, top_k")
    assert last.startswith(f"{Path('runs', 'newest', 'best')} on ")


def test_lines_of_json_may_be_conversations(folder):
    messages = [{"role": "user", "content": "hi"}]
    lines = json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "hi"})
    result = script(folder, "--jsonl", "--chat", "--max-new-tokens", "5", "--temperature", "0", prompt=lines)
    asked, prompted = map(json.loads, result.stdout.splitlines())
    assert asked["prompt"] == messages and prompted["prompt"] == "hi" and asked["text"] == prompted["text"]


def test_the_stories_model_prints_the_bytes_of_the_reference_without_importing_dynamo(stories260k_directory, shared):
    """Dynamo takes as long to import as torch itself."""
    code = "import sys, generate; generate.main(); sys.exit('torch._dynamo' in sys.modules)"
    flags = [stories260k_directory, "--temperature", "0", "--device", "cpu"]
    result = run_python("-c", code, *flags, input=b"", text=False)
    expected = shared / "stories260K" / "greedy_200_steps.txt"
    assert result.returncode == 0 and result.stdout == expected.read_bytes()


def test_given_flags_win_over_the_recommended_sampling_even_with_a_default_value(monkeypatch, folder, capsys):
    monkeypatch.setattr("generation.cli.run", run := Mock())

    def main(*flags: str) -> tuple:
        monkeypatch.setattr(sys, "argv", ["generate.py", str(folder / "runs" / "newest"), *flags])
        generate.main()
        settings, *_, prompts = run.call_args.args
        return settings, prompts

    config = folder / "runs" / "newest" / "best" / "generation_config.json"
    config.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 3}')
    assert main("hello", "--prompt", "x", "--prompt", "y")[1] == ["hello", "x", "y"]
    for flags, expected in {(): (0.6, 3), ("--temperature", "0.8"): (0.8, 3), ("--top-k", "0"): (0.6, 0)}.items():
        settings, _ = main("x", *flags)
        assert (settings.sampling.temperature, settings.sampling.top_k) == expected
    said = "generation_config.json): repetition_penalty 1, temperature 0.8, top_k 3"
    assert said in capsys.readouterr().err
    mixed = b'"a"\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(mixed)))
    with pytest.raises(UserError, match="some lines have messages, others a prompt; give --chat"):
        main("--jsonl")
    with pytest.raises(UserError, match=r"put a text of several words in quotes: 'The old sailor'$"):
        main("The", "old", "sailor")
    with pytest.raises(UserError, match=r"^for several texts repeat --prompt TEXT"):
        main("The old", "sailor")
    config.write_text('{"do_sample": false}')  # greedy is for conversations: a text would repeat itself
    assert main("x")[0].sampling.temperature == 0.8 and main("--chat", "--prompt=x")[0].sampling.temperature == 0
    config.write_text("{}")


def test_errors_are_found_before_torch_is_imported(folder, tmp_path):
    text = shutil.copytree(folder / "runs" / "newest" / "best", tmp_path / "text")
    (text / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    code = "import atexit, sys, generate; atexit.register(lambda: print('torch' in sys.modules)); generate.main()"
    for flags, content, words in (
        ([text, "--chat"], "", "has no chat template, so it only continues text; put the chat_template.jinja"),
        ([text, "--jsonl"], "5", "line 1 of standard input cannot be read"),
    ):
        result = run_python("-c", code, *flags, input=content)
        assert words in result.stderr and result.stdout == "False\n"
