"""Decoding and training on a CPU beside other programs: `python -m benchmarks.peers decoding` or `training`.

The others are transformers, eager and compiled, and llama2.c's program if its path is given; what is not installed is
left out with a line. Ours decodes in int8 too. Every program runs in a process of its own, all have the same shape and
random weights, and they take turns. Prints a table in Markdown: medians, and the median of the ratios to transformers
in the same turn, with their range. The last line is one JSON object with every measurement.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.arguments import positive
from benchmarks.loading import STATUS, peak
from benchmarks.timing import product_rate, read_rate
from benchmarks.training import PEER, transformers_model
from errors import UserError, exit_on_user_error
from generation.generate import generate
from generation.settings import Sampling
from generation.weights import bytes_per_step, cast_weights, quantize_matrices
from model.config import ModelConfig
from model.count import flops_per_token
from model.cpu_decode import MAX_SEQUENCES
from model.decoder import Decoder
from model.device import keep_freed_memory, processor, why_not_compile
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import OptimizerSettings
from training.step import train_step

SHAPES = {
    "260k": ModelConfig(512, 64, 172, 5, 8, 4, max_position_embeddings=512),  # stories260K of llama2.c
    "15m": ModelConfig(32000, 288, 768, 6, 6, 6, max_position_embeddings=256),  # stories15M of llama2.c
    "26m": ModelConfig(6400, 512, 1408, 8, 8, 2, max_position_embeddings=512),  # MiniMind, and configs/small.toml
    "135m": ModelConfig(32000, 768, 2048, 16, 12, 12, max_position_embeddings=256),
}
PROMPT, NEW_TOKENS = 0, 128
TRAINED = 8, 256  # sequences and tokens of each in a training step
CPU = torch.device("cpu")
LLAMA2C = "llama2.c"
DTYPES = {"decoding": ("float32", "bfloat16", "int8"), "training": ("float32", "bfloat16")}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program in one setting, as its process receives it."""

    task: str  # decoding or training
    program: str  # "ours", PEER or LLAMA2C
    shape: str  # a key of SHAPES
    sequences: int
    dtype: str
    norm: str = "rms"
    compiled: bool = False
    path: str | None = None  # of llama2.c's program

    @property
    def label(self) -> str:
        """Its name in tables, without shape, sequences and dtype."""
        if self.program == "ours" and self.task == "training":
            return f"ours, {self.norm}"
        return self.program + " compiled" * self.compiled


def our_decoder(shape: str, dtype: str, seed: int | None = 1) -> Decoder:
    """Our decoder as `generate.py --dtype` stores it; with `seed` None its weights are not initialized."""
    decoder = Decoder(SHAPES[shape], seed=seed).eval()
    cast_weights(decoder, getattr(torch, activations(dtype)))
    if dtype == "int8":
        quantize_matrices(decoder)
    return decoder


def activations(dtype: str) -> str:
    """The dtype of the activations in a case."""
    return "bfloat16" if dtype == "int8" else dtype


def decode_ours(case: Case, folder: Path) -> Callable[[], float]:
    """Prepare our decoder; what is returned decodes once and returns the seconds of a step. So do those below."""
    decoder = our_decoder(case.shape, case.dtype)

    def run() -> float:
        prompts = [[PROMPT]] * case.sequences
        result = generate(decoder, prompts, max_new_tokens=NEW_TOKENS, sampling=Sampling(temperature=0))
        return result.decode_seconds / result.steps

    return run


def decode_transformers(case: Case, folder: Path) -> Callable[[], float]:
    model = transformers_model(SHAPES[case.shape]).to(getattr(torch, case.dtype)).eval()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    if case.compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"
    tokens = torch.full((case.sequences, 1), PROMPT)

    def run() -> float:
        start = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return (time.perf_counter() - start) / NEW_TOKENS

    return run


def decode_llama2c(case: Case, folder: Path) -> Callable[[], float]:
    """llama2.c prints its own tokens per second. It is given random weights, and a tokenizer of numbers."""
    config = SHAPES[case.shape]
    width, kv_width = config.hidden_size, config.num_key_value_heads * config.resolved_head_dim
    matrices = 2 * width * (width + kv_width) + 3 * width * config.intermediate_size
    layers = config.num_hidden_layers * (2 * width + matrices)
    tables = config.max_position_embeddings * config.resolved_head_dim
    weights = np.random.default_rng(1).normal(0, 0.02, config.vocab_size * width + layers + width + tables)
    weights[width : 2 * width] = 0  # token 1, <s>, ends the program's loop: with a logit of 0 it is never the likeliest
    sizes = (width, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    sizes += (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
    (folder / "model.bin").write_bytes(struct.pack("7i", *sizes) + weights.astype(np.float32).tobytes())
    pieces = b"".join(struct.pack("fi", 0, 7) + b"%07d" % index for index in range(config.vocab_size))
    (folder / "tokenizer.bin").write_bytes(struct.pack("i", 7) + pieces)
    command = [case.path, folder / "model.bin", "-t", "0", "-n", str(NEW_TOKENS), "-z", folder / "tokenizer.bin"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = re.search(r"achieved tok/s: ([\d.]+)", done.stderr)
        if found is None:
            raise UserError(f"{case.path} is no program of llama2.c: it prints no tokens per second.")
        return 1 / float(found[1])

    return run


def random_batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary, (_, length) = SHAPES[case.shape].vocab_size, TRAINED
    tokens = torch.randint(vocabulary, (case.sequences, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_ours(case: Case, folder: Path) -> Callable[[], float]:
    config = dataclasses.replace(SHAPES[case.shape], norm=case.norm)
    model = Decoder(config, seed=1, compute_dtype=getattr(torch, case.dtype))
    optimizer = build_optimizer(model, OptimizerSettings(), CPU)
    scaler, batch = torch.amp.GradScaler("cpu", enabled=False), random_batch(case)
    keep_freed_memory()

    def run() -> float:
        start = time.perf_counter()
        train_step(model, [batch], optimizer, scaler, 1.0, Processes(), CPU)
        return time.perf_counter() - start

    return run


def train_transformers(case: Case, folder: Path) -> Callable[[], float]:
    """As its users train: float32 weights, autocast, fused AdamW, clipping. Freed memory is kept, as by ours."""
    model = transformers_model(SHAPES[case.shape])
    forward = torch.compile(model) if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = random_batch(case)
    mixed = case.dtype != "float32"
    keep_freed_memory()

    def run() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", getattr(torch, case.dtype), enabled=mixed):
            loss = forward(input_ids=inputs, labels=inputs, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start

    return run


PREPARE = {
    ("decoding", "ours"): decode_ours,
    ("decoding", PEER): decode_transformers,
    ("decoding", LLAMA2C): decode_llama2c,
    ("training", "ours"): train_ours,
    ("training", PEER): train_transformers,
}


def serve(case: Case, folder: Path) -> None:
    """Warm up with two runs, then measure once for each line on standard input."""
    run = PREPARE[case.task, case.program](case, folder)
    for _ in range(2):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        known = STATUS.exists() and case.program != LLAMA2C  # whose memory is that of a child of this process
        print(json.dumps({"seconds": run(), "peak_bytes": peak() if known else None}), flush=True)


class Served:
    """The process of a case, which waits for its turns."""

    def __init__(self, case: Case) -> None:
        self.case, self.seconds, self.peak_bytes = case, [], None
        self._folder = tempfile.TemporaryDirectory(prefix="peers", ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr.txt"
        command = [sys.executable, "-m", "benchmarks.peers", "--folder", self._folder.name]
        command += ["--serve", json.dumps(dataclasses.asdict(case))]
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            self._read_line()
        except BaseException:
            self.stop()
            raise

    def _read_line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            last = (self._errors.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise UserError(f"{self.case.label} with {self.case.dtype} failed: {last}")
        return line

    def take_turn(self) -> None:
        """Measure once."""
        with contextlib.suppress(BrokenPipeError):  # of a process that is gone: its last line says why
            print(file=self._process.stdin, flush=True)
        found = json.loads(self._read_line())
        self.seconds.append(found["seconds"])
        self.peak_bytes = found["peak_bytes"]

    def row(self) -> dict:
        """What was measured, and of what; the path of llama2.c's program is nobody else's business."""
        about = dataclasses.asdict(self.case) | {"label": self.case.label}
        del about["path"]
        return about | {"seconds": self.seconds, "peak_bytes": self.peak_bytes}

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what it no longer reads
            self._process.stdin.close()
        self._folder.cleanup()


def take_turns(cases: list[Case], turns: int, on_turn: Callable[[], object]) -> list[dict]:
    """A row for each case: A B B A A B ..., so that a drift of the machine's speed cancels."""
    served = []
    try:
        for case in cases:  # one after another: they warm up
            served.append(Served(case))
        for turn in range(turns):
            for each in served if turn % 2 else reversed(served):
                each.take_turn()
                on_turn()
    finally:
        for each in served:
            each.stop()
    return [each.row() for each in served]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n\n")[0])
    parser.add_argument("task", nargs="?", choices=["decoding", "training"], default="decoding")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["26m"], help="default: 26m")
    parser.add_argument("--sequences", type=positive, nargs="+", help="default: 1 and 8 for decoding, 8 for training")
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES["decoding"], help="default: all; int8: decoding by our model only"
    )
    parser.add_argument("--turns", type=positive, default=7, help="turns of each program (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="also transformers with torch.compile: minutes")
    parser.add_argument(
        "--llama2c", metavar="PATH", help="llama2.c's program, built with `make runomp`; it decodes one sequence"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(Case(**json.loads(arguments.serve)), arguments.folder)
        return
    dtypes = arguments.dtypes or DTYPES[arguments.task]
    if unknown := set(dtypes) - set(DTYPES[arguments.task]):
        raise UserError(f"--dtypes {', '.join(unknown)} is only for decoding.")
    programs = [{"program": "ours"}, *peers(arguments)]
    sequences = arguments.sequences or ([1, 8] if arguments.task == "decoding" else [TRAINED[0]])
    if set(dtypes) == {"int8"} and max(sequences) > MAX_SEQUENCES:
        raise UserError(
            f"--sequences {max(sequences)}: int8 is for at most {MAX_SEQUENCES}; give another --dtypes too."
        )
    results = {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    results["read_bytes_per_second"] = read_rate(CPU)
    products = sorted({activations(dtype) for dtype in dtypes})
    results["product_flops"] = {dtype: product_rate(CPU, getattr(torch, dtype)) for dtype in products}
    rates = ", ".join(f"{dtype} {rate / 1e12:.2f}" for dtype, rate in results["product_flops"].items())
    print(f"{results['processor']}, {results['threads']} threads, torch {torch.__version__}")
    print(f"reads {results['read_bytes_per_second'] / 1e9:.1f} GB/s; products, TFLOP/s: {rates}\n")
    columns = ("shape", "sequences", "program", "dtype", "ms per step", "tokens/s", f"speed relative to {PEER}")
    print("| " + " | ".join([*columns, "of the machine's rate", "peak MB"]) + " |")
    print("|---" * 9 + "|")
    results["rows"] = []
    for shape in arguments.shapes:
        for count in sequences:
            cases = list_cases(arguments.task, programs, shape, count, dtypes)
            with tqdm(total=arguments.turns * len(cases), unit="turn", dynamic_ncols=True, leave=False) as bar:
                rows = take_turns(cases, arguments.turns, bar.update)
            for row in rows:
                print(table_row(row, rows, results), flush=True)
            results["rows"] += rows
    print(json.dumps(results))


def peers(arguments: argparse.Namespace) -> list[dict]:
    """The other programs that can run here, as fields of a case; a line for each that cannot."""
    found = []
    if importlib.util.find_spec(PEER) is None:
        print(f"note: {PEER} is not installed (pip install {PEER}); measuring without it")
    else:
        found.append({"program": PEER})
        if arguments.compiled and (obstacle := why_not_compile(CPU)) is not None:
            raise UserError(f"--compiled cannot be measured here: {obstacle}.")
        if arguments.compiled:
            found.append({"program": PEER, "compiled": True})
    if arguments.llama2c is not None:
        path = Path(arguments.llama2c)
        if not path.is_file():
            raise UserError(
                f"--llama2c {path} is no file; give the program that `make runomp` in llama2.c builds (`make run` "
                "uses one thread)."
            )
        found.append({"program": LLAMA2C, "path": str(path.resolve())})
    return found


def list_cases(task: str, programs: list[dict], shape: str, sequences: int, dtypes: Sequence[str]) -> list[Case]:
    """Every program in every setting that it has: llama2.c one sequence in float32, ours alone up to 16 in int8."""
    found = []
    for dtype in dtypes:
        for program in programs:
            case = Case(task=task, shape=shape, sequences=sequences, dtype=dtype, **program)
            if case.program == LLAMA2C and (task, sequences, dtype) != ("decoding", 1, "float32"):
                continue
            if dtype == "int8" and (case.program != "ours" or sequences > MAX_SEQUENCES):
                continue
            norms = ("rms", "layer") if (task, case.program) == ("training", "ours") else ("rms",)
            found += [dataclasses.replace(case, norm=norm) for norm in norms]
    return found


def table_row(row: dict, rows: list[dict], results: dict) -> str:
    """A row in Markdown.

    The last cells but one are bytes of weights a second beside `read_rate`, above 100% where they fit into the caches;
    or FLOP/s beside `product_rate`. Memory is that of the whole process, imports included. int8 is compared with
    transformers in its fastest dtype.
    """
    seconds, config = statistics.median(row["seconds"]), SHAPES[row["shape"]]
    tokens = row["sequences"] * (1 if row["task"] == "decoding" else TRAINED[1])
    others = [r for r in rows if r["label"] == PEER and row["dtype"] in (r["dtype"], "int8")]
    peer = min(others, key=lambda r: statistics.median(r["seconds"]), default=None)
    ratio = "not measured"
    if peer is not None:
        ratios = [theirs / ours for theirs, ours in zip(peer["seconds"], row["seconds"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    if row["task"] == "decoding":
        with torch.device("meta"):
            read = bytes_per_step(our_decoder(row["shape"], row["dtype"], seed=None)) / seconds
        limit = f"{read / 1e9:.1f} GB/s, {read / results['read_bytes_per_second']:.0%}"
    else:
        flops = flops_per_token(config, TRAINED[1]) * tokens / seconds
        limit = f"{flops / results['product_flops'][row['dtype']]:.0%} of the products' rate"
    memory = "not known" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
    cells = [row["shape"], row["sequences"], row["label"], row["dtype"], f"{seconds * 1e3:,.2f}"]
    return "| " + " | ".join(map(str, [*cells, f"{tokens / seconds:,.0f}", ratio, limit, memory])) + " |"


if __name__ == "__main__":
    with exit_on_user_error():
        main()
