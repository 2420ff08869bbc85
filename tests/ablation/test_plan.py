"""Plans: arms, runs, rates, and what they refuse."""

import dataclasses
import subprocess
import sys

import pytest

from ablation.plan import PLANS, Plan, arms_of, baseline_of, final_runs, load_plan, rate_runs, settings_of
from errors import UserError


def test_every_combination_is_an_arm_whose_label_names_what_differs():
    plan = Plan(arms=("rms", "layer"), positions=("pre", "post"), epsilons=(1e-5,))
    assert [arm.label for arm in arms_of(plan)] == ["rms, pre", "rms, post", "layer, pre", "layer, post"]
    assert [arm.label for arm in arms_of(Plan(arms=("rms",), gates=("swiglu", "relu")))] == ["swiglu", "relu"]
    assert [arm.label for arm in arms_of(Plan(arms=("rms",)))] == ["rms"]
    eps = Plan(arms=("rms",), dtypes=("float32", "bfloat16"), epsilons=(1e-5, 1e-8))
    assert [arm.label for arm in arms_of(eps)][1:3] == ["float32, eps 1e-08", "bfloat16, eps 1e-05"]


def test_initial_weights_can_be_scaled():
    plan = Plan(arms=("rms",), initializations=(1.0, 4.0), seeds=2)
    assert [arm.label for arm in arms_of(plan)] == ["start x 1", "start x 4"]
    small, large = (
        settings_of(plan, run).model for run in final_runs(plan, {a.label: 1e-3 for a in arms_of(plan)})[:2]
    )
    assert large.initializer_range == 4 * small.initializer_range
    assert dataclasses.replace(large, initializer_range=small.initializer_range) == small


def test_each_arm_is_compared_with_layernorm_in_its_surroundings_or_with_swiglu():
    arms = arms_of(Plan(arms=("rms", "layer", "none"), positions=("pre", "post")))
    found = {arm.label: baseline_of(arm, arms) for arm in arms}
    assert {label: base and base.label for label, base in found.items()} == {
        "rms, pre": "layer, pre",
        "rms, post": "layer, post",
        "layer, pre": None,
        "layer, post": None,
        "none, pre": "layer, pre",
        "none, post": "layer, post",
    }
    arms = arms_of(Plan(arms=("rms",), gates=("swiglu", "relu")))
    assert [baseline_of(arm, arms) for arm in arms] == [None, arms[0]]
    arms = arms_of(Plan(arms=("rms", "none")))
    assert [baseline_of(arm, arms) for arm in arms] == [None, arms[0]]
    arms = arms_of(Plan(arms=("rms",), positions=("pre", "post"), epsilons=(1e-5, 1e-6)))
    assert [base and base.label for base in (baseline_of(arm, arms) for arm in arms)] == [
        *(None, None, "pre, eps 1e-05", "pre, eps 1e-06")
    ]
    assert baseline_of(arms_of(Plan(arms=("rms",)))[0], arms_of(Plan(arms=("rms",)))) is None


def test_within_a_seed_runs_differ_by_their_arm_alone_and_rates_are_chosen_on_other_seeds():
    plan = Plan(arms=("rms", "layer"), seeds=3, learning_rates=(1e-3, 2e-3), steps=50)
    rate, final = rate_runs(plan), final_runs(plan, {"rms": 1e-3, "layer": 2e-3})
    assert len(rate) == 4 and len(final) == 6
    assert not {run.seed for run in rate} & {run.seed for run in final}
    ours, theirs = (settings_of(plan, dataclasses.replace(run, learning_rate=1e-3)) for run in final[:2])
    assert final[0].seed == final[1].seed
    assert dataclasses.replace(theirs, model=ours.model) == ours
    assert dataclasses.replace(theirs.model, norm="rms") == ours.model
    assert ours.optimizer.max_minutes is None and ours.optimizer.steps == 50
    assert len({run.key for run in [*rate, *final]}) == 10


def test_an_arm_that_diverged_at_every_rate_has_no_final_runs():
    plan = Plan(arms=("rms", "none"), seeds=2)
    assert {run.arm.norm for run in final_runs(plan, {"rms": 1e-3})} == {"rms"}


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_plan_that_comes_with_the_project_can_be_read(path):
    plan = load_plan(path.stem)
    assert plan.name == path.stem and arms_of(plan)
    for run in rate_runs(plan)[:1] + final_runs(plan, {arm.label: 1e-3 for arm in arms_of(plan)}):
        assert settings_of(plan, run).model.norm == run.arm.norm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": ()}, "--arms needs at least one value"),
        ({"arms": ("rms", "rms")}, "each once"),
        ({"seeds": 1}, "--seeds is 1 and must be at least 2"),
        ({"rate_seeds": 0}, "--rate-seeds is 0"),
        ({"bound": 0.0}, "--bound is 0.0"),
        ({"bound": float("inf")}, "--bound is inf"),
        ({"steps": 0}, "--steps is 0"),
        ({"learning_rates": (1e-3, -1.0)}, "must be greater than 0"),
        ({"learning_rates": (1e-3, 1e-3)}, "each given once"),
        ({"arms": ("rms",), "switch": True}, "add layer to --arms"),
    ],
)
def test_a_plan_that_cannot_work_is_one_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        Plan(**changes)


def test_an_unknown_plan_or_key_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="Did you mean gates"):
        load_plan("gate")
    (tmp_path / "plan.toml").write_text("seed = 3\n", encoding="utf-8")
    with pytest.raises(UserError, match="unknown key seed"):
        load_plan(str(tmp_path / "plan.toml"))
    (tmp_path / "plan.toml").write_text("seeds = [\n", encoding="utf-8")
    with pytest.raises(UserError, match="not a readable TOML file"):
        load_plan(str(tmp_path / "plan.toml"))


def test_plans_import_no_torch():
    script = "import sys; import ablation.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
