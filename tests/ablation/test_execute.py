"""Which runs are made and kept: resuming, failures, other settings, texts and devices, and processes of their own."""

import dataclasses
import os
import signal
import threading
from concurrent.futures import Future

import pytest

from ablation import execute, study
from ablation.execute import Experiment, load_or_create, write_plan
from ablation.plan import Plan
from ablation.records import Row, append, read_lines
from errors import UserError

PLAN = Plan(vary={"norm": ["layer", "rms"]}, seeds=2, rerun_seeds=0, learning_rates=(2e-2,))


@pytest.fixture
def experiment(config, tmp_path, monkeypatch) -> Experiment:
    """Nothing is done yet. Rows that are made up have no hash of settings and come from "CPU", as this machine does."""
    monkeypatch.setattr(execute, "settings_hash", lambda settings: "")
    monkeypatch.setattr(execute, "hardware", lambda device: "CPU")
    found = load_or_create(dataclasses.replace(PLAN, config=str(config)), tmp_path / "out", "cpu", 2)
    write_plan(found)
    return found


def test_a_trained_comparison_has_a_row_for_each_run_and_is_never_repeated(trained):
    found = study.load(trained.folder)
    assert found.final_seeds and not trained.failed and {c.effect.n for c in found.comparisons} == {2}
    assert len(read_lines(trained.folder / "runs.jsonl", Row)) == len(found.rows) == len(found.wanted)
    again, made = load_or_create(trained.plan, trained.folder, "cpu", 1), []
    execute.execute(again, lambda run, device: made.append(run))
    assert not made


def test_a_comparison_killed_within_a_line_resumes_to_the_rows_of_an_uninterrupted_one(trained, here, tmp_path):
    path, whole = tmp_path / "runs.jsonl", trained.folder / "runs.jsonl"
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:100])
    resumed = load_or_create(trained.plan, tmp_path, "cpu", 1)
    execute.execute(resumed, here(resumed))
    found, wanted = ([dataclasses.replace(row, seconds=0) for row in read_lines(each, Row)] for each in (path, whole))
    assert found == wanted


def test_a_run_that_raises_is_a_failed_row_that_costs_no_other_and_is_tried_again(experiment, row, at_once):
    def raising(run, device):
        return row(run, 3.0 if (run.arm, run.seed) != ("rms", 1) else 1 / 0)

    execute.execute(experiment, at_once(raising))
    assert [(r.arm, r.seed, r.reason[:17]) for r in experiment.failed] == [("rms", 1, "ZeroDivisionError")]
    assert len(experiment.rows) == 4 and experiment.study.comparisons == []
    again = load_or_create(experiment.plan, experiment.folder, "cpu", 1)
    execute.execute(again, at_once(lambda run, device: row(run, 4.0)))
    finished = study.load(experiment.folder).rows
    assert [(r.arm, r.seed) for r in finished[finished.loss == 4].itertuples()] == [("rms", 1)] and len(finished) == 4


def test_each_device_is_used_by_one_run_at_a_time(experiment, row):
    experiment.workers = ["cuda:0", "cuda:1", "cuda:2"]
    experiment.plan = dataclasses.replace(experiment.plan, seeds=10)
    used, most = set(), []

    def start(run, device) -> Future:
        assert device not in used
        used.add(device)
        most.append(len(used))
        future = Future()

        def end() -> None:
            used.remove(device)
            future.set_result(row(run, 3.0))

        threading.Timer(0.01 * (run.seed % 3 + 1), end).start()
        return future

    execute.execute(experiment, start)
    assert len(experiment.rows) == 20 and max(most) == 3


def test_runs_with_other_settings_are_refused_and_changes_of_the_plan_written_down(trained, tmp_path):
    append(tmp_path / "runs.jsonl", *trained.rows)
    write_plan(load_or_create(trained.plan, tmp_path))
    with pytest.raises(UserError, match="had other settings"):
        load_or_create(dataclasses.replace(trained.plan, steps=5), tmp_path)
    write_plan(load_or_create(dataclasses.replace(trained.plan, margin=0.5), tmp_path))
    (change,) = read_lines(tmp_path / "changes.jsonl")
    assert change == {"field": "margin", "before": "0.005", "after": "0.5", "finished_runs": len(trained.rows)}


def test_a_run_on_another_text_or_device_has_failed(experiment, row, at_once):
    others = iter([{}, {}, {"text_hash": "two"}, {"device": "GPU"}])
    execute.execute(experiment, at_once(lambda run, device: row(run, 3.0, **{"text_hash": "one"} | next(others))))
    reasons = sorted(row.reason for row in experiment.failed)
    assert len(reasons) == 2 and "it ran on GPU" in reasons[0] and "the text has hash two" in reasons[1]


def test_unfinished_seeds_of_another_device_are_made_again_and_finished_ones_kept(experiment, row, at_once):
    wanted = experiment.study.wanted
    append(experiment.folder / "runs.jsonl", *(row(run, 3.0, device="GPU") for run in wanted[:3]))
    again = load_or_create(experiment.plan, experiment.folder, "cpu", 1)
    execute.execute(again, at_once(lambda run, device: row(run, 3.0)))
    devices = study.load(experiment.folder).rows.set_index(["seed", "arm"]).device.sort_index()
    assert devices.tolist() == ["GPU", "GPU", "CPU", "CPU"] and [c.effect.n for c in again.study.comparisons] == [2]


@pytest.mark.slow
def test_runs_in_processes_of_their_own_are_those_of_this_process_and_a_killed_one_costs_itself(
    config, here, tmp_path, monkeypatch
):
    plan = dataclasses.replace(PLAN, config=str(config))
    inside = load_or_create(plan, tmp_path / "inside", "cpu", 1)
    outside = load_or_create(plan, tmp_path / "outside", "cpu", 2)
    for experiment, start in ((inside, here(inside)), (outside, None)):
        write_plan(experiment)
        execute.execute(experiment, start)
    rows = [{(r.arm, r.seed): r.loss for r in each.rows} for each in (inside, outside)]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    killed = load_or_create(dataclasses.replace(plan, seeds=3), tmp_path / "outside", "cpu", 2)
    monkeypatch.setattr(execute, "train_run", kill_itself)
    execute.execute(killed)
    assert [row.reason for row in killed.failed] == ["its process was killed, perhaps for lack of memory"] * 2


def kill_itself(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
