"""What a machine with a GPU and no network needs: few packages, and one script that a failing step does not stop."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import SHAPES
from kernels import gpu

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
OTHER_PROGRAMS = ("harness", "loading", "peers")  # not for a GPU; they read tokenizers

# What a machine made for torch and Triton has; it lacks everything else in requirements*.txt.
# torch.compile itself imports filelock.
PRESENT = {"torch", "triton", "numpy", "safetensors", "transformers", "tqdm", "pytest", "filelock"}
REQUIRED = {
    re.match(r"[\w-]+", line)[0]
    for path in ROOT.glob("requirements*.txt")
    for line in path.read_text(encoding="utf-8").splitlines()
    if not line.startswith("-r ")
}
ABSENT = {"pytest-xdist": "xdist", "tomli-w": "tomli_w"}  # where the module has another name than the package
ABSENT = [ABSENT.get(name, name) for name in sorted(REQUIRED - PRESENT)]
IMPORTABLE = [
    *(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in OTHER_PROGRAMS),
    *(f"model.{name}" for name in ("cpu_decode", "decoder", "fused_decode", "pretrained")),
    "training.step",
]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash")


def run_without_absent(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python code in a process that cannot import the absent packages."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n{code}"
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.skipif(gpu is None, reason="Triton is not installed")
def test_models_and_benchmarks_import_on_a_machine_made_for_torch_and_triton():
    assert {"msgspec", "scipy", "tyro", "tomli_w", "xdist"} < set(ABSENT)
    done = run_without_absent(f"import importlib\nfor name in {IMPORTABLE}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(gpu is None, reason="Triton is not installed")
def test_the_tests_that_need_a_gpu_are_collected_there():
    flags = ["-o", "addopts=--import-mode=importlib", "-m", "gpu", "--collect-only", "-q", "tests/kernels"]
    done = run_without_absent("import pytest\nsys.exit(pytest.main())", *flags)
    assert done.returncode == 0 and "test_gpu.py::test_norms_are_within" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def run_script(tmp_path):
    """Run gpu.sh with a Python that does nothing but fail where its arguments contain `failing`; returns the output.

    The Python prints its arguments; it lacks the module tomli_w.
    """
    python = tmp_path / "python-of-the-gpu"
    python.write_text(
        '#!/usr/bin/env bash\n[[ $1 = -c && $2 = "import tomli_w" ]] && exit 1\n'
        '[[ $1 = -c ]] || echo "ran: $*"\n[[ -n $FAILING && "$*" = *$FAILING* ]] && exit 3\nexit 0\n'
    )
    python.chmod(0o755)
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text("#!/usr/bin/env bash\nexit 0\n")
    sanitizer.chmod(0o755)

    def run(part: str, failing: str = "", **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHON": str(python), "FAILING": failing} | variables
        environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", SCRIPT, *part.split(), *([] if variables else [str(tmp_path / "out")])]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


@needs_bash
def test_a_step_that_fails_does_not_stop_the_others_and_sets_the_exit_status(run_script, tmp_path):
    done = run_script("kernels")
    assert done.returncode == 0 and "0 steps failed" in done.stdout
    steps = [line for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert len(steps) == 5 and all(f"--out {tmp_path}/out/kernels.json" in step for step in steps)
    failed = run_script("kernels", "head and loss")
    assert failed.returncode == 1 and "1 steps failed: head and loss" in failed.stdout
    assert [line for line in failed.stdout.splitlines() if line.startswith("ran: ")] == steps
    assert (tmp_path / "out" / "kernels.txt").read_text() == failed.stdout


@needs_bash
def test_every_part_stays_within_nine_minutes_and_writes_few_files(run_script, tmp_path):
    for part in ("tests", "kernels", "model"):
        done = run_script(part)
        limits = [line for line in done.stdout.splitlines() if "(at most " in line]
        assert sum(int(line.partition("(at most ")[2].split()[0]) for line in limits) <= 530 and limits, part
        absent = [line for line in done.stdout.splitlines() if line.startswith("Missing: ")]
        assert absent == (
            [] if part == "kernels" else ["Missing: tomli-w (the head of benchmarks/gpu.sh says how to install them)"]
        )
    names = set(os.listdir(tmp_path / "out"))
    assert names == {"tests.txt", "kernels.txt", "model.txt"}
    model = [line for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert [line.split("-m ")[1].split()[0] for line in model] == ["benchmarks.decoding"] * 2 + ["benchmarks.training"]


@needs_bash
def test_the_folder_is_an_argument_or_a_variable_and_an_unknown_part_is_refused(run_script, tmp_path):
    assert run_script("model", OUT=str(tmp_path / "elsewhere")).returncode == 0
    assert os.listdir(tmp_path / "elsewhere") == ["model.txt"]
    refused = run_script("everything")
    assert refused.returncode == 2 and "usage: " in refused.stderr


@needs_bash
def test_the_families_of_the_script_are_all_cases_of_a_gpu_and_none_twice():
    patterns = re.findall(r"--only '(.+)'", SCRIPT.read_text(encoding="utf-8"))
    names = [f"{norm.kind} norm{' after addition' * norm.after_addition}" for norm in SHAPES["cuda"].norms]
    names += ["SwiGLU kernels", "gate and up in inference", "SwiGLU MLP", "rotary", "rotary with norms of heads"]
    names += ["head and loss", "head and loss, weighted sum"]
    for name in names:
        assert sum(bool(re.search(pattern, name)) for pattern in patterns) == 1, name
