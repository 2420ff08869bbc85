"""Effects that claims are about: what a study has measured, and what is known of norms without training."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import kernels
from ablation.plan import arm_settings, base_settings
from ablation.records import read_lines
from ablation.report import TIMINGS, time_ratios
from ablation.stats import Effect, mean_effect
from ablation.study import Study, load
from model.count import flops_per_token, num_norm_parameters

EPS = 1e-5


def measured(folder: Path) -> tuple[Study, list[Effect]]:
    """A study and everything that it has measured, with the times of RMSNorm over those of LayerNorm."""
    study, timings = load(folder), read_lines(folder / TIMINGS)
    pairs = itertools.permutations(study.arms, 2)
    differences = [study.mean_loss(f"{arm} minus {base}", {arm: 1.0, base: -1.0}) for arm, base in pairs]
    times = []
    for part in ("step", "forward"):
        for effect in time_ratios(timings, part, "rms", "layer"):
            times.append(dataclasses.replace(effect, name=f"{part}: {effect.name}"))
    return study, [*filter(None, differences), *study.effects, *sweeps(study), *streams(study), *times]


def sweeps(study: Study) -> Iterator[Effect]:
    """For each setting, how much more the losses of arms with one of its values vary over the learning rates than those
    of arms with its first value. A seed with a diverged run is left out: leaving out the learning rate would flatter.
    """
    varies = pd.DataFrame(index=study.arms, columns=study.plan.phase_seeds["sweep"], dtype=float)
    for arm in study.arms if study.rates else ():
        losses = study.of("sweep", arm).pivot(index="learning_rate", columns="seed", values=study.measure)
        varies.loc[arm] = losses.max(skipna=False) - losses.min(skipna=False)
    for setting in study.plan.varied:
        values = [str(study.plan.value(arm, setting)) for arm in study.arms.values()]
        first, *others = varies.groupby(np.array(values), sort=False).mean().iterrows()
        for value, spread in others:
            differences = (spread - first[1]).dropna()
            if len(differences):
                name = f"{setting}: {value} minus {first[0]}, spread over the sweep"
                yield mean_effect(name, differences, study.unit)


def streams(study: Study) -> Iterator[Effect]:
    """What a norm before a block gets: |mean| / std over that of random rows, and the cosine with x minus its mean."""
    for name, arm in study.arms.items():
        model, rows = arm_settings(study.plan, arm).model, study.final(name)
        over_chance = rows.mean_over_std * math.sqrt(math.pi * model.hidden_size / 2)
        cosine = (1 - rows.cosine_with_ones**2) ** 0.5
        for what, column in (("mean over chance", over_chance), ("cosine without mean", cosine)):
            values = column.dropna()
            if model.norm_placement == "pre" and len(values) > 1:
                yield mean_effect(f"{what}, {model.norm}: {name}", values, "")


def normal_rows(seed: int, width: int = 256) -> Tensor:
    return torch.randn(512, width, generator=torch.Generator().manual_seed(seed))


def change(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).norm() / old.norm()


def exact_effect(name: str, value: float, unit: str) -> Effect:
    return Effect(name, value, (value, value), (value, value), p=0.0, unit=unit, n=0)


def facts(kind: str) -> list[Effect]:
    """All that is known exactly of RMSNorm (`rms`) or LayerNorm (`layer`)."""
    x, ones, norm = normal_rows(0) + 0.3, torch.ones(256), functools.partial(kernels.normalize, kind=kind, eps=EPS)
    y = norm(x, ones)[0]
    values = {
        "change by scale": (change(norm(10 * x, ones)[0], y), "relative change"),
        "cosine": (torch.cosine_similarity(x.double(), y.double(), dim=-1).mean(), "cosine"),
        "others": (change(norm(x[:1], ones)[0], y[:1]), "relative change"),
        "float16 overflows": ((400 * normal_rows(4)).half().square().mean(-1).isinf().double().mean(), "of rows"),
    }
    mean_square = x.square().mean(-1, keepdim=True) + EPS
    values["rsqrt"] = change(x * torch.rsqrt(mean_square), x / mean_square.sqrt()), "relative change"

    lengths = []  # lengths of the gradient of weights before the norm, 10 times as large and as they are
    for scale in (10.0, 1.0):
        weight = (scale * normal_rows(2, 64)[:256]).requires_grad_()
        output = norm(normal_rows(1, 64) @ weight.T, ones)[0]
        lengths.append(torch.autograd.grad(output, weight, normal_rows(3))[0].norm())
    values["gradient by scale"] = lengths[0] / lengths[1], "ratio"

    def jacobian(gain: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(lambda row: norm(row[None], gain)[0][0], x[0]).abs()

    learned = jacobian(ones)
    off_diagonal = learned - learned.diagonal().diag()
    values["coupling"] = off_diagonal.max() / learned.diagonal().max(), "of the diagonal"
    values["weight 0"] = jacobian(0 * ones).max(), "largest derivative"

    large, rms = (base_settings(config).model for config in ("ablation-10m", "ablation"))
    layer = dataclasses.replace(rms, norm="layer")
    values["norm parameters"] = num_norm_parameters(rms) / num_norm_parameters(layer), "rms over layer"
    shares = [8 * config.num_norms * config.hidden_size / flops_per_token(config, 128) for config in (large, rms)]
    values["operations"] = shares[0] / shares[1], "of 10M over 1.3M parameters"
    return [exact_effect(f"{name}: {kind}", float(value), unit) for name, (value, unit) in values.items()]
