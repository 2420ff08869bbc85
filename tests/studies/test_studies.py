"""Effects of the norm, the mean and the bias; verdicts on claims; studies that train; pictures of a model."""

import dataclasses
import math
import shutil

import matplotlib.image
import pytest
import torch

from ablation import study
from ablation.plan import STUDIES, Plan, find_plan, load_plan, save_plan
from ablation.stats import Effect, mean_effect
from benchmarks.timing import Table
from checkpoints.pretrained import save_pretrained
from errors import UserError
from model.inspect import inspect
from studies import claims, convert
from studies.claims import judge
from studies.effects import contrasts, draw, pairs_at_5e_4
from studies.inside import LEGENDS, grid, main


def test_parts_are_found_for_each_learning_rate_and_for_branches_against_the_run_that_they_leave(finish):
    def loss(run):
        no_bias, no_mean = "without bias" in run.arm or run.arm.startswith("rms from"), "rms" in run.arm
        later = "2/4" in run.arm or run.arm.endswith("0.002")
        return 3 + 0.01 * no_bias * (1 + later) + 0.001 * no_mean + 0.002 * (no_bias and no_mean) + 0.1 * run.seed

    bias = {name: {"norm": "layer", "norm_bias": "without" not in name} for name in ("layer", "layer without bias")}
    rates = Plan(arms=bias, vary={"learning_rate": [1e-3, 2e-3]}, seeds=2, rerun_seeds=0)
    branches = dataclasses.replace(load_plan(find_plan("branches")), seeds=2)
    tables = [contrasts(finish(plan, loss)) for plan in (rates, branches)]
    rounded = [{at: {k: round(e.estimate, 6) for k, e in row.items()} for at, row in table.items()} for table in tables]
    assert rounded[0] == {"learning_rate=0.001": {"no bias": 0.01}, "learning_rate=0.002": {"no bias": 0.02}}
    quarter = {"RMSNorm minus LayerNorm": 0.013, "no mean": 0.002, "no bias": 0.011}
    half = {"RMSNorm minus LayerNorm": 0.023, "no mean": 0.002, "no bias": 0.021}
    assert rounded[1] == {"quarter 1": quarter, "quarter 2": half, "quarter 3": quarter}
    three = [("layer", {}), ("layer 0.5", {"weight_decay": 0.5}), ("rms 0.5", {"weight_decay": 0.5, "norm": "rms"})]
    for order in (three, [three[0], *three[:0:-1]]):  # a baseline with another setting is nobody's partner
        arms = {name: {"norm": "layer"} | settings for name, settings in order}
        study_of_three = finish(Plan(arms=arms, seeds=2, rerun_seeds=0), lambda run: len(run.arm))
        [(group, effects)] = contrasts(study_of_three).items()
        assert group == "weight_decay=0.5" and effects["RMSNorm minus LayerNorm"].estimate == len("rms") - len("layer")


def test_they_are_the_effects_of_a_grid_and_drawn_for_every_study():
    factorial, budget = (study.load(STUDIES / name) for name in ("factorial", "budget-600"))
    for effect, name in zip(factorial.effects, ("no mean", "no bias"), strict=False):
        assert contrasts(factorial)[""][name].interval == pytest.approx(effect.interval)
    drawn = draw([factorial, budget]).axes[0]
    # Its final pairs, its pilot, and sweeps of two others.
    assert [len(pairs) for pairs in pairs_at_5e_4(["factorial"])] == [30, 8, 3, 3]
    rows = ["small model, 2,400 steps\n30 pairs", "small model, 600 steps\n6 pairs"]
    assert [text.get_text() for text in drawn.get_yticklabels()] == [*rows, "all at rate 5e-4, exploratory\n80 pairs"]


def test_times_are_means_over_processes_of_medians_of_ratios_within_turns(monkeypatch):
    processes = [([1, 1, 9], [2, 2, 2]), ([3, 3, 3], [4, 4, 4])]
    seconds = [{"eager, rms": {"step": rms}, "eager, layer": {"step": layer}} for rms, layer in processes]
    tables = [Table("", None, {}, times, {}) for times in seconds]
    monkeypatch.setattr(claims, "read_speed", lambda _: tables)
    ratio = claims.norm_times("record", "step")["eager"]
    assert (ratio.name, ratio.estimate, ratio.n) == ("step: eager", 0.625, 2)  # the mean of 0.5 and 0.75


def test_a_seed_in_which_one_arm_of_a_value_diverged_does_not_count_in_how_losses_vary_over_learning_rates(finish):
    grid = {"norm": ["layer", "rms"], "qk_norm": [False, True]}
    plan = Plan(vary=grid, learning_rates=(1e-3, 2e-3), seeds=2, rerun_seeds=0, sweep_seeds=3)

    def loss(run):
        if run.phase == "sweep" and run.seed == 1002 and run.arm == [*plan.all_arms][-1]:
            return None
        return 3 + run.learning_rate * (100 if run.seed == 1002 else 1) * (2 if "rms" in run.arm else 1)

    [norm, _] = claims.sweeps(finish(plan, loss))
    reach = max(plan.learning_rates) - min(plan.learning_rates)
    assert norm.n == 2 and norm.estimate == pytest.approx(reach)  # without seed 1002, whose losses vary more


def effect(low: float, high: float, n: int = 9) -> Effect:
    middle, reach = (low + high) / 2, 0.4 * (high - low)
    return Effect("e", middle, (low, high), (middle - reach, middle + reach), 0.5, "", n)


def test_a_claim_holds_inside_its_region_does_not_outside_and_is_inconclusive_at_its_ends():
    assert judge(effect(0.1, 0.2), 0.0, math.inf) == "holds"
    assert judge(effect(-0.2, -0.1), 0.0, math.inf) == "does not hold"
    assert judge(effect(-0.1, 0.2), 0.0, math.inf) == "inconclusive"
    assert judge(effect(0.0, 0.0, n=0), 0.0, math.inf) == "does not hold"
    assert judge(mean_effect("e", [0.1], ""), 0.0, math.inf) == "inconclusive"  # one pair
    # Between two bounds the 90% interval of five pairs decides: two one-sided tests at 5%.
    assert judge(effect(-1.1, 1.1), -1.0, 1.0) == "holds"
    assert judge(effect(-1.1, 1.1, n=4), -1.0, 1.0) == "inconclusive"
    assert judge(effect(-1.1, 1.1), -1.0, math.inf) == "inconclusive"
    assert judge(effect(1.1, 1.2, n=4), -1.0, 1.0) == "does not hold"


@pytest.mark.parametrize("show", LEGENDS)
def test_a_cell_of_the_grid_is_a_norm_and_a_token_and_the_legend_is_in_words(make_decoder, show):
    inside = inspect(make_decoder(), [3, 1, 4, 1, 5])
    axes, legend = grid(inside, ["a", "$b", "c$", "_", "\\n"], show).axes
    assert torch.equal(torch.tensor(axes.images[0].get_array().data), getattr(inside, show))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "$b", "c$", "_", "\\n"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*inside.norms] and not axes.yaxis_inverted()
    assert legend.get_xlabel() == LEGENDS[show].format(chance=0.115)  # sqrt(2 / (48 pi))


def test_the_command_draws_a_text_or_how_the_stream_grows(stories260k_directory, tmp_path, capsys):
    main(stories260k_directory, "Once upon a time", out=tmp_path / "grid.png")
    main(stories260k_directory, out=tmp_path / "stream.png")
    shapes = [matplotlib.image.imread(tmp_path / name).shape for name in ("grid.png", "stream.png")]
    assert shapes[0][1] > 300 and shapes[1][:2] == (374, 594)
    assert capsys.readouterr().out.count("divided by the norm 1.000") == 1


def test_the_stream_is_not_drawn_for_norms_that_do_not_divide_by_the_rms(make_decoder, stories260k_directory, tmp_path):
    save_pretrained(make_decoder(norm="layer", vocab_size=512), tmp_path)
    shutil.copy(stories260k_directory / "tokenizer.model", tmp_path)
    with pytest.raises(UserError, match="no pre-norm model with RMSNorm; give a text"):
        main(tmp_path, out=tmp_path / "stream.png")
    assert not (tmp_path / "stream.png").exists()


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
        convert.main(tmp_path, "cpu")
    result = study.load(tmp_path)
    assert len(result.rows) == 2 * 4
    costs = {c.arm: abs(c.effect.estimate) for c in result.comparisons}
    assert costs["centered rms with bias"] < 1e-3 < costs["rms"] < 0.5
    tokens = result.rows.set_index("arm").tokens.groupby(level=0).first() / (4 * 32)
    assert tokens.to_dict() == {"layer": 12, "rms": 0, "centered rms with bias": 0, "rms, norms trained": 1}


@pytest.mark.slow
def test_a_branch_goes_on_exactly_where_its_model_was(config, tmp_path):
    layer = {"norm": "layer", "init_from": "quarter 2", "center_weights": False}
    with_bias = {"norm": "rms", "norm_bias": True, "init_from": "quarter 2", "center_weights": True}
    arms = {"layer": {"norm": "layer"}, "same": layer, "with bias": with_bias, "rms": with_bias | {"norm_bias": False}}
    arms["centered"] = layer | {"init_from": "quarter 2, centered"}
    rows = convert.train_models(make_plan(config, tmp_path, arms), 1, "cpu", tmp_path)
    trunk, same, with_bias, without, centered = (row.loss for row in rows)
    assert 0 < abs(centered - trunk) < 2e-3  # LayerNorm computes the same with centered weights, until they are trained
    assert same == trunk and with_bias != trunk and abs(with_bias - trunk) < abs(without - trunk) < 0.5
    assert len({row.batches_hash for row in rows}) == len({row.tokens for row in rows}) == 1
    assert rows[0].curve[-1][0] == rows[1].curve[-1][0] and rows[1].curve[0][0] == 7
