"""The timing harness: whose turn it is, and what a block's time is."""

import itertools

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import CALLS_PER_BLOCK, interleaved, peak_bytes, times

CPU = torch.device("cpu")


def test_calls_take_turns_in_an_order_that_reverses_after_every_block():
    order, blocks = [], []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(calls, CPU, 4, lambda: blocks.append(len(order)))
    warm_up, timed = order[:9], order[9:]
    assert sorted(warm_up) == sorted("abc" * 3)
    turns = [timed[i : i + CALLS_PER_BLOCK] for i in range(0, len(timed), CALLS_PER_BLOCK)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert [turn[0] for turn in turns] == list("cbaabccbaabc")
    assert list(seconds) == list("abc") and all(len(values) == 4 for values in seconds.values())
    assert blocks == [9 + CALLS_PER_BLOCK * 3 * (block + 1) for block in range(4)]


def test_a_block_is_the_median_of_its_calls_in_the_order_of_the_blocks(monkeypatch):
    clock = itertools.count()
    now, lengths = [0.0], iter([*[0.0] * 3, 1, 9, 2, 4, *[5, 5, 5, 500]])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        next(clock)
        now[0] += next(lengths)

    assert interleaved({"a": call}, CPU, 2) == {"a": [3.0, 5.0]}
    assert next(clock) == 3 + 2 * CALLS_PER_BLOCK


def test_repeated_times_take_turns_between_the_calls(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(name: str, seconds: float):
        order.append(name)
        now[0] += seconds

    assert times([lambda: call("a", 1.0), lambda: call("b", 3.0)], CPU, 5) == [1, 3, 1, 3, 1]
    assert order == list("ababa")


def test_a_cpu_does_not_count_the_bytes_that_a_call_needs():
    assert peak_bytes(lambda: pytest.fail("must not be called"), CPU) is None
