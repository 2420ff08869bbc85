"""Plans: what the arms are and what they are compared with, their settings, seeds and learning rates."""

import dataclasses
import subprocess
import sys

import pytest

from ablation import command
from ablation.plan import COMPARISONS, Plan, load_plan, save_plan
from errors import UserError

GRID = {"norm": ["layer", "rms"], "qk_norm": [False, True]}


def test_a_grid_has_every_combination_and_compares_the_first_setting_at_equal_others():
    arms = Plan(vary=GRID).compared
    assert {arm.name: arm.baseline for arm in arms.values()} == {
        "layer, no qk_norm": None,
        "rms, no qk_norm": "layer, no qk_norm",
        "layer, qk_norm": None,
        "rms, qk_norm": "layer, qk_norm",
    }
    assert arms["rms, qk_norm"].settings == {"norm": "rms", "qk_norm": True}


def test_a_sweep_is_the_default_where_one_learning_rate_would_be_unfair():
    for setting, values in {"norm": ["layer", "rms"], "weight_decay": [0.1, 0.5]}.items():
        assert Plan(vary={setting: values}).rates == ()
    for setting, other in {"norm": "dyt", "norm_placement": "post", "mlp": "gelu", "optimizer": "muon"}.items():
        default = {"norm": "layer", "norm_placement": "pre", "mlp": "swiglu", "optimizer": "adamw"}[setting]
        plan = Plan(vary={setting: [default, other]})
        assert plan.rates == (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
        assert dataclasses.replace(plan, learning_rates=(1e-3,)).rates == ()
        assert dataclasses.replace(plan, learning_rates=(2e-3, 1e-3)).rates == (1e-3, 2e-3)


def test_seeds_of_sweep_pilot_and_final_runs_are_disjoint():
    seeds = Plan(vary=GRID).phase_seeds
    assert len({*seeds["sweep"], *seeds["pilot"], *seeds["final"]}) == sum(map(len, seeds.values()))
    assert len(seeds["pilot"]) == 8 and len(Plan(vary=GRID, seeds=4).phase_seeds["pilot"]) == 0
    for first in (1000, 2003):
        with pytest.raises(UserError, match="seeds of the sweep or the pilot"):
            Plan(vary=GRID, first_seed=first)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arms": {"a": {"norm": "rms"}}}, "a comparison needs two arms or more"),
        ({}, "a comparison needs two arms or more"),
        ({"vary": {"nrom": ["rms", "layer"]}}, "nrom is not a setting .* Did you mean norm?"),
        ({"vary": {"data.norm": ["rms", "layer"]}}, "data.norm is not a setting"),
        ({"vary": {"norm": ["rms", "lay"]}}, "norm=lay: Invalid enum value 'lay'. Did you mean layer?"),
        ({"vary": {"weight_decay": ["a", "0.1"]}}, "weight_decay=a: Expected `float`"),
        ({"vary": {"seed": [1, 2]}}, "seed is not a setting that arms can have"),
        ({"arms": {"a": {"norm": "rms"}, "b": {"norm": "rms", "norm_bias": False}}}, "a and b have the same settings"),
        ({"vary": GRID, "seeds": 1}, "--seeds is 1 and must be from 2"),
    ],
)
def test_a_plan_that_cannot_work_is_a_one_line_error(fields, words):
    with pytest.raises(UserError, match=words):
        assert Plan(**fields).compared


def test_every_plan_of_the_project_has_arms_and_reads_back_as_it_was_saved(tmp_path):
    for path in COMPARISONS.glob("*.toml"):
        plan = load_plan(path.stem)
        assert plan.name == path.stem and len(plan.compared) > 1
        save_plan(plan, tmp_path / "plan.toml")
        assert load_plan(str(tmp_path / "plan.toml")) == plan


def test_the_command_line_makes_plans():
    assert command.parse([]).plan == load_plan("norms")
    grid = command.parse(["--vary", "norm=layer,rms", "--vary", "attention_bias=true,false", "--seeds", "4"]).plan
    assert grid.vary == {"norm": ["layer", "rms"], "attention_bias": [True, False]} and grid.seeds == 4
    assert grid.name == "norm-layer-rms-attention_bias-true-false"
    pair = command.parse(["--a", "", "--b", "weight_decay=0.5 qk_norm=true", "--judge"]).plan
    assert pair.arms == {"default": {}, "weight_decay=0.5 qk_norm=true": {"weight_decay": 0.5, "qk_norm": True}}
    assert (pair.seeds, pair.rerun_seeds) == (20, 0)
    quick = command.parse(["placement", "--quick"]).plan
    assert (quick.seeds, quick.steps, quick.rates, quick.name) == (3, 300, (), "placement-quick")
    more = command.parse(["family", "--vary", "qk_norm=true,false", "--margin", "0.02"]).plan
    assert len(more.compared) == 24 and more.margin == 0.02 and more.seeds == 6
    for wrong in (["--a", "norm=rms"], ["--vary", "norm"], ["--a", "", "--b", ""], ["placment"]):
        with pytest.raises(UserError):
            command.parse(wrong)


def test_plans_and_studies_import_no_torch():
    code = "import sys, ablation.command, ablation.study; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
