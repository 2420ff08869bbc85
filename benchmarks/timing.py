"""The harness: what is compared takes turns, and every speed stands beside a limit that the machine reached.

A record, as in speed/, is a JSON object: the command, the machine, and a `Table` for each comparison. It is the last
line of a benchmark whose output goes to a file or a pipe. The programs of `benchmarks.decoding` time themselves; all
else is timed by `block`.
"""

import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import kernels
from errors import UserError, exit_on_user_error
from flags import call_with_flags
from model.machine import device_model, machine

PAUSE = 20_000_000  # cycles of a GPU, about 11 ms, in which the host queues the calls to time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
READ_BYTES = 2**30  # more than a server's cache holds
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}

Blocks = dict[str, Callable[[], float]]  # what a program runs in its turn, by section: returns the seconds of a call
Maker = Callable[[], Blocks]  # prepares a program


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_kernels(choice: str, device: torch.device) -> None:
    """`kernels.use`, but `UserError` where the reference would be measured under the name of our kernels."""
    kernels.use(choice, device)
    if choice != "reference" and kernels.implementation(device) is kernels.reference:
        raise UserError(f"our kernels do not run here: {kernels.describe(device)}.")


def measure(makers: dict[str, Maker], turns: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds by program and section, and why a program cannot run.

    Item i of every list is from turn i. Before the first turn every block runs once, to compile and to fill caches.
    """
    programs, failures = {}, {}
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


def copying(device: torch.device) -> Blocks:
    """The limit for what moves data: seconds for a byte, read or written, of torch's copy of much memory."""
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return {"bytes": lambda: block([lambda: target.copy_(source)], device) / (2 * COPY_BYTES[device.type])}


def reading(device: torch.device) -> Blocks:
    """The limit for what reads weights: seconds for a byte that a CPU reads in a dot product, or that a GPU copies."""
    if device.type == "cuda":
        return copying(device)
    x = torch.ones(READ_BYTES // 4)
    return {"bytes": lambda: block([lambda: torch.dot(x, x)], device) / READ_BYTES}


def multiplying(device: torch.device, dtype: torch.dtype) -> Blocks:
    """The limit for what multiplies: seconds for a FLOP of torch's product of square matrices."""
    size = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return {"FLOP": lambda: block([lambda: a @ b], device) / (2 * size**3)}


@dataclass
class Table:
    title: str
    tokens: int | None  # of a call of the last section
    limits: dict[str, float]  # by section: the seconds that the machine's rate allows
    seconds: dict[str, dict[str, list[float]]]  # by program and section, in each turn
    not_run: dict[str, str]  # by program: why
    rates: dict[str, float] = field(default_factory=dict)  # bytes or FLOP per second, measured in the same turns

    def medians(self, program: str) -> dict[str, float]:
        return {section: statistics.median(seconds) for section, seconds in self.seconds[program].items()}

    def shares_of_limit(self, program: str) -> str:
        """How much of the speed that the limit allows a program reaches, for each section with a limit."""
        medians = self.medians(program)
        return ", ".join(f"{limit / medians[section]:.0%}" for section, limit in self.limits.items())

    def rows(self) -> list[dict[str, str]]:
        """Medians of each program, and of its last section the speed relative to the first program's, within turns."""
        rows = []
        first = next(iter(self.seconds), "")
        for program, sections in self.seconds.items():
            medians = self.medians(program)
            last = [*sections][-1]
            row = {"": program} | {f"{section}, ms": three_digits(1e3 * medians[section]) for section in sections}
            if self.tokens is not None:
                row["tokens/s"] = three_digits(self.tokens / medians[last])
            if self.limits:
                row["of the limit"] = self.shares_of_limit(program)
            pairs = zip(self.seconds[first][last], sections[last], strict=True)
            ratios = [first_seconds / seconds for first_seconds, seconds in pairs]
            row[f"speed, times {first}"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append(row)
        rows += [{"": f"limit: {rate / 1e9:,.4g} billion {unit} a second"} for unit, rate in self.rates.items()]
        return rows + [{"": f"{program}, not run: {reason}"} for program, reason in self.not_run.items()]


def compare(
    title: str, makers: dict[str, Maker], work: dict[str, float], limit: Maker, turns: int, tokens: int | None = None
) -> Table:
    """Measure the programs, print the table in Markdown, and return it for a record.

    work: bytes or FLOP by section; `limit` makes the block for one of them, which takes turns with the programs: their
    speed and the limit suffer alike from what else the machine does. tokens: of a call of the last section.
    """
    seconds, failures = measure(makers | {"limit": limit}, turns)
    rates, limits = {}, {}
    for unit, values in seconds.pop("limit", {}).items():
        rates[unit] = 1 / statistics.median(values)
        limits = {section: amount / rates[unit] for section, amount in work.items()}
    table = Table(title, tokens, limits, seconds, failures, rates)
    rows = table.rows()
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row.get(column, '') for column in columns)} |", flush=True)
    if not sys.stdout.isatty():
        print(json.dumps(vars(table)), flush=True)  # what is left if the benchmark is killed later
    return table


def three_digits(value: float) -> str:
    """At least three significant digits: 0.813, 2.00, 13.4, 1,263."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}"


def run(measure: Callable[..., list[Table]], program: str) -> None:
    """Call `measure` as the command line asks, print the record of its tables and exit."""
    with exit_on_user_error():
        sys.exit(finish(call_with_flags(measure, prog=f"python -m {program}")))


def finish(tables: list[Table]) -> int:
    """Print the record unless to a terminal; the exit status, 1 if something did not run. `UserError` for no tables."""
    if not any(table.seconds or table.not_run for table in tables):
        raise UserError("nothing was measured; ask for a program that runs with the other flags.")
    if not sys.stdout.isatty():
        command = shlex.join(["python", *sys.orig_argv[1:]])
        where = machine(default_device()) | {"processor": device_model("cpu")}
        print(json.dumps({"command": command, "machine": where, "tables": [vars(table) for table in tables]}))
    return int(any(table.not_run for table in tables))
