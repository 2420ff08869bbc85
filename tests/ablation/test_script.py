"""`python ablate.py` end to end: it is stopped, it resumes, and it names what failed."""

import json
import signal
import subprocess
import sys
import time

import pytest

from ablation.records import read_rows
from tests.conftest import ROOT, run_python


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "ablate.py", *arguments, "--device", "cpu", "--jobs", "1", "--rerun-seeds", "0"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_flags_plans_and_studies_import_no_torch():
    code = "import sys, ablate, ablation.study; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGINT]])
def test_ctrl_c_and_sigterm_end_it_in_one_line_and_the_same_command_resumes(config, tmp_path, stops):
    arguments = ["--config", str(config), "--vary", "norm=layer,rms", "--seeds", "2", "--out", str(tmp_path)]
    first = start(*arguments)
    while len(read_rows(tmp_path)) < 1 and first.poll() is None:
        time.sleep(0.05)
    for stop in stops:
        first.send_signal(stop)
    _, errors = first.communicate(timeout=500)
    assert first.returncode == 130 and "Traceback" not in errors and "Warning" not in errors
    assert errors.splitlines()[-1].startswith("stopped; the same command resumes it")
    assert 1 <= len(read_rows(tmp_path)) < 4
    output, _ = start(*arguments).communicate(timeout=500)
    assert len(read_rows(tmp_path)) == 4 and "report.md" in output and (tmp_path / "report.md").is_file()


@pytest.mark.slow
def test_a_judge_ends_with_one_json_object_and_failed_runs_are_named_with_status_1(config, tmp_path):
    arms = ["--a", "", "--b", "tokenizer=/nowhere"]
    judging = start("judge", *arms, "--config", str(config), "--out", str(tmp_path), "--seeds", "10")
    output, errors = judging.communicate(timeout=500)
    last = json.loads(output.splitlines()[-1])
    assert (last["verdict"], last["reason"]) == ("inconclusive", "runs did not complete, or the hours are used up")
    assert judging.returncode == 1 and "failed: tokenizer=/nowhere, final seed 1, " in errors
    assert [row.status for row in read_rows(tmp_path)].count("failed") == 2
