import math

import pytest

from training.schedule import learning_rate
from training.settings import OptimizerSettings


def learning_rates(**settings) -> list[float]:
    steps = settings.pop("steps", 100)
    return [
        learning_rate(step, steps, OptimizerSettings(steps=steps, learning_rate=2.0, **settings))
        for step in range(steps)
    ]


def test_warm_up_rises_linearly_to_the_peak():
    assert learning_rates(warmup_steps=10)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])


def test_wsd_is_constant_and_then_falls_linearly_to_the_final_learning_rate():
    found = learning_rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_learning_rate=0.1)
    assert found[10:80] == [2.0] * 70
    assert found[80:] == pytest.approx([2.0 * (1 - 0.9 * (i + 1) / 20) for i in range(20)])


def test_cosine_follows_half_a_cosine_to_the_final_learning_rate():
    found = learning_rates(schedule="cosine", warmup_steps=10, final_learning_rate=0.1)
    expected = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * (i + 1) / 90)) / 2) for i in range(90)]
    assert found[10:] == pytest.approx(expected)
    assert found[-1] == pytest.approx(0.2)


def test_a_warm_up_longer_than_the_run_never_exceeds_the_peak():
    assert max(learning_rates(steps=5, warmup_steps=50)) == 2.0
