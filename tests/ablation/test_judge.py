"""A verdict on a change: the boundaries, how often it is wrong, and what it prints."""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ablation import execute, study
from ablation.judge import DEFAULT_PAIRS, judged, pairs_of_looks, repeated_interval
from ablation.plan import STUDIES, Plan
from errors import UserError

SIMULATED = 10_000
PLAN = Plan(arms={"default": {}, "qk_norm=true": {"qk_norm": True}}, learning_rates=(1e-3,), seeds=20, rerun_seeds=0)


def simulate(draw: Callable, most: int = DEFAULT_PAIRS) -> dict:
    """Shares of the verdicts, and the mean number of pairs, over many comparisons with differences from `draw`."""
    differences = draw((SIMULATED, most))
    verdict, pairs = np.zeros(SIMULATED), np.full(SIMULATED, most)
    for look, n in enumerate(pairs_of_looks(most), 1):
        low, high = repeated_interval(differences[:, :n], look)
        crossed = (verdict == 0) & ((high < 0) | (low > 0))
        verdict[crossed], pairs[crossed] = np.where(high < 0, -1, 1)[crossed], n
    return {"keep": (verdict < 0).mean(), "discard": (verdict > 0).mean(), "pairs": pairs.mean()}


@pytest.mark.parametrize("most", [10, 20])
def test_changes_that_do_nothing_are_kept_in_at_most_5_of_100_and_large_ones_nearly_always(most):
    generator = np.random.default_rng(most)
    for nothing in (lambda shape: generator.normal(0, 1, shape), lambda shape: generator.standard_t(3, shape)):
        shares = simulate(nothing, most)
        assert 0.015 < shares["keep"] < 0.035 > shares["discard"] > 0.015 and shares["pairs"] > 0.95 * most
    better = simulate(lambda shape: generator.normal(-2, 1, shape), most)
    assert better["keep"] > 0.99 and better["discard"] == 0 and better["pairs"] < 0.8 * most


@pytest.mark.slow
def test_on_recorded_differences_verdicts_are_as_often_right_and_wrong_as_the_documents_say():
    """Each simulated comparison draws from the differences of one of the committed ones, with their mean replaced."""
    folders = [path.parent for path in sorted(STUDIES.glob("*/runs.jsonl"))]
    recorded = [np.array(c.differences) for folder in folders for c in study.load(folder).comparisons]
    centered = [values - values.mean() for values in recorded if len(values) >= 5]
    assert len(centered) > 30

    def shares(deviations: float) -> tuple[float, float]:
        generator = np.random.default_rng(1)
        chosen = [centered[n] for n in generator.integers(len(centered), size=SIMULATED)]
        better = [values - deviations * values.std(ddof=1) for values in chosen]
        verdicts = simulate(lambda shape: np.stack([generator.choice(values, shape[1]) for values in better]))
        return verdicts["keep"], verdicts["discard"]

    assert shares(0) == pytest.approx((0.035, 0.049), abs=0.01)
    assert shares(0.5) == pytest.approx((0.61, 0.003), abs=0.01)
    assert shares(1) == pytest.approx((0.995, 0.001), abs=0.005)


def test_of_20_real_comparisons_of_an_arm_with_itself_one_is_kept_and_one_discarded():
    said, table = [], pd.read_csv(Path(__file__).with_name("arm_with_itself.csv"))
    for _, pairs in table.groupby("comparison"):
        differences = (pairs.loss_again - pairs.loss).to_numpy()
        ends = [repeated_interval(differences[pairs.look <= look], look) for look in pairs.look.unique()]
        verdicts = ["keep" if high < 0 else "discard" if low > 0 else "inconclusive" for low, high in ends]
        assert verdicts == pairs.verdict.dropna().tolist() and set(verdicts[:-1]) <= {"inconclusive"}
        said.append(verdicts[-1])
    assert Counter(said) == {"inconclusive": 18, "keep": 1, "discard": 1} and table.seed.is_unique


@pytest.fixture
def judged_with(row, start_of, config, tmp_path, capsys):
    """The lines of a verdict on a plan, with losses by run instead of training."""

    def verdict(loss, **fields) -> list[dict]:
        plan = dataclasses.replace(PLAN, config=str(config), **fields)
        experiment = execute.Experiment(plan, tmp_path, ["cpu"], "CPU", 1, [])
        start = start_of(lambda run, device: row(run, loss(run)))
        last = execute.judge(experiment, start)
        return [json.loads(line) for line in [*capsys.readouterr().out.splitlines(), last]]

    return verdict


@pytest.mark.parametrize(("shift", "word"), [(-0.1, "keep"), (0.1, "discard")])
def test_a_clear_difference_is_a_verdict_at_an_early_look_as_one_object(judged_with, tmp_path, shift, word):
    def loss(run):
        return 3 + (run.arm != "default") * (shift + 0.001 * math.sin(run.seed))

    *_, last = judged_with(loss)
    assert (last["verdict"], last["a"], last["b"], last["pairs"]) == (word, "default", "qk_norm=true", 4)
    assert last["difference"] == pytest.approx(shift, abs=0.001) and last["unit"] == "nats per token"
    assert last["interval"][0] < last["difference"] < last["interval"][1]
    assert last["learning_rates"] == {"default": 1e-3, "qk_norm=true": 1e-3}
    assert last["reason"] == "decided after 4 of at most 20 pairs"
    (comparison,) = study.load(tmp_path).comparisons
    assert comparison.effect.n == 4


def test_no_difference_and_used_up_hours_decide_nothing_and_a_change_that_diverges_is_discarded(judged_with):
    lines = judged_with(lambda run: 3 + (run.arm != "default") * math.sin(run.seed), seeds=12)
    assert [line["pairs"] for line in lines] == [2, 4, 7, 9, 12]
    assert {line["verdict"] for line in lines} == {"inconclusive"}
    reasons = [lines[i]["reason"] for i in (0, 1, -1)]
    assert [re.search(r"\d+", reason)[0] for reason in reasons] == ["2", "3", "12"] and "next look" in reasons[0]
    (short,) = judged_with(lambda run: 3.0 - (run.arm != "default"), hours=5 / 3600)
    assert short["verdict"] == "inconclusive" and "hours" in short["reason"]
    assert judged_with(lambda run: None if run.arm != "default" else 3.0)[-1]["verdict"] == "discard"


def test_a_change_whose_process_was_killed_is_not_discarded(judged_with):
    (last,) = judged_with(lambda run: 3.0 if run.arm == "default" else 1 / 0)
    assert last["verdict"] == "inconclusive" and "did not complete" in last["reason"]


def test_what_cannot_be_judged_is_refused():
    for fields in ({"seeds": 8}, {"arms": {"a": {}, "b": {"qk_norm": True}, "c": {"norm": "layer"}}}):
        with pytest.raises(UserError, match="judge needs two arms"):
            judged(dataclasses.replace(PLAN, **fields))
