"""Plans: arms, baselines, runs, what they refuse, files and the command line."""

import dataclasses
import subprocess
import sys

import pytest

from ablation import command
from ablation.plan import (
    PLANS,
    Arm,
    Plan,
    Run,
    arm_settings,
    baseline,
    default_learning_rate,
    final_runs,
    label,
    load_plan,
    pilot_runs,
    run_settings,
    save_plan,
    sweep_runs,
)
from errors import UserError
from model.config import NORMS


def labels(plan: Plan) -> list[str]:
    return [label(plan, arm) for arm in plan.arms]


def test_every_combination_is_an_arm_whose_label_names_what_differs():
    plan = Plan(norms=("rms", "layer"), placements=("pre", "post"), eps=(1e-6,))
    assert plan.arms[1] == Arm("rms", "post", "swiglu", "auto", 1e-6, 1.0)
    assert labels(plan) == ["rms, pre", "rms, post", "layer, pre", "layer, post"]
    assert labels(Plan(norms=("rms",), mlps=("swiglu", "relu"))) == ["swiglu", "relu"]
    assert labels(Plan(norms=("rms",))) == ["rms"]
    precision = Plan(norms=("rms",), dtypes=("float32", "bfloat16"), eps=(1e-5, 1e-8))
    assert labels(precision)[1:3] == ["float32, eps 1e-08", "bfloat16, eps 1e-05"]
    assert labels(Plan(norms=("rms",), init_scales=(0.25, 1.0))) == ["initial weights x 0.25", "initial weights x 1"]


FACTORIAL = {"norms": ("rms", "layer"), "norm_biases": (False, True)}


def test_a_norm_is_named_with_its_bias_where_that_is_not_its_default():
    assert labels(Plan(**FACTORIAL)) == ["rms", "rms with bias", "layer without bias", "layer"]
    assert labels(Plan(norms=("rms", "layer"), norm_biases=(True,))) == ["rms with bias", "layer"]
    assert labels(Plan(norms=("rms",), norm_biases=(True,))) == ["rms with bias"]
    assert labels(Plan(norms=("none", "dyt"), norm_biases=(False, True))) == ["none", "dyt without bias", "dyt"]
    assert labels(Plan(norms=("rms",), qk_norms=(False, True))) == ["no qk norm", "qk norm"]
    assert labels(Plan(**FACTORIAL, qk_norms=(True,), eps=(1e-5, 1e-6)))[0] == "rms, eps 1e-05"


def test_the_default_asked_for_is_the_default_and_an_arm_as_it_was_before():
    assert Plan(**FACTORIAL).arms[0] == Arm("rms", "pre", "swiglu", "auto", 1e-5, 1.0) == Plan().arms[0]
    assert set(Plan().arms) < set(Plan(**FACTORIAL).arms)
    assert Run(Plan().arms[0], "final", 1, 1e-3).folder_name == "rms-pre-swiglu-auto-1e-05-1.0-final-0.001-1"
    both = Plan(**FACTORIAL, qk_norms=(False, True))
    runs = final_runs(both, dict.fromkeys(both.arms, 1e-3), 5)
    assert len({run.folder_name for run in runs}) == len({run_settings(both, run) for run in runs}) == 8 * 5


def baselines(plan: Plan) -> dict[str, str | None]:
    found = {label(plan, arm): baseline(plan, arm) for arm in plan.arms}
    return {name: arm and label(plan, arm) for name, arm in found.items()}


def test_each_arm_is_compared_with_layernorm_in_its_surroundings_else_with_swiglu_or_the_first_value():
    assert baselines(Plan(norms=("rms", "layer", "none"), placements=("pre", "post"))) == {
        "rms, pre": "layer, pre",
        "rms, post": "layer, post",
        "layer, pre": None,
        "layer, post": None,
        "none, pre": "layer, pre",
        "none, post": "layer, post",
    }
    assert baselines(Plan(norms=("rms",), mlps=("relu", "swiglu"))) == {"relu": "swiglu", "swiglu": None}
    assert baselines(Plan(norms=("rms", "none"))) == {"rms": None, "none": "rms"}
    assert baselines(Plan(norms=("rms",), mlps=("geglu", "relu"))) == {"geglu": None, "relu": "geglu"}
    assert baselines(Plan(norms=("rms",), placements=("post", "pre"), eps=(1e-5, 1e-6))) == {
        "post, eps 1e-05": None,
        "post, eps 1e-06": None,
        "pre, eps 1e-05": "post, eps 1e-05",
        "pre, eps 1e-06": "post, eps 1e-06",
    }
    assert baselines(Plan(norms=("rms",), dtypes=("float32", "bfloat16"))) == {"float32": None, "bfloat16": "float32"}
    assert baselines(Plan(norms=("rms",))) == {"rms": None}
    factorial = {"rms": "layer", "rms with bias": "layer", "layer without bias": "layer", "layer": None}
    assert baselines(Plan(**FACTORIAL)) == factorial
    assert baselines(Plan(norms=("rms",), norm_biases=(False, True))) == {"rms": None, "rms with bias": "rms"}
    assert baselines(Plan(norms=("rms", "layer"), norm_biases=(False,))) == {
        "rms": "layer without bias",
        "layer without bias": None,
    }
    assert baselines(Plan(norms=("rms",), qk_norms=(True, False))) == {"qk norm": None, "no qk norm": "qk norm"}


def test_within_a_seed_runs_differ_by_their_arm_alone():
    plan = Plan(norms=("rms", "layer"), seeds=3, learning_rates=(1e-3, 2e-3), steps=50)
    rms, layer = (run_settings(plan, run) for run in final_runs(plan, dict.fromkeys(plan.arms, 1e-3), 3)[:2])
    assert dataclasses.replace(layer, model=rms.model) == rms and rms.run.seed == 1
    assert dataclasses.replace(layer.model, norm="rms") == rms.model
    assert rms.optimizer.steps == 50 and rms.optimizer.warmup_steps == 5
    assert rms.run.evaluate_every == 50 // 12


def test_learning_rates_are_chosen_on_seeds_that_the_final_runs_do_not_use():
    plan = Plan(norms=("rms", "layer"), seeds=3, sweep_seeds=2, learning_rates=(2e-3, 1e-3))
    rms, layer = plan.arms
    sweep, final = sweep_runs(plan, [1e-3, 2e-3]), final_runs(plan, {rms: 1e-3, layer: 2e-3}, 3)
    assert [(run.seed, run.arm, run.learning_rate) for run in sweep] == [
        (seed, arm, rate) for seed in (1001, 1002) for arm in (rms, layer) for rate in (1e-3, 2e-3)
    ]
    assert [(run.seed, run.arm, run.learning_rate) for run in final] == [
        (seed, arm, rate) for seed in (1, 2, 3) for arm, rate in ((rms, 1e-3), (layer, 2e-3))
    ]
    assert {run.phase for run in sweep} == {"sweep"} and {run.phase for run in final} == {"final"}
    assert len({run.folder_name for run in [*sweep, *final]}) == 14
    assert (
        run_settings(plan, final[1]).optimizer.learning_rate == 2e-3 and run_settings(plan, sweep[-1]).run.seed == 1002
    )


def test_final_runs_begin_at_a_seed_of_the_plan_that_is_none_of_a_sweep():
    plan = Plan(seeds=3, first_seed=3001)
    assert [run.seed for run in final_runs(plan, {plan.arms[0]: 1e-3}, 3)] == [3001, 3002, 3003]
    assert Plan(seeds=2, first_seed=999, sweep_seeds=2).final_seeds == range(999, 1001)
    assert Plan(seeds=2, first_seed=1003, sweep_seeds=2).final_seeds == range(1003, 1005)
    for first in (998, 1000, 1001, 1002):
        with pytest.raises(UserError, match=r"are those of a sweep, not of final runs; change --first-seed"):
            Plan(seeds=4, first_seed=first, sweep_seeds=2)


def test_an_arm_without_a_learning_rate_has_no_final_runs_and_one_learning_rate_needs_no_sweep():
    plan = Plan(norms=("rms", "none"), seeds=2)
    assert {run.arm.norm for run in final_runs(plan, {plan.arms[0]: 1e-3}, 2)} == {"rms"}
    staged = dataclasses.replace(plan, seeds=None, pilot_seeds=3)
    assert [run.seed for run in pilot_runs(staged, {plan.arms[0]: 1e-3})] == [2001, 2002, 2003]
    assert pilot_runs(plan, dict.fromkeys(plan.arms, 1e-3)) == []
    one = Plan(learning_rates=(7e-4,))
    assert not one.has_sweep and sweep_runs(one, [7e-4]) == [] and default_learning_rate(one) == 7e-4
    assert sweep_runs(Plan(), [1e-3]) == [] and default_learning_rate(Plan()) == 5e-4  # of configs/ablation.toml


def test_every_choice_of_an_arm_reaches_the_model():
    plan = Plan(
        norms=("layer",),
        placements=("post",),
        mlps=("relu",),
        dtypes=("float32",),
        eps=(1e-8,),
        init_scales=(4.0,),
        norm_biases=(False,),
        qk_norms=(True,),
    )
    settings, usual = (arm_settings(of, of.arms[0]) for of in (plan, Plan(norms=("layer",))))
    model = settings.model
    assert (model.norm, model.norm_placement, model.mlp, model.norm_eps) == ("layer", "post", "relu", 1e-8)
    assert model.initializer_range == 4 * usual.model.initializer_range and settings.machine.dtype == "float32"
    assert (model.has_norm_bias, model.qk_norm) == (False, True)
    assert (usual.model.has_norm_bias, usual.model.qk_norm) == (True, False)
    assert Plan(norms=tuple(NORMS)).arms[-1].norm == list(NORMS)[-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norms": ()}, "--norms needs one or more different values"),
        ({"seeds": 1}, "--seeds is 1 and must be at least 2"),
        ({"seeds": 2**70}, "--seeds is 1180591620717411303424 and must be at most 10,000"),
        ({"pilot_seeds": 2}, "--pilot-seeds is 2 and must be at least 3"),
        ({"hours": 0.0}, "--hours is 0.0 and must be a finite number greater than 0"),
        ({"first_seed": 1900}, "are those of a pilot, not of final runs; change --first-seed"),
        ({"margin": float("nan")}, "--margin is nan"),
        ({"learning_rates": (1e-3, 1e-3)}, "different numbers greater than 0"),
        ({"norms": ("rms",), "convert": True}, "add layer to --norms"),
        ({"convert": True, "norm_biases": (True,)}, "leave out --norm-biases"),
    ],
)
def test_a_plan_that_cannot_work_is_a_one_line_error(changes, words):
    with pytest.raises(UserError, match=words):
        Plan(**changes)


FILES = sorted(PLANS.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_plan_of_the_project_reads_back_as_it_was_saved(path, tmp_path):
    plan = load_plan(path.stem)
    assert plan.name == path.stem and plan == load_plan(str(path))
    save_plan(plan, tmp_path / "plan.toml")
    assert load_plan(str(tmp_path / "plan.toml")) == plan
    for run in sweep_runs(plan, [1e-3])[:1] + final_runs(plan, dict.fromkeys(plan.arms, 1e-3), 2):
        assert run_settings(plan, run).model.norm == run.arm.norm


def test_there_are_plans_and_a_changed_one_reads_back_too(tmp_path):
    assert len(FILES) >= 6
    plan = Plan(name="my plan-2.0", learning_rates=(1 / 3, 1e-9), steps=7, convert=True, timing=False, margin=0.1 + 0.2)
    plans = [plan, Plan(**FACTORIAL, qk_norms=(True, False), first_seed=5)]
    for plan in plans:
        save_plan(plan, tmp_path / "plan.toml")
        assert load_plan(str(tmp_path / "plan.toml")) == plan


def test_an_unknown_plan_or_key_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="Did you mean placement"):
        load_plan("placements")
    path = tmp_path / "plan.toml"
    for text, words in {
        "seed = 3\n": "unknown key seed.*Did you mean seeds",
        "seeds = [\n": "cannot be read",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            load_plan(str(path))


def test_flags_override_the_plan_that_the_command_line_names(capsys):
    plan = load_plan("mlp")
    assert command.parse(["mlp"]).plan == plan and command.parse([]).plan == Plan()
    changed = command.parse(["mlp", "--steps", "800", "--norms", "layer", "rms", "--no-timing", "--out", "there"])
    assert changed.plan == dataclasses.replace(plan, steps=800, norms=("layer", "rms"), timing=False)
    assert str(changed.out) == "there" and changed.jobs is None
    family = command.parse(["--seeds", "2", "family"])
    assert family.plan == dataclasses.replace(load_plan("family"), seeds=2)
    assert command.parse(["--seeds", "4"]).plan == Plan(seeds=4)
    with pytest.raises(SystemExit) as stopped:
        command.parse(["mlp", "--norm", "rms", "--nonsense"])
    assert stopped.value.code == 2 and "nonsense" in capsys.readouterr().err


def test_plans_import_no_torch():
    script = "import sys; import ablate, ablation.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
