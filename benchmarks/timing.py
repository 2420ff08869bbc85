"""The harness: what is compared takes turns, and every speed stands beside a limit that the machine reached.

A record, as in speed/ (older ones without the command), is a JSON object: the command, the machine, and tables of
seconds by program and section. It is the last line of a benchmark whose output goes to a file or a pipe.
The programs of `benchmarks.decoding` time themselves; all else is timed by `block`.
"""

import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import torch

from errors import exit_on_user_error
from flags import call_with_flags
from model.device import device_name, processor

BEYOND_CACHE = 256e6  # bytes, more than a GPU's cache holds
PAUSE = 20_000_000  # cycles of a GPU, about 11 ms, in which the host queues the calls to time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
READ_BYTES = 2**30  # more than a server's cache holds
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}

Blocks = dict[str, Callable[[], float]]  # what a program runs in its turn, by section: returns the seconds of a call


def default_device() -> torch.device:
    """The GPU, if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(makers: dict[str, Callable[[], Blocks]], turns: int) -> tuple[dict[str, dict], dict[str, str]]:
    """Seconds by program and section, and why a program cannot run. `makers` make the blocks of each program.

    Item i of every list is from turn i. Before the first turn every block runs once, to compile and to fill caches.
    """
    programs = {}
    failures = {}
    for name, make in makers.items():
        print("preparing", name, file=sys.stderr, flush=True)
        try:
            blocks = make()
            for run in blocks.values():
                run()
        except Exception as error:  # whatever a program, a compiler or the capture of a graph may raise
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            programs[name] = blocks
    seconds = {name: {section: [] for section in blocks} for name, blocks in programs.items()}
    for turn in range(turns):  # C B A A B C ...: a drift of the machine's speed cancels
        for name in programs if turn % 2 else reversed(programs):
            for section, run in programs[name].items():
                seconds[name][section].append(run())
    return seconds, failures


def block(calls: list[Callable[[], object]], device: torch.device, repeats: int = 4) -> float:
    """Median seconds of `repeats` calls, which take turns: give calls on different data, so that none stays cached.

    On a GPU the host first queues all of them behind a pause, so that what is measured is the device's time alone. Of
    calls that wait for the device, as a training step does for its loss, the time of the host is included.
    """
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for i in range(repeats):
            calls[i % len(calls)]()
            ends.append(time.perf_counter())
        return statistics.median(end - start for start, end in itertools.pairwise(ends))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(PAUSE)
    events[0].record()
    for i in range(repeats):
        calls[i % len(calls)]()
        events[i + 1].record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events))


def rate(call: Callable[[], object], amount: float, device: torch.device) -> float:
    """Amount per second of a call that does `amount`: the median of twenty."""
    call()
    return amount / block([call], device, 20)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read plus written, of torch's copy of much memory: the limit for what moves data."""
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * COPY_BYTES[device.type], device)


def memory_rate(device: torch.device) -> float:
    """The limit for what reads weights: bytes per second that a CPU reads in a dot product, or that a GPU copies."""
    if device.type == "cuda":
        return copy_rate(device)
    x = torch.ones(READ_BYTES // 4)
    return rate(lambda: torch.dot(x, x), READ_BYTES, device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of torch's product of square matrices: the limit for what multiplies."""
    size = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return rate(lambda: a @ b, 2 * size**3, device)


def compare(
    title: str, makers: dict[str, Callable[[], Blocks]], limits: dict[str, float], turns: int, tokens: int | None = None
) -> dict:
    """Measure the programs, print a table in Markdown, and return it for a record.

    limits: by section, the seconds that the machine's measured rates allow. tokens: of a call of the last section.
    """
    seconds, failures = measure(makers, turns)
    table = {"title": title, "tokens": tokens, "limits": limits, "seconds": seconds, "not_run": failures}
    rows = program_rows(table)
    print(f"\n### {title}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |", flush=True)
    if not sys.stdout.isatty():
        print(json.dumps(table), flush=True)  # what is left if the benchmark is killed later
    return table


def program_rows(table: dict) -> list[dict[str, str]]:
    """Medians of each program, and its speed relative to the first one's in the last section: the median and the range
    of the ratios within turns.
    """
    rows = []
    first = next(iter(table["seconds"]), "")
    for name, sections in table["seconds"].items():
        medians = {section: statistics.median(values) for section, values in sections.items()}
        row = {"": name} | {f"{section}, ms": three_digits(1e3 * median) for section, median in medians.items()}
        last = [*sections][-1]
        if table["tokens"] is not None:
            row["tokens/s"] = three_digits(table["tokens"] / medians[last])
        if table["limits"]:
            row["of the limit"] = shares_of_limit(table, name)
        pairs = zip(table["seconds"][first][last], sections[last], strict=True)
        ratios = [first_seconds / seconds for first_seconds, seconds in pairs]
        row[f"speed, times {first}"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(row)
    return rows + [{"": name, "ms": f"not run: {reason}"} for name, reason in table["not_run"].items()]


def shares_of_limit(table: dict, program: str) -> str:
    """How much of the speed that the limit allows a program reaches, for each section with a limit."""
    seconds = table["seconds"][program]
    return ", ".join(f"{limit / statistics.median(seconds[name]):.0%}" for name, limit in table["limits"].items())


def three_digits(value: float) -> str:
    """At least three significant digits: 0.813, 2.00, 13.4, 1,263."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def run(measure: Callable[..., tuple[list[dict], dict[str, float]]], program: str) -> None:
    """Call `measure` as the command line asks, which returns tables and the machine's rates, print them and exit."""
    with exit_on_user_error():
        tables, rates = call_with_flags(measure, prog=f"python -m {program}")
        sys.exit(finish(tables, rates))


def finish(tables: list[dict], rates: dict[str, float]) -> int:
    """Print the record of a benchmark, unless to a terminal; the exit status, 1 if something did not run."""
    machine = {"device": device_name(default_device()), "processor": processor(), "threads": torch.get_num_threads()}
    machine |= {"torch": torch.__version__, "python": platform.python_version()}
    command = shlex.join(["python", *sys.orig_argv[1:]])
    if not sys.stdout.isatty():
        print(json.dumps({"command": command, "machine": machine | rates, "tables": tables}))
    return int(any(table["not_run"] for table in tables))
