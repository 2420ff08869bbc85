"""`python generate.py --chat` as a user runs it, with a message on standard input."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import generate

SCRIPT = Path(__file__).parent.parent.parent / "generate.py"
FLAGS = ("--chat", "--device", "cpu")


def test_a_message_on_standard_input_gets_the_answer_alone_on_standard_output(chatml_model):
    flags = (*FLAGS, "--max-new-tokens", "9", "--system", "Be terse.")
    command = [sys.executable, str(SCRIPT), str(chatml_model), *flags]
    result = subprocess.run(command, input=b"hello\n", capture_output=True, timeout=120)
    assert result.returncode == 0 and len(result.stdout) > 5 and result.stdout.endswith(b"\n")
    assert b"hello" not in result.stdout and b"assistant" not in result.stdout
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 2 and lines[1].startswith(f"{chatml_model} on cpu")


def test_flags_that_are_given_win_over_the_recommended_sampling_even_with_the_value_of_the_default(
    chatml_model, tmp_path, monkeypatch, capsys
):
    model = shutil.copytree(chatml_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 3}')
    seen = []
    monkeypatch.setattr("generation.session.run", lambda settings, *_: seen.append(settings.sampling))
    for flags in ((), ("--temperature", "0.8"), ("--top-k", "0")):
        monkeypatch.setattr(sys, "argv", ["generate.py", str(model), *FLAGS, "--prompt", "x", *flags])
        generate.main()
    assert [(s.temperature, s.top_k) for s in seen] == [(0.6, 3), (0.8, 3), (0.6, 0)]
    assert (
        "(generation_config.json, then flags): repetition_penalty 1, temperature 0.8, top_k 3"
        in capsys.readouterr().err
    )


def test_no_message_is_an_error_and_a_terminal_without_a_prompt_is_a_conversation(chatml_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(chatml_model), *FLAGS])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert "error: there is no message to answer" in capsys.readouterr().err
    seen = []
    monkeypatch.setattr("generation.session.run", lambda settings, checkpoint, prompts: seen.append(prompts))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for flags in (FLAGS, (*FLAGS, "--prompt", "x"), FLAGS[1:]):
        monkeypatch.setattr(sys, "argv", ["generate.py", str(chatml_model), *flags])
        generate.main()
    assert seen == [[], ["x"], [""]]
