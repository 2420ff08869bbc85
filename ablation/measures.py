"""What the published claims are judged by: effects of a study's runs and timings, and what arithmetic shows."""

import dataclasses
import functools
import math
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

import kernels
from ablation.plan import arm_settings, base_settings
from ablation.report import time_ratios
from ablation.stats import Effect, exact_effect, mean_effect
from ablation.study import Study
from model.config import GATED, PLAIN
from model.count import flops_per_token, num_norm_parameters

EPS = 1e-5
SWEPT = " over the sweep"
Measure = Callable[[Study, list[dict]], list[Effect]]
"""From a study and its timings to the effects that a claim is about; none where they were not measured."""


@functools.cache
def facts(kind: str) -> dict[str, tuple[float, str]]:
    """What needs no training, with its unit: what a norm does to random rows, numbers of parameters and operations."""
    x, upstream, inputs = rows(0) + 0.3, rows(3), rows(1, 64)
    norm = functools.partial(kernels.normalize, kind=kind, eps=EPS)
    ones, mean_square = torch.ones(256), x.square().mean(-1, keepdim=True) + EPS
    y = norm(x, ones)[0]

    def gradient_length(scale: float) -> Tensor:
        """Of norm(W x) by W, for random weights of this scale."""
        weight = (scale * rows(2, 64)[:256]).requires_grad_()
        return torch.autograd.grad(norm(inputs @ weight.T, ones)[0], weight, upstream)[0].norm()

    jacobian = torch.autograd.functional.jacobian(lambda row: norm(row[None], ones)[0][0], x[0]).abs()
    diagonal = jacobian.diagonal()
    blocked = torch.autograd.functional.jacobian(lambda row: norm(row[None], 0 * ones)[0][0], x[0])
    half = (400 * rows(4)).half()  # its squares overflow
    exact, without = half.double(), half * torch.rsqrt(half.square().mean(-1, keepdim=True) + EPS)
    exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt()
    right = (without.double() - exact).norm(dim=-1) < 0.1 * exact.norm(dim=-1)
    rms, layer = (dataclasses.replace(base_settings("ablation").model, norm=name) for name in ("rms", "layer"))
    large = base_settings("ablation-10m").model
    shares = [8 * c.num_norms * c.hidden_size / flops_per_token(c, 128) for c in (large, rms)]
    found = {
        "change by scale": (change(norm(10 * x, ones)[0], y), "relative change"),
        "gradient by scale": (gradient_length(10.0) / gradient_length(1.0), "ratio"),
        "cosine": (torch.cosine_similarity(x.double(), y.double(), dim=-1).mean(), "cosine"),
        "coupling": ((jacobian - diagonal.diag()).max() / diagonal.max(), "of the diagonal"),
        "others": (change(norm(x[:1], ones)[0], y[:1]), "relative change"),
        "weight 0": (blocked.abs().max(), "largest derivative"),
        "rsqrt": (change(x * torch.rsqrt(mean_square), x / mean_square.sqrt()), "relative change"),
        "rows lost": ((~right).double().mean(), "of rows"),
        "parameters": (num_norm_parameters(rms) / num_norm_parameters(layer), "rms over layer"),
        "operations": (shares[0] / shares[1], "of 10M over 1.3M parameters"),
    }
    return {name: (float(value), unit) for name, (value, unit) in found.items()}


def rows(seed: int, width: int = 256) -> Tensor:
    return torch.randn(512, width, generator=torch.Generator().manual_seed(seed))


def change(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).norm() / old.norm()


def fact(name: str, *kinds: str) -> Measure:
    return lambda study, timings: [exact_effect(kind, *facts(kind)[name]) for kind in kinds]


def difference(*arms: str, base: str = "layer") -> Measure:
    """Arms minus their baseline."""
    return lambda study, timings: [c.effect for c in study.comparisons if c.arm in arms and c.baseline == base]


def grid_effects(*names: str) -> Measure:
    """Main effects and interactions of a grid."""
    return lambda study, timings: [effect for effect in study.effects if effect.name in names]


def mean_at_equal_bias(study: Study, timings: list[dict]) -> list[Effect]:
    """RMSNorm minus LayerNorm where both have a bias or neither has: what removing the mean changes by itself."""
    return grid_effects("norm: rms minus layer")(study, timings) if "norm_bias" in study.plan.varied else []


def plain_against_gated(study: Study, timings: list[dict]) -> list[Effect]:
    """The better plain MLP minus each gated one."""
    means = {arm: study.final(arm).loss.mean() for arm in PLAIN if arm in study.arms}
    best = min(means, key=means.get, default=None)
    gated = [arm for arm in study.arms if arm in GATED and best is not None]
    found = [
        study.per_seed(f"{best} minus {arm}", {best, arm}, lambda of, arm=arm: of[best] - of[arm]) for arm in gated
    ]
    return [effect for effect in found if effect is not None]


def mean_over_chance(*norms: str) -> Measure:
    """|mean| / std of the residual stream over that of rows of D independent normal numbers, sqrt(2 / (pi D))."""

    def over_chance(study: Study, arm: str) -> pd.Series:
        width = arm_settings(study.plan, study.arms[arm]).model.hidden_size
        return study.final(arm).mean_over_std * math.sqrt(math.pi * width / 2)

    return stream(norms, over_chance, "of the chance level")


def direction(*norms: str) -> Measure:
    """Cosine of a row of the stream with itself minus its mean, from its cosine with the vector of ones."""
    return stream(norms, lambda study, arm: (1 - study.final(arm).cosine_with_ones ** 2) ** 0.5, "cosine")


def stream(norms: tuple[str, ...], probe: Callable[[Study, str], pd.Series], unit: str) -> Measure:
    """Of arms with these norms before each block, where the input of a norm is the residual stream."""

    def measure(study: Study, timings: list[dict]) -> list[Effect]:
        models = {name: arm_settings(study.plan, arm).model for name, arm in study.arms.items()}
        arms = [name for name, m in models.items() if m.norm in norms and m.norm_placement == "pre"]
        values = {arm: probe(study, arm).dropna() for arm in arms}
        return [mean_effect(arm, found, unit) for arm, found in values.items() if len(found) > 1]

    return measure


def sweep(setting: str, value: object, other: object, measured: Callable[[pd.DataFrame], pd.Series]) -> Measure:
    """Arms that have a value for a setting minus those that have another, in a measure of their losses by seed and
    learning rate. It is NaN where a run diverged: leaving that learning rate out would flatter the arm.
    """

    def measure(study: Study, timings: list[dict]) -> list[Effect]:
        found = {value: [], other: []}
        for name, arm in study.arms.items() if study.rates else ():
            losses = study.of("sweep", name).pivot(index="seed", columns="learning_rate", values="loss")
            found.get(study.plan.value(arm, setting), []).append(measured(losses))
        if not all(found.values()):
            return []
        means = [pd.concat(of, axis=1).mean(axis=1) for of in found.values()]
        differences = (means[0] - means[1]).dropna()
        name = f"{setting}: {value} minus {other}{SWEPT}"
        return [mean_effect(name, differences, "nats per token")] if len(differences) else []

    return measure


def spread(losses: pd.DataFrame) -> pd.Series:
    """How far the loss varies over the learning rates."""
    return losses.max(axis=1, skipna=False) - losses.min(axis=1, skipna=False)


def rise(losses: pd.DataFrame) -> pd.Series:
    """How far the loss rises from its minimum to the highest learning rate."""
    return losses.iloc[:, -1] - losses.min(axis=1, skipna=False)


def time(part: str) -> Measure:
    return lambda study, timings: time_ratios(timings, part, "rms", "layer")


def memory(study: Study, timings: list[dict]) -> list[Effect]:
    peaks = {(t["variant"], t["arm"]): t["peak_bytes"] for t in timings if t["part"] == "step" and t["peak_bytes"]}
    both = [variant for variant, arm in peaks if arm == "rms" and (variant, "layer") in peaks]
    return [exact_effect(v, peaks[v, "rms"] / peaks[v, "layer"], "ratio of peak bytes") for v in both]
