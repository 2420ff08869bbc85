"""Records: what is appended is what is read, wherever a kill cuts it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from ablation.plan import Run, run_settings
from ablation.report import load_study
from ablation.results import CURVES, append_lines, as_table, read_results, read_timings
from ablation.run import settings_hash
from benchmarks.timing import Timing
from errors import UserError
from model.config import NORMS


@pytest.fixture
def results(study) -> list:
    """A completed run, one that diverged, and one with every optional field."""
    completed = next(r for r in study.results if r.status == "completed" and r.phase == "final")
    diverged = next(r for r in study.results if r.status == "diverged")
    converted = dataclasses.replace(completed, phase="conversion", variant="rms at once", loss_before=3.25)
    return [completed, diverged, converted]


def test_the_records_of_real_runs_read_back_as_they_were(experiment):
    assert read_results(experiment.folder / "runs.jsonl") == experiment.study.results
    assert len(experiment.study.results) == 33


def test_what_is_appended_is_what_is_read(results, tmp_path):
    path = tmp_path / "runs.jsonl"
    assert read_results(path) == []
    for number, result in enumerate(results, start=1):
        append_lines(path, result)
        assert read_results(path) == results[:number]
    assert results[1].validation_loss is None and results[1].probes is None and results[0].validation_curve
    timing = Timing(7, "eager", "step", "rms", [0.25, 1 / 3], 1024)
    append_lines(tmp_path / "timings.jsonl", timing)
    assert read_timings(tmp_path / "timings.jsonl") == [timing]


def test_a_line_cut_at_any_byte_is_ignored_and_overwritten_by_the_next(results, tmp_path):
    curves = {name: [(1, 2.5)] for name in CURVES} | {"validation_blocks": [2.5]}
    short = [dataclasses.replace(result, **curves) for result in results]
    path = tmp_path / "runs.jsonl"
    append_lines(path, short[0])
    start = path.stat().st_size
    append_lines(path, short[1])
    complete = path.read_bytes()
    for end in range(start, len(complete)):
        path.write_bytes(complete[:end])
        assert read_results(path) == short[:1]
        if end % 40 == 0 or end > len(complete) - 3 or end < start + 3:
            append_lines(path, short[2])
            assert read_results(path) == [short[0], short[2]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2],
        lambda line: b"[1]",
        lambda line: line.replace(b'"seed"', b'"sead"'),
    ],
)
def test_a_damaged_line_in_the_middle_is_a_one_line_error_that_names_it(results, tmp_path, damage):
    path = tmp_path / "runs.jsonl"
    for result in results:
        append_lines(path, result)
    first, second, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, damage(second), third, b""]))
    with pytest.raises(UserError) as error:
        read_results(path)
    assert str(error.value).startswith(f"line 2 of {path} cannot be read") and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_does_not_have_is_refused_and_nothing_is_written(results, tmp_path, value):
    path = tmp_path / "runs.jsonl"
    append_lines(path, results[0])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        append_lines(path, dataclasses.replace(results[0], seconds=value))
    with pytest.raises(ValueError, match="a completed run has finite losses"):
        dataclasses.replace(results[0], validation_loss=value)
    assert path.read_bytes() == before and len(json.loads(before)) == len(dataclasses.fields(results[0]))


def test_a_table_has_a_row_for_each_run_and_nan_for_what_a_diverged_run_lacks(results):
    table = as_table(results)
    assert table.result.tolist() == results and table.arm.tolist() == [r.arm for r in results]
    assert table.validation_loss.isna().tolist() == [False, True, False]
    assert table.loss_before.tolist()[2] == 3.25 and math.isnan(table.loss_before[0])
    assert table.seed.tolist() == [r.seed for r in results] and table.learning_rate.dtype == float
    assert as_table([]).empty and "validation_loss" in as_table([]).columns


def test_runs_that_differ_in_one_choice_have_different_keys(results):
    run = results[0]
    others = [
        dataclasses.replace(run, seed=run.seed + 1),
        dataclasses.replace(run, learning_rate=run.learning_rate * 2),
        dataclasses.replace(run, phase="sweep"),
        dataclasses.replace(run, variant="rms at once"),
        dataclasses.replace(run, arm=dataclasses.replace(run.arm, norm="l2")),
        dataclasses.replace(run, arm=dataclasses.replace(run.arm, norm_bias=not NORMS[run.arm.norm][1:])),
        dataclasses.replace(run, arm=dataclasses.replace(run.arm, qk_norm=True)),
    ]
    assert len({result.key for result in [run, *others]}) == 8
    assert dataclasses.replace(run, validation_loss=1.0).key == run.key


FOLDERS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("ablation-*"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_records_of_earlier_versions_are_of_the_same_runs_and_have_the_same_effects(folder):
    study = load_study(folder)
    for arm in study.plan.arms:
        result = next(r for r in study.results if r.arm == arm and r.phase != "conversion")
        run = Run(arm, result.phase, result.seed, result.learning_rate)
        assert result.settings_hash == settings_hash(run_settings(study.plan, run))
    assert study.table[study.table.phase == "conversion"].used.all()
    written = json.loads((folder / "results.json").read_text(encoding="utf-8"))["arms"]
    assert [(arm.label, arm.loss and arm.loss.estimate, arm.completed) for arm in study.arms] == [
        (arm["label"], arm["loss"] and arm["loss"]["estimate"], arm["completed"]) for arm in written
    ]
