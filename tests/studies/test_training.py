"""Studies that train in their own way: norms of trained models are converted, and many seeds trained as one stack."""

import pytest

from ablation import study
from ablation.plan import Plan, Run, save_plan
from ablation.run import train_run
from errors import UserError
from studies import convert, train


def make_plan(config, folder, arms: dict) -> Plan:
    untied = folder / "untied.toml"
    untied.write_text(config.read_text().replace("[data]", "tie_word_embeddings = false\n[data]"))
    return Plan("p", arms, config=str(untied), seeds=2, rerun_seeds=0, learning_rates=(2e-2,))


@pytest.mark.slow
def test_every_model_is_converted_in_every_way_and_compared_with_itself(config, tmp_path):
    start = {"init_from": "layer", "center_weights": False}
    arms = {"layer": {"norm": "layer"}, "rms": start | {"norm": "rms", "norm_bias": False}}
    arms["centered rms with bias"] = start | {"norm": "rms", "norm_bias": True, "center_weights": True}
    arms["rms, norms trained"] = arms["rms"] | {"freeze": ["*_proj.*"], "steps": 1, "learning_rate": 1e-2}
    save_plan(make_plan(config, tmp_path, arms), tmp_path / "plan.toml")
    for _ in range(2):  # the second has no more to do
        train.main(tmp_path, "cpu")
    found = study.load(tmp_path)
    assert len(found.rows) == 2 * 4
    costs = {c.arm: abs(c.effect.estimate) for c in found.comparisons}
    assert costs["centered rms with bias"] < 1e-3 < costs["rms"] < 0.5
    tokens = found.rows.set_index("arm").tokens.groupby(level=0).first() / (4 * 32)
    assert tokens.to_dict() == {"layer": 12, "rms": 0, "centered rms with bias": 0, "rms, norms trained": 1}


@pytest.mark.slow
def test_a_branch_goes_on_exactly_where_its_model_was(config, tmp_path):
    layer = {"norm": "layer", "init_from": "quarter 2", "center_weights": False}
    with_bias = {"norm": "rms", "norm_bias": True, "init_from": "quarter 2", "center_weights": True}
    arms = {"layer": {"norm": "layer"}, "same": layer, "with bias": with_bias, "rms": with_bias | {"norm_bias": False}}
    rows = convert.train_models(make_plan(config, tmp_path, arms), 1, "cpu", tmp_path)
    trunk, same, with_bias, without = (row.loss for row in rows)
    assert same == trunk and with_bias != trunk and abs(with_bias - trunk) < abs(without - trunk) < 0.5
    assert len({row.batches_hash for row in rows}) == len({row.tokens for row in rows}) == 1
    assert rows[0].curve[-1][0] == rows[1].curve[-1][0] and rows[1].curve[0][0] == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on a CPU has no rule for vmap
def test_a_stack_trains_each_model_like_a_run_of_its_own(config, tmp_path):
    arms = {norm: {"norm": norm, "dtype": "float32"} for norm in ("layer", "dyt")}  # dyt has a scalar parameter
    plan = Plan("stack", arms, config=str(config), seeds=2, rerun_seeds=0, learning_rates=(5e-3,))
    save_plan(plan, tmp_path / "plan.toml")
    for _ in range(2):  # the second has no more to do
        train.main(tmp_path, "cpu")
    found = study.load(tmp_path)
    assert len(found.rows) == 4 and len(found.comparisons) == 1
    for row in found.rows.to_dict("records"):
        alone = vars(train_run(plan, Run(row["arm"], "final", row["seed"], row["learning_rate"]), "cpu", 1, 1))
        # Sums in another order differ by 1e-7; twelve steps at 5e-3 enlarge that. Gradients that are clipped over all
        # seeds, or batches of another seed, change the loss by 1e-2.
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        for name in ("settings_hash", "weights_hash", "batches_hash", "text_hash", "tokens"):
            assert row[name] == alone[name]


def test_a_plan_that_cannot_be_stacked_is_refused(tmp_path):
    for vary in ({"optimizer": ["muon", "adamw"]}, {"norm": ["rms", "batch"]}, {"document_mask": [True, False]}):
        save_plan(Plan(vary=vary, seeds=2, learning_rates=(5e-3,)), tmp_path / "plan.toml")
        with pytest.raises(UserError, match="for any other use ablate"):
            train.main(tmp_path, "cpu")
