"""`python generate.py` as a user runs it: standard output, standard error and exit status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.pretrained import save_pretrained
from data.corpus import train_tokenizer
from model.config import ModelConfig
from model.decoder import Decoder

SCRIPT = Path(__file__).parent.parent / "generate.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with two runs; the older one is `runs/other`."""
    folder = tmp_path_factory.mktemp("work")
    best = folder / "runs" / "newest" / "best"
    best.mkdir(parents=True)
    text = [f"def add_{name}(x, y):\n    return x + y  # {name} ☺\n" for name in "abcdefghijklmnop" * 8]
    tokenizer = train_tokenizer(text, 300, best / "tokenizer.model")
    shape = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, max_position_embeddings=64)
    decoder = Decoder(ModelConfig(**shape, initializer_range=0.5), seed=3)
    save_pretrained(decoder, best, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    (best / "state.json").write_text("{}")  # the last file of a save
    shutil.copytree(best, folder / "runs" / "other" / "last")
    os.utime(folder / "runs" / "other" / "last", (1_000_000_000, 1_000_000_000))
    return folder


def command(*args) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, args)]


def generate(folder, *args, prompt: str = "") -> subprocess.CompletedProcess:
    """Run the script in `folder` with `prompt` on standard input."""
    return subprocess.run(command(*args), cwd=folder, input=prompt.encode(), capture_output=True, timeout=120)


def test_help_answers_within_a_second_without_importing_torch(folder):
    before = os.times()
    result = generate(folder, "--help")
    after = os.times()
    assert result.returncode == 0 and b"--repetition-penalty" in result.stdout and b"runs/NAME" in result.stdout
    # CPU time, which does not depend on other programs (on Windows, children count as 0).
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1
    code = "import sys, generate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent).returncode == 0


def test_standard_input_and_the_newest_run_are_the_default_prompt_and_run(folder):
    result = generate(folder, "--max-new-tokens", 12, "--seed", 7, prompt="def é☺\n")
    assert result.returncode == 0 and len(result.stdout) > 15 and b"\r" not in result.stdout
    assert result.stdout.startswith("def é☺".encode()) and result.stdout.endswith(b"\n")
    note, last = result.stderr.decode().splitlines()
    assert note == "reading the prompt from standard input"
    assert last.startswith(f"{Path('runs', 'newest', 'best')} on ")


def test_a_wrong_value_is_named_with_exit_status_2(folder):
    result = generate(folder, "--temperature", "-1")
    assert result.returncode == 2 and result.stdout == b""
    assert "temperature is -1.0" in result.stderr.decode() and b"Traceback" not in result.stderr


def test_prompts_as_lines_of_json_give_an_object_for_each_text(folder):
    lines = '"def "\n{"prompt": "a\\nb", "id": 7}\n\n'
    out = generate(folder, "runs/newest", "--jsonl", "--samples", "2", "--max-new-tokens", "4", prompt=lines)
    found = [json.loads(line) for line in out.stdout.decode().splitlines()]
    assert [(one["prompt"], one["sample"]) for one in found] == [("def ", 0), ("def ", 1), ("a\nb", 0), ("a\nb", 1)]
    assert all(one["text"].startswith(one["prompt"]) and one["end"] in ("length", "eos") for one in found), out.stderr
    wrong = generate(folder, "runs/newest", "--jsonl", prompt='{"text": "x"}\n')
    assert wrong.returncode == 2 and "no 'prompt'" in wrong.stderr.decode()


def test_a_closed_pipe_ends_the_program_quietly(folder):
    process = subprocess.Popen(
        command("--prompt", "def", "--samples", 30, "--batch-size", 1),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(3) == b"def"
    process.stdout.close()
    stderr = process.stderr.read().decode()
    assert process.wait(60) == 141
    assert "Traceback" not in stderr and "error" not in stderr.lower() and "tokens/s" not in stderr


def test_the_stories_model_prints_the_bytes_of_the_reference_program_without_importing_the_compiler_of_torch(
    stories260k_directory, shared
):
    """Dynamo takes as long to import as torch itself."""
    code = "import sys, generate; generate.main(); sys.exit('torch._dynamo' in sys.modules)"
    flags = [str(stories260k_directory), "--temperature", "0", "--device", "cpu"]
    result = subprocess.run([sys.executable, "-c", code, *flags], cwd=SCRIPT.parent, input=b"", capture_output=True)
    expected = shared / "stories260K" / "greedy_200_steps.txt"
    assert result.returncode == 0 and result.stdout == expected.read_bytes()
