"""LayerNorm runs converted to RMSNorm: what is trained, with which weights, and what the record says."""

import dataclasses

import pytest
import torch

from ablation import run as run_module
from ablation.claims import CLAIMS
from ablation.conversion import SEED_OFFSET, VARIANTS
from ablation.plan import Plan, Run
from ablation.run import curve_loss
from model.norm import is_norm_parameter
from training.evaluate import evaluate


@pytest.fixture(scope="module")
def converted(train_plan, config, tmp_path_factory):
    """An experiment with all conversions of two runs of 16 steps, and by variant the first and last weights.

    Conversions are found by the settings of their sessions; weights are those before the first step and at the end.
    """
    seen = {}
    final_loss, set_up = run_module.final_loss, run_module.set_up

    def weights(session) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in session.model.named_parameters()}

    def starting(settings, folder, **options):
        session = set_up(settings, folder, **options)
        seen[folder.name] = {"session": session, "before": weights(session)}
        return session

    def ending(session):
        seen[session.run_dir.name]["after"] = weights(session)
        return final_loss(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "set_up", starting)
        patch.setattr(run_module, "final_loss", ending)
        untied = tmp_path_factory.mktemp("untied") / "untied.toml"
        text = config.read_text(encoding="utf-8").replace("[model]", "[model]\ntie_word_embeddings = false")
        untied.write_text(text, encoding="utf-8")
        plan = Plan(seeds=2, steps=16, dtypes=("float32",), config=str(untied), convert=True, timing=False)
        return train_plan(plan, known_losses=False), seen


def of(converted, variant: str, seed: int = 1):
    experiment, seen = converted
    (result,) = [r for r in experiment.study.results if (r.variant, r.seed) == (variant, seed)]
    return result, seen[f"{variant} {seed}".replace(",", "").replace(" ", "-")]


def base_of(converted, seed: int = 1):
    experiment, seen = converted
    (found,) = [r for r in experiment.study.results if (r.arm.norm, r.phase, r.seed) == ("layer", "final", seed)]
    return found, seen[Run(found.arm, "final", seed, found.learning_rate).folder_name]


def test_every_finished_layernorm_run_is_converted_in_every_way(converted):
    experiment, _ = converted
    records = [r for r in experiment.study.results if r.phase == "conversion"]
    assert [(r.variant, r.seed) for r in records] == [(variant, seed) for seed in (1, 2) for variant in VARIANTS]
    for record in records:
        base, _ = base_of(converted, record.seed)
        assert record.loss_before == base.validation_loss and record.learning_rate == base.learning_rate
        how = VARIANTS[record.variant]
        assert record.arm == dataclasses.replace(base.arm, norm=how.norm, norm_bias=how.norm_bias)
        assert record.status == "completed" and record.steps == (0 if "at once" in record.variant else 2)
    assert len({(r.variant, r.validation_loss) for r in records}) == len({r.validation_loss for r in records}) == 14
    used = experiment.study.table.query("phase == 'conversion'").used
    assert len(used) == 14 and used.all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_conversion_starts_from_the_weights_of_the_run_and_draws_other_batches(converted, variant):
    result, seen = of(converted, variant)
    _, base = base_of(converted)
    how = VARIANTS[variant]
    assert seen["session"].model.config.norm == how.norm
    biases = {name for name in base["after"] if name.endswith("norm.bias") or name.endswith("layernorm.bias")}
    kept = base["after"].keys() - (set() if how.norm_bias else biases)
    assert seen["before"].keys() == kept and len(biases) == 5
    different = {name for name in kept if not torch.equal(seen["before"][name], base["after"][name])}
    writers = {name for name in kept if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight"))}
    assert different == (writers if how.center_weights else set())
    settings = seen["session"].settings
    assert settings.run.seed == result.seed + SEED_OFFSET
    assert settings.optimizer.learning_rate == result.learning_rate / 4


def test_only_what_a_variant_says_is_trained(converted):
    changed = {}
    for variant in VARIANTS:
        _, seen = of(converted, variant)
        changed[variant] = {n for n, p in seen["after"].items() if not torch.equal(p, seen["before"][n])}
    _, seen = of(converted, "rms, norms trained")
    norms = {name for name in seen["after"] if is_norm_parameter(name)}
    assert not any(names for variant, names in changed.items() if VARIANTS[variant].train == "none")
    assert changed["rms, norms trained"] == norms and len(norms) == 5
    assert changed["rms, all trained"] == seen["after"].keys()
    assert changed["layer, all trained"] == of(converted, "layer, all trained")[1]["after"].keys()


def test_the_loss_at_once_is_that_of_the_same_weights_under_rmsnorm(converted):
    result, seen = of(converted, "rms at once")
    session = seen["session"]
    windows = run_module.validation_windows(session.corpus.validation, 32, 4)
    loss = evaluate(session.model, windows, session.corpus.validation_bytes, session.device).loss
    assert result.validation_loss == loss != result.loss_before


def test_only_the_conversion_with_bias_and_centered_weights_loses_nothing(converted):
    costs = {}
    for variant, how in VARIANTS.items():
        if how.train == "none":
            result, _ = of(converted, variant)
            costs[variant] = abs(result.validation_loss - result.loss_before)
    exact = costs.pop("rms with bias and centered weights at once")
    assert exact < 1e-6 and min(costs.values()) > 10 * exact
    study = converted[0].study
    measured = {claim.id: claim.measure(study) for claim in CLAIMS if claim.id.startswith("C14")}
    names = ["rms with bias at once", "layer without bias at once", "rms at once"]
    names.append("rms with bias and centered weights at once")
    assert [(id, [(e.name, e.n) for e in effects]) for id, effects in measured.items()] == [
        (id, [(name, 2)]) for id, name in zip(("C14a", "C14b", "C14c", "C14d"), names, strict=True)
    ]


def test_the_cost_of_a_conversion_is_measured_along_the_run_and_at_its_end_is_that_of_the_saved_weights(converted):
    experiment, _ = converted
    for seed in (1, 2):
        base, _ = base_of(converted, seed)
        at_once = [name for name, how in VARIANTS.items() if how.train == "none"]
        assert list(base.measured_curves) == at_once
        for name, curve in base.measured_curves.items():
            assert [step for step, _ in curve] == [step for step, _ in base.validation_curve] and curve[-1][0] == 16
            _, converted_seen = of(converted, name, seed)
            change = curve_loss(converted_seen["session"]) - base.validation_curve[-1][1]
            assert curve[-1][1] == pytest.approx(change, abs=2e-5)  # the curve is rounded to six digits
    others = [r for r in experiment.study.results if r.arm.norm == "rms" and r.phase == "final"]
    assert others and all(r.measured_curves == {} for r in others)
