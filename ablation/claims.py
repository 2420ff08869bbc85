"""Published claims about norms, and what was measured.

A claim is data: its text, its source, the function that measures its effects, and the region that the claim says they
lie in. One rule, `judge`, turns effects and region into a verdict; there is no other.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ablation import norm_alone
from ablation.analysis import Study
from ablation.conversion import VARIANTS
from ablation.effects import Effect, exact_effect, mean_effect
from ablation.plan import Arm, default_learning_rate, model_config
from ablation.results import Probes
from model.config import GATED, PLAIN
from model.count import num_norm_parameters

Verdict = Literal["holds", "does not hold", "not resolved", "not measured"]
RMSNORM = "Zhang and Sennrich 2019, arXiv 1910.07467"
TUTORIALS = "papers and tutorials on RMSNorm"


@dataclass(frozen=True)
class Claim:
    """A statement about effects: all of them lie between `low` and `high`."""

    id: str
    text: str
    source: str
    measure: Callable[[Study], list[Effect]]
    """The effects that the claim is about; none where the study did not measure them."""
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Judged:
    """A claim with what was measured and the verdict on each effect and on all of them."""

    claim: Claim
    effects: list[Effect]
    verdicts: list[Verdict]
    verdict: Verdict


def judge(effect: Effect, low: float, high: float) -> Verdict:
    """Does the effect lie between low and high?

    It holds where the whole interval lies inside: the 95% interval, or between two finite bounds the 90% interval,
    which is two one-sided tests at 5% and takes as many pairs as any equivalence. It does not hold where the whole 95%
    interval lies outside. An effect on an arm that is not well tuned decides nothing.
    """
    if effect.interval is None or effect.untuned:
        return "not resolved"
    if effect.interval[1] <= low or effect.interval[0] >= high:
        return "does not hold"
    inside = effect.interval
    if math.isfinite(low) and math.isfinite(high):
        if not effect.can_be_equivalent:
            return "not resolved"
        inside = effect.interval_90
    return "holds" if low < inside[0] and inside[1] < high else "not resolved"


def judge_all(claims: Sequence[Claim], study: Study) -> list[Judged]:
    """A claim about several effects holds if it holds for all, and does not hold if it does not for any."""
    judged = []
    for claim in claims:
        effects = claim.measure(study)
        verdicts = [judge(effect, claim.low, claim.high) for effect in effects]
        order = ("does not hold", "not resolved", "holds")
        overall = next((verdict for verdict in order if verdict in verdicts), "not measured")
        judged.append(Judged(claim, effects, verdicts, overall))
    return judged


def step_times(study: Study) -> list[Effect]:
    return study.time_ratios("step", "rms", "layer")


def loss_difference(arm: str, base: str) -> Callable[[Study], list[Effect]]:
    def measure(study: Study) -> list[Effect]:
        found = study.compare(arm, base)
        return [] if found is None else [found.loss]

    return measure


def probes_by_arm(study: Study, norms: Sequence[str]) -> dict[Arm, list[Probes]]:
    """Probes of the final runs of each arm that has one of these norms and at least two runs with probes.

    Pre-norm only: elsewhere a norm's input is not the residual stream.
    """
    arms = [arm for arm in study.plan.arms if arm.norm in norms and arm.placement == "pre"]
    found = {arm: [run.probes for run in study.final(arm).result if run.probes is not None] for arm in arms}
    return {arm: probes for arm, probes in found.items() if len(probes) > 1}


def mean_over_chance(norm: str) -> Callable[[Study], list[Effect]]:
    """|mean| of the stream over its standard deviation at the norms of the second half of the depth, over its chance
    level: that of rows of D independent normal numbers, sqrt(2 / (pi D)).
    """

    def measure(study: Study) -> list[Effect]:
        effects = []
        for arm, probes in probes_by_arm(study, [norm]).items():
            deep = [float(np.mean(p.mean_over_std[len(p.mean_over_std) // 2 :])) / study.chance for p in probes]
            effects.append(mean_effect(study.label(arm), deep, "of the chance level"))
        return effects

    return measure


def direction_in_training(study: Study) -> list[Effect]:
    """Cosine of a row with itself minus its mean, for the rows that the norms got in training.

    It is sqrt(1 - c^2), c the row's cosine with the vector of ones; here c is the mean over tokens and norms.
    """
    effects = []
    for arm, probes in probes_by_arm(study, ["rms", "layer"]).items():
        cosines = [math.sqrt(1 - float(np.mean(p.cosine_with_ones)) ** 2) for p in probes]
        effects.append(mean_effect(study.label(arm), cosines, "cosine"))
    return effects


def norm_parameter_ratio(study: Study) -> list[Effect]:
    arms = [arm for arm in study.plan.arms if arm.norm_bias is None]
    by_norm = {arm.norm: num_norm_parameters(model_config(study.plan, arm)) for arm in arms}
    if not {"rms", "layer"} <= by_norm.keys():
        return []
    return [exact_effect("rms over layer", by_norm["rms"] / by_norm["layer"], "ratio")]


def memory_ratio(study: Study) -> list[Effect]:
    peaks = {(t.variant, t.arm): t.peak_bytes for t in study.timings if t.part == "step" and t.peak_bytes}
    variants = sorted({variant for variant, _ in peaks})
    return [
        exact_effect(variant, peaks[variant, "rms"] / peaks[variant, "layer"], "ratio of peak bytes")
        for variant in variants
        if {(variant, "rms"), (variant, "layer")} <= peaks.keys()
    ]


def averaged_over_seeds(
    study: Study, name: str, arms: Iterable[Arm], difference: Callable[[pd.Series], float]
) -> list[Effect]:
    """An effect whose unit is the seed: the mean, within each seed, of a difference between these arms of that seed.

    `difference` gets the losses of one seed by arm and returns NaN where it lacks an arm or a run diverged. There is
    none until all final runs are there, as in `Study.final`.
    """
    if not study.is_finished:
        return []
    table = study.table[(study.table.phase == "final") & study.table.used]
    values = [difference(runs.set_index("arm").validation_loss) for _, runs in table.groupby("seed")]
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return []
    untuned = not study.untuned_arms.isdisjoint(arms)
    return [dataclasses.replace(mean_effect(name, values, "nats per token"), untuned=untuned)]


def mean_difference(losses: pd.Series, pairs: list[tuple[Arm, Arm]]) -> float:
    """Mean of losses[a] - losses[b] over pairs of arms; NaN if there are none or one is missing."""
    return float(np.mean([losses.get(a, math.nan) - losses.get(b, math.nan) for a, b in pairs])) if pairs else math.nan


def changed(arms: list[Arm], field: str, value: object, other: object) -> list[tuple[Arm, Arm]]:
    """Pairs of arms that differ in one field alone: there one has `value` and the other `other`."""
    return [
        (a, b)
        for a in arms
        for b in arms
        if getattr(a, field) == value and getattr(b, field) == other and vars(a) | {field: other} == vars(b)
    ]


def mean_alone(study: Study) -> list[Effect]:
    """RMSNorm minus LayerNorm where both have a bias or neither has: what removing the mean changes by itself."""
    by_choice = {(*_choices(study, arm), arm.norm): arm for arm in study.plan.arms}
    pairs = [(arm, by_choice.get((*key, "layer"))) for (*key, norm), arm in by_choice.items() if norm == "rms"]
    return _differences(study, "rms minus layer at equal bias", pairs)


def bias_alone(study: Study) -> list[Effect]:
    """RMSNorm or LayerNorm with a bias minus the same norm without."""
    by_choice = {_choices(study, arm, "norm"): arm for arm in study.plan.arms if arm.norm in ("rms", "layer")}
    pairs = [(arm, by_choice.get((*key, False))) for (*key, bias), arm in by_choice.items() if bias]
    return _differences(study, "with bias minus without", pairs)


def qk_norm_alone(study: Study) -> list[Effect]:
    """An arm with a norm of queries and keys minus the same arm without."""
    return _differences(study, "with minus without", changed(study.plan.arms, "qk_norm", True, False))


def _choices(study: Study, arm: Arm, *more: str) -> tuple:
    """The choices of an arm apart from its norm: the fields `more`, all other fields, and whether it has a bias."""
    names = [*more, *(name for name in vars(arm) if name not in ("norm", "norm_bias"))]
    return (*(getattr(arm, name) for name in names), model_config(study.plan, arm).has_norm_bias)


def _differences(study: Study, name: str, pairs: list[tuple[Arm, Arm | None]]) -> list[Effect]:
    complete = [(a, b) for a, b in pairs if b is not None]
    arms = itertools.chain.from_iterable(complete)
    return averaged_over_seeds(study, name, arms, lambda losses: mean_difference(losses, complete))


def cost_of_float16(study: Study) -> list[Effect]:
    """What float16 costs LayerNorm minus what it costs RMSNorm.

    bfloat16 has the range of float32, in which the statistics are computed in every dtype: it would show nothing.
    """

    def difference(losses: pd.Series) -> float:
        pairs = changed(study.plan.arms, "dtype", "float16", "float32")
        cost = {n: mean_difference(losses, [p for p in pairs if p[0].norm == n]) for n in ("layer", "rms")}
        return cost["layer"] - cost["rms"]

    return averaged_over_seeds(study, "float16: layer minus rms", study.plan.arms, difference)


def eps_differences(study: Study) -> list[Effect]:
    arms = [arm for arm in study.plan.arms if arm.dtype == "float32"]
    effects = []
    for eps in sorted(set(study.plan.eps) - {1e-5}):
        pairs = changed(arms, "eps", eps, 1e-5)
        effects += _differences(study, f"eps {eps:g} minus 1e-05", pairs)
    return effects


def sweep_range(losses: pd.Series) -> float:
    """How far the loss varies over the learning rates."""
    return losses.max() - losses.min()


def rise_to_highest(losses: pd.Series) -> float:
    """How far the loss rises from its minimum to the highest learning rate."""
    return losses.iloc[-1] - losses.min()


def over_the_sweep(
    field: str, value: object, other: object, name: str, measure: Callable[[pd.Series], float]
) -> Callable[[Study], list[Effect]]:
    """Arms whose `field` has a value minus those where it has another, in a measure of an arm's losses of one seed.

    The measure gets them in order of the learning rate.
    """

    def effects(study: Study) -> list[Effect]:
        table = study.table[(study.table.phase == "sweep") & study.table.used]
        losses = table.sort_values("learning_rate").groupby(["seed", "arm"], sort=False).validation_loss
        # Where a run diverged there is no such number: leaving that learning rate out would flatter the arm.
        by_arm = losses.agg(lambda of: measure(of) if of.notna().all() else math.nan).reset_index(name="value")
        means = by_arm.groupby(["seed", by_arm.arm.map(lambda arm: getattr(arm, field))]).value.mean().unstack()
        if not {value, other} <= set(means.columns):
            return []
        differences = (means[value] - means[other]).dropna()
        return [mean_effect(name, differences, "nats per token")] if len(differences) else []

    return effects


def note_shared_learning_rate(study: Study, effects: list[Effect]) -> list[Effect]:
    """The effects; where all arms had one learning rate, which may suit some better, their unit says so."""
    more = "" if study.plan.has_sweep else f" at one learning rate, {default_learning_rate(study.plan):g}"
    return [dataclasses.replace(effect, unit=effect.unit + more) for effect in effects]


def gated_against_swiglu(study: Study) -> list[Effect]:
    found = [study.compare(mlp, "swiglu") for mlp in GATED if mlp != "swiglu"]
    return note_shared_learning_rate(study, [comparison.loss for comparison in found if comparison is not None])


def plain_against_gated(study: Study) -> list[Effect]:
    """The better plain MLP minus each gated one."""
    means = {arm: study.final(arm).validation_loss.mean() for arm in study.plan.arms if arm.mlp in PLAIN}
    means = {arm: mean for arm, mean in means.items() if not math.isnan(mean)}
    if not means:
        return []
    best = min(means, key=means.get)
    effects = []
    for arm in study.plan.arms:
        if arm.mlp in GATED:
            name = f"{study.label(best)} minus {study.label(arm)}"
            effects += _differences(study, name, [(best, arm)])
    return note_shared_learning_rate(study, effects)


def conversion_cost(variant: str) -> Callable[[Study], list[Effect]]:
    """Loss after a conversion of LayerNorm runs, minus before."""

    def measure(study: Study) -> list[Effect]:
        runs = study.table[(study.table.variant == variant) & study.table.used]
        tied = VARIANTS[variant].center_weights and model_config(study.plan, study.plan.arms[0]).tie_word_embeddings
        diverged = runs.validation_loss.isna().any()
        if not study.is_finished or runs.empty or diverged or tied:  # a tied embedding is not centered
            return []
        return [mean_effect(variant, runs.validation_loss - runs.loss_before, "nats per token")]

    return measure


ROUNDING_TOLERANCE = 1e-4  # relative change that rounding in float32 may cause
CLAIMS = [
    Claim(
        "C1",
        "RMSNorm reduces the running time by 7% to 64% (here: a training step by at least 7%)",
        RMSNORM,
        step_times,
        high=0.93,
    ),
    Claim(
        "C2",
        "RMSNorm and LayerNorm reach the same loss (here: within 0.01 nats)",
        RMSNORM,
        loss_difference("rms", "layer"),
        low=-0.01,
        high=0.01,
    ),
    Claim(
        "C3",
        "Re-centering alone is far worse than LayerNorm (here: by more than 0.1 nats)",
        RMSNORM,
        loss_difference("center", "layer"),
        low=0.1,
    ),
    Claim(
        "C4a",
        "In deep layers the mean of the activations is near 0 under RMSNorm too (here: |mean| / std is that of random "
        "rows, sqrt(2 / (pi D)), within a factor of 1.5)",
        "Gupta et al. 2024, arXiv 2409.12951",
        mean_over_chance("rms"),
        low=1 / 1.5,
        high=1.5,
    ),
    Claim(
        "C4b",
        "In deep layers the mean of the activations is nearer to 0 under LayerNorm than by chance (here: |mean| / std "
        "is under half of that of random rows)",
        "Gupta et al. 2024, arXiv 2409.12951",
        mean_over_chance("layer"),
        high=0.5,
    ),
    Claim("C5a", "RMSNorm needs half the norm parameters", RMSNORM, norm_parameter_ratio, low=0.499, high=0.501),
    Claim("C5b", "RMSNorm needs measurably less memory (here: 1% of a step)", RMSNORM, memory_ratio, high=0.99),
    Claim(
        "C6",
        "RMSNorm is numerically more robust in float16 (here with statistics in float32, as in every dtype)",
        TUTORIALS,
        cost_of_float16,
        low=0.0,
    ),
    Claim(
        "C7",
        "Without the float32 upcast the squares overflow in float16 (here: over 99% of rows of std 400 are lost)",
        TUTORIALS,
        norm_alone.rows_lost_without_upcast,
        low=0.99,
    ),
    Claim(
        "C8a",
        "The output is invariant to the scale of the input",
        RMSNORM,
        norm_alone.output_change_by_scale,
        high=ROUNDING_TOLERANCE,
    ),
    Claim(
        "C8b",
        "The gradient is invariant to the scale of the weights (here: factor at weights 10 times as large)",
        TUTORIALS,
        norm_alone.gradient_factor_by_scale,
        low=0.99,
        high=1.01,
    ),
    Claim(
        "C9a",
        "RMSNorm keeps the direction of x, before the weight (here: cosine above 0.999999)",
        RMSNORM,
        norm_alone.direction("rms"),
        low=0.999999,
    ),
    Claim(
        "C9b",
        "LayerNorm does not keep the direction of x, before the weight (here: rows of mean 0.3, std 1)",
        RMSNORM,
        norm_alone.direction("layer"),
        high=0.999999,
    ),
    Claim(
        "C9c",
        "That LayerNorm changes the direction matters (here: cosine below 0.99 for the rows seen in training)",
        TUTORIALS,
        direction_in_training,
        high=0.99,
    ),
    Claim(
        "C10a",
        "Pre-norm trains more stably than post-norm (here: its loss varies less over the learning rates)",
        "Xiong et al. 2020, arXiv 2002.04745",
        over_the_sweep("placement", "post", "pre", "post minus pre", sweep_range),
        low=0.0,
    ),
    Claim(
        "C10b",
        "Pre-norm trains more stably than post-norm (here: its loss rises less to the highest learning rate)",
        "Xiong et al. 2020, arXiv 2002.04745",
        over_the_sweep("placement", "post", "pre", "post minus pre", rise_to_highest),
        low=0.0,
    ),
    Claim(
        "C11",
        "eps between 1e-5 and 1e-8 does not matter in float32 (here: within 0.01 nats)",
        TUTORIALS,
        eps_differences,
        low=-0.01,
        high=0.01,
    ),
    Claim("C12a", "SwiGLU is the best gated MLP", "Shazeer 2020, arXiv 2002.05202", gated_against_swiglu, low=0.0),
    Claim("C12b", "Any gate beats the plain MLP", "Shazeer 2020, arXiv 2002.05202", plain_against_gated, low=0.0),
    Claim(
        "C13",
        "BatchNorm does not suit a decoder (here: a higher loss in evaluation)",
        "Shen et al. 2020, arXiv 2003.07845",
        loss_difference("batch", "layer"),
        low=0.0,
    ),
    Claim(
        "C14a",
        "A trained LayerNorm model cannot simply lose its means (here: RMSNorm with its bias costs over 0.01 nats)",
        TUTORIALS,
        conversion_cost("rms with bias at once"),
        low=0.01,
    ),
    Claim(
        "C14b",
        "A trained LayerNorm model cannot simply lose its biases (here: that alone costs over 0.01 nats)",
        TUTORIALS,
        conversion_cost("layer without bias at once"),
        low=0.01,
    ),
    Claim(
        "C14c",
        "A trained LayerNorm model cannot simply be converted to RMSNorm (here: losing both costs over 0.01 nats)",
        TUTORIALS,
        conversion_cost("rms at once"),
        low=0.01,
    ),
    Claim(
        "C14d",
        "A LayerNorm model with centered weights is an RMSNorm model (here: the loss is the same within 0.0005 nats)",
        "Jiang et al. 2023, arXiv 2305.14858",
        conversion_cost("rms with bias and centered weights at once"),
        low=-0.0005,
        high=0.0005,
    ),
    Claim(
        "C15a",
        "Removing the mean does not matter (here: RMSNorm and LayerNorm, both with or both without bias, within "
        "0.01 nats)",
        "Gupta et al. 2024, arXiv 2409.12951",
        mean_alone,
        low=-0.01,
        high=0.01,
    ),
    Claim(
        "C15b",
        "The bias of a norm does not matter (here: RMSNorm and LayerNorm, each with and without, within 0.01 nats)",
        "Xu et al. 2019, arXiv 1911.07013",
        bias_alone,
        low=-0.01,
        high=0.01,
    ),
    Claim(
        "C16a",
        "A norm of the queries and keys lowers the loss",
        "Henry et al. 2020, arXiv 2010.04245",
        qk_norm_alone,
        high=0.0,
    ),
    Claim(
        "C16b",
        "A norm of the queries and keys makes the learning rate matter less (here: the loss rises less to the highest)",
        "Wortsman et al. 2023, arXiv 2309.14322",
        over_the_sweep("qk_norm", True, False, "with minus without", rise_to_highest),
        high=0.0,
    ),
]
