"""Learning rate and sequence length as functions of the step number alone, so that a resumed run continues exactly."""

import math

from data.settings import DataSettings
from training.settings import OptimizerSettings

SHORTER = 0.4  # share of the steps with shorter sequences than --sequence-length, with --first-sequence-length


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of step 0 <= step < steps: linear warm-up, then a decay to the final learning rate.

    cosine: half a cosine after the warm-up (Loshchilov and Hutter 2017, SGDR, equation 5).
    wsd: constant, then linear over the last `decay_fraction` of the steps (Hu et al. 2024, MiniCPM, section 4).
    """
    warmup = min(settings.warmup_steps, steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    wsd = settings.schedule == "wsd"
    decay_start = max(warmup, steps - round(settings.decay_fraction * steps)) if wsd else warmup
    progress = max(0, step + 1 - decay_start) / max(1, steps - decay_start)  # 0 before the decay, 1 at the last step
    remaining = 1 - progress if wsd else (1 + math.cos(math.pi * progress)) / 2
    final = settings.final_learning_rate
    return settings.learning_rate * (final + (1 - final) * remaining)


def sequence_length(step: int, steps: int, data: DataSettings) -> int:
    """Tokens per sequence of step 0 <= step < steps: twice as many after each of equal parts of SHORTER of the steps.

    A curriculum that saves time in attention: Li et al. 2022, The Stability-Efficiency Dilemma, arXiv 2108.06084.
    """
    if data.first_sequence_length is None:
        return data.sequence_length
    doublings = (data.sequence_length // data.first_sequence_length).bit_length() - 1
    return data.first_sequence_length << min(doublings, int(step * doublings / (SHORTER * steps)))
