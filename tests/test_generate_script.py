"""`python generate.py` as a user runs it: standard output, standard error and exit status."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.pretrained import save_pretrained
from data.tokenizer import train_tokenizer
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


def test_generating_does_not_import_the_compiler_of_torch():
    """It takes as long as torch itself."""
    code = "import sys, generation.session, model.fused_decode; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent).returncode == 0


def test_standard_input_and_the_newest_run_are_the_default_prompt_and_run(folder):
    flags = ("--max-new-tokens", 12, "--seed", 7)
    piped = generate(folder, *flags, prompt="def é☺\n")
    named = generate(folder, "runs/other", "def é☺", *flags, prompt="something else")
    assert piped.returncode == named.returncode == 0
    assert piped.stdout == named.stdout and len(piped.stdout) > 15 and b"\r" not in piped.stdout
    assert piped.stdout.startswith("def é☺".encode()) and piped.stdout.endswith(b"\n")
    for result, save in ((piped, Path("runs", "newest", "best")), (named, Path("runs", "other", "last"))):
        lines = result.stderr.decode().splitlines()
        assert lines[-1].startswith(f"{save} on ")
        assert lines[:-1] == (["reading the prompt from standard input"] if result is piped else [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--tempreture", "1"], "--temperature"),
        (["--top-k", "many"], "--top-k"),
        (["runs"], "error: runs has no config.json, best/ or last/"),
        (["runs/newest", "--prompt-file", "missing.txt"], "error: missing.txt cannot be read"),
    ],
)
def test_a_wrong_flag_value_or_path_is_named_with_exit_status_2(folder, args, message):
    result = generate(folder, *args)
    assert result.returncode == 2 and result.stdout == b""
    assert message in result.stderr.decode() and b"Traceback" not in result.stderr


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
    assert process.wait(60) == 0
    assert "Traceback" not in stderr and "error" not in stderr.lower() and "tokens/s" not in stderr


def test_the_trained_stories_model_prints_the_bytes_of_the_reference_program(stories260k_directory, shared, tmp_path):
    result = generate(tmp_path, stories260k_directory, "--temperature", 0, "--device", "cpu")
    expected = shared / "stories260K" / "greedy_200_steps.txt"
    assert result.returncode == 0 and result.stdout == expected.read_bytes()
