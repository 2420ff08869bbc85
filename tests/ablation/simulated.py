"""Verdicts on simulated differences, for the error rates of docs/compare.md."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from ablation import study
from ablation.judge import LOOKS, crossing_probability, lond_level, pairs_of_looks
from ablation.plan import STUDIES

CONSTANTS = np.linspace(8, 0.1, 100)  # of boundaries; those of other levels are interpolated
IDEAS = 50


@functools.cache
def log_levels() -> np.ndarray:
    return np.log([crossing_probability(constant, LOOKS) for constant in CONSTANTS])


def verdicts(differences: np.ndarray, constant: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Of each row 1 where it is kept, -1 where it is discarded, else 0; and the look (from 0) that decides first."""
    reached = []
    for look, n in enumerate(pairs_of_looks(differences.shape[1]), 1):
        pairs = differences[:, :n]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = pairs.mean(-1) / (pairs.std(-1, ddof=1) / math.sqrt(n))
        reached.append(-special.ndtri(special.stdtr(n - 1, t)) * math.sqrt(look / LOOKS))
    decided = np.abs(reached) >= constant
    first = decided.argmax(axis=0)
    return np.sign(np.array(reached)[first, np.arange(len(first))]) * decided.any(axis=0), first


def simulate(campaigns: int, draw: Callable, share: float, fading: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The rate of false keeps and the power, of campaigns at 10% and of verdicts at 5%.

    draw: differences with a mean of 0 and a deviation of 1. A share of the ideas is better by 1; each keep multiplies
    what later ones gain by `fading`.
    """
    generator = np.random.default_rng(1)
    keeps, false_keeps, true_ideas = np.zeros((3, 2, campaigns))
    for number in range(1, IDEAS + 1):
        noise, is_true = draw(generator, (campaigns, 20)), generator.random(campaigns) < share
        levels = np.stack([2 * lond_level(0.1, number, keeps[0]), np.full(campaigns, 0.05)])
        for way, constants in enumerate(np.interp(np.log(levels), log_levels(), CONSTANTS)):
            gain = np.where(is_true, fading ** keeps[way], 0)
            kept = verdicts(noise - gain[:, None], constants)[0] > 0
            keeps[way] += kept
            false_keeps[way] += kept & ~is_true
            true_ideas[way] += is_true
    rates = (false_keeps / np.maximum(keeps, 1)).mean(1)
    return rates, (keeps - false_keeps).sum(1) / np.maximum(true_ideas.sum(1), 1)


def arm_with_itself(generator: np.random.Generator, shape: tuple) -> np.ndarray:
    table = pd.read_csv(Path(__file__).with_name("arm_with_itself.csv"))
    values = (table.loss_again - table.loss).to_numpy()
    return generator.choice((values - values.mean()) / values.std(), shape)


@functools.cache
def recorded() -> list[np.ndarray]:
    """The differences of every committed comparison of five pairs or more, with a mean of 0 and a deviation of 1."""
    folders = [path.parent for path in sorted(STUDIES.glob("*/runs.jsonl"))]
    values = [np.array(c.differences) for folder in folders for c in study.load(folder).comparisons]
    return [(pairs - pairs.mean()) / pairs.std(ddof=1) for pairs in values if len(pairs) >= 5]


def recorded_comparisons(generator: np.random.Generator, shape: tuple) -> np.ndarray:
    chosen = generator.integers(len(recorded()), size=shape[0])
    return np.stack([generator.choice(recorded()[n], shape[1]) for n in chosen])
