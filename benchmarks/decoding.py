"""Decoding beside other programs and beside the time it takes to read the weights: `python -m benchmarks.decoding`.

Every program (see `benchmarks.programs`) runs in a process of its own, and they take turns. Prints a table in Markdown:
medians, and the median of the ratios to transformers in the same turn, with their range. The last line is one JSON
object with every measurement.
"""

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.programs import COMPILED, DTYPES, LLAMA2C, PROGRAMS, SHAPES, Case, is_possible, our_decoder
from benchmarks.timing import copy_rate, in_turns, print_header, print_json, print_row, read_rate, relative_speed
from benchmarks.training import PEER
from errors import exit_on_user_error
from generation.weights import bytes_per_step
from model.device import choose_device, device_name, processor
from model.fused_decode import describe


@functools.cache
def prepare(case: Case) -> Callable[[], float]:
    """The call that is timed, after it has run once."""
    run = PROGRAMS[case.program](case)
    run()
    return run


def take_turn(case: Case) -> tuple[float, int | None]:
    """Seconds of a step, and the most memory that this process has had: on a GPU torch's, else imports included."""
    seconds, status = prepare(case)(), Path("/proc/self/status")
    if case.device != "cpu":
        return seconds, torch.cuda.max_memory_allocated()
    if case.program == LLAMA2C or not status.exists():  # llama2.c is a child of this process
        return seconds, None
    return seconds, int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024


def take_turns(cases: list[Case], turns: int, deadline: float = math.inf) -> list[dict]:
    """A row for each case: `seconds` of a step, a value per turn, or the reason as `not_run`."""
    rows = {case: {**case._asdict(), "path": None, "seconds": [], "peak_bytes": None} for case in cases}
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":  # its children need not import torch and transformers again
        context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    with contextlib.ExitStack() as stack:
        processes = {case: stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for case in cases}
        for case in cases:  # one after another: they warm up
            print("preparing", *case[:5], file=sys.stderr, flush=True)
            try:
                processes[case].submit(take_turn, case).result()
            except Exception as error:  # whatever a program, a compiler or the capture of a graph may raise
                rows[case]["not_run"] = describe(error)
                del processes[case]
        for case in in_turns(processes, turns, deadline):
            seconds, rows[case]["peak_bytes"] = processes[case].submit(take_turn, case).result()
            rows[case]["seconds"].append(seconds)
    return [*rows.values()]


def compare(cases: list[Case], turns: int, rate: float, deadline: float = math.inf) -> list[dict]:
    """Measure the cases that can run, and print a table; those of one shape, prompt and batch take turns."""
    columns = ("shape", "prompt", "sequences", "program", "dtype", "ms per step", "tokens/s")
    print_header(*columns, f"speed relative to {PEER}", "read", "peak MB")
    groups = [[*group] for _, group in itertools.groupby(filter(is_possible, cases), lambda case: case[:3])]
    found = []
    for number, group in enumerate(groups):
        now = time.monotonic()
        rows = take_turns(group, turns, now + (deadline - now) / (len(groups) - number))
        for case, row in zip(group, rows, strict=True):
            row["bytes"] = bytes_read(case)
            print_row(*case[:5], *cells(row, rows, rate))
        found += rows
    return found


def bytes_read(case: Case) -> int:
    """Bytes of weights, and of keys and values halfway through the steps, that a step of ours reads."""
    config = case.config
    weights = bytes_per_step(our_decoder(case._replace(device="meta")))
    heads = config.num_hidden_layers * config.num_key_value_heads * config.resolved_head_dim
    width = 2 if case.dtype == "bfloat16" and case.device != "cpu" else 4
    return weights + 2 * case.sequences * heads * (case.prompt + case.tokens // 2) * width


def cells(row: dict, rows: list[dict], rate: float) -> list[str]:
    """The measured cells of a row: what is read is in GB/s beside `rate`, above 100% where the weights stay in a cache.

    Each is compared with the fastest transformers, of its own dtype if there is one.
    """
    if "not_run" in row:
        return [f"not run: {row['not_run']}", "", "", "", ""]
    seconds, ratio = statistics.median(row["seconds"]), ""
    others = [r for r in rows if r["program"] in (PEER, COMPILED) and r["seconds"]]
    others = [r for r in others if r["dtype"] == row["dtype"]] or others
    if others:
        peer = min(others, key=lambda r: statistics.median(r["seconds"]))
        ratio = relative_speed(peer["seconds"], row["seconds"])
    read = row["bytes"] / seconds
    memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
    speeds = [f"{seconds * 1e3:,.2f}", f"{row['sequences'] / seconds:,.0f}"]
    return [*speeds, ratio, f"{read / 1e9:.1f} GB/s, {read / rate:.0%}", memory]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["26m"], help="default: 26m")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1], help="tokens before (default: 1)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help="default: all that there are")
    parser.add_argument("--turns", type=int, default=7, help="turns of each program (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence in a turn (default: %(default)s)")
    usual = [name for name in PROGRAMS if name != COMPILED]  # which compiles for minutes on a CPU
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=usual, help=f"default: all but {COMPILED}")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    rate = read_rate() if device.type == "cpu" else copy_rate(device)
    print(f"{device_name(device)}, {processor()}: {rate / 1e9:,.1f} GB/s\n")
    settings = itertools.product(arguments.shapes, arguments.prompt, arguments.sequences)
    settings = itertools.product(settings, arguments.dtypes, arguments.programs)
    others = arguments.tokens, device.type, arguments.llama2c and arguments.llama2c.resolve()
    cases = [Case(*setting, program, dtype, *others) for setting, dtype, program in settings]
    rows = compare(cases, arguments.turns, rate)
    print_json(device, bytes_per_second=rate, rows=rows)
    if any("not_run" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
