"""Models of a comparison that are trained together are those that its runs train one by one."""

import pytest

from ablation import stack, study
from ablation.plan import Plan, Run, save_plan
from ablation.run import train_run
from errors import UserError


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention on a CPU has no rule for vmap
def test_a_stack_trains_each_model_like_a_run_of_its_own(config, device, tmp_path):
    arms = {norm: {"norm": norm, "dtype": "float32"} for norm in ("layer", "rms", "dyt")}  # dyt has a scalar parameter
    plan = Plan("stack", arms, config=str(config), seeds=2, rerun_seeds=0, learning_rates=(5e-3,))
    save_plan(plan, tmp_path / "plan.toml")
    stack.main(str(tmp_path / "plan.toml"), tmp_path, device)
    found = study.load(tmp_path)
    assert len(found.rows) == 6 and len(found.comparisons) == 2
    with pytest.raises(UserError, match="has runs; give another"):
        stack.main(str(tmp_path / "plan.toml"), tmp_path, device)
    for row in found.rows.to_dict("records"):
        alone = vars(train_run(plan, Run(row["arm"], "final", row["seed"], row["learning_rate"]), device, 1, 1))
        # Sums in another order differ by 1e-7; twelve steps at 5e-3 enlarge that. Gradients that are clipped over all
        # seeds, or batches of another seed, change the loss by 1e-2.
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        equal = "settings_hash", "weights_hash", "batches_hash", "text_hash", "tokens", "parameters", "device", "dtype"
        assert {name: row[name] for name in equal} == {name: alone[name] for name in equal}


@pytest.mark.parametrize("plan", ["recipe", "factorial", "precision"])  # Muon; seeds from a pilot; two dtypes
def test_a_plan_that_cannot_be_stacked_is_refused(plan, tmp_path):
    with pytest.raises(UserError, match="any other use ablate"):
        stack.main(plan, tmp_path, "cpu")
