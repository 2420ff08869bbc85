"""What a machine with a GPU and no network needs: few packages, and one script whose commands all run."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cases, decoding, kernels, timing, training
from kernels import gpu
from model.config import ModelConfig
from training.settings import DataSettings, MachineSettings, Settings, parse

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
    *(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")),
    *(f"model.{name}" for name in ("decoder", "fused_decode")),
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


@pytest.fixture
def run_script(tmp_path):
    """Run gpu.sh with a Python that prints its arguments and an object, and fails where they contain $FAILING."""
    python = tmp_path / "python-of-the-gpu"
    python.write_text(
        "#!/usr/bin/env bash\n[[ $1 = -c ]] && exit 0\nprintf 'ran:'; printf ' %q' \"$@\"\n"
        "printf '\\n{}\\n'\n[[ -z $FAILING || $* != *$FAILING* ]]\n"
    )
    (tmp_path / "nvidia-smi").write_text("#!/usr/bin/env bash\necho NVIDIA H200\n")
    for program in (python, tmp_path / "nvidia-smi"):
        program.chmod(0o755)

    def run(*steps: str, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHON": str(python), "FAILING": ""} | variables
        environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", SCRIPT, str(tmp_path / "out"), *steps]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


def steps_of(done: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^== (\S+) \(at most", done.stdout, re.MULTILINE)


@needs_bash
def test_a_step_that_fails_does_not_stop_the_others_and_a_limit_says_how_to_continue(run_script, tmp_path):
    done = run_script(FAILING=" 1b ")
    assert done.returncode == 1 and "5 failed: 1b 1b-plain 1b-layer decoding-128 decoding-4000" in done.stdout
    assert steps_of(done)[:3] == ["smoke", "124m", "train.py"] and len(steps_of(done)) > 12
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout
    assert (tmp_path / "out" / "decoding-128-nvidia-h200.json").read_text() == "{}\n"
    assert steps_of(run_script("norms", "others..")) == ["norms", "others", "tests"]
    part = run_script(LIMIT="250")
    assert steps_of(part) == ["smoke"] and part.stdout.endswith("124m..\n")


@needs_bash
def test_every_command_of_the_script_runs_on_a_cpu_with_small_shapes(run_script, monkeypatch, capsys):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ModelConfig(64, num_key_value_heads=1, max_position_embeddings=16, **shape)
    data, machine = DataSettings(sequence_length=8, batch_size=2), MachineSettings(dtype="float32")
    small = Settings(model=model, data=data, machine=machine)
    monkeypatch.setattr(training, "load_settings", lambda path: small)
    decoded, measured = [], []
    monkeypatch.setattr(decoding, "compare", lambda cases, *_: decoded.extend(cases) or {"not_run": {}})
    for name in ("torch.compile", "Triton and torch.compile"):
        monkeypatch.setitem(training.VARIANTS, name, ("torch", False))
    monkeypatch.setattr(kernels, "compare", lambda case, *_: measured.append(case.name) or {"not_run": {}})
    monkeypatch.setattr(kernels, "cases", lambda device: cases.cases(torch.device("cuda")))
    no_triton = {"cpu": "not in this test"}.get
    monkeypatch.setattr(cases.kernels, "triton_unavailable_reason", lambda device: no_triton(device.type))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("COPY_BYTES", "PRODUCT_SIZE"):
        monkeypatch.setitem(getattr(timing, name), "cpu", 2**6)
    monkeypatch.setattr(timing, "READ_BYTES", 2**6)
    for module in (kernels, training):
        monkeypatch.setattr(module, "keep_freed_memory", lambda: None)  # for the rest of the tests
    more = {"training": ["--turns", "1"], "decoding": [], "kernels": []}
    commands = [shlex.split(line) for line in re.findall(r"^ran: (.*)$", run_script().stdout, re.MULTILINE)]
    for flag, name, *flags in commands:
        if flag == "train.py":
            assert parse([name, *flags], "").settings.optimizer.steps == 40
        elif name.startswith("benchmarks."):
            monkeypatch.setattr(sys, "argv", [name, *flags, "--device", "cpu", *more[name.partition(".")[2]]])
            assert importlib.import_module(name).main() == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    seconds = [table["seconds"] for result in results for table in result["tables"] if "seconds" in table]
    assert sum(map(len, seconds)) == 10
    assert {(case.prompt, case.sequences) for case in decoded} == {(128, 1), (128, 8), *((4000, n) for n in (1, 4, 8))}
    assert {(case.program, case.dtype) for case in decoded} >= {("ours", "bfloat16"), ("transformers", "bfloat16")}
    assert sorted(measured) == sorted(case.name for case in cases.cases(torch.device("cuda")))
