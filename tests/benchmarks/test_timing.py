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


def test_bytes_kept_and_peak_bytes_are_counted_from_before_the_call_and_without_the_output(monkeypatch):
    gpu, log = torch.device("cuda"), []
    allocated, peak = [1000], [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, allocated[0]))

    def call():
        log.append("call")
        allocated[0] += 500  # 100 of them the output
        peak[0] = 1900
        return torch.empty(25)

    assert timing.kept_bytes(call, gpu) == 400
    allocated[0], peak[0] = 1000, 5000  # a peak of before
    assert peak_bytes(call, gpu) == 900
    assert log == ["wait", "call", "wait", "call", "wait"]


def test_the_time_that_a_call_occupies_the_host_is_taken_from_an_idle_device(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: now.__setitem__(0, now[0] + 100))
    calls = []

    def call():
        calls.append(1)
        now[0] += 3

    assert timing.host_seconds(call, torch.device("cuda")) == 3 and len(calls) == timing.HOST_REPEATS
    assert timing.host_seconds(call, CPU) is None and timing.kept_bytes(call, CPU) is None


def test_the_limits_count_what_a_copy_moves_and_what_a_product_computes(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 4000)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cpu", 8)
    monkeypatch.setattr(timing, "times", lambda calls, device, repeats: [2.0, 4.0, 8.0])
    assert timing.copy_rate(CPU) == 2 * 4000 / 4
    assert timing.product_rate(CPU, torch.bfloat16) == 2 * 8**3 / 4


def test_events_of_a_device_are_read_in_milliseconds_after_all_calls_were_queued(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append(self)

        def query(self):
            return False

        def elapsed_time(self, end):
            return 1000.0 * (log.index(end) - log.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", log.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    seconds = times([lambda: log.append("a"), lambda: log.append("b")], torch.device("cuda"), 3)
    assert seconds == [2.0, 2.0, 2.0]  # the call stands between its two events
    assert [entry for entry in log if not isinstance(entry, Event)] == ["wait", timing.PAUSES[0], *"aba", "wait"]
