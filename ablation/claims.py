"""Published claims about norms as data, and verdicts on them: `python ablate.py --claims FOLDER ...`.

A claim names effects and the region in which they lie; one rule, `judge`, turns both into a verdict.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import kernels
from ablation.plan import arm_settings, base_settings
from ablation.records import read_lines
from ablation.report import MISSING, TIMINGS, table, time_ratios, with_interval
from ablation.stats import MIN_PAIRS_FOR_EQUIVALENCE, Effect, mean_effect
from ablation.study import Study, load
from model.count import flops_per_token, num_norm_parameters

EPS = 1e-5
ROUNDING = 1e-4  # relative change that rounding in float32 may cause
VERDICTS = ("does not hold", "inconclusive", "holds")  # of several effects the first of these counts


@dataclass(frozen=True)
class Claim:
    """A statement about effects: all of them lie between `low` and `high`."""

    id: str
    text: str
    source: str
    effects: str  # their names in `measured` or `facts`; "; " between them, * is any text, none: not measured
    low: float = -math.inf
    high: float = math.inf


def judge(effect: Effect, low: float, high: float) -> str:
    """Whether the effect lies between low and high: where its 95% interval lies inside, or outside. Between two finite
    bounds it is inside where that of 90% is, which is two one-sided tests at 5% and takes five pairs.
    """
    if effect.interval[1] <= low or effect.interval[0] >= high:
        return "does not hold"
    two_sided = math.isfinite(low) and math.isfinite(high)
    inside = effect.interval_90 if two_sided else effect.interval
    enough = not two_sided or effect.n == 0 or effect.n >= MIN_PAIRS_FOR_EQUIVALENCE
    return "holds" if enough and low < inside[0] and inside[1] < high else "inconclusive"


ZHANG, GUPTA = "Zhang and Sennrich 2019, arXiv 1910.07467", "Gupta et al. 2024, arXiv 2409.12951"
XIONG, SHAZEER = "Xiong et al. 2020, arXiv 2002.04745", "Shazeer 2020, arXiv 2002.05202"
XU, JIANG = "Xu et al. 2019, arXiv 1911.07013", "Jiang et al. 2023, arXiv 2305.14858"
SHEN, HENRY = "Shen et al. 2020, arXiv 2003.07845", "Henry et al. 2020, arXiv 2010.04245"
WORTSMAN, TEXTS = "Wortsman et al. 2023, arXiv 2309.14322", "papers and tutorials on RMSNorm"
EQUAL_BIAS = "rms with bias minus layer; rms minus layer without bias"
HEADS, WITH = "qk_norm: True minus False", "norm: rms minus layer x"
CLAIMS = [
    Claim("C1", "RMSNorm saves 7% to 64% of the time (here: of a step, 7% or more)", ZHANG, "step: *", high=0.93),
    Claim("C2", "RMSNorm and LayerNorm reach the same loss", ZHANG, "rms minus layer", -0.005, 0.005),
    Claim("C3", "Re-centering alone is far worse than LayerNorm", ZHANG, "center minus layer", 0.1),
    Claim("C4a", "Deep in RMSNorm models means are as in random rows", GUPTA, "mean over chance, rms: *", 2 / 3, 1.5),
    Claim("C4b", "Deep in LayerNorm models they are half of that", GUPTA, "mean over chance, layer: *", high=0.5),
    Claim("C5a", "RMSNorm needs half the norm parameters", ZHANG, "norm parameters: rms", 0.499, 0.501),
    Claim("C5b", "RMSNorm needs measurably less memory in a step", ZHANG, ""),
    Claim("C6", "RMSNorm loses less to float16", TEXTS, f"{WITH} dtype: float16 minus float32", high=0.0),
    Claim("C7", "Without a float32 upcast squares overflow in float16", TEXTS, "float16 overflows: rms", 0.99),
    Claim("C8a", "The output is invariant to the input's scale", ZHANG, "change by scale: *", high=ROUNDING),
    Claim("C8b", "The gradient is invariant to weights x 10", TEXTS, "gradient by scale: *", 0.99, 1.01),
    Claim("C9a", "RMSNorm keeps the direction of x", ZHANG, "cosine: rms", 0.999999),
    Claim("C9b", "LayerNorm does not keep the direction of x", ZHANG, "cosine: layer", high=0.999999),
    Claim("C9c", "In training removing the mean changes directions", TEXTS, "cosine without mean, *", high=0.99),
    Claim("C10", "Post-norm's loss varies more over learning rates", XIONG, "*: post minus pre, spread*", 0.0),
    Claim("C11", "eps between 1e-5 and 1e-8 does not matter", TEXTS, "norm_eps: 1e-0? minus 1e-05", -0.01, 0.01),
    Claim("C12a", "SwiGLU is the best gated MLP", SHAZEER, "*glu minus swiglu", 0.0),
    Claim("C12b", "Any gate beats any plain MLP", SHAZEER, "relu minus *glu; gelu minus *glu", 0.0),
    Claim("C13", "BatchNorm does not suit a decoder: its loss is higher", SHEN, "batch minus layer", 0.0),
    Claim("C14a", "A LayerNorm model cannot lose its means", TEXTS, "rms with bias at once minus layer", 0.01),
    Claim("C14b", "A LayerNorm model cannot lose its biases", TEXTS, "layer without bias at once minus layer", 0.01),
    Claim("C14c", "A LayerNorm model cannot be switched to RMSNorm", TEXTS, "rms at once minus layer", 0.01),
    Claim("C14d", "A centered LayerNorm model is an RMSNorm model", JIANG, "*centered* minus layer", -0.0005, 0.0005),
    Claim("C14e", "Training the norms alone restores its loss", TEXTS, "rms, norms trained minus layer", -0.01, 0.01),
    Claim("C15a", "Removing the mean alone does not matter", GUPTA, EQUAL_BIAS, -0.01, 0.01),
    Claim("C15b", "The bias of a norm does not matter", XU, "norm_bias: False minus True", -0.01, 0.01),
    Claim("C16a", "A norm of q and k lowers the loss", HENRY, HEADS, high=0.0),
    Claim("C16b", "With it the loss varies less over learning rates", WORTSMAN, f"{HEADS}, spread*", high=0.0),
    Claim("C17", "RMSNorm does not couple the gradients of a row", TEXTS, "coupling: rms", high=ROUNDING),
    Claim("C18", "A row's output depends on no other row of the batch", TEXTS, "others: *", high=ROUNDING),
    Claim("C19", "rsqrt gives what dividing by sqrt gives", TEXTS, "rsqrt: rms", high=ROUNDING),
    Claim("C20a", "No gradient passes a norm whose weight begins at 0", TEXTS, "weight 0: *", high=ROUNDING),
    Claim("C20b", "Random initial weights of the norms do not matter", TEXTS, ""),
    Claim("C21", "The norms' share of operations grows with the model", TEXTS, "operations: rms", 1.0),
    Claim("C22", "What RMSNorm brings takes over a billion parameters", TEXTS, ""),
    Claim("C23", "RMSNorm's loss varies less over learning rates", TEXTS, "norm: rms minus layer, spread*", high=0.0),
    Claim("C24", "RMSNorm is less sensitive to initial weights", TEXTS, f"{WITH} initializer_range: *", high=0.0),
    Claim("C25", "RMSNorm lowers the latency of a forward pass", TEXTS, "forward: *", high=1.0),
    Claim("C26", "RMSNorm models lose less when they are quantized", TEXTS, ""),
]


def claims_table(folders: Sequence[Path]) -> str:
    """One Markdown table of claims; each is judged from the first of the folders that measured it."""
    found = [(study := load(folder), measured(study, read_lines(folder / TIMINGS))) for folder in folders]
    arithmetic = None, [fact for kind in ("rms", "layer") for fact in facts(kind)]
    return table(claim_row(claim, [*found, arithmetic]) for claim in CLAIMS)


def claim_row(claim: Claim, known: Sequence[tuple[Study | None, list[Effect]]]) -> dict[str, str]:
    """The claim, every effect with its own verdict where there are several, and where it was judged."""
    ends = [f"above {claim.low:g}"] * math.isfinite(claim.low) + [f"below {claim.high:g}"] * math.isfinite(claim.high)
    row = {"id": claim.id, "claim": claim.text, "source": claim.source, "region": " and ".join(ends) or MISSING}
    for study, effects in known:
        if about := [e for e in effects if any(fnmatchcase(e.name, name) for name in claim.effects.split("; "))]:
            verdicts = [judge(effect, claim.low, claim.high) for effect in about]
            texts = [f"{e.name} {with_interval(e, '.4g')} {e.unit}".rstrip() for e in about]
            if len(about) > 1:
                texts = [f"{text} ({verdict})" for text, verdict in zip(texts, verdicts, strict=True)]
            verdict = next(verdict for verdict in VERDICTS if verdict in verdicts)
            return row | {"measured": "; ".join(texts), "judged at": judged_at(study, about), "verdict": verdict}
    return row | {"measured": MISSING, "judged at": MISSING, "verdict": "not measured"}


def judged_at(study: Study | None, effects: list[Effect]) -> str:
    """Scale and learning rates of the runs that the effects are of."""
    if study is None:
        return "arithmetic"
    named = {arm for effect in effects for arm in effect.name.split(" minus ")} & {*study.learning_rates}
    swept = any("sweep" in effect.name for effect in effects)
    rates = study.rates if swept else {study.learning_rates[arm] for arm in named or study.learning_rates}
    scale = f"{study.rows.parameters.max() / 1e6:.3g}M parameters, {study.rows.tokens.max() / 1e6:.2g}M tokens"
    shared = " of all arms" if study.shares_rate else ""
    return f"{scale}, learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}{shared}"


def measured(study: Study, timings: list[dict]) -> list[Effect]:
    """Everything that a study has measured, and the times of RMSNorm over those of LayerNorm."""
    pairs = itertools.permutations(study.arms, 2)
    differences = (study.mean_loss(f"{arm} minus {base}", {arm: 1.0, base: -1.0}) for arm, base in pairs)
    ratios = [(part, effect) for part in ("step", "forward") for effect in time_ratios(timings, part, "rms", "layer")]
    times = [dataclasses.replace(effect, name=f"{part}: {effect.name}") for part, effect in ratios]
    return [*filter(None, differences), *study.effects, *sweeps(study), *stream(study), *times]


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
            if len(differences := (spread - first[1]).dropna()):
                name = f"{setting}: {value} minus {first[0]}, spread over the sweep"
                yield mean_effect(name, differences, study.unit)


def stream(study: Study) -> Iterator[Effect]:
    """What a norm before a block gets: |mean| / std over that of random rows, and the cosine with x minus its mean."""
    for name, arm in study.arms.items():
        model, rows = arm_settings(study.plan, arm).model, study.final(name)
        over_chance = rows.mean_over_std * math.sqrt(math.pi * model.hidden_size / 2)
        cosine = (1 - rows.cosine_with_ones**2) ** 0.5
        for what, values in (("mean over chance", over_chance), ("cosine without mean", cosine)):
            if model.norm_placement == "pre" and len(values := values.dropna()) > 1:
                yield mean_effect(f"{what}, {model.norm}: {name}", values, "")


def facts(kind: str) -> list[Effect]:
    """What needs no training: what a norm does to random rows, numbers of parameters and operations."""
    x, ones, norm = normal_rows(0) + 0.3, torch.ones(256), functools.partial(kernels.normalize, kind=kind, eps=EPS)
    y, mean_square = norm(x, ones)[0], x.square().mean(-1, keepdim=True) + EPS
    scaled = [(scale * normal_rows(2, 64)[:256]).requires_grad_() for scale in (10.0, 1.0)]
    outputs = [norm(normal_rows(1, 64) @ weight.T, ones)[0] for weight in scaled]
    lengths = [torch.autograd.grad(*pair, normal_rows(3))[0].norm() for pair in zip(outputs, scaled, strict=True)]
    learned, blocked = (
        torch.autograd.functional.jacobian(lambda row, g=gain: norm(row[None], g)[0][0], x[0]).abs()
        for gain in (ones, 0 * ones)
    )
    large, rms = (base_settings(config).model for config in ("ablation-10m", "ablation"))
    layer = dataclasses.replace(rms, norm="layer")
    shares = [8 * c.num_norms * c.hidden_size / flops_per_token(c, 128) for c in (large, rms)]
    found = {
        "change by scale": (change(norm(10 * x, ones)[0], y), "relative change"),
        "gradient by scale": (lengths[0] / lengths[1], "ratio"),
        "cosine": (torch.cosine_similarity(x.double(), y.double(), dim=-1).mean(), "cosine"),
        "coupling": ((learned - learned.diagonal().diag()).max() / learned.diagonal().max(), "of the diagonal"),
        "others": (change(norm(x[:1], ones)[0], y[:1]), "relative change"),
        "weight 0": (blocked.max(), "largest derivative"),
        "rsqrt": (change(x * torch.rsqrt(mean_square), x / mean_square.sqrt()), "relative change"),
        "float16 overflows": ((400 * normal_rows(4)).half().square().mean(-1).isinf().double().mean(), "of rows"),
        "norm parameters": (num_norm_parameters(rms) / num_norm_parameters(layer), "rms over layer"),
        "operations": (shares[0] / shares[1], "of 10M over 1.3M parameters"),
    }
    exact = {f"{name}: {kind}": ((float(value),) * 2, unit) for name, (value, unit) in found.items()}
    return [Effect(name, limits[0], limits, limits, 0.0, unit, 0) for name, (limits, unit) in exact.items()]


def normal_rows(seed: int, width: int = 256) -> Tensor:
    return torch.randn(512, width, generator=torch.Generator().manual_seed(seed))


def change(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).norm() / old.norm()
