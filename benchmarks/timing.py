"""How long a call takes, what memory it needs, and the tables that benchmarks print.

Kernels, training steps and ablations are timed here; `benchmarks.decoding` times its own loop, because each step waits
for a token.
"""

import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

BEYOND_CACHE = 256e6  # bytes, more than a GPU's cache holds
PAUSE = 20_000_000  # cycles of a GPU, about 11 ms, in which the host queues the calls to time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
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


def interleaved(
    calls: dict[Hashable, Callable[[], object]], device: torch.device, blocks: int
) -> dict[Hashable, list[float]]:
    """Seconds of a call, one value per block: A B B A A B ..., so that a drift of the machine's speed cancels.

    A block is the median of CALLS_PER_BLOCK calls in a row.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for call in calls.values():  # compiles, fills caches
        for _ in range(3):
            call()
    seconds = {key: [] for key in calls}
    for block in range(blocks):
        for key in calls if block % 2 else reversed(calls):
            taken = []
            for _ in range(CALLS_PER_BLOCK):
                wait()
                start = time.perf_counter()
                calls[key]()
                wait()
                taken.append(time.perf_counter() - start)
            seconds[key].append(statistics.median(taken))
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


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read plus written, of torch's copy of much memory: the limit for what moves data."""
    size = COPY_BYTES[device.type]
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / statistics.median(times([lambda: target.copy_(source)], device, 20))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of torch's product of square matrices: the limit for what multiplies."""
    size = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b
    return 2 * size**3 / statistics.median(times([lambda: a @ b], device, 20))
