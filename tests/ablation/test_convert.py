"""LayerNorm models that become RMSNorm models: what starts from what, what is trained, and what is lost."""

import dataclasses

import pytest
import torch

from ablation import convert, study
from errors import UserError


@pytest.fixture(scope="module")
def converted(config, tmp_path_factory) -> tuple[study.Study, list]:
    """Two LayerNorm models and their conversions, and the weights at the start and at the end of each."""
    untied = tmp_path_factory.mktemp("config") / "untied.toml"
    untied.write_text(config.read_text().replace("[data]", "tie_word_embeddings = false\n[data]"))
    folder, models = tmp_path_factory.mktemp("conversion"), []

    def measured(session, run, *arguments, **options):
        before = {name: value.clone() for name, value in session.model.state_dict().items()}
        row = measure(session, run, *arguments, **options)
        models.append((run, before, {name: value.clone() for name, value in session.model.state_dict().items()}))
        return row

    measure = convert.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "measure", measured)
        convert.main(folder, str(untied), learning_rate=2e-2, seeds=2, device="cpu")
        with pytest.raises(UserError, match="runs of another plan; give another --out"):
            convert.main(folder, str(untied), learning_rate=1e-2, seeds=2, device="cpu")
    return study.load(folder), models


def test_every_model_is_converted_in_every_way_and_compared_with_itself(converted):
    found, _ = converted
    assert len(found.rows) == 2 * 8 and found.final_seeds and found.unit == "nats per token"
    costs = {c.arm: c for c in found.comparisons}
    assert len(costs) == 7 and {c.baseline for c in costs.values()} == {"layer"}
    assert abs(costs["rms with bias and centered weights at once"].effect.estimate) < 1e-3
    tokens = found.rows.set_index("arm").tokens.groupby(level=0).first() / (4 * 32)
    assert tokens["rms at once"] == 0 and tokens["rms, all trained"] == 1 and tokens["layer"] == 12


def test_a_conversion_starts_from_the_weights_of_its_model(converted):
    _, models = converted
    trained = {run.seed: after for run, _, after in models if run.arm == "layer"}
    for run, before, after in models:
        if run.arm == "layer":
            continue
        has_bias = any(name.endswith("layernorm.bias") for name in before)
        assert has_bias == ("with bias" in run.arm or run.arm == "layer, all trained")
        if "centered" not in run.arm:
            assert all(torch.equal(value, trained[run.seed][name]) for name, value in before.items())
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert bool(moved) == ("trained" in run.arm)
        if "norms trained" in run.arm:
            assert all("norm" in name for name in moved)


def test_a_branch_goes_on_exactly_where_its_model_was(config, tmp_path):
    untied = tmp_path / "untied.toml"
    untied.write_text(config.read_text().replace("[data]", "tie_word_embeddings = false\n[data]"))
    plan = convert.make_branch_plan(str(untied), None, 2e-2, seeds=2)
    assert len(plan.compared) == 1 + 3 * 3
    arms = {name: plan.arms[name] for name in ("layer", "rms with bias from 2/4", "rms from 2/4")}
    arms["layer from 2/4"] = {"norm": "layer", "init_from": "quarter 2"}
    rows = convert.train_models(dataclasses.replace(plan, arms=arms), 1, "cpu", tmp_path, True)
    trunk, with_bias, without, same = (row.loss for row in rows)
    assert same == trunk and with_bias != trunk and abs(with_bias - trunk) < abs(without - trunk) < 0.5
    assert len({row.batches_hash for row in rows}) == len({row.tokens for row in rows}) == 1
    assert rows[0].curve[-1][0] == rows[1].curve[-1][0] and rows[1].curve[0][0] == 7
