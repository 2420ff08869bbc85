import math
from unittest.mock import Mock

import pytest

from data.settings import DataSettings
from tests.training.runs import open_session
from training.loop import train_steps
from training.schedule import learning_rate, sequence_length
from training.settings import OptimizerSettings


def learning_rates(steps: int = 100, **settings) -> list[float]:
    settings = OptimizerSettings(steps=steps, learning_rate=2.0, **settings)
    return [learning_rate(step, steps, settings) for step in range(steps)]


def test_warm_up_rises_linearly_to_the_peak():
    assert learning_rates(warmup_steps=10)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(learning_rates(steps=5, warmup_steps=50)) == 2.0  # never above it


def test_wsd_is_constant_and_then_falls_linearly_to_the_final_learning_rate():
    found = learning_rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_learning_rate=0.1)
    assert found[10:80] == [2.0] * 70
    assert found[80:] == pytest.approx([2.0 * (1 - 0.9 * (i + 1) / 20) for i in range(20)])


def test_cosine_follows_half_a_cosine_to_the_final_learning_rate():
    found = learning_rates(schedule="cosine", warmup_steps=10, final_learning_rate=0.1)
    expected = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * (i + 1) / 90)) / 2) for i in range(90)]
    assert found[10:] == pytest.approx(expected)


def lengths(steps: int, **data: int) -> list[int]:
    return [sequence_length(step, steps, DataSettings(**data)) for step in range(steps)]


def test_sequences_double_in_equal_parts_of_40_percent_of_the_steps():
    found = lengths(100, first_sequence_length=64, sequence_length=256)
    assert found == [64] * 20 + [128] * 20 + [256] * 60
    assert lengths(20, first_sequence_length=256, sequence_length=256) == [256] * 20 == lengths(20)


def test_every_step_has_as_many_tokens_in_as_many_micro_batches(flags, tmp_path, monkeypatch):
    growing = ["--first-sequence-length", "8", "--micro-batch-size", "4", "--steps", "10"]
    session = open_session(tmp_path, *flags, *growing)
    monkeypatch.setattr("training.loop.train_step", step := Mock(return_value=(1.0, 1.0)))
    assert [result.step for result in train_steps(session)] == [*range(1, 11)]
    shapes = [[inputs.shape for inputs, _ in call.args[1]] for call in step.call_args_list]
    assert shapes == [[(16, 8)] * 2] * 2 + [[(8, 16)] * 2] * 2 + [[(4, 32)] * 2] * 6
    assert session.state.tokens == 10 * 8 * 32


def test_shorter_sequences_read_the_same_text_in_the_same_order(flags, tmp_path):
    """Step by step the tokens are those of a run without the schedule, and so are the targets."""
    whole, growing = (open_session(tmp_path, *flags, *more) for more in ([], ["--first-sequence-length", "8"]))
    for step in range(whole.steps):
        for expected, cut in zip(whole.batch(step), growing.batch(step), strict=True):
            assert cut.tolist() == expected.reshape(cut.shape).tolist()
    assert growing.batch(0)[0].shape == (32, 8) and whole.batch(0)[0].shape == (8, 32)
