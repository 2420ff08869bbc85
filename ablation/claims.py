"""Published claims about norms as data, and verdicts on them: `python ablate.py --claims FOLDER ...`.

A claim says in which region the effects lie that it is about. One rule, `judge`, turns effects and region into a
verdict; there is no other. Claims whose ids differ in a letter are parts of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ablation import measures
from ablation.measures import Measure, difference, direction, fact, grid_effects, mean_over_chance, sweep, time
from ablation.report import MISSING, TIMINGS, read_lines, table, with_interval
from ablation.stats import Effect
from ablation.study import Study, load

ROUNDING = 1e-4  # relative change that rounding in float32 may cause
VERDICTS = ("does not hold", "inconclusive", "holds")  # of several effects the first of these counts


@dataclass(frozen=True)
class Claim:
    """A statement about effects: all of them lie between `low` and `high`."""

    id: str
    text: str
    source: str
    measure: Measure | str
    """Its effects, or why it was not measured."""
    low: float = -math.inf
    high: float = math.inf


def judge(effect: Effect, low: float, high: float) -> str:
    """Does the effect lie between low and high?

    It holds where the whole interval lies inside: the 95% interval, or between two finite bounds the 90% interval,
    which is two one-sided tests at 5% and takes as many pairs as any equivalence. It does not hold where the whole 95%
    interval lies outside. An effect on an arm that is not well tuned decides nothing.
    """
    if effect.interval is None or effect.untuned:
        return "inconclusive"
    if effect.interval[1] <= low or effect.interval[0] >= high:
        return "does not hold"
    two_sided = math.isfinite(low) and math.isfinite(high)
    inside = effect.interval_90 if two_sided else effect.interval
    enough = effect.can_be_equivalent or not two_sided
    return "holds" if enough and low < inside[0] and inside[1] < high else "inconclusive"


ZHANG, GUPTA = "Zhang and Sennrich 2019, arXiv 1910.07467", "Gupta et al. 2024, arXiv 2409.12951"
XIONG, SHAZEER = "Xiong et al. 2020, arXiv 2002.04745", "Shazeer 2020, arXiv 2002.05202"
XU, JIANG = "Xu et al. 2019, arXiv 1911.07013", "Jiang et al. 2023, arXiv 2305.14858"
SHEN, HENRY = "Shen et al. 2020, arXiv 2003.07845", "Henry et al. 2020, arXiv 2010.04245"
WORTSMAN, TEXTS = "Wortsman et al. 2023, arXiv 2309.14322", "papers and tutorials on RMSNorm"
BOTH = ("rms", "layer")
CENTERED = "rms with bias and centered weights at once"
PLACES, NORMS, HEADS = ("norm_placement", "post", "pre"), ("norm", "rms", "layer"), ("qk_norm", True, False)
FLOAT16 = "norm: rms minus layer x dtype: float16 minus float32"
EPS = [f"norm_eps: {eps:g} minus 1e-05" for eps in (1e-6, 1e-8)]
SCALES = [f"norm: rms minus layer x initializer_range: {scale:g} minus 0.02" for scale in (0.005, 0.08)]
CLAIMS = [
    Claim("C1", "RMSNorm saves 7% to 64% of the time (here: of a step, 7% or more)", ZHANG, time("step"), high=0.93),
    Claim("C2", "RMSNorm and LayerNorm reach the same loss", ZHANG, difference("rms"), -0.01, 0.01),
    Claim("C3", "Re-centering alone is far worse than LayerNorm", ZHANG, difference("center"), 0.1),
    Claim("C4a", "Deep in RMSNorm models means are as in random rows", GUPTA, mean_over_chance("rms"), 2 / 3, 1.5),
    Claim("C4b", "Deep in LayerNorm models means are half of that or less", GUPTA, mean_over_chance("layer"), high=0.5),
    Claim("C5a", "RMSNorm needs half the norm parameters", ZHANG, fact("parameters", "rms"), 0.499, 0.501),
    Claim("C5b", "RMSNorm needs measurably less memory in a step", ZHANG, measures.memory, high=0.99),
    Claim("C6", "RMSNorm loses less to float16 than LayerNorm", TEXTS, grid_effects(FLOAT16), high=0.0),
    Claim("C7", "Without a float32 upcast squares overflow in float16", TEXTS, fact("rows lost", "rms"), 0.99),
    Claim("C8a", "The output is invariant to the input's scale", ZHANG, fact("change by scale", *BOTH), high=ROUNDING),
    Claim("C8b", "The gradient is invariant to weights x 10", TEXTS, fact("gradient by scale", *BOTH), 0.99, 1.01),
    Claim("C9a", "RMSNorm keeps the direction of x", ZHANG, fact("cosine", "rms"), 0.999999),
    Claim("C9b", "LayerNorm does not keep the direction of x", ZHANG, fact("cosine", "layer"), high=0.999999),
    Claim("C9c", "Without its mean a row seen in training has another direction", TEXTS, direction(*BOTH), high=0.99),
    Claim("C10a", "Post-norm's loss varies more over learning rates", XIONG, sweep(*PLACES, measures.spread), 0.0),
    Claim("C10b", "Post-norm's loss rises more to the highest one", XIONG, sweep(*PLACES, measures.rise), 0.0),
    Claim("C11", "eps between 1e-5 and 1e-8 does not matter", TEXTS, grid_effects(*EPS), -0.01, 0.01),
    Claim("C12a", "SwiGLU is the best gated MLP", SHAZEER, difference("geglu", "reglu", "glu", base="swiglu"), 0.0),
    Claim("C12b", "Any gate beats the better plain MLP", SHAZEER, measures.plain_against_gated, 0.0),
    Claim("C13", "BatchNorm does not suit a decoder: its loss is higher", SHEN, difference("batch"), 0.0),
    Claim("C14a", "A LayerNorm model cannot lose its means", TEXTS, difference("rms with bias at once"), 0.01),
    Claim("C14b", "A LayerNorm model cannot lose its biases", TEXTS, difference("layer without bias at once"), 0.01),
    Claim("C14c", "A LayerNorm model cannot be switched to RMSNorm", TEXTS, difference("rms at once"), 0.01),
    Claim("C14d", "A centered LayerNorm model is an RMSNorm model", JIANG, difference(CENTERED), -0.0005, 0.0005),
    Claim("C14e", "Training the norms alone restores its loss", TEXTS, difference("rms, norms trained"), -0.01, 0.01),
    Claim("C15a", "Removing the mean alone does not matter", GUPTA, measures.mean_at_equal_bias, -0.01, 0.01),
    Claim("C15b", "The bias of a norm does not matter", XU, grid_effects("norm_bias: False minus True"), -0.01, 0.01),
    Claim("C16a", "A norm of q and k lowers the loss", HENRY, grid_effects("qk_norm: True minus False"), high=0.0),
    Claim("C16b", "With it the loss rises less to the highest one", WORTSMAN, sweep(*HEADS, measures.rise), high=0.0),
    Claim("C17", "RMSNorm does not couple the gradients of a row", TEXTS, fact("coupling", "rms"), high=ROUNDING),
    Claim("C18", "A row's output depends on no other row of the batch", TEXTS, fact("others", *BOTH), high=ROUNDING),
    Claim("C19", "rsqrt gives what dividing by sqrt gives", TEXTS, fact("rsqrt", "rms"), high=ROUNDING),
    Claim("C20a", "No gradient passes a norm whose weight begins at 0", TEXTS, fact("weight 0", *BOTH), high=ROUNDING),
    Claim("C20b", "Random initial weights of the norms do not matter", TEXTS, "no run has them"),
    Claim("C21", "The norms' share of operations grows with the model", TEXTS, fact("operations", "rms"), 1.0),
    Claim("C22", "What RMSNorm brings takes over a billion parameters", TEXTS, "takes other hardware"),
    Claim("C23", "RMSNorm's loss varies less over learning rates", TEXTS, sweep(*NORMS, measures.spread), high=0.0),
    Claim("C24", "RMSNorm is less sensitive to initial weights", TEXTS, grid_effects(*SCALES), high=0.0),
    Claim("C25", "RMSNorm lowers the latency of a forward pass", TEXTS, time("forward"), high=1.0),
    Claim("C26", "RMSNorm models lose less when they are quantized", TEXTS, "no runs of both norms were quantized"),
]


def claims_table(folders: Sequence[Path]) -> str:
    """One Markdown table of claims; each is judged from the first of the folders that measured it."""
    studies = [(load(folder), read_lines(folder / TIMINGS)) for folder in folders]
    return table(claim_row(claim, studies) for claim in CLAIMS)


def claim_row(claim: Claim, studies: Sequence[tuple[Study, list[dict]]]) -> dict[str, str]:
    """The claim, every effect with its own verdict where there are several, and where it was judged."""
    row = {"id": claim.id, "claim": claim.text, "source": claim.source, "region": region(claim)}
    for study, timings in () if isinstance(claim.measure, str) else studies:
        if effects := claim.measure(study, timings):
            verdicts = [judge(effect, claim.low, claim.high) for effect in effects]
            found = [f"{e.name} {with_interval(e, '.4g')} {e.unit}" for e in effects]
            if len(effects) > 1:
                found = [f"{text} ({verdict})" for text, verdict in zip(found, verdicts, strict=True)]
            verdict = next(verdict for verdict in VERDICTS if verdict in verdicts)
            return row | {"measured": "; ".join(found), "judged at": judged_at(study, effects), "verdict": verdict}
    reason = claim.measure if isinstance(claim.measure, str) else MISSING
    return row | {"measured": reason, "judged at": MISSING, "verdict": "not measured"}


def region(claim: Claim) -> str:
    ends = [f"above {claim.low:g}"] * math.isfinite(claim.low) + [f"below {claim.high:g}"] * math.isfinite(claim.high)
    return " and ".join(ends) or MISSING


def judged_at(study: Study, effects: list[Effect]) -> str:
    """Scale and learning rates of the runs that the effects are of."""
    if not any(effect.n for effect in effects):
        return "arithmetic"
    arms = {arm for effect in effects for arm in effect.name.split(" minus ")} & {*study.learning_rates}
    rates = {study.learning_rates[arm] for arm in arms or study.learning_rates}
    if any(effect.name.endswith(measures.SWEPT) for effect in effects):
        rates = study.rates
    scale = f"{study.rows.parameters.max() / 1e6:.3g}M parameters, {study.rows.tokens.max() / 1e6:.2g}M tokens"
    shared = " of all arms" if study.shares_rate else ""
    return f"{scale}, learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}{shared}"
