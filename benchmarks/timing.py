"""How long a call takes on the device, how long it keeps the host, and what memory it needs."""

import statistics
import time
from collections.abc import Callable

import torch

BEYOND_CACHE = 256e6  # bytes that a call should not find in a GPU's cache again


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
    torch.cuda._sleep(int(100e6))  # about 60 ms, in which the calls are queued
    for i in range(repeats):
        events[2 * i].record()
        calls[i % len(calls)]()
        events[2 * i + 1].record()
    torch.cuda.synchronize(device)
    return [events[2 * i].elapsed_time(events[2 * i + 1]) / 1e3 for i in range(repeats)]


def host_seconds(call: Callable[[], object], device: torch.device, repeats: int = 50) -> float:
    """Median seconds until a call returns, before the device has done it."""
    if device.type != "cuda":
        return float("nan")
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


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
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / statistics.median(times([lambda: target.copy_(source)], device, 20))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of torch's product of square matrices: the limit for what multiplies."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b
    return 2 * size**3 / statistics.median(times([lambda: a @ b], device, 20))
