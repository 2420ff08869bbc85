"""Decoding on a CPU beside other programs: `python -m benchmarks.peers`.

The others are transformers, eager and compiled, and llama2.c's program if its path is given. Ours decodes in int8 too.
Every program runs in a process of its own, all have the same shape and random weights, and they take turns. Prints a
table in Markdown: medians, and the median of the ratios to transformers in the same turn, with their range. The last
line is one JSON object with every measurement.
"""

import argparse
import contextlib
import functools
import itertools
import json
import re
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.timing import copy_rate, print_header, print_row
from benchmarks.training import PEER, transformers_model
from errors import exit_on_user_error
from generation.cpu_step import MAX_SEQUENCES
from generation.generate import generate
from generation.settings import Sampling
from generation.weights import bytes_per_step, cast_weights, quantize_matrices
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import processor

SHAPES = {
    "260k": ModelConfig(512, 64, 172, 5, 8, 4, max_position_embeddings=512),  # stories260K of llama2.c
    "15m": ModelConfig(32000, 288, 768, 6, 6, 6, max_position_embeddings=256),  # stories15M of llama2.c
    "26m": ModelConfig(6400, 512, 1408, 8, 8, 2, max_position_embeddings=512),  # MiniMind, and configs/small.toml
    "135m": ModelConfig(32000, 768, 2048, 16, 12, 12, max_position_embeddings=256),
}
PROMPT, NEW_TOKENS = 0, 128
CPU = torch.device("cpu")
COMPILED, LLAMA2C = f"{PEER} compiled", "llama2.c"
DTYPES = ("float32", "bfloat16", "int8")


class Case(NamedTuple):
    """One program in one setting, as its process receives it."""

    program: str  # a key of PROGRAMS
    shape: str  # a key of SHAPES
    sequences: int
    dtype: str
    path: Path | None = None  # of llama2.c's program


def our_decoder(shape: str, dtype: str, seed: int | None = 1) -> Decoder:
    """Our decoder as `generate.py --dtype` stores it; with `seed` None its weights are not initialized."""
    decoder = Decoder(SHAPES[shape], seed=seed).eval()
    cast_weights(decoder, torch.float32 if dtype == "float32" else torch.bfloat16)
    if dtype == "int8":
        quantize_matrices(decoder)
    return decoder


def decode_ours(case: Case) -> Callable[[], float]:
    """Prepare our decoder; what is returned decodes once and returns the seconds of a step. So do those below."""
    decoder = our_decoder(case.shape, case.dtype)

    def run() -> float:
        prompts = [[PROMPT]] * case.sequences
        result = generate(decoder, prompts, max_new_tokens=NEW_TOKENS, sampling=Sampling(temperature=0))
        return result.decode_seconds / result.steps

    return run


def decode_transformers(case: Case, compiled: bool = False) -> Callable[[], float]:
    model = transformers_model(SHAPES[case.shape]).to(getattr(torch, case.dtype)).eval()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    if compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"
    tokens = torch.full((case.sequences, 1), PROMPT)

    def run() -> float:
        start = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return (time.perf_counter() - start) / NEW_TOKENS

    return run


def decode_llama2c(case: Case) -> Callable[[], float]:
    """llama2.c prints its own tokens per second. It is given random weights, and a tokenizer of numbers."""
    config, folder = SHAPES[case.shape], tempfile.TemporaryDirectory(prefix="peers")
    width, kv_width = config.hidden_size, config.num_key_value_heads * config.resolved_head_dim
    matrices = 2 * width * (width + kv_width) + 3 * width * config.intermediate_size
    layers = config.num_hidden_layers * (2 * width + matrices)
    tables = config.max_position_embeddings * config.resolved_head_dim
    weights = np.random.default_rng(1).normal(0, 0.02, config.vocab_size * width + layers + width + tables)
    weights[width : 2 * width] = 0  # token 1, <s>, ends the program's loop: with a logit of 0 it is never the likeliest
    sizes = (width, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    sizes += (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
    Path(folder.name, "model.bin").write_bytes(struct.pack("7i", *sizes) + weights.astype(np.float32).tobytes())
    pieces = b"".join(struct.pack("fi", 0, 7) + b"%07d" % index for index in range(config.vocab_size))
    Path(folder.name, "tokenizer.bin").write_bytes(struct.pack("i", 7) + pieces)
    command = [case.path, "model.bin", "-t", "0", "-n", str(NEW_TOKENS), "-z", "tokenizer.bin"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder.name)
        return 1 / float(re.search(r"achieved tok/s: ([\d.]+)", done.stderr)[1])

    return run


PROGRAMS: dict[str, Callable[[Case], Callable[[], float]]] = {
    "ours": decode_ours,
    PEER: decode_transformers,
    COMPILED: functools.partial(decode_transformers, compiled=True),
    LLAMA2C: decode_llama2c,
}


@functools.cache
def prepare(case: Case) -> Callable[[], float]:
    """The call that is timed, after it has run once."""
    run = PROGRAMS[case.program](case)
    run()
    return run


def take_turn(case: Case) -> tuple[float, int | None]:
    """Seconds, and where Linux says so the most memory that this process has had, imports included."""
    seconds, status = prepare(case)(), Path("/proc/self/status")
    if case.program == LLAMA2C or not status.exists():  # llama2.c is a child of this process
        return seconds, None
    return seconds, int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024


def take_turns(cases: list[Case], turns: int) -> list[dict]:
    """A row for each case, whose turns are A B B A A B ..., so that a drift of the machine's speed cancels."""
    rows = [case._asdict() | {"path": None, "seconds": []} for case in cases]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for _ in cases]
        for process, case in zip(processes, cases, strict=True):  # one after another: they warm up
            process.submit(take_turn, case).result()
        for turn in range(turns):
            for i in range(len(cases)) if turn % 2 else reversed(range(len(cases))):
                seconds, rows[i]["peak_bytes"] = processes[i].submit(take_turn, cases[i]).result()
                rows[i]["seconds"].append(seconds)
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["26m"], help="default: 26m")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="int8: our model only")
    parser.add_argument("--turns", type=int, default=7, help="turns of each program (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="also transformers with torch.compile: minutes")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    arguments = parser.parse_args()
    left_out = {COMPILED: not arguments.compiled, LLAMA2C: arguments.llama2c is None}
    programs = [name for name in PROGRAMS if not left_out.get(name)]
    rate, path = copy_rate(CPU), arguments.llama2c and arguments.llama2c.resolve()
    results = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    results |= {"copy_bytes_per_second": rate, "rows": []}
    print(
        f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, copies {rate / 1e9:.1f} GB/s\n"
    )
    columns = ("shape", "sequences", "program", "dtype", "ms per step", "tokens/s", f"speed relative to {PEER}")
    print_header(*columns, "weights read", "peak MB")
    for shape, count in itertools.product(arguments.shapes, arguments.sequences):
        settings = itertools.product(arguments.dtypes, programs)
        cases = [Case(name, shape, count, dtype, path) for dtype, name in settings]
        cases = [case for case in cases if is_possible(case)]
        rows = take_turns(cases, arguments.turns)
        for row in rows:
            print_row(*table_row(row, rows, rate))
        results["rows"] += rows
    print(json.dumps(results))


def is_possible(case: Case) -> bool:
    """Whether a program has a setting: llama2.c one sequence in float32, ours alone up to 16 in int8."""
    if case.program == LLAMA2C:
        return (case.sequences, case.dtype) == (1, "float32")
    return case.dtype != "int8" or (case.program == "ours" and case.sequences <= MAX_SEQUENCES)


def table_row(row: dict, rows: list[dict], copy_rate: float) -> list[object]:
    """The cells of a row.

    Weights read are in GB/s beside `copy_rate`, above 100% where they fit into the caches. Memory is that of the whole
    process, imports included. int8 is compared with transformers in its fastest dtype.
    """
    seconds, ratio = statistics.median(row["seconds"]), ""
    others = [r for r in rows if r["program"] == PEER and row["dtype"] in (r["dtype"], "int8")]
    if others:
        peer = min(others, key=lambda r: statistics.median(r["seconds"]))
        ratios = [theirs / ours for theirs, ours in zip(peer["seconds"], row["seconds"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    with torch.device("meta"):
        rate = bytes_per_step(our_decoder(row["shape"], row["dtype"], seed=None)) / seconds
    read = f"{rate / 1e9:.1f} GB/s, {rate / copy_rate:.0%}"
    memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
    speeds = f"{seconds * 1e3:,.2f}", f"{row['sequences'] / seconds:,.0f}"
    return [row["shape"], row["sequences"], row["program"], row["dtype"], *speeds, ratio, read, memory]


if __name__ == "__main__":
    with exit_on_user_error():
        main()
