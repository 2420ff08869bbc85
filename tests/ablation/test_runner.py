"""Plans that are carried out: nothing is trained twice, and nothing is mixed that cannot be compared.

The runs are trained in this process here; test_script.py has the processes.
"""

import dataclasses
import functools
import math
import signal
import statistics
import subprocess
import sys

import pytest
import torch

from ablation import runner
from ablation.analysis import Study
from ablation.plan import Plan, Run, load_plan, run_settings
from ablation.processes import run_in_processes
from ablation.results import Change, Machine, append_lines, read_changes, read_results, read_timings
from ablation.run import can_resume, initial_weights_hashes, on_device, perturb, train_run
from ablation.runner import execute, load_or_create, timed_entries
from benchmarks import training as step_benchmark
from benchmarks.timing import Timing
from benchmarks.training import PARTS
from errors import UserError
from training.loop import train_steps
from training.session import initial_model, no_log


@pytest.fixture
def plan(config) -> Plan:
    return Plan(seeds=2, noise_seeds=0, steps=2, evaluations=1, config=str(config), timing=False)


@pytest.fixture
def trained(one_process, monkeypatch, panels) -> list:
    """The runs that are trained from here on, as (norm, phase, seed, learning rate)."""
    found, train_run = [], runner.train_run

    def noting(run, *rest, **options):
        found.append((run.arm.norm, run.phase, run.seed, run.learning_rate))
        return train_run(run, *rest, **options)

    monkeypatch.setattr(runner, "train_run", noting)
    return found


def stop_at_five(session):
    """The steps of a session, with Ctrl-C in the fifth."""
    for step in train_steps(session):
        if step.step == 5:
            signal.raise_signal(signal.SIGINT)
        yield step


def start(plan: Plan, folder) -> runner.Experiment:
    return load_or_create(plan, folder, "cpu", None)


def test_finished_runs_are_never_repeated_and_more_seeds_add_only_theirs(plan, tmp_path, trained):
    assert execute(start(plan, tmp_path)) and len(trained) == 4
    records = (tmp_path / "runs.jsonl").read_bytes()
    assert execute(start(plan, tmp_path)) and len(trained) == 4
    assert (tmp_path / "runs.jsonl").read_bytes() == records
    assert execute(start(dataclasses.replace(plan, seeds=3), tmp_path))
    assert trained[4:] == [("rms", "final", 3, 5e-3), ("layer", "final", 3, 5e-3)]
    assert load_plan(str(tmp_path / "plan.toml")).seeds == 3
    assert read_results(tmp_path / "runs.jsonl") == start(dataclasses.replace(plan, seeds=3), tmp_path).study.results
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "report.md", "results.json"}
    assert list((tmp_path / "runs").iterdir()) == []  # the state of a finished run is not needed


def test_the_sweep_comes_first_and_its_best_learning_rates_are_used(plan, tmp_path, trained):
    swept = dataclasses.replace(plan, learning_rates=(1e-3, 2e-2, 5.0), sweep_seeds=1, norms=("rms",))
    experiment = start(swept, tmp_path)
    assert execute(experiment)
    best = experiment.study.sweeps[0].best
    assert trained[:3] == [("rms", "sweep", 1001, rate) for rate in (1e-3, 2e-2, 5.0)] and best == 2e-2
    assert trained[3:] == [("rms", "final", 1, best), ("rms", "final", 2, best)]


def test_a_stop_keeps_what_is_finished_and_the_same_plan_continues(plan, tmp_path, trained, monkeypatch):
    train_run, stops = runner.train_run, [3]

    def stopping(*arguments, **options):
        if len(trained) + 1 in stops:
            stops.clear()
            return None
        return train_run(*arguments, **options)

    monkeypatch.setattr(runner, "train_run", stopping)
    assert not execute(start(plan, tmp_path))
    before = read_results(tmp_path / "runs.jsonl")
    assert len(before) == 2 and (tmp_path / "report.md").is_file()
    assert execute(start(plan, tmp_path))
    assert read_results(tmp_path / "runs.jsonl")[:2] == before and len(trained) == 4


@pytest.mark.parametrize(("name", "value"), [("margin", 0.5), ("steps", 3), ("evaluations", 2), ("config", "ablation")])
def test_another_margin_config_or_length_is_refused_once_there_are_results(plan, tmp_path, trained, name, value):
    experiment = start(plan, tmp_path)
    execute(dataclasses.replace(experiment, plan=plan, study=Study(plan, [], [])))
    with pytest.raises(UserError) as error:
        start(dataclasses.replace(plan, **{name: value}), tmp_path)
    assert f"different settings ({name})" in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "runs.jsonl").unlink()
    start(dataclasses.replace(plan, **{name: value}), tmp_path)  # nothing is there that it could not be compared with


@pytest.fixture
def finished(experiment, tmp_path):
    """Write the records of the trained comparison, with changed fields, into a folder of its own."""

    def write(**fields):
        runner.save_plan(experiment.plan, tmp_path / "plan.toml")
        for result in experiment.study.results:
            append_lines(tmp_path / "runs.jsonl", dataclasses.replace(result, **fields))
        return start(experiment.plan, tmp_path)

    return write


@pytest.mark.parametrize("field", ["processor", "torch", "kernels"])
def test_results_of_another_machine_are_refused(experiment, finished, field):
    machine = dataclasses.replace(experiment.study.results[0].machine, **{field: "another"})
    with pytest.raises(UserError, match=f"another machine .{field} another before, .* now"):
        finished(machine=machine)


def test_another_number_of_processes_is_no_other_machine(experiment, finished):
    machine = dataclasses.replace(experiment.study.results[0].machine, processes=17, threads=3)
    assert len(finished(machine=machine).study.results) == 33


def test_finished_runs_with_other_settings_are_refused(finished, trained):
    with pytest.raises(UserError, match=r"the finished run rms-.* had other settings; give another --out"):
        finished(settings_hash="0" * 32)
    assert trained == []


def test_runs_on_a_changed_text_are_refused(experiment, finished, trained):
    text = dataclasses.replace(experiment.study.results[0].text, hash="another")
    again = finished(text=text)
    more = dataclasses.replace(again.plan, seeds=4)
    with pytest.raises(UserError, match="the text has changed"):
        execute(dataclasses.replace(again, plan=more, study=Study(more, again.study.results, [])))
    assert len(read_results(again.folder / "runs.jsonl")) == 33


def test_conversions_are_done_once_and_again_for_a_run_that_replaces_theirs(plan, tmp_path, trained, monkeypatch):
    plan = dataclasses.replace(plan, convert=True, learning_rates=(1e-3, 2e-2), sweep_seeds=1, steps=8)
    converted, convert_norm = [], runner.convert_norm

    def noting(base, settings, checkpoint, folder, variant, *rest):
        converted.append((variant, base.seed, base.learning_rate))
        return convert_norm(base, settings, checkpoint, folder, variant, *rest)

    monkeypatch.setattr(runner, "convert_norm", noting)
    monkeypatch.setattr(runner, "VARIANTS", ("rms with bias at once", "rms, all trained"))
    for _ in range(2):
        assert execute(start(plan, tmp_path)) and len(converted) == 4
    changed = dataclasses.replace(plan, learning_rates=(1e-3,))
    assert execute(start(changed, tmp_path)) and [rate for _, _, rate in converted] == 4 * [2e-2] + 4 * [1e-3]
    study = start(changed, tmp_path).study
    assert study.table[study.table.phase == "conversion"].used.sum() == 4


def test_every_arm_is_timed_in_every_variant_by_five_processes(plan, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(step_benchmark, "why_not_compile", lambda device: "not in this test")
    monkeypatch.setattr(runner, "TIMING_BLOCKS", 2)
    ids = iter(range(100))
    time_together = runner.time_together
    monkeypatch.setattr(
        runner, "time_together", lambda *a: [dataclasses.replace(t, process=next(ids) // 5) for t in time_together(*a)]
    )
    timed = dataclasses.replace(plan, timing=True, norms=("rms",))
    assert "timing: about" in runner.describe(start(timed, tmp_path))
    assert execute(start(timed, tmp_path))
    timings = read_timings(tmp_path / "timings.jsonl")
    assert [(t.variant, t.part, t.arm) for t in timings] == 5 * [
        (variant, part, "rms") for variant in ("reference, eager", "CPU functions") for part in runner.PARTS
    ]
    assert all(len(t.seconds) == 2 for t in timings)
    again = start(timed, tmp_path)
    assert again.study.timings == timings and "timing: about" not in runner.describe(again)
    assert execute(again) and read_timings(tmp_path / "timings.jsonl") == timings


def test_a_record_that_stands_twice_counts_once(experiment, tmp_path):
    for result in [*experiment.study.results, *experiment.study.results]:
        append_lines(tmp_path / "runs.jsonl", result)
    assert read_results(tmp_path / "runs.jsonl") == experiment.study.results


def test_timings_that_lack_an_arm_are_made_again(experiment):
    labels = [experiment.study.label(arm) for arm in experiment.plan.arms]
    known = next(iter(timed_entries(experiment)))

    def timings(process: int, arms: list[str]) -> list[Timing]:
        return [Timing(process, known, part, arm, [1.0] * 6, None) for part in PARTS for arm in arms]

    def missing(found: list[Timing]) -> bool:
        study = Study(experiment.plan, experiment.study.results, found)
        return known in timed_entries(dataclasses.replace(experiment, study=study))

    four = [timing for process in range(4) for timing in timings(process, labels)]
    assert missing([]) and missing(four) and missing(four + timings(5, labels[:-1]))
    assert missing(four + timings(5, labels[:-1]) + timings(6, labels[-1:]))  # not in turns with the others
    assert not missing(four + timings(5, labels))


def test_a_save_with_other_settings_or_a_damaged_one_is_not_resumed(config, tmp_path, monkeypatch):
    plan = Plan(norms=("rms",), seeds=2, steps=12, config=str(config), timing=False)
    run = Run(plan.arms[0], "final", 1, 5e-3)
    settings, machine = run_settings(plan, run), Machine("cpu", "p", 1, 1, "t", "3", "s", "k", "float32")

    with monkeypatch.context() as patch:
        patch.setattr("ablation.run.train_steps", stop_at_five)
        assert train_run(run, settings, tmp_path / "run", machine, 1) is None
    assert can_resume(tmp_path / "run", settings)
    assert can_resume(tmp_path / "run", on_device(settings, "cpu"))
    longer = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, steps=24))
    assert not can_resume(tmp_path / "run", longer)
    (tmp_path / "run" / "last" / "state.json").write_text("")
    assert not can_resume(tmp_path / "run", settings)
    fresh = train_run(run, settings, tmp_path / "other", machine, 1)
    assert train_run(run, settings, tmp_path / "run", machine, 1).validation_loss == fresh.validation_loss


def test_what_other_tasks_finish_is_kept_when_one_fails():
    results = []
    slow = functools.partial(subprocess.run, [sys.executable, "-c", "import time; time.sleep(3)"])
    tasks = [load_plan, slow]  # with its device "cpu", the first looks for a plan of that name
    with pytest.raises(UserError, match="cpu is neither a file nor one of"):
        run_in_processes([-1, "cpu"], tasks, results.append)
    assert [result.returncode for result in results] == [0]


@pytest.fixture
def staged(plan) -> Plan:
    return dataclasses.replace(plan, seeds=None, pilot_seeds=3, noise_seeds=2, steps=12, margin=10.0)


def test_the_pilot_and_the_noise_come_first_and_fix_the_number_of_final_pairs(staged, tmp_path, trained, capsys):
    experiment = start(staged, tmp_path)
    announced = runner.describe(experiment)
    assert "6 of the pilot (3 pairs), 2 for the noise between equal runs; 0 done" in announced
    assert "the pilot fixes their number, at least 5 pairs, and 12 hours allow" in announced
    assert experiment.study.size is None and execute(experiment)
    pilot = [(norm, "pilot", seed, 5e-3) for seed in (2001, 2002, 2003) for norm in ("rms", "layer")]
    noise = [("layer", "noise", seed, 5e-3) for seed in (2001, 2002)]
    final = [(norm, "final", seed, 5e-3) for seed in range(1, 6) for norm in ("rms", "layer")]
    assert trained == [*pilot, *noise, *final]
    size = experiment.study.size
    assert (size.pairs, size.needed) == (5, 5) and "nats; 5 final pairs, " in capsys.readouterr().out
    losses = {(r.arm.norm, r.phase, r.seed): r.validation_loss for r in experiment.study.results}
    differences = [losses["rms", "pilot", seed] - losses["layer", "pilot", seed] for seed in (2001, 2002, 2003)]
    assert size.deviation == pytest.approx(statistics.stdev(differences))
    (found,) = experiment.study.comparisons
    assert found.loss.n == 5  # the final pairs alone are judged
    drift = [losses["layer", "noise", seed] - losses["layer", "pilot", seed] for seed in (2001, 2002)]
    assert found.noise.differences == pytest.approx(drift) and 0 < found.noise.deviation < 0.01
    assert found.noise.deviation == pytest.approx(math.sqrt(sum(d * d for d in drift) / 2))
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    pairs = " ".join(f"{difference:+.4f}" for difference in differences)
    assert f"| rms minus layer | {pairs} | {size.deviation:.4f} | " in report
    assert f"{found.noise.deviation:.4f} between equal runs (n = 2)" in report and "5 final pairs" in report


def test_no_final_pair_is_shown_before_all_are_there(staged, tmp_path, trained, monkeypatch):
    train_run = runner.train_run
    monkeypatch.setattr(runner, "train_run", lambda *a, **o: None if len(trained) == 15 else train_run(*a, **o))
    experiment = start(staged, tmp_path)
    assert not execute(experiment)  # one of the ten final runs is missing
    study = experiment.study
    assert len(study.results) == 17 - 2 and study.comparisons == [] and len(study.final(study.plan.arms[0])) == 0
    lines = runner.report.headline(study)
    assert {line["verdict"] for line in lines} == {"not finished"}
    assert "of 5 final runs; their losses count when all arms have all of theirs" in lines[0]["detail"]
    assert "90% interval" not in (tmp_path / "report.md").read_text(encoding="utf-8")  # of the final pairs
    monkeypatch.setattr(runner, "train_run", train_run)
    assert execute(start(staged, tmp_path)) and start(staged, tmp_path).study.comparisons[0].loss.n == 5


def test_final_pairs_are_as_many_as_fit_into_the_hours(staged, tmp_path, trained, capsys):
    tight = dataclasses.replace(staged, margin=1e-9, hours=1e-6)
    experiment = start(tight, tmp_path)
    assert execute(experiment) and {phase for _, phase, _, _ in trained} == {"pilot", "noise"}
    size = experiment.study.size
    assert size.pairs == 0 and size.needed == 10_000
    out = capsys.readouterr().out
    lines = runner.report.headline(experiment.study)
    assert [line["verdict"] for line in lines] == ["not measured"] * 2 and "would be needed" in lines[0]["detail"]
    assert "0 final pairs" in out and "all that fit into 1e-06 hours; over 10,000 would be needed (" in out
    more = dataclasses.replace(tight, hours=(4.5 * size.seconds_per_pair + spent(experiment)) / 3600)
    again = start(more, tmp_path)
    assert again.study.size.pairs == 4 and execute(again)
    with pytest.raises(UserError, match=r"different settings \(hours\)"):
        start(dataclasses.replace(more, hours=100.0), tmp_path)
    fixed = {"pilot_seeds": 4, "seeds": 9, "norms": ("rms", "layer", "none"), "first_seed": 5, "noise_seeds": 3}
    for name, value in fixed.items():
        with pytest.raises(UserError, match=rf"different settings \({name}\)"):
            start(dataclasses.replace(more, **{name: value}), tmp_path)
    start(dataclasses.replace(more, timing=True), tmp_path)


def spent(experiment) -> float:
    runs = [r for r in experiment.study.results if r.phase in ("pilot", "noise", "sweep")]
    return sum(r.seconds for r in runs) / experiment.jobs


def test_a_sweep_goes_on_beyond_its_edge_until_no_arm_is_best_there(plan, tmp_path, trained):
    swept = dataclasses.replace(plan, learning_rates=(2e-3, 4e-3), sweep_seeds=2, noise_seeds=1)
    experiment = start(swept, tmp_path)
    assert execute(experiment)
    study = experiment.study
    assert study.rates == [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2] and {sweep.best for sweep in study.sweeps} == {1.6e-2}
    tried = [rate for _, phase, _, rate in trained if phase == "sweep"]
    assert sorted(set(tried)) == study.rates and len(tried) == 4 * len(study.rates)
    noise = [rate for _, phase, _, rate in trained if phase == "noise"]
    assert sorted(noise) == study.rates
    assert [point.learning_rate for point in study.curve] == study.rates
    for point in study.curve:
        losses = {(r.arm.norm, r.phase, r.seed): r for r in study.results if r.learning_rate == point.learning_rate}
        seeds = (1001, 1002)
        rms, layer = ([losses[n, "sweep", seed].validation_loss for seed in seeds] for n in ("rms", "layer"))
        assert point.differences == pytest.approx([a - b for a, b in zip(rms, layer, strict=True)])
        assert point.noise.differences == pytest.approx([losses["layer", "noise", 1001].validation_loss - layer[0]])
    trained.clear()
    assert execute(start(swept, tmp_path)) and trained == []


def test_a_stop_within_an_extension_of_the_sweep_trains_nothing_else(plan, tmp_path, trained, monkeypatch):
    swept = dataclasses.replace(plan, learning_rates=(1e-4, 2e-4), sweep_seeds=1, norms=("rms",), steps=12)
    train_run = runner.train_run
    monkeypatch.setattr(runner, "train_run", lambda *a, **o: None if len(trained) == 2 else train_run(*a, **o))
    assert not execute(start(swept, tmp_path)) and {phase for _, phase, _, _ in trained} == {"sweep"}
    monkeypatch.setattr(runner, "train_run", train_run)
    assert execute(start(swept, tmp_path)) and trained[2] == ("rms", "sweep", 1001, 4e-4)


def test_a_comparison_whose_arms_all_diverge_in_the_sweep_ends_without_final_runs(staged, tmp_path, trained):
    wild = dataclasses.replace(staged, learning_rates=(1e30, 1e31), sweep_seeds=1)
    experiment = start(wild, tmp_path)
    assert "the pilot fixes their number" in runner.describe(experiment)  # before the sweep too
    assert execute(experiment) and {phase for _, phase, _, _ in trained} <= {"sweep", "noise"}
    assert {line["verdict"] for line in runner.report.headline(experiment.study)} == {"no learning rate"}


def test_without_a_pilot_and_a_sweep_the_noise_is_that_of_final_runs(plan, tmp_path, trained):
    experiment = start(dataclasses.replace(plan, noise_seeds=1), tmp_path)
    assert execute(experiment) and trained[-1] == ("layer", "noise", 1, 5e-3)
    losses = {(r.arm.norm, r.phase, r.seed): r.validation_loss for r in experiment.study.results}
    (found,) = experiment.study.comparisons
    assert found.noise.differences == pytest.approx([losses["layer", "noise", 1] - losses["layer", "final", 1]])
    assert found.loss.n == 2 and experiment.study.table.used.all()


def test_a_noise_run_that_was_stopped_is_not_perturbed_again(config, tmp_path, monkeypatch):
    plan = Plan(norms=("layer",), seeds=2, steps=12, dtypes=("float32",), config=str(config), timing=False)
    run = Run(plan.arms[0], "noise", 1, 5e-3)
    settings, machine = run_settings(plan, run), Machine("cpu", "p", 1, 1, "t", "3", "s", "k", "float32")

    whole = train_run(run, settings, tmp_path / "whole", machine, 1)
    with monkeypatch.context() as patch:
        patch.setattr("ablation.run.train_steps", stop_at_five)
        assert train_run(run, settings, tmp_path / "run", machine, 1) is None
    assert train_run(run, settings, tmp_path / "run", machine, 1).validation_loss == whole.validation_loss


def test_noise_runs_start_from_weights_that_differ_by_a_millionth(plan):
    settings = run_settings(plan, Run(plan.arms[1], "final", 1, 5e-3))
    before, after = (initial_model(settings, torch.float32, log=no_log) for _ in range(2))
    perturb(after, seed=1)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        ratio = (new / old)[old != 0] - 1
        if len(ratio):
            assert 0 < ratio.abs().max() < 1e-5 and not torch.equal(old, new), name
    weights = torch.cat([p.flatten() for p in before.parameters()])
    changed = torch.cat([p.flatten() for p in after.parameters()])
    ratio = (changed.double() / weights.double())[weights != 0] - 1
    assert ratio.std().item() == pytest.approx(1e-6, rel=0.02)
    hashes = [initial_weights_hashes(settings, Run(plan.arms[1], phase, 1, 5e-3)) for phase in ("final", "noise")]
    assert hashes[0]["initial_weights_hash"] == hashes[1]["initial_weights_hash"]
    assert hashes[0]["own_weights_hash"] != hashes[1]["own_weights_hash"]


def test_what_changes_in_a_plan_after_its_first_run_is_written_down_and_reported(plan, tmp_path, trained):
    assert execute(start(plan, tmp_path)) and not (tmp_path / "changes.jsonl").exists()
    assert execute(start(dataclasses.replace(plan, seeds=3), tmp_path))
    assert read_changes(tmp_path / "changes.jsonl") == [Change("seeds", 2, 3, 4)]
    assert "| seeds | 2 | 3 | 4 |" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert execute(start(dataclasses.replace(plan, seeds=3), tmp_path))
    assert len(read_changes(tmp_path / "changes.jsonl")) == 1
