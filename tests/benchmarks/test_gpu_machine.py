"""What a machine with a GPU and no network needs: few packages, and one script that a failing step does not stop."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import training
from benchmarks.cases import cases
from kernels import gpu

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"

# What a machine made for torch and Triton has; it lacks everything else in requirements*.txt.
# torch.compile itself imports filelock.
PRESENT = {"torch", "triton", "numpy", "safetensors", "transformers", "tqdm", "pytest", "filelock"}
REQUIRED = {
    re.match(r"[\w-]+", line)[0]
    for path in ROOT.glob("requirements*.txt")
    for line in path.read_text(encoding="utf-8").splitlines()
    if not line.startswith(("-r ", "#"))
}
ABSENT = {"pytest-xdist": "xdist", "tomli-w": "tomli_w"}  # where the module has another name than the package
ABSENT = [ABSENT.get(name, name) for name in sorted(REQUIRED - PRESENT)]
IMPORTABLE = [
    *(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "peers"),
    *(f"model.{name}" for name in ("cpu_decode", "decoder", "fused_decode")),
    "checkpoints.pretrained",
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
def test_the_tests_that_need_a_gpu_are_collected_there_and_few_of_them_run_each_kernel_once():
    smoke = "".join(re.findall(r'^smoke\+?="(.*)"', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
    flags = ["-o", "addopts=--import-mode=importlib", "-m", "gpu", "-k", smoke, "--collect-only", "-q", "tests/kernels"]
    done = run_without_absent("import pytest\nsys.exit(pytest.main())", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"::test_(.*?)_(?:is|are|equal|gives)_\S*\[", done.stdout)
    kinds = {"norms", "the_activation", "the_loss_and_its_gradients", "rotary", "a_graph_of_the_decoding_step"}
    assert {*found} == kinds and len(found) < 12


@pytest.fixture
def run_script(tmp_path):
    """Run gpu.sh with a Python that prints its arguments, and fails where they contain $FAILING.

    Asked for the missing packages, it prints $MISSING.
    """
    python = tmp_path / "python-of-the-gpu"
    python.write_text(
        "#!/usr/bin/env bash\n[[ $1 = -c && $2 = *find_spec* ]] && echo $MISSING\n"
        '[[ $1 = -c ]] || echo "ran: $*"\n[[ -n $FAILING && "$*" = *$FAILING* ]] && exit 3\nexit 0\n'
    )
    (tmp_path / "compute-sanitizer").write_text("#!/usr/bin/env bash\nexit 0\n")
    (tmp_path / "nvidia-smi").write_text(
        "#!/usr/bin/env bash\n"
        "while printf 'now, 345, 70.1, 30\\nnow, 1980, 650.7, 50\\n'; [[ $* = *-l* ]]; do sleep 0.01; done\n"
    )
    for program in (python, tmp_path / "compute-sanitizer", tmp_path / "nvidia-smi"):
        program.chmod(0o755)

    def run(*steps: str, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHON": str(python), "FAILING": "", "MISSING": ""} | variables
        environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", SCRIPT, str(tmp_path / "out"), *steps]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


def steps_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^== (\S+) \(at most", done.stdout, re.MULTILINE)


@needs_bash
def test_a_step_that_fails_does_not_stop_the_others_and_sets_the_exit_status(run_script, tmp_path):
    done = run_script()
    assert done.returncode == 0 and "== 18 steps, 0 failed" in done.stdout, done.stdout
    assert steps_of(done)[:3] == ["smoke", "124m", "train.py"] and steps_of(done)[-1] == "racecheck"
    failed = run_script(FAILING="--config 1b")
    assert failed.returncode == 1 and "5 failed: 1b 1b-plain 1b-layer decoding-128 decoding-4000" in failed.stdout
    assert steps_of(failed) == steps_of(done)
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout + failed.stdout
    assert "SM clock 345 to 1980 MHz, at most 650 W" in done.stdout


@needs_bash
def test_steps_are_chosen_by_name_and_a_limit_says_how_to_continue(run_script):
    assert steps_of(run_script("norms", "transformers..")) == [
        "norms",
        "transformers",
        "trace",
        "others",
        "tests",
        "memcheck",
        "racecheck",
    ]
    assert run_script("nothing").returncode == 1
    complete = run_script(LIMIT="570")  # no step takes so long by itself
    assert len(steps_of(complete)) == 18 and "continue with" not in complete.stdout
    part = run_script(LIMIT="250")
    assert steps_of(part) == ["smoke", "124m"] and part.stdout.endswith("train.py..\n")


@needs_bash
def test_train_py_is_left_out_with_a_line_where_its_packages_are_missing(run_script):
    done = run_script("124m", "train.py", MISSING="tyro msgspec")
    assert "== train.py: not run, these packages are missing: tyro msgspec" in done.stdout
    assert steps_of(done) == ["124m"] and done.returncode == 0


@needs_bash
def test_the_script_names_every_case_of_a_gpu_once_and_variants_that_exist_there(monkeypatch):
    script = SCRIPT.read_text(encoding="utf-8")
    patterns = re.findall(r"^    kernels \w+ \d+ '(.+)'", script, re.MULTILINE)
    monkeypatch.setattr(training, "why_not_compile", lambda device: None)
    monkeypatch.setattr(training.kernels, "find_triton_obstacle", lambda device: None)
    for case in cases(torch.device("cuda")):
        assert sum(bool(re.search(pattern, case.name)) for pattern in patterns) == 1, case.name
    lines = re.findall(r"^    training \S+ \d+ \S+ \w+ (.*?)(?: #.*)?$", script, re.MULTILINE)
    ours = re.search(r'ours="(.+)"', script)[1]
    chosen = {name for line in lines for name in shlex.split(line.replace("$ours", ours))}
    assert len(lines) == 6 and chosen <= (training.variants(torch.device("cuda")) | training.PEERS).keys()
