"""Decoding beside other programs and beside the time it takes to read the weights: `python -m benchmarks.decoding`.

Every program (see `benchmarks.programs`) runs in a process of its own, and they take turns. Prints tables in Markdown,
and everything as JSON in its last line. Exit status 1: a program did not run.
"""

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.programs import COMPILED, DTYPES, PROGRAMS, SHAPES, USUAL, Case, is_possible, our_decoder
from benchmarks.timing import Block, copy_rate, read_rate
from errors import exit_on_user_error
from model.device import choose_device, device_name, processor


@functools.cache
def prepare(case: Case) -> Callable[[], float]:
    """The function that decodes once and returns the seconds of a step."""
    return PROGRAMS[case.program](case)


def decode(case: Case) -> float:
    """Seconds of a step, in the process of a case."""
    return prepare(case)()


def compare(cases: list[Case], turns: int, rate: float, minutes: float = math.inf) -> dict:
    """Measure cases of one shape, prompt, batch and dtype, which take turns, and print a table.

    A step that reads its weights at the memory's `rate` is at 100% of the limit; with weights in a cache it exceeds it.
    """
    deadline = time.monotonic() + 60 * minutes
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":  # its children need not import torch and transformers again
        context.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    with contextlib.ExitStack() as stack:

        def start(case: Case) -> dict[str, Block]:
            process = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
            return {"step": lambda: process.submit(decode, case).result()}

        makers = {case.program: partial(start, case) for case in cases}
        limits = {case.program: {"step": bytes_read(case) / rate} for case in cases}
        shape, prompt, sequences, _, dtype = cases[0][:5]
        title = f"Decoding {shape}, {sequences} sequences after {prompt} tokens, {dtype}"
        return timing.compare(title, makers, limits, turns, deadline, sequences)


def bytes_read(case: Case) -> int:
    """Bytes of weights, and of keys and values halfway through the steps, that a step of ours reads."""
    config = case.config
    decoder = our_decoder(case._replace(device="meta"))
    quantized = [module for module in decoder.modules() if getattr(module, "int8", None) is not None]
    weights = sum(p.nbytes for p in decoder.parameters()) - sum(module.weight.nbytes for module in quantized)
    weights += sum(tensor.nbytes for module in quantized for tensor in module.int8)
    heads = config.num_hidden_layers * config.num_key_value_heads * config.resolved_head_dim
    width = 2 if case.dtype == "bfloat16" and case.device != "cpu" else 4
    return weights + 2 * case.sequences * heads * (case.prompt + case.tokens // 2) * width


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["26m"], help="default: 26m")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1], help="tokens before (default: 1)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help="default: all that there are")
    parser.add_argument("--turns", type=int, default=7, help="turns of each program (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no fourth turn begins")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence in a turn (default: %(default)s)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=USUAL, help=f"default: all but {COMPILED}")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    rate = read_rate() if device.type == "cpu" else copy_rate(device)
    print(f"{device_name(device)}, {processor()}: memory at {rate / 1e9:,.1f} GB/s")
    settings = itertools.product(arguments.shapes, arguments.prompt, arguments.sequences, arguments.dtypes)
    others = arguments.tokens, device.type, arguments.llama2c and arguments.llama2c.resolve()
    groups = [[Case(*one[:3], name, one[3], *others) for name in arguments.programs] for one in settings]
    groups = [possible for group in groups if (possible := [*filter(is_possible, group)])]
    tables = [compare(group, arguments.turns, rate, arguments.minutes / len(groups)) for group in groups]
    timing.print_json(device, bytes_per_second=rate, tables=tables)
    return int(any(table["not_run"] for table in tables))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
