"""Models of a study that are trained together are those that its runs train one by one."""

import pytest

from ablation import study
from ablation.plan import Plan, Run, save_plan
from ablation.run import train_run
from errors import UserError
from studies import many_seeds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on a CPU has no rule for vmap
def test_a_stack_trains_each_model_like_a_run_of_its_own(config, tmp_path):
    arms = {norm: {"norm": norm, "dtype": "float32"} for norm in ("layer", "dyt")}  # dyt has a scalar parameter
    plan = Plan("stack", arms, config=str(config), seeds=2, rerun_seeds=0, learning_rates=(5e-3,))
    save_plan(plan, tmp_path / "plan.toml")
    for _ in range(2):  # the second has no more to do
        many_seeds.main(tmp_path, "cpu")
    found = study.load(tmp_path)
    assert len(found.rows) == 4 and len(found.comparisons) == 1
    for row in found.rows.to_dict("records"):
        alone = vars(train_run(plan, Run(row["arm"], "final", row["seed"], row["learning_rate"]), "cpu", 1, 1))
        # Sums in another order differ by 1e-7; twelve steps at 5e-3 enlarge that. Gradients that are clipped over all
        # seeds, or batches of another seed, change the loss by 1e-2.
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        for name in ("settings_hash", "weights_hash", "batches_hash", "text_hash", "tokens", "parameters"):
            assert row[name] == alone[name]


@pytest.mark.parametrize(
    "vary",
    [{"optimizer": ["muon", "adamw"]}, {"norm": ["rms", "batch"]}, {"document_mask": [True, False]}],
)
def test_a_plan_that_cannot_be_stacked_is_refused(tmp_path, vary):
    save_plan(Plan(vary=vary, seeds=2, learning_rates=(5e-3,)), tmp_path / "plan.toml")
    with pytest.raises(UserError, match="for any other use ablate"):
        many_seeds.main(tmp_path, "cpu")
