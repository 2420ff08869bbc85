"""`python ablate.py` as a user runs it, with runs in processes of their own: output, exit status, kills, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ablation.results import read_results

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REPORTS = ("results.json", "report.md", "report.html")


def ablate(*arguments) -> subprocess.Popen:
    """The script in a process group of its own, as a terminal starts it."""
    command = [sys.executable, "ablate.py", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    printed, errors = process.communicate(timeout=300)
    return process.returncode, printed, errors


def wait_for_runs(process: subprocess.Popen, path: Path, number: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def interrupted(config, tmp_path_factory) -> tuple[Path, list, str, str]:
    """A comparison killed after two runs, then stopped by Ctrl-C: its folder, the records before, and the output."""
    out = tmp_path_factory.mktemp("work") / "out"
    arguments = ["--config", config, "--out", out, "--no-timing", "--seeds", 6]
    arguments += ["--noise-seeds", 0]
    arguments += ["--steps", 150]  # runs of half a second, so that Ctrl-C comes before the last one
    runs = out / "runs.jsonl"
    process = ablate(*arguments)
    wait_for_runs(process, runs, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = read_results(runs)

    process = ablate(*arguments)
    wait_for_runs(process, runs, len(killed) + 1)
    os.killpg(process.pid, signal.SIGINT)
    status, printed, errors = finish(process)
    assert status == 130, errors
    return out, killed, printed, errors


def test_a_killed_comparison_keeps_what_is_finished(interrupted):
    out, killed, _, _ = interrupted
    results = read_results(out / "runs.jsonl")
    assert results[: len(killed)] == killed and 2 <= len(killed) < len(results) < 12
    assert len({result.key for result in results}) == len(results)


def test_ctrl_c_prints_the_command_that_resumes_and_that_command_finishes(interrupted):
    out, _, printed, errors = interrupted
    finished = read_results(out / "runs.jsonl")
    assert "Traceback" not in errors
    hint = errors.strip().splitlines()[-1]
    assert hint.startswith(
        f"stopped; {len(finished)} runs are finished and kept. Resume with: python ablate.py --config "
    )
    assert "\nrms: " in printed or "\nlayer: " in printed

    status, printed, errors = finish(ablate(*hint.split("python ablate.py ")[1].split()))
    assert status == 0, errors
    results = read_results(out / "runs.jsonl")
    assert results[: len(finished)] == finished and len(results) == 12
    assert {(result.arm.norm, result.seed) for result in results} == {
        (n, s) for n in ("rms", "layer") for s in range(1, 7)
    }
    assert f"{len(finished)} done" in printed and re.search(r"\nrms: .+ layer \(.+ over 6 pairs", printed)
    assert all((out / name).is_file() for name in REPORTS)
    assert len({result.initial_weights_hash for result in results}) == 6

    written = {name: (out / name).read_bytes() for name in REPORTS}
    for name in REPORTS:
        (out / name).unlink()
    picture = out / "differences.png"
    status, printed, errors = finish(ablate("--report", out, "--picture", picture))
    assert status == 0 and "report.html" in printed, errors
    assert {name: (out / name).read_bytes() for name in REPORTS} == written and picture.stat().st_size > 1000
