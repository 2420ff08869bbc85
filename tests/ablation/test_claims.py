"""Every claim measured on small comparisons that were really trained; the rule is in test_report_is_true.py."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from ablation import effects
from ablation.analysis import Study
from ablation.claims import CLAIMS, judge, judge_all
from ablation.effects import Effect, mean_effect
from ablation.plan import Plan, arm_settings
from benchmarks import training as step_benchmark
from benchmarks.training import REFERENCE, time_together
from model.decoder import Decoder
from model.norm import is_norm_parameter

SHORT = {"steps": 3, "evaluations": 1, "noise_seeds": 0, "timing": False}


def effects_of(id: str, study: Study) -> list[Effect]:
    return next(claim for claim in CLAIMS if claim.id == id).measure(study)


def verdict(id: str, study: Study) -> str:
    return judge_all([claim for claim in CLAIMS if claim.id == id], study)[0].verdict


def final_losses(study: Study) -> dict:
    """The final losses by arm and seed."""
    return {(r.arm, r.seed): r.validation_loss for r in study.results if r.phase == "final"}


def add(study: Study, cost) -> Study:
    """The study with `cost(result)` added to the losses."""
    results = [dataclasses.replace(r, validation_loss=r.validation_loss + cost(r)) for r in study.results]
    return dataclasses.replace(study, results=results)


@pytest.fixture(scope="module")
def precision(train_plan, config) -> Study:
    plan = Plan(dtypes=("float32", "bfloat16"), eps=(1e-5, 1e-6), seeds=3, config=str(config), **SHORT)
    return train_plan(plan).study


def in_float16(study: Study) -> Study:
    """The study as if its runs in bfloat16 had been in float16, which a CPU is slow at."""
    names = {"float32": "float32", "bfloat16": "float16"}
    results = [dataclasses.replace(r, arm=dataclasses.replace(r.arm, dtype=names[r.arm.dtype])) for r in study.results]
    return Study(dataclasses.replace(study.plan, dtypes=("float32", "float16")), results, [])


@pytest.fixture(scope="module")
def placements(train_plan, config) -> Study:
    rates = (5e-3, 2e-2, 5e-2)
    plan = Plan(placements=("pre", "post"), seeds=2, sweep_seeds=2, learning_rates=rates, config=str(config), **SHORT)
    return train_plan(plan).study


@pytest.fixture(scope="module")
def mlps(train_plan, config) -> Study:
    plan = Plan(norms=("rms",), mlps=("swiglu", "geglu", "relu", "gelu"), seeds=3, config=str(config), **SHORT)
    return train_plan(plan).study


@pytest.fixture(scope="module")
def factorial(train_plan, config) -> Study:
    plan = Plan(norms=("rms", "layer"), norm_biases=(False, True), seeds=3, config=str(config), **SHORT)
    return train_plan(plan).study


@pytest.fixture(scope="module")
def qk_norms(train_plan, config) -> Study:
    arms = {"norms": ("rms",), "qk_norms": (False, True)}
    rates = (5e-3, 2e-2)
    plan = Plan(**arms, seeds=3, sweep_seeds=2, learning_rates=rates, config=str(config), **SHORT)
    return train_plan(plan).study


@pytest.fixture
def timed(study, monkeypatch) -> Study:
    """The study with real timings of a training step, eager ones alone."""
    monkeypatch.setattr(step_benchmark, "why_not_compile", lambda device: "not in this test")
    arms = {study.label(arm): arm_settings(study.plan, arm) for arm in study.plan.arms}
    device = torch.device("cpu")
    entries = {(v, name): settings for v in step_benchmark.variants(device) for name, settings in arms.items()}
    timings = time_together(entries, ("step",), device, 6)
    return dataclasses.replace(study, timings=[dataclasses.replace(t, process=p) for p in (1, 2, 3) for t in timings])


def test_a_study_measures_the_claims_that_it_can_and_no_others(study, precision, placements, mlps, qk_norms):
    norm_alone = {"C7", "C8a", "C8b", "C9a", "C9b"}
    studies = {"norms": study, "precision": precision, "placement": placements, "mlp": mlps, "qk norm": qk_norms}
    measured = {name: {claim.id for claim in CLAIMS if claim.measure(of)} - norm_alone for name, of in studies.items()}
    assert measured["norms"] == {"C2", "C3", "C4a", "C4b", "C5a", "C9c"}
    assert measured["precision"] == {"C4a", "C4b", "C5a", "C9c", "C11"}
    assert measured["placement"] == {"C4a", "C4b", "C5a", "C9c", "C10a", "C10b"}
    assert measured["mlp"] == {"C4a", "C9c", "C12a", "C12b"}
    assert measured["qk norm"] == {"C4a", "C9c", "C16a", "C16b"}


def test_a_study_without_runs_measures_the_norms_alone(config):
    judged = judge_all(CLAIMS, Study(Plan(config=str(config)), [], []))
    assert {j.claim.id for j in judged if j.effects} == {"C5a", "C7", "C8a", "C8b", "C9a", "C9b"}
    assert {j.verdict for j in judged if not j.effects} == {"not measured"}
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.usefixtures("few_pairs_suffice")
def test_an_interval_that_ends_at_a_bound_does_not_lie_inside():
    low_end = mean_effect("d", [0.0, 1.0, 2.0], "nats")
    assert judge(low_end, low_end.interval[0], math.inf) == "not resolved"
    assert judge(low_end, low_end.interval[0] - 1e-9, math.inf) == "holds"
    assert judge(low_end, -math.inf, low_end.interval[0]) == "does not hold"
    between = low_end.interval_90[0] - 1e-9, low_end.interval_90[1] + 1e-9
    assert judge(low_end, *between) == "holds"  # two one-sided tests at 5%
    assert judge(low_end, -math.inf, between[1]) == "not resolved"  # one bound: the 95% interval


def test_the_speed_claim_is_about_the_ratio_of_whole_steps_in_every_variant(timed):
    found = effects_of("C1", timed)
    assert [effect.name for effect in found] == [REFERENCE, "CPU functions"]
    for effect in found:
        seconds = {t.arm: np.array(t.seconds) for t in timed.timings if t.variant == effect.name}
        assert effect.estimate == pytest.approx(np.median(seconds["rms"] / seconds["layer"])) and effect.n == 3

    def slower(arm: str, factor: float) -> Study:
        even = {t.variant: t.seconds for t in timed.timings if t.arm == "layer"}
        timings = [
            dataclasses.replace(t, seconds=[s * (factor if t.arm == arm else 1) for s in even[t.variant]])
            for t in timed.timings
        ]
        return dataclasses.replace(timed, timings=timings)

    assert verdict("C1", slower("layer", 1.2)) == "holds" and verdict("C1", slower("layer", 1.01)) == "does not hold"
    forward = [dataclasses.replace(t, part="forward") for t in timed.timings]
    assert effects_of("C1", dataclasses.replace(timed, timings=forward)) == []


def test_the_memory_claim_is_about_the_peak_of_a_step_where_a_device_counts_it(timed):
    assert effects_of("C5b", timed) == []  # a CPU does not

    def peaks(rms: int) -> Study:
        timings = [dataclasses.replace(t, peak_bytes=rms if t.arm == "rms" else 1000) for t in timed.timings]
        return dataclasses.replace(timed, timings=timings)

    assert [effect.estimate for effect in effects_of("C5b", peaks(900))] == [0.9, 0.9]
    assert verdict("C5b", peaks(900)) == "holds" and verdict("C5b", peaks(995)) == "does not hold"


@pytest.mark.usefixtures("few_pairs_suffice")
def test_claims_about_two_norms_are_about_their_paired_difference(study, with_losses):
    assert effects_of("C2", study) == [study.compare("rms", "layer").loss]
    layer = np.array([3.0, 3.1, 3.05])
    steady = np.array([-1, 0, 1]) * 1e-3
    close = with_losses(study, {"layer": layer, "rms": layer + steady, "center": layer + 0.5 + steady})
    assert (verdict("C2", close), verdict("C3", close)) == ("holds", "holds")
    far = with_losses(study, {"layer": layer, "rms": layer + 0.3 + steady, "center": layer + 0.02 + steady})
    assert (verdict("C2", far), verdict("C3", far)) == ("does not hold", "does not hold")


@pytest.mark.usefixtures("few_pairs_suffice")
def test_mean_and_bias_are_told_apart_by_the_four_arms(factorial):
    losses = {(factorial.label(arm), seed): loss for (arm, seed), loss in final_losses(factorial).items()}
    rms, biased, plain, layer = (
        np.array([losses[label, seed] for seed in (1, 2, 3)])
        for label in ("rms", "rms with bias", "layer without bias", "layer")
    )
    expected = {
        "C2": rms - layer,
        "C15a": (rms - plain + biased - layer) / 2,
        "C15b": (biased - rms + layer - plain) / 2,
    }
    for id, differences in expected.items():
        (effect,) = effects_of(id, factorial)
        assert effect.n == 3 and effect.estimate == pytest.approx(differences.mean())

    def costs(mean: float, bias: float) -> dict[str, str]:
        def cost(result) -> float:
            has_bias = factorial.label(result.arm) in ("rms with bias", "layer")
            removed = mean * (result.arm.norm == "layer") + bias * has_bias
            return 3.0 - result.validation_loss + removed * (1 + result.seed / 100)

        return {id: verdict(id, add(factorial, cost)) for id in expected}

    assert costs(0.1, 0.0) == {"C2": "does not hold", "C15a": "does not hold", "C15b": "holds"}
    assert costs(0.0, 0.1) == {"C2": "does not hold", "C15a": "holds", "C15b": "does not hold"}
    assert set(costs(0.0, 0.0).values()) == {"holds"}


def test_no_claim_is_judged_from_final_runs_before_all_of_them_are_there(factorial):
    (last,) = [r for r in factorial.results if (r.phase, r.seed, factorial.label(r.arm)) == ("final", 3, "layer")]
    unfinished = dataclasses.replace(factorial, results=[r for r in factorial.results if r is not last])
    for id in ("C2", "C15a", "C15b"):
        assert len(effects_of(id, factorial)) == 1 and effects_of(id, unfinished) == []


def test_the_mean_of_the_stream_is_compared_with_chance_at_the_norms_of_the_second_half_of_the_depth(study, change):
    chance = math.sqrt(2 / (math.pi * 32))
    for id, norm in {"C4a": "rms", "C4b": "layer"}.items():
        (effect,) = effects_of(id, study)
        runs = [r.probes.mean_over_std for r in study.results if (r.arm.norm, r.phase) == (norm, "final")]
        deep = [sum(values[2:]) / 3 / chance for values in runs]  # of five norms
        assert (effect.name, effect.n) == (norm, 3) and effect.estimate == pytest.approx(sum(deep) / 3)
    rows = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(3))
    random = (rows.mean(-1).abs() / rows.std(-1, correction=0)).mean().item()
    assert random == pytest.approx(chance, rel=0.03)

    def verdicts(ratio: float) -> tuple[str, str, str]:
        """Of all three claims about the mean if |mean| / std is this everywhere."""

        def fields(result) -> dict:
            if result.probes is None:
                return {}
            means = [ratio * (1 + result.seed / 1000)] * 5
            cosines = [mean / math.sqrt(1 + mean**2) for mean in means]
            return {"probes": dataclasses.replace(result.probes, mean_over_std=means, cosine_with_ones=cosines)}

        found = change(study, fields)
        (rms, layer) = effects_of("C9c", found)
        assert rms.estimate == layer.estimate == pytest.approx(1 / math.sqrt(1 + ratio**2), abs=0.01)
        return verdict("C4a", found), verdict("C4b", found), verdict("C9c", found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effects, "MIN_PAIRS_FOR_EQUIVALENCE", 2)
        assert verdicts(0.8 * random) == ("holds", "does not hold", "does not hold")
        assert verdicts(random / 5) == ("does not hold", "holds", "does not hold")
        assert verdicts(random * 5) == ("does not hold", "does not hold", "holds")


def test_norm_parameters_are_counted_in_the_model(study):
    counts = {}
    for arm in study.plan.arms[:2]:
        model = Decoder(arm_settings(study.plan, arm).model, seed=1)
        counts[arm.norm] = sum(p.numel() for name, p in model.named_parameters() if is_norm_parameter(name))
    (effect,) = effects_of("C5a", study)
    assert effect.estimate == counts["rms"] / counts["layer"] == 0.5 and verdict("C5a", study) == "holds"


def test_the_unit_of_half_precision_and_eps_is_the_seed(precision):
    """Two values of eps in one seed are averaged: they do not double the number of independent values."""
    losses = final_losses(precision)
    arms = {(arm.norm, arm.dtype, arm.eps): arm for arm in precision.plan.arms}
    (half,) = effects_of("C6", in_float16(precision))
    costs = [
        np.mean(
            [losses[arms[norm, "bfloat16", eps], s] - losses[arms[norm, "float32", eps], s] for eps in (1e-5, 1e-6)]
        )
        for s in (1, 2, 3)
        for norm in ("layer", "rms")
    ]
    per_seed = np.array(costs).reshape(3, 2) @ [1, -1]
    assert (half.name, half.n) == ("float16: layer minus rms", 3)
    assert half.estimate == pytest.approx(per_seed.mean()) and np.ptp(per_seed) > 0
    assert half.interval == pytest.approx(mean_effect("d", per_seed, "").interval)
    (eps,) = effects_of("C11", precision)
    in_float32 = [
        np.mean([losses[arms[norm, "float32", 1e-6], s] - losses[arms[norm, "float32", 1e-5], s] for norm in NORMS])
        for s in (1, 2, 3)
    ]
    assert (eps.name, eps.n) == ("eps 1e-06 minus 1e-05", 3) and eps.estimate == pytest.approx(np.mean(in_float32))


NORMS = ("rms", "layer")


@pytest.mark.usefixtures("few_pairs_suffice")
def test_half_precision_and_eps_are_judged_by_what_they_cost(precision):
    steady = precision
    for r in precision.results:  # all arms of a seed equal
        first = final_losses(precision)[precision.plan.arms[0], r.seed]
        steady = add(steady, lambda x, r=r, first=first: first - r.validation_loss if x.key == r.key else 0.0)

    def costly(layer_cost: float, eps_cost: float) -> Study:
        def cost(result) -> float:
            noise = 1 + result.seed / 100
            half = layer_cost * (result.arm.norm == "layer" and result.arm.dtype == "bfloat16")
            return noise * (half + eps_cost * (result.arm.eps == 1e-6))

        return add(steady, cost)

    found = [verdict("C6", in_float16(costly(cost, 0.0))) for cost in (0.1, -0.1)]
    assert found == ["holds", "does not hold"] and verdict("C6", costly(0.1, 0.0)) == "not measured"
    assert (verdict("C11", costly(0.0, 0.0)), verdict("C11", costly(0.0, 0.1))) == ("holds", "does not hold")
    assert verdict("C11", costly(0.3, 0.005)) == "holds"  # bfloat16 does not matter to it


def test_a_seed_with_a_diverged_run_is_left_out_of_averages(precision, change):
    def fields(result) -> dict:
        return {"validation_loss": None, "status": "diverged"} if result.key == precision.results[0].key else {}

    assert precision.results[0].seed == 1
    assert effects_of("C6", in_float16(change(precision, fields)))[0].n == 2


def test_placements_are_judged_by_how_the_loss_depends_on_the_learning_rate(placements):
    sweep = {(r.arm, r.seed, r.learning_rate): r.validation_loss for r in placements.results if r.phase == "sweep"}
    rates, seeds = placements.plan.learning_rates, (1001, 1002)
    for id, measure in {"C10a": lambda v: max(v) - min(v), "C10b": lambda v: v[-1] - min(v)}.items():
        per_seed = []
        for seed in seeds:
            means = {"pre": [], "post": []}
            for arm in placements.plan.arms:
                means[arm.placement].append(measure([sweep[arm, seed, rate] for rate in rates]))
            per_seed.append(np.mean(means["post"]) - np.mean(means["pre"]))
        (effect,) = effects_of(id, placements)
        assert effect.n == 2 and effect.estimate == pytest.approx(np.mean(per_seed))

    def raised(*rises: tuple[str, float, float]) -> Study:
        """Equal losses, but raised at (placement, learning rate) by a size."""
        found = add(placements, lambda r: -r.validation_loss + 3.0)
        for rise in rises:
            found = add(found, lambda r, rise=rise: ((r.arm.placement, r.learning_rate) == rise[:2]) * rise[2])
        return add(found, lambda r: (r.arm.placement == "post") * (r.learning_rate == 5e-2) * r.seed / 1e6)

    post, pre = raised(("post", 5e-2, 0.5)), raised(("pre", 5e-2, 0.5))
    assert verdict("C10a", post) == verdict("C10b", post) == "holds"
    assert verdict("C10a", pre) == verdict("C10b", pre) == "does not hold"
    low = raised(("pre", 5e-3, 0.5), ("post", 5e-2, 0.1))  # varies more, and rises less
    assert (verdict("C10a", low), verdict("C10b", low)) == ("does not hold", "holds")


def test_a_norm_of_queries_and_keys_is_judged_by_the_loss_and_by_its_rise_to_the_highest_learning_rate(qk_norms):
    losses, arms = final_losses(qk_norms), qk_norms.plan.arms
    sweep = {(r.arm, r.seed, r.learning_rate): r.validation_loss for r in qk_norms.results if r.phase == "sweep"}

    def rise(arm, seed):
        by_rate = [sweep[arm, seed, rate] for rate in qk_norms.rates]
        return by_rate[-1] - min(by_rate)

    measures = {"C16a": ((1, 2, 3), lambda arm, seed: losses[arm, seed]), "C16b": ((1001, 1002), rise)}
    sign = {True: 1, False: -1}
    for id, (seeds, measure) in measures.items():
        per_seed = [sum(sign[arm.qk_norm] * measure(arm, seed) for arm in arms) for seed in seeds]
        (effect,) = effects_of(id, qk_norms)
        assert effect.n == len(seeds) and effect.estimate == pytest.approx(np.mean(per_seed))

    def lowered(phase: str, size: float) -> Study:
        """Equal losses of a phase, higher from the plan's highest learning rate on, and there less so with the norm."""
        highest = max(qk_norms.plan.learning_rates)

        def cost(result) -> float:
            if result.phase != phase:
                return 0.0
            less = size * result.arm.qk_norm * (1 + result.seed / 1e5)
            at_highest = result.learning_rate >= highest
            return 3.0 - result.validation_loss + 0.5 * at_highest - less * (at_highest or phase == "final")

        return add(qk_norms, cost)

    for size, expected in ((0.1, "holds"), (-0.1, "does not hold")):
        assert verdict("C16a", lowered("final", size)) == verdict("C16b", lowered("sweep", size)) == expected


def test_mlps_are_compared_with_swiglu_and_the_better_plain_one_with_every_gated_one(mlps):
    (against,) = effects_of("C12a", mlps)
    assert against.estimate == mlps.compare("geglu", "swiglu").loss.estimate
    assert against.unit == "nats per token at one learning rate, 0.005" == effects_of("C12b", mlps)[0].unit
    level = {"swiglu": 3.0, "geglu": 3.2, "relu": 3.5, "gelu": 3.4}

    def at(levels: dict) -> Study:
        flat = add(mlps, lambda r: -r.validation_loss)
        return add(flat, lambda r: levels[r.arm.mlp] + r.seed / 10 + (r.arm.mlp == "geglu") * r.seed / 1e3)

    found = effects_of("C12b", at(level))
    assert [effect.name for effect in found] == ["gelu minus swiglu", "gelu minus geglu"]
    assert [effect.estimate for effect in found] == pytest.approx([0.4, 0.198]) and {e.n for e in found} == {3}
    assert verdict("C12a", at(level)) == verdict("C12b", at(level)) == "holds"
    assert verdict("C12a", at(level | {"geglu": 2.9})) == verdict("C12b", at(level | {"relu": 3.1})) == "does not hold"


def test_batchnorm_is_compared_with_layernorm(study, with_losses):
    named = {"center": "batch"}
    results = [
        dataclasses.replace(r, arm=dataclasses.replace(r.arm, norm=named.get(r.arm.norm, r.arm.norm)))
        for r in study.results
    ]
    plan = dataclasses.replace(study.plan, norms=("rms", "layer", "batch"))
    (effect,) = effects_of("C13", Study(plan, results, []))
    assert effect.estimate == study.compare("center", "layer").loss.estimate
    layer = np.array([3.0, 3.1, 3.05])
    found = {}
    for difference in (0.2, -0.2):
        losses = {"layer": layer, "batch": layer + difference + np.array([-1, 0, 1]) * 1e-3}
        found[difference] = verdict("C13", with_losses(Study(plan, results, []), losses))
    assert found == {0.2: "holds", -0.2: "does not hold"}


def test_a_norm_alone_shows_what_the_claims_say(study):
    by_id = {id: {e.name: e.estimate for e in effects_of(id, study)} for id in ("C7", "C8a", "C8b", "C9a", "C9b")}
    assert max(by_id["C8a"].values()) < 1e-4 and set(by_id["C8a"]) == {"rms", "layer"}
    assert by_id["C8b"] == pytest.approx({"rms": 0.1, "layer": 0.1}, rel=1e-3)  # the factor is 1/10, not 1
    assert by_id["C9a"]["rms"] > 0.999999 > 0.99 > by_id["C9b"]["layer"]
    # A row's cosine with itself less its mean 0.3: its std over its root mean square, 1 / sqrt(1 + 0.09).
    assert by_id["C9b"]["layer"] == pytest.approx(1 / math.sqrt(1.09), abs=2e-3)
    assert by_id["C7"] == {"without the upcast": 1.0}
    verdicts = {id: verdict(id, study) for id in by_id}
    assert verdicts == {"C7": "holds", "C8a": "holds", "C8b": "does not hold", "C9a": "holds", "C9b": "holds"}
