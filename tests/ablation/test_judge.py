"""A verdict on a change: the boundaries, how often it is wrong, and what it prints."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import ablate
from ablation import execute, study
from ablation.judge import LOOKS, boundary, decide, pairs_of_looks
from ablation.plan import JUDGED_PAIRS, Plan
from errors import UserError
from tests.ablation import simulated

PLAN = Plan(arms={"default": {}, "qk_norm=true": {"qk_norm": True}}, learning_rates=(1e-3,), seeds=20, rerun_seeds=0)
ABOUT = {"baseline": "a", "idea": "b", "unit": ""}


def test_boundaries_are_those_of_jennison_and_turnbull_and_crossed_as_often_as_the_level_says():
    published = {0.1: [1.645, 1.678, 1.71, 1.733, 1.751], 0.05: [1.96, 1.977, 2.004, 2.024, 2.04]}
    for level, constants in published.items():
        assert [boundary(level, looks) for looks in range(1, 6)] == pytest.approx(constants, abs=6e-4)
    steps = np.random.default_rng(1).normal(size=(100_000, LOOKS))
    highest = np.abs(np.cumsum(steps, axis=1)).max(axis=1) / math.sqrt(LOOKS)  # |z| sqrt(k / LOOKS)
    for level in (0.05, 0.01, 0.002):
        assert (highest > boundary(level, LOOKS)).mean() == pytest.approx(level, abs=4 * math.sqrt(level / len(steps)))


def test_a_verdict_is_reached_where_p_is_at_most_the_level_and_the_interval_excludes_0():
    generator = np.random.default_rng(3)
    for level, look in itertools.product([0.05, 0.018, 0.001], [1, 2, 3, 4, 5] * 4):
        differences = generator.normal(generator.normal(0, 1), 1, 4 * look)
        result = decide(differences, pairs_of_looks(20), level, **ABOUT)
        low, high = result.interval
        word = "keep" if high < 0 else "discard" if low > 0 else "inconclusive"
        assert result.verdict == word and (word != "inconclusive") == (result.p <= level)


@pytest.mark.slow
def test_on_recorded_differences_verdicts_are_as_often_right_and_wrong_as_the_documents_say():
    def shares(deviations: float) -> tuple[float, float]:
        differences = simulated.recorded_comparisons(np.random.default_rng(1), (10_000, JUDGED_PAIRS)) - deviations
        said, _ = simulated.verdicts(differences, boundary(0.05, LOOKS))
        return (said > 0).mean(), (said < 0).mean()

    assert shares(0) == pytest.approx((0.040, 0.043), abs=0.001)
    assert shares(0.5) == pytest.approx((0.620, 0.002), abs=0.001)
    assert shares(1) == pytest.approx((0.994, 0.001), abs=0.001)


def test_of_20_real_comparisons_of_an_arm_with_itself_one_is_kept_and_one_discarded():
    said, table = [], pd.read_csv(Path(__file__).with_name("arm_with_itself.csv"))
    for _, pairs in table.groupby("comparison"):
        differences = (pairs.loss_again - pairs.loss).to_numpy()
        looks = pairs_of_looks(10)  # two pairs each, as recorded
        results = [decide(differences[: looks[look - 1]], looks, 0.05, **ABOUT) for look in pairs.look.unique()]
        verdicts = [result.verdict for result in results]
        assert verdicts == pairs.verdict.dropna().tolist() and set(verdicts[:-1]) <= {"inconclusive"}
        said.append(verdicts[-1])
    assert Counter(said) == {"inconclusive": 18, "keep": 1, "discard": 1} and table.seed.is_unique


@pytest.fixture
def judged_with(row, start_of, config, tmp_path, capsys, monkeypatch):
    """The lines of a verdict on a plan, with losses by run instead of training."""

    def judge(loss, **fields) -> list[dict]:
        plan = dataclasses.replace(PLAN, config=str(config), **fields)
        workers = execute.Workers("CPU", ["cpu"], 1, start_of(lambda run, device: row(run, loss(run))))
        monkeypatch.setattr(execute, "print_report", lambda *_: None)
        last = execute.judge(execute.Experiment(plan, tmp_path, workers, []), 0.05)
        return [*map(json.loads, [*capsys.readouterr().out.splitlines(), str(last)])]

    return judge


@pytest.mark.parametrize(("shift", "word"), [(-0.1, "keep"), (0.1, "discard")])
def test_a_clear_difference_is_a_verdict_at_an_early_look_as_one_object(judged_with, tmp_path, shift, word):
    def loss(run):
        return 3 + (run.arm != "default") * (shift + 0.001 * math.sin(run.seed))

    *_, last = judged_with(loss)
    assert (last["verdict"], last["baseline"], last["idea"], last["pairs"]) == (word, "default", "qk_norm=true", 4)
    assert last["difference"] == pytest.approx(shift, abs=0.001) and last["unit"] == "nats per token"
    assert last["interval"][0] < last["difference"] < last["interval"][1]
    assert last["learning_rates"] == {"default": 1e-3, "qk_norm=true": 1e-3}
    assert last["reason"] == "decided after 4 of at most 20 pairs"
    (comparison,) = study.load(tmp_path).comparisons
    assert comparison.effect.n == 4
    with pytest.raises(UserError, match="has a verdict after 4 pairs, and other looks at the same pairs would be no"):
        judged_with(loss, seeds=30)


def test_a_change_that_diverges_is_discarded_and_no_difference_used_up_hours_or_a_killed_run_decide_nothing(
    judged_with,
):
    lines = judged_with(lambda run: 3 + (run.arm != "default") * math.sin(run.seed), seeds=12)
    assert [line["pairs"] for line in lines] == [2, 4, 7, 9, 12]
    assert {line["verdict"] for line in lines} == {"inconclusive"}
    assert lines[0]["reason"] == "not decided after 2 of at most 12 pairs"
    (short,) = judged_with(lambda run: 3.0 - (run.arm != "default"), hours=3 / 3600, seeds=12)
    assert short["verdict"] == "inconclusive" and "hours" in short["reason"]
    assert judged_with(lambda run: None if run.arm != "default" else 3.0, seeds=12)[-1]["verdict"] == "discard"
    (last,) = judged_with(lambda run: 3.0 if run.arm == "default" else 1 / 0)
    assert last["verdict"] == "inconclusive" and "did not complete" in last["reason"]


def test_what_cannot_be_judged_is_refused(tmp_path):
    three = {"a": {}, "b": {"qk_norm": True}, "c": {"norm": "layer"}}
    nowhere = {"default": {}, "other": {"init_from": "runs/nowhere"}}
    refused = [({"seeds": 8}, "--seeds 10 or more, not 8"), ({"arms": three}, "two arms, .* are 3")]
    for fields, words in (*refused, ({"arms": nowhere}, "runs/nowhere does not exist")):
        with pytest.raises(UserError, match=words):
            ablate.judge_idea(ablate.JudgeFlags(plan=dataclasses.replace(PLAN, **fields), b="", out=tmp_path))
