"""Which runs are made and kept: resuming, failures, other settings, texts and devices, a cluster, and ablate.py."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ablation import execute, study
from ablation.execute import Experiment, local_workers, open_experiment, write_plan
from ablation.plan import Plan, Run, load_plan, run_settings
from ablation.records import Row, append_rows, read_lines, read_rows
from ablation.run import settings_hash
from errors import UserError
from files import read_toml
from tests.ablation.conftest import carry_out
from tests.conftest import ROOT, run_python

PLAN = Plan(vary={"norm": ["layer", "rms"]}, seeds=2, rerun_seeds=0, learning_rates=(2e-2,))


@pytest.fixture
def experiment(config, tmp_path) -> Experiment:
    """Nothing is done yet."""
    started = open_experiment(dataclasses.replace(PLAN, config=str(config)), tmp_path / "out", "cpu", 2)
    write_plan(started)
    return started


@pytest.fixture
def ended(experiment, row) -> Callable[..., Row]:
    """The row of a run that ended with this loss on this machine, with the hash that its settings have."""

    def made(run: Run, loss: float = 3.0, **more: object) -> Row:
        recorded = {"settings_hash": settings_hash(run_settings(experiment.plan, run))}
        return row(run, loss, **recorded | {"device": experiment.workers.device} | more)

    return made


def failed(experiment) -> list[Row]:
    return [row for row in experiment.rows if row.status == "failed"]


def test_more_jobs_than_gpus_of_one_model_share_them(monkeypatch):
    models = {"cuda:0": "H200", "cuda:1": "A10", "cuda:2": "H200"}
    monkeypatch.setattr(execute, "choose_device", lambda name: torch.device(name.replace("auto", "cuda")))
    monkeypatch.setattr(execute, "device_model", models.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for asked, gpus in ((("auto", None), "02"), (("auto", 1), "0"), (("auto", 3), "020"), (("cuda:1", 2), "11")):
        assert local_workers(*asked).slots == [f"cuda:{gpu}" for gpu in gpus]


def test_a_trained_comparison_has_a_row_for_each_run_and_is_never_repeated(trained):
    loaded = study.load(trained.folder)
    assert loaded.counted_seeds and not failed(trained) and {c.effect.n for c in loaded.comparisons} == {2}
    assert len(read_rows(trained.folder)) == len(loaded.rows) == len(loaded.runs_in_time)
    again, made = open_experiment(trained.plan, trained.folder, "cpu", 1), []
    carry_out(again, lambda experiment, run, device: made.append(run))
    assert not made


def test_a_comparison_killed_within_a_line_resumes_to_the_rows_of_an_uninterrupted_one(trained, here, tmp_path):
    shutil.copy(trained.folder / "machine.toml", tmp_path)
    lines = (trained.folder / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:100])
    resumed = open_experiment(trained.plan, tmp_path, "cpu", 1)
    carry_out(resumed, here)
    folders = (tmp_path, trained.folder)
    timeless = {"seconds": 0, "all_seconds": 0}
    ours, theirs = ([dataclasses.replace(row, **timeless) for row in read_rows(folder)] for folder in folders)
    assert ours == theirs


def test_a_run_that_raises_is_a_failed_row_that_costs_no_other_and_is_tried_again(experiment, ended, start_of):
    def raising(run, device):
        return ended(run, 3.0 if (run.arm, run.seed) != ("rms", 1) else 1 / 0)

    carry_out(experiment, start_of(raising))
    assert [(r.arm, r.seed, r.reason[:17]) for r in failed(experiment)] == [("rms", 1, "ZeroDivisionError")]
    assert len(experiment.rows) == 4 and experiment.study.comparisons == []
    again = open_experiment(experiment.plan, experiment.folder, "cpu", 1)
    carry_out(again, start_of(lambda run, device: ended(run, 4.0)))
    finished = study.load(experiment.folder).rows
    assert [(r.arm, r.seed) for r in finished[finished.loss == 4].itertuples()] == [("rms", 1)] and len(finished) == 4


def test_each_device_is_used_by_one_run_at_a_time(experiment, ended):
    experiment.workers.slots = ["cuda:0", "cuda:1", "cuda:2"]
    experiment.plan = dataclasses.replace(experiment.plan, seeds=10)
    used, most = set(), []

    def use(run, device) -> Row:
        assert device not in used
        used.add(device)
        most.append(len(used))
        time.sleep(0.01 * (run.seed % 3 + 1))
        used.remove(device)
        return ended(run)

    with ThreadPoolExecutor(9) as pool:
        carry_out(experiment, lambda experiment, *of_run: pool.submit(use, *of_run))
    assert len(experiment.rows) == 20 and max(most) == 3


def test_runs_with_other_settings_are_refused_and_changes_of_the_plan_written_down(trained, tmp_path, monkeypatch):
    append_rows(tmp_path, *trained.rows)
    write_plan(open_experiment(trained.plan, tmp_path))
    with pytest.raises(UserError, match="had other settings"):
        open_experiment(dataclasses.replace(trained.plan, steps=5), tmp_path)
    monkeypatch.setattr(execute, "code_hash", lambda: "another")
    with pytest.raises(UserError, match="the code in checkpoints, data, kernels, model or training was changed"):
        open_experiment(trained.plan, tmp_path)
    monkeypatch.undo()
    with pytest.raises(UserError, match="runs of another plan"):
        open_experiment(dataclasses.replace(trained.plan, vary={"qk_norm": [True, False]}), tmp_path)
    write_plan(open_experiment(dataclasses.replace(trained.plan, margin=0.5), tmp_path))
    (change,) = read_lines(tmp_path / "changes.jsonl")
    assert change == {"field": "margin", "before": "0.005", "after": "0.5", "finished_runs": len(trained.rows)}


def test_a_plan_is_written_before_the_first_run_and_what_is_changed_late_is_said(
    experiment, ended, start_of, tmp_path, monkeypatch, capsys
):
    def start(begun: Experiment, run: Run, device: str):
        assert load_plan(begun.folder / "plan.toml") == begun.plan
        return start_of(lambda run, device: ended(run))(begun, run, device)

    monkeypatch.setattr(execute, "start_process", start)
    for margin, notes in ((0.005, 0), (0.5, 1)):
        plan = dataclasses.replace(experiment.plan, margin=margin)
        execute.compare(open_experiment(plan, tmp_path / "norms", "cpu", 1, None))
        assert capsys.readouterr().out.count("note: a margin that is changed after a look") == notes


def test_rows_say_what_they_ran_on_once_for_all_of_a_machine_and_are_read_as_they_were(trained, tmp_path):
    rows = [*trained.rows, dataclasses.replace(trained.rows[0], seed=9, torch="2.11.0")]
    append_rows(tmp_path, *rows[:2])
    append_rows(tmp_path, *rows[2:])
    assert read_rows(tmp_path) == rows
    first, second = read_toml(tmp_path / "machine.toml").values()
    assert first == {"torch": second.pop("torch")} | second | {"torch": rows[0].torch} and first["device"]
    assert not {*first} & {*read_lines(tmp_path / "runs.jsonl")[0]}
    (tmp_path / "machine.toml").write_text("")
    with pytest.raises(UserError, match="no '1'"):
        read_rows(tmp_path)


def test_a_dry_run_prints_what_a_run_of_each_arm_needs_and_the_time_of_all(experiment, capsys):
    execute.estimate_runs(experiment, "cpu")
    first, other = capsys.readouterr().out.split("a run of ")[1:]
    assert first.startswith("layer:\ntext: ") and "training  1,536 tokens" in first and "layer norm" in first
    assert other.startswith("rms:\ntext: ") and "training  1,536 tokens" in other and "rms norm" in other
    assert "all runs that can start: 4, 2 at once, about " in other


def test_a_run_on_another_device_has_failed_and_another_text_or_other_code_ends_all(experiment, ended, start_of):
    others = iter([{}, {"device": "GPU"}, {}, {}])
    carry_out(experiment, start_of(lambda run, device: ended(run, text_hash="one", **next(others))))
    assert [row.reason.partition(",")[0] for row in failed(experiment)] == ["it ran on GPU"]
    for what in ("text", "code"):
        experiment.rows = [ended(experiment.study.planned_runs[0], text_hash="one", code_hash="one")]
        other = {"text_hash": "one", "code_hash": "one"} | {f"{what}_hash": "two"}
        with pytest.raises(UserError, match=f"the {what} was changed since the first runs"):
            carry_out(experiment, start_of(lambda run, device, other=other: ended(run, **other)))
        assert len(experiment.rows) == 1


def test_unfinished_seeds_of_another_device_are_made_again_and_finished_ones_kept(experiment, ended, start_of):
    wanted = experiment.study.runs_in_time
    append_rows(experiment.folder, *(ended(run, device="GPU") for run in wanted[:3]))
    again = open_experiment(experiment.plan, experiment.folder, "cpu", 1)
    carry_out(again, start_of(lambda run, device: ended(run)))
    devices = study.load(experiment.folder).rows.set_index(["seed", "arm"]).device.sort_index()
    assert [*devices] == ["GPU"] * 2 + [experiment.workers.device] * 2 and again.study.comparisons[0].effect.n == 2


@pytest.mark.slow
def test_runs_in_other_processes_are_those_of_this_one_and_a_killed_one_costs_itself(experiment, trained, monkeypatch):
    execute.execute(experiment)
    ours, theirs = ({(r.arm, r.seed): r.loss for r in e.rows if r.phase == "final"} for e in (experiment, trained))
    assert len(ours) == 4 and ours.items() <= theirs.items()
    killed = open_experiment(dataclasses.replace(experiment.plan, seeds=3), experiment.folder, "cpu", 2)
    monkeypatch.setattr(execute, "train_run", kill_itself)
    execute.execute(killed)
    assert [row.reason[:22] for row in failed(killed)] == ["its process was killed"] * 2


def kill_itself(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def ray_address():
    """A head without CPUs and two workers with one each, as processes of their own."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_twelve_runs_on_two_workers_one_of_which_is_killed_are_those_of_the_pool(ray_address, config, here, tmp_path):
    from ablation import cluster

    psutil = pytest.importorskip("psutil")
    plan = dataclasses.replace(PLAN, config=str(config), vary={"norm": ["layer", "rms", "none"]}, seeds=4)
    local, spread = (open_experiment(plan, tmp_path / name, "cpu", 1) for name in ("local", "cluster"))
    for experiment in (local, spread):
        execute.write_plan(experiment)
    carry_out(local, here)
    killed = []

    def kill_a_worker() -> None:
        while not killed:
            time.sleep(0.02)
            for process in psutil.process_iter(["cmdline"]) if len(spread.rows) >= 4 else ():
                if not killed and any("ray::train_run" in word for word in process.info["cmdline"] or ()):
                    process.kill()
                    killed.append(process.pid)

    threading.Thread(target=kill_a_worker, daemon=True).start()
    spread.workers = execute.Workers(*cluster.join(ray_address))
    execute.execute(spread)
    assert killed and not [row for row in spread.rows if row.status == "failed"]
    same = {"seconds": 0, "all_seconds": 0, "workers": 0}  # apart from these, the rows are equal
    ours, theirs = ({(r.arm, r.seed): dataclasses.replace(r, **same) for r in e.rows} for e in (spread, local))
    assert ours == theirs and len(ours) == 12


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
