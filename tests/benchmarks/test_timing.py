"""The timing harness: whose turn it is, and what a block's time is."""

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import CALLS_PER_BLOCK, interleaved, peak_bytes, times

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """What `time.perf_counter` returns."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_calls_take_turns_in_an_order_that_reverses_after_every_block():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(calls, CPU, 4)
    warm_up, timed = order[:9], order[9:]
    assert sorted(warm_up) == sorted("abc" * 3)
    turns = [timed[i : i + CALLS_PER_BLOCK] for i in range(0, len(timed), CALLS_PER_BLOCK)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert [turn[0] for turn in turns] == list("cbaabccbaabc")
    assert list(seconds) == list("abc") and all(len(values) == 4 for values in seconds.values())


def test_a_block_is_the_median_of_its_calls_in_the_order_of_the_blocks(clock):
    lengths = iter([*[0.0] * 3, 1, 9, 2, 4, *[5, 5, 5, 500]])

    def call():
        clock[0] += next(lengths)

    assert interleaved({"a": call}, CPU, 2) == {"a": [3.0, 5.0]}


def test_repeated_times_take_turns_between_the_calls(clock):
    def call(seconds: float):
        clock[0] += seconds

    assert times([lambda: call(1.0), lambda: call(3.0)], CPU, 5) == [1, 3, 1, 3, 1]
    assert peak_bytes(lambda: pytest.fail("a CPU does not count bytes"), CPU) is None


def test_the_limits_count_what_is_copied_and_multiplied(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cpu", 8)
    monkeypatch.setattr(timing, "times", lambda calls, device, repeats: [2.0, 4.0, 8.0])
    assert timing.copy_rate(CPU) == 2 * 2**20 / 4
    assert timing.product_rate(CPU, torch.bfloat16) == 2 * 8**3 / 4
