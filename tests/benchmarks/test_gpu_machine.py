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

from benchmarks import kernels

ROOT = Path(__file__).parents[2]
NEEDS_BASH = pytest.mark.skipif(not all(map(shutil.which, ("bash", "timeout"))), reason="needs bash and timeout")


def test_benchmarks_import_on_a_machine_made_for_torch_and_triton():
    absent = "scipy xdist pandas matplotlib tokenizers numba jinja2".split()
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.kernels, benchmarks.training"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def run_script(folder: Path, *steps: str, failing: str = "nothing") -> subprocess.CompletedProcess:
    """Run gpu.sh with a Python that prints its arguments and an object, or fails where they contain `failing`."""
    python = f"printf 'ran:'; printf ' %q' \"$@\"; echo; [[ $* != *'{failing}'* ]] && echo '{{}}'"
    for name, code in (("python", python), ("nvidia-smi", "echo NVIDIA H200")):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"OUT": str(folder / "out"), "PYTHON": str(folder / "python")}
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(["bash", ROOT / "benchmarks/gpu.sh", *steps], capture_output=True, text=True, env=environment)


def steps_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^== (\S+), after", done.stdout, re.MULTILINE)


@NEEDS_BASH
def test_commands_of_the_script_are_understood_and_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    done = run_script(tmp_path, failing=" 1b ")
    assert steps_of(done)[:3] == ["smoke", "124m", "train.py"]
    assert "failed: 1b 1b-plain 1b-layer decoding-128 decoding-4000" in done.stdout and done.returncode == 1
    assert (tmp_path / "out" / "norms-nvidia-h200.json").read_text() == "{}\n"
    commands = [shlex.split(line) for line in re.findall(r"^ran: -m (benchmarks.*)$", done.stdout, re.MULTILINE)]
    assert len(commands) == 11
    for name, *flags in commands:
        monkeypatch.setattr(sys, "argv", [name, *flags, "--help"])  # which is only reached after flags that are right
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(name).main()
    patterns = "|".join(command[-1] for command in commands if command[0] == "benchmarks.kernels")
    assert all(re.search(patterns, case.name) for case in kernels.all_cases(torch.device("cpu")))


@NEEDS_BASH
def test_the_script_runs_the_chosen_steps_and_then_those_without_a_result(tmp_path):
    chosen = run_script(tmp_path, "loss", "norms")
    assert chosen.returncode == 0 and steps_of(chosen) == ["norms", "loss"]
    assert (tmp_path / "out" / "norms-nvidia-h200.json").read_text() == "{}\n"
    rest = run_script(tmp_path, failing=" -m smoke")
    assert not {"norms", "loss"} & {*steps_of(rest)} and "failed: smoke\n" in rest.stdout and rest.returncode == 1
    again = run_script(tmp_path)
    assert steps_of(again) == ["smoke"] and again.returncode == 0
    assert run_script(tmp_path, "nonsense").returncode == 1
