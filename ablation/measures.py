"""What the published claims are judged by: effects of a study's runs and timings, and what arithmetic shows."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

import kernels
from ablation.plan import arm_settings, base_settings
from ablation.report import time_ratios
from ablation.stats import Effect, mean_effect
from ablation.study import Study
from model.count import flops_per_token, num_norm_parameters

EPS = 1e-5


def effects(study: Study, timings: list[dict]) -> list[Effect]:
    """Everything that a study has measured: differences of each two arms, effects of a grid, how the loss varies over a
    sweep, what the residual stream is like, and times of RMSNorm over those of LayerNorm.
    """
    differences = (
        study.mean_loss(f"{arm} minus {base}", {arm: 1.0, base: -1.0})
        for arm, base in itertools.permutations(study.arms, 2)
    )
    times = [
        dataclasses.replace(effect, name=f"{part}: {effect.name}")
        for part in ("step", "forward")
        for effect in time_ratios(timings, part, "rms", "layer")
    ]
    return [*filter(None, differences), *study.effects, *sweeps(study), *stream(study), *times]


def sweeps(study: Study) -> Iterator[Effect]:
    """For each setting, how much more the losses of arms with one of its values vary over the learning rates than those
    of arms with its first value. A seed with a diverged run is left out: leaving out the learning rate would flatter.
    """
    for setting in study.plan.varied if study.rates else ():
        varies: dict[object, list[pd.Series]] = {}
        for name, arm in study.arms.items():
            losses = study.of("sweep", name).pivot(index="seed", columns="learning_rate", values=study.measure)
            spread = losses.max(axis=1, skipna=False) - losses.min(axis=1, skipna=False)
            varies.setdefault(study.plan.value(arm, setting), []).append(spread)
        first, *others = ((value, pd.concat(found, axis=1).mean(axis=1)) for value, found in varies.items())
        for value, spread in others:
            if len(differences := (spread - first[1]).dropna()):
                yield mean_effect(
                    f"{setting}: {value} minus {first[0]}, spread over the sweep", differences, study.unit
                )


def stream(study: Study) -> Iterator[Effect]:
    """What a norm before each block gets: |mean| / std over that of rows of D independent normal numbers, which is
    sqrt(2 / (pi D)), and the cosine of a row with itself minus its mean.
    """
    for name, arm in study.arms.items():
        model, rows = arm_settings(study.plan, arm).model, study.final(name)
        over_chance = rows.mean_over_std * math.sqrt(math.pi * model.hidden_size / 2)
        cosine = (1 - rows.cosine_with_ones**2) ** 0.5
        for what, values in (("mean over chance", over_chance), ("cosine without mean", cosine)):
            if model.norm_placement == "pre" and len(values := values.dropna()) > 1:
                yield mean_effect(f"{what}, {model.norm}: {name}", values, "")


def facts(kind: str) -> list[Effect]:
    """What needs no training: what a norm does to random rows, numbers of parameters and operations."""
    x, ones, norm = rows(0) + 0.3, torch.ones(256), functools.partial(kernels.normalize, kind=kind, eps=EPS)
    y, mean_square = norm(x, ones)[0], x.square().mean(-1, keepdim=True) + EPS
    scaled = [(scale * rows(2, 64)[:256]).requires_grad_() for scale in (10.0, 1.0)]
    outputs = [norm(rows(1, 64) @ weight.T, ones)[0] for weight in scaled]
    lengths = [torch.autograd.grad(*pair, rows(3))[0].norm() for pair in zip(outputs, scaled, strict=True)]
    learned, blocked = (
        torch.autograd.functional.jacobian(lambda row, g=gain: norm(row[None], g)[0][0], x[0]).abs()
        for gain in (ones, 0 * ones)
    )
    rms, layer = (dataclasses.replace(base_settings("ablation").model, norm=name) for name in ("rms", "layer"))
    shares = [
        8 * c.num_norms * c.hidden_size / flops_per_token(c, 128) for c in (base_settings("ablation-10m").model, rms)
    ]
    overflows = (400 * rows(4)).half().square().mean(-1).isinf().double().mean()
    found = {
        "change by scale": (change(norm(10 * x, ones)[0], y), "relative change"),
        "gradient by scale": (lengths[0] / lengths[1], "ratio"),
        "cosine": (torch.cosine_similarity(x.double(), y.double(), dim=-1).mean(), "cosine"),
        "coupling": ((learned - learned.diagonal().diag()).max() / learned.diagonal().max(), "of the diagonal"),
        "others": (change(norm(x[:1], ones)[0], y[:1]), "relative change"),
        "weight 0": (blocked.max(), "largest derivative"),
        "rsqrt": (change(x * torch.rsqrt(mean_square), x / mean_square.sqrt()), "relative change"),
        "float16 overflows": (overflows, "of rows"),
        "norm parameters": (num_norm_parameters(rms) / num_norm_parameters(layer), "rms over layer"),
        "operations": (shares[0] / shares[1], "of 10M over 1.3M parameters"),
    }
    values = {f"{name}: {kind}": (float(value), unit) for name, (value, unit) in found.items()}
    return [Effect(name, value, (value, value), (value, value), 0.0, unit, 0) for name, (value, unit) in values.items()]


def rows(seed: int, width: int = 256) -> Tensor:
    return torch.randn(512, width, generator=torch.Generator().manual_seed(seed))


def change(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).norm() / old.norm()
