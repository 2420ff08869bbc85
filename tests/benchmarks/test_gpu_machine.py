"""What a machine with a GPU and no network needs: few packages, and one script whose commands all run."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, timing, training
from kernels import gpu
from training.settings import parse

ROOT = Path(__file__).parents[2]
ABSENT = ["scipy", "tyro", "tomli_w", "xdist", "msgspec", "pandas", "matplotlib", "tokenizers", "numba", "jinja2"]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash")


@pytest.mark.skipif(gpu is None, reason="Triton is not installed")
def test_benchmarks_import_on_a_machine_made_for_torch_and_triton():
    names = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")]
    code = f"import importlib, sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    code += f"for name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run_script(tmp_path):
    """Run gpu.sh with a Python that prints its arguments and an object, and fails where they contain $FAILING."""
    python = "#!/usr/bin/env bash\nprintf 'ran:'; printf ' %q' \"$@\"\nprintf '\\n{}\\n'\n[[ $* != *$FAILING* ]]\n"
    programs = {"python": python, "nvidia-smi": "#!/usr/bin/env bash\necho NVIDIA H200\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*steps: str, failing: str = "nothing") -> subprocess.CompletedProcess:
        environment = os.environ | {
            "OUT": str(tmp_path / "out"),
            "FAILING": failing,
            "PYTHON": str(tmp_path / "python"),
        }
        environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", ROOT / "benchmarks" / "gpu.sh", *steps]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


@needs_bash
def test_a_step_that_fails_does_not_stop_the_others_and_steps_can_be_chosen(run_script, tmp_path):
    done = run_script(failing=" 1b ")
    steps = re.findall(r"^== (\S+), after", done.stdout, re.MULTILINE)
    assert steps[:3] == ["smoke", "124m", "train.py"] and len(steps) > 12 and done.returncode == 1
    failed = done.stdout.splitlines()[-1].partition("failed: ")[2].split()
    assert failed[:5] == ["1b", "1b-plain", "1b-layer", "decoding-128", "decoding-4000"]
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout
    assert (tmp_path / "out" / "norms-nvidia-h200.json").read_text() == "{}\n"
    chosen = run_script("loss", "norms")
    assert chosen.returncode == 0 and re.findall(r"^== (\S+), after", chosen.stdout, re.MULTILINE) == ["norms", "loss"]
    assert run_script("nonsense").returncode == 1


@needs_bash
def test_every_command_of_the_script_is_understood(run_script, monkeypatch):
    timed, chosen = [], []
    for name in ("copy_rate", "product_rate", "read_rate"):
        monkeypatch.setattr(timing, name, lambda *_: 1.0)
    monkeypatch.setattr(
        timing, "compare", lambda title, makers, *_: timed.append((title, [*makers])) or {"not_run": {}}
    )
    monkeypatch.setattr(kernels, "compare", lambda case, *_: chosen.append(case.name) or {"not_run": {}})
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for module in (kernels, training):
        monkeypatch.setattr(module, "keep_freed_memory", lambda: None)  # for the rest of the tests
    for line in re.findall(r"^ran: (.*)$", run_script().stdout, re.MULTILINE):
        flag, name, *flags = shlex.split(line)
        if flag == "train.py":
            assert parse([name, *flags], "").settings.optimizer.steps == 40
        elif name.startswith("benchmarks."):
            monkeypatch.setattr(sys, "argv", [name, *flags, "--device", "cpu"])
            importlib.import_module(name).main()
    assert sorted(chosen) == sorted(case.name for case in kernels.all_cases(torch.device("cpu")))  # each of them once
    decoded = [programs for title, programs in timed if title.startswith("Decoding 1b")]
    assert decoded == [["transformers", "transformers compiled", "plain decoder", "ours"]] * 5 and len(timed) == 5 + 6
