"""Plans: what the arms are and what they are compared with, their settings, seeds and learning rates."""

import dataclasses

import pytest

import ablate
from ablation.plan import STUDIES, Plan, find_plan, load_plan, save_plan
from checkpoints.pretrained import save_pretrained
from errors import UserError
from model.config import ModelConfig
from model.decoder import Decoder
from training.settings import parse

GRID = {"norm": ["layer", "rms"], "qk_norm": [False, True]}


def test_a_grid_has_every_combination_and_compares_the_first_setting_at_equal_others():
    arms = Plan(vary=GRID).all_arms
    baselines = {"rms, no qk_norm": "layer, no qk_norm", "rms, qk_norm": "layer, qk_norm"}
    expected = {"layer, no qk_norm": None, "layer, qk_norm": None} | baselines
    assert {name: arm.baseline for name, arm in arms.items()} == expected
    assert arms["rms, qk_norm"].changes == {"norm": "rms", "qk_norm": True}


def test_a_sweep_is_the_default_where_one_learning_rate_would_be_unfair():
    def rates(plan: Plan) -> tuple[float, ...]:
        (of_all_arms,) = {*plan.candidate_learning_rates.values()}
        return of_all_arms

    assert rates(Plan(vary={"norm": ["layer", "rms"]})) == rates(Plan(vary={"weight_decay": [0.1, 0.5]})) == (5e-4,)
    unfair = {"norm": ["rms", "dyt"], "norm_placement": ["pre", "post"], "mlp": ["swiglu", "gelu"]}
    for setting, values in (unfair | {"optimizer": ["adamw", "muon"]}).items():
        plan = Plan(vary={setting: values})
        assert rates(plan) == (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
        assert rates(dataclasses.replace(plan, learning_rates=(1e-3,))) == (1e-3,)
        assert rates(dataclasses.replace(plan, learning_rates=(2e-3, 1e-3))) == (1e-3, 2e-3)


def test_a_warm_up_shrinks_with_the_steps_of_a_plan_but_never_one_that_an_arm_asks_for():
    def warm_ups(**fields) -> list[int]:
        plan = Plan(**fields)
        return [arm.settings.optimizer.warmup_steps for arm in plan.all_arms.values()]

    assert warm_ups(vary={"warmup_steps": [20, 500]}, steps=30) == [20, 500]
    assert warm_ups(vary={"steps": [30, 2400]}) == [3, 60] and warm_ups(vary=GRID, steps=300) == [30] * 4


def test_an_arm_has_the_model_of_its_checkpoint_and_derived_settings_as_in_train_py(tmp_path):
    for norm in ("rms", "layer"):
        model = ModelConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, norm=norm)
        save_pretrained(Decoder(dataclasses.replace(model, num_key_value_heads=1, rope_theta=500.0)), tmp_path / norm)
    for changes in ({}, {"norm": ["rms"]}, {"sequence_length": [64]}):
        plan = Plan(config="tiny", vary={"init_from": [str(tmp_path / "rms"), str(tmp_path / "layer")]} | changes)
        for arm in plan.all_arms.values():
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in arm.changes.items()]
            expected = parse(["--config", "tiny", *flags], "").settings
            settings = arm.settings
            assert (settings.model, settings.data) == (expected.model, expected.data)
            assert settings.run.init_from == expected.run.init_from


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arms": {"a": {"norm": "rms"}, "b": {"norm": "rms", "norm_bias": False}}}, "a and b have the same settings"),
        ({"vary": {"norm": ["rms", "lay"]}}, "norm is 'lay': it must be one of rms, .* Did you mean layer?"),
        ({"vary": {"seed": [1, 2]}}, "seed is not a setting that arms can have. All arms have the same seeds: --seeds"),
        ({"vary": GRID, "seeds": 1}, "seeds is 1"),
        ({"vary": GRID, "margin": float("nan")}, "margin is nan"),
        ({"vary": {"lr": [1e-3, 2e-3]}}, "lr is not a setting that arms can have. Did you mean learning_rate?"),
        ({"vary": GRID, "first_seed": 2003}, "seeds of the sweep or the pilot"),
        ({"vary": {"learning_rate": [1e-3, 2e-3]}, "learning_rates": (1e-2,)}, "every arm has a learning_rate"),
    ],
)
def test_a_plan_that_cannot_work_is_a_one_line_error(fields, words):
    with pytest.raises(UserError, match=words):
        assert Plan(**fields).candidate_learning_rates


def test_every_plan_of_the_project_has_arms_and_reads_back_as_it_was_saved(tmp_path):
    for path in STUDIES.glob("*/plan.toml"):
        plan = load_plan(find_plan(path.parent.name))
        assert plan.name == path.parent.name and len(plan.all_arms) > 1
        save_plan(plan, tmp_path / "plan.toml")
        assert load_plan(tmp_path / "plan.toml") == plan
    (tmp_path / "plan.toml").write_text('data = ["x"]')
    with pytest.raises(UserError, match=r"data is a setting of train\.py; write vary = "):
        load_plan(tmp_path / "plan.toml")


def test_the_command_line_makes_plans():
    assert ablate.parse([]).plan == load_plan(find_plan("norms"))
    grid = ablate.parse(["--vary", "norm=layer,rms", "--vary", "attention_bias=true,false", "--seeds", "4"]).plan
    assert ablate.assignments("lr=1e-3,2e-3") == {"learning_rate": "1e-3,2e-3"}
    assert grid.vary == {"norm": ["layer", "rms"], "attention_bias": [True, False]} and grid.seeds == 4
    pair = ablate.parse(["--a", "", "--b", "weight_decay=0.5 qk_norm=true"]).plan
    assert pair.arms == {"default": {}, "weight_decay=0.5 qk_norm=true": {"weight_decay": 0.5, "qk_norm": True}}
    words = "--vary data=my|texts --vary norm=layer,rms --vary hidden_size=64".split()
    own = ablate.parse([word.replace("|", " ") for word in words]).plan
    assert {name: arm.baseline for name, arm in own.all_arms.items()} == {"layer": None, "rms": "layer"}
    assert own.vary["data"] == [("my texts",)] and ablate.assignments("data='my texts' norm=rms")["data"] == "my texts"
    quick = ablate.parse(["placement", "--quick"]).plan
    assert (quick.seeds, quick.steps, quick.learning_rates) == (3, 300, (5e-4,))
    assert ablate.parse(["--config", "tiny", "--quick", "--vary", "norm=rms,layer"]).plan.learning_rates == (0.0024,)
    assert [*ablate.parse(["--vary", "lora=none,8", "--vary", "init_from=x"]).plan.all_arms] == ["lora=none", "lora=8"]
    assert ablate.parse(["--vary", "lr=1e-3,2e-3", "--quick"]).plan.learning_rates == (), "arms have their own"
    assert ablate.parse(["default-recipe", "--config", "ablation", "--quick"]).plan.learning_rates == (5e-4,)
    more = ablate.parse(["family", "--vary", "qk_norm=true,false", "--margin", "0.02"]).plan
    assert len(more.all_arms) == 24 and more.margin == 0.02 and more.seeds == 6
    with pytest.raises(UserError, match="differ"):
        ablate.parse(["--a", "", "--b", ""])
    with pytest.raises(UserError, match="norm is given twice"):
        ablate.parse(["--a", "", "--b", "norm=rms norm=layer"])
    for setting in ("data=a,b", "validation_fraction=0.1,0.2", "validation_salt=0,1", "text_field=a,b"):
        with pytest.raises(UserError, match=f"differ in {setting.partition('=')[0]} have losses of different texts"):
            _ = ablate.parse(["--vary", setting]).plan.all_arms


def test_ideas_that_begin_alike_or_swap_their_arms_have_folders_of_their_own():
    long = "weight_decay=0.5 qk_norm=true learning_rate=0.002 warmup_steps=40 steps="
    pairs = [("", long + "600"), ("", long + "1200"), (long + "600", ""), ("", "qk_norm=true"), ("qk_norm=true", "")]
    names = {ablate.parse(["--a", a, "--b", b]).plan.name for a, b in pairs}
    names |= {ablate.parse(["--vary", "norm=layer,rms", "--config", name]).plan.name for name in ("ablation", "tiny")}
    assert len(names) == len(pairs) + 2
