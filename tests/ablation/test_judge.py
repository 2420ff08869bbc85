"""A verdict on a change: the boundaries, how often it is wrong, and what it prints."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ablation import execute, study
from ablation.judge import BOUNDARY, LOOKS, decide, judge, pairs_of_looks, repeated_interval
from ablation.plan import JUDGED_PAIRS, Plan
from errors import UserError

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
ARMS = {"default": {}, "qk_norm=true": {"qk_norm": True}}
PLAN = Plan(arms=ARMS, learning_rates=(1e-3,), seeds=20, rerun_seeds=0)


def simulate(draw: Callable, most: int = JUDGED_PAIRS, times: int = 10_000) -> dict:
    """Shares of the verdicts, and the mean number of pairs, over many comparisons with differences from `draw`."""
    differences = draw((times, most))
    verdict, pairs = np.zeros(times), np.full(times, most)
    for look, n in enumerate(pairs_of_looks(most), 1):
        low, high = repeated_interval(differences[:, :n], look)
        crossed = (verdict == 0) & ((high < 0) | (low > 0))
        verdict[crossed], pairs[crossed] = np.where(high < 0, -1, 1)[crossed], n
    return {"keep": (verdict < 0).mean(), "discard": (verdict > 0).mean(), "pairs": pairs.mean()}


def test_the_boundaries_spend_the_error_of_the_published_table():
    """Under a normal distribution of known variance five looks cross them on either side in 5% of cases."""
    sums = np.random.default_rng(1).standard_normal((400_000, LOOKS)).cumsum(1)
    z = np.abs(sums) / np.sqrt(np.arange(1, LOOKS + 1))
    crossed = (z > BOUNDARY * np.sqrt(LOOKS / np.arange(1, LOOKS + 1))).any(1).mean()
    assert crossed == pytest.approx(0.05, abs=0.0015)


def test_a_verdict_is_an_interval_that_excludes_0():
    base = np.array([0.9, 1.1, 1.0, 1.05, 0.95, 1.0, 0.9, 1.1])
    assert (decide(-base, 2), decide(base, 2), decide(base - 1, 2)) == ("keep", "discard", "inconclusive")
    assert decide(-base[:2], 1) == "inconclusive"  # two pairs are never enough at the first look
    assert pairs_of_looks(20) == [4, 8, 12, 16, 20] and pairs_of_looks(12) == [2, 4, 7, 9, 12]


@pytest.mark.parametrize("most", [10, 20])
def test_changes_that_do_nothing_are_kept_in_at_most_5_of_100_and_large_ones_nearly_always(most):
    generator = np.random.default_rng(most)
    for nothing in (lambda shape: generator.normal(0, 1, shape), lambda shape: generator.standard_t(3, shape)):
        found = simulate(nothing, most)
        assert max(found["keep"], found["discard"]) < 0.035 and found["pairs"] > 0.95 * most
    better = simulate(lambda shape: generator.normal(-2, 1, shape), most)
    assert better["keep"] > 0.99 and better["discard"] == 0 and better["pairs"] < 0.8 * most


@pytest.mark.slow
def test_on_recorded_differences_changes_that_do_nothing_are_kept_in_at_most_5_of_100():
    """Each simulated comparison draws from the centered differences of one of the committed ones."""
    folders = [path.parent for path in sorted(RESULTS.glob("ablation-*/runs.jsonl"))]
    recorded = [np.array(c.differences) for folder in folders for c in study.load(folder).comparisons]
    centered = [values - values.mean() for values in recorded if len(values) >= 5]
    assert len(centered) > 30
    generator = np.random.default_rng(1)

    def draw(shape: tuple[int, int]) -> np.ndarray:
        return np.stack(
            [generator.choice(centered[n], shape[1]) for n in generator.integers(len(centered), size=shape[0])]
        )

    found = simulate(draw)
    assert found["keep"] <= 0.05 and found["discard"] <= 0.055


def test_of_20_real_comparisons_of_an_arm_with_itself_one_is_kept_and_one_discarded():
    table = pd.read_csv(RESULTS / "judge-arm-with-itself.csv")
    said = []
    for _, pairs in table.assign(difference=table.loss_again - table.loss).groupby("comparison"):
        looks = [(look, pairs.difference[pairs.look <= look].to_numpy()) for look in pairs.look.unique()]
        verdicts = [decide(differences, look) for look, differences in looks]
        assert verdicts == pairs.verdict.dropna().tolist() and set(verdicts[:-1]) <= {"inconclusive"}
        said.append(verdicts[-1])
    assert Counter(said) == {"inconclusive": 18, "keep": 1, "discard": 1} and table.seed.is_unique


@pytest.fixture
def judged_with(row, config, tmp_path):
    """The lines of a verdict on a plan, with losses by run instead of training."""

    def verdict(loss, **fields) -> list[dict]:
        experiment = execute.Experiment(dataclasses.replace(PLAN, config=str(config), **fields), tmp_path, "cpu", 1)

        def run_all(experiment) -> None:
            while missing := experiment.study.missing(experiment.study.wanted):
                future = Future()
                future.set_result(row(missing[0], loss(missing[0]), device=experiment.hardware))
                experiment.add(missing[0], future)

        return [json.loads(line) for line in judge(experiment, run_all)]

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
    found = study.load(tmp_path)
    assert found.final_seeds and found.comparisons[0].effect.n == 4


def test_no_difference_is_inconclusive_after_all_looks(judged_with):
    lines = judged_with(lambda run: 3 + (run.arm != "default") * math.sin(run.seed), seeds=12)
    assert [line["pairs"] for line in lines] == [2, 4, 7, 9, 12]
    assert {line["verdict"] for line in lines} == {"inconclusive"} and lines[-1]["reason"] == "look 5 of 5"


def test_a_change_that_diverges_is_discarded(judged_with):
    assert judged_with(lambda run: None if run.arm != "default" else 3.0)[-1]["verdict"] == "discard"


def test_hours_that_are_used_up_decide_nothing(judged_with):
    lines = judged_with(lambda run: 3.0 - (run.arm != "default"), hours=5 / 3600)
    assert len(lines) == 1 and lines[0]["verdict"] == "inconclusive" and "hours" in lines[0]["reason"]


def test_what_cannot_be_judged_is_refused(judged_with, config):
    for fields in ({"seeds": 8}, {"arms": {"a": {}, "b": {"qk_norm": True}, "c": {"norm": "layer"}}}):
        with pytest.raises(UserError, match=r"--judge needs two arms .* at least 10"):
            judged_with(lambda run: 3.0, **fields)
