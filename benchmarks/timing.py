"""How long a call takes and how much memory, whose turn it is, the machine's limits, and how results are printed.

Every benchmark takes its turns, limits, tables and JSON from here. The programs of `benchmarks.decoding` time their own
steps, because each waits for a token.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass

import torch

from model.device import device_name, processor

BEYOND_CACHE = 256e6  # bytes, more than a GPU's cache holds
PAUSE = 20_000_000  # cycles of a GPU, about 11 ms, in which the host queues the calls to time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
READ_BYTES = 2**30  # more than a server's cache holds
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
MIN_TURNS = 3
CALLS_PER_BLOCK = 4  # their median is the time of the block


@dataclass(frozen=True)
class Timing:
    """Times of one part of training in one variant of the code, for one arm, in blocks that took turns with others."""

    process: int
    """Id of the process that measured it; times of one process may share a bias."""
    variant: str
    part: str
    arm: str
    seconds: list[float]
    """Of one call, a value per block; equal places in lists of one process were measured next to each other."""
    peak_bytes: int | None
    """Bytes that a call allocates beyond those that were in use; None where the device does not count them."""


def print_header(*columns: str) -> None:
    """The first two lines of a table in Markdown."""
    print_row(*columns)
    print("|---" * len(columns) + "|")


def print_row(*cells: object) -> None:
    """A row of a table in Markdown."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def machine(device: torch.device) -> dict[str, object]:
    """What ran a benchmark, for its JSON."""
    names = {"device": device_name(device), "processor": processor(), "threads": torch.get_num_threads()}
    return names | {"torch": torch.__version__, "python": platform.python_version()}


def print_json(device: torch.device, **results: object) -> None:
    """The last line of every benchmark: the machine and everything that was measured."""
    print(json.dumps({"machine": machine(device), **results}))


def relative_speed(baseline: list[float], seconds: list[float]) -> str:
    """Speed relative to a baseline that took turns with it: the median of the ratios within turns, and their range."""
    ratios = [theirs / ours for theirs, ours in zip(baseline, seconds, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def in_turns(keys: Collection[Hashable], turns: int, deadline: float = math.inf) -> Iterator[Hashable]:
    """C B A A B C ...: the order of each turn is that of the one before, reversed, so that a drift of speed cancels.

    After MIN_TURNS no turn begins beyond the deadline, a time of `time.monotonic`.
    """
    for turn in range(turns):
        if turn >= MIN_TURNS and time.monotonic() > deadline:
            return
        yield from keys if turn % 2 else reversed(list(keys))


def interleaved(
    calls: dict[Hashable, Callable[[], object]], device: torch.device, blocks: int, deadline: float = math.inf
) -> dict[Hashable, list[float]]:
    """Seconds of a call, one value per block, which take turns. A block is the median of CALLS_PER_BLOCK calls."""
    for call in calls.values():  # compiles, fills caches
        for _ in range(3):
            call()
    seconds = {key: [] for key in calls}
    for key in in_turns(calls, blocks, deadline):
        seconds[key].append(statistics.median(times([calls[key]], device, CALLS_PER_BLOCK)))
    return seconds


def times(calls: list[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, which take turns: give calls on different data, so that none stays cached.

    On a GPU the host first queues all of them behind a pause, so that what is measured is the device's time alone.
    """
    if device.type != "cuda":
        found = []
        for i in range(repeats):
            start = time.perf_counter()
            calls[i % len(calls)]()
            found.append(time.perf_counter() - start)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(PAUSE)
    for i in range(repeats):
        events[2 * i].record()
        calls[i % len(calls)]()
        events[2 * i + 1].record()
    torch.cuda.synchronize(device)
    return [events[2 * i].elapsed_time(events[2 * i + 1]) / 1e3 for i in range(repeats)]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a call allocates on a GPU at most, beyond what stood there."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def rate(call: Callable[[], object], amount: float, device: torch.device) -> float:
    """Amount per second of a call that does `amount`: the median of twenty."""
    call()
    return amount / statistics.median(times([call], device, 20))


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read plus written, of torch's copy of much memory: the limit for what moves data."""
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * COPY_BYTES[device.type], device)


def read_rate() -> float:
    """Bytes per second that the CPU reads from memory, in a dot product: the limit for what reads weights."""
    x = torch.ones(READ_BYTES // 4)
    return rate(lambda: torch.dot(x, x), READ_BYTES, x.device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of torch's product of square matrices: the limit for what multiplies."""
    size = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return rate(lambda: a @ b, 2 * size**3, device)
