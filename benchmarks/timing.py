"""The harness: what is compared takes turns, and every speed stands beside a limit that the machine reached.

The programs of `benchmarks.decoding` time themselves; all else is timed by `block`.
"""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator

import torch

from model.device import device_name, processor

BEYOND_CACHE = 256e6  # bytes, more than a GPU's cache holds
PAUSE = 20_000_000  # cycles of a GPU, about 11 ms, in which the host queues the calls to time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
READ_BYTES = 2**30  # more than a server's cache holds
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
MIN_TURNS = 3

Block = Callable[[], float]
"""What has a turn. It returns the seconds of one call."""


def measure(
    makers: dict[Hashable, Callable[[], dict[str, Block]]], turns: int, deadline: float = math.inf
) -> tuple[dict[Hashable, dict[str, list[float]]], dict[Hashable, str]]:
    """Seconds of the blocks that the makers make, by key and part, and for each key that cannot run, why.

    Equal places in two lists were measured next to each other. Before the first turn every block runs once, to compile
    and to fill caches.
    """
    blocks, failures = {}, {}
    for key, make in makers.items():
        print("preparing", *(key if isinstance(key, tuple) else [key]), file=sys.stderr, flush=True)
        try:
            made = make()
            for run in made.values():
                run()
        except Exception as error:  # whatever a program, a compiler or the capture of a graph may raise
            failures[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            blocks[key] = made
    seconds = {key: {part: [] for part in made} for key, made in blocks.items()}
    for key in in_turns(blocks, turns, deadline):
        for part, run in blocks[key].items():
            seconds[key][part].append(run())
    return seconds, failures


def in_turns(keys: Collection[Hashable], turns: int, deadline: float = math.inf) -> Iterator[Hashable]:
    """C B A A B C ...: the order of each turn is that of the one before, reversed, so that a drift of speed cancels.

    After MIN_TURNS no turn begins beyond the deadline, a time of `time.monotonic`.
    """
    for turn in range(turns):
        if turn >= MIN_TURNS and time.monotonic() > deadline:
            return
        yield from keys if turn % 2 else reversed(list(keys))


def block(calls: list[Callable[[], object]], device: torch.device, repeats: int = 4) -> float:
    """Median seconds of `repeats` calls, which take turns: give calls on different data, so that none stays cached.

    On a GPU the host first queues all of them behind a pause, so that what is measured is the device's time alone.
    """
    if device.type != "cuda":
        found = []
        for i in range(repeats):
            start = time.perf_counter()
            calls[i % len(calls)]()
            found.append(time.perf_counter() - start)
        return statistics.median(found)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(PAUSE)
    for i in range(repeats):
        events[2 * i].record()
        calls[i % len(calls)]()
        events[2 * i + 1].record()
    torch.cuda.synchronize(device)
    return statistics.median(events[2 * i].elapsed_time(events[2 * i + 1]) / 1e3 for i in range(repeats))


def rate(call: Callable[[], object], amount: float, device: torch.device) -> float:
    """Amount per second of a call that does `amount`: the median of twenty."""
    call()
    return amount / block([call], device, 20)


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


def compare(
    title: str,
    makers: dict[str, Callable[[], dict[str, Block]]],
    limits: dict[str, dict[str, float]],
    turns: int,
    deadline: float = math.inf,
    tokens: int | None = None,
) -> dict:
    """Measure, and print a table in Markdown: a row for each maker; returns it with all seconds.

    limits: by maker and part, the seconds that the machine's measured rates allow. tokens: of the last part; it is also
    the one whose speed is compared with the first maker's, by the median of the ratios within turns, and their range.
    """
    seconds, failures = measure(makers, turns, deadline)
    first = next(iter(seconds), "")
    parts = [*seconds.get(first, [""])]
    columns = [f"{part}, ms" for part in parts] + ["tokens/s"] * (tokens is not None)
    print(f"\n### {title}\n")
    print_row("", *columns, "of the limit", f"speed relative to {first}")
    print("|---" * (len(columns) + 3) + "|")
    for name in makers:
        if name in failures:
            print_row(name, f"not run: {failures[name]}")
            continue
        medians = {part: statistics.median(values) for part, values in seconds[name].items()}
        shares = ", ".join(f"{limit / medians[part]:.0%}" for part, limit in limits[name].items())
        rates = [] if tokens is None else [f"{tokens / medians[parts[-1]]:,.0f}"]
        times_in_ms = (f"{1e3 * one:,.{3 if one < 0.01 else 1}f}" for one in medians.values())
        pairs = zip(seconds[first][parts[-1]], seconds[name][parts[-1]], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print_row(name, *times_in_ms, *rates, shares, speed)
    return {"title": title, "tokens": tokens, "limits": limits, "seconds": seconds, "not_run": failures}


def print_row(*cells: object) -> None:
    """A row of a table in Markdown."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def results(device: torch.device, **measured: object) -> dict:
    """What a benchmark returns: the machine and everything that was measured."""
    names = {"device": device_name(device), "processor": processor(), "threads": torch.get_num_threads()}
    names |= {"torch": torch.__version__, "python": platform.python_version()}
    return {"machine": names, **measured}


def finish(found: dict) -> int:
    """Print what a benchmark returned as its last line; the exit status, 1 if something did not run."""
    print(json.dumps(found))
    return int(any(table["not_run"] for table in found["tables"]))
