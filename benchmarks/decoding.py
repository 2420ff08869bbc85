"""Decoding speed beside the time it takes to read the weights and the cache: `python -m benchmarks.decoding`.

Variants, with random bfloat16 weights: the decoder called step by step; the fused step (five or six kernels per layer,
one graph on CUDA); and the plain decoder with a static cache in one graph, eager and compiled. Prints a table in
Markdown and, last, one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import kernels
from benchmarks.static_cache import StaticDecoder
from benchmarks.timing import copy_rate, print_header, print_row
from benchmarks.training import read_settings
from errors import exit_on_user_error
from generation.weights import bytes_per_step, cast_weights
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import choose_device, device_name
from model.fused_decode import DecodeStep, describe

STATIC, COMPILED = "static cache", "static cache, torch.compile"
VARIANTS = "decoder", "fused", STATIC, COMPILED
WARM_UP = 8  # steps: they compile the kernels, capture the graph and fill the GPU's caches


@torch.inference_mode()
def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="1b", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8], help="default: %(default)s")
    parser.add_argument("--cached", type=int, nargs="+", default=[128, 4000], help="filled positions: %(default)s")
    parser.add_argument("--steps", type=int, default=64, help="steps to time (default: %(default)s)")
    arguments = parser.parse_args()
    device, steps = choose_device(arguments.device), arguments.steps
    config = read_settings(arguments.config).model
    config = dataclasses.replace(config, max_position_embeddings=max(arguments.cached) + steps + WARM_UP)
    decoder = Decoder(config, seed=1).to(device).eval()
    cast_weights(decoder, torch.bfloat16)
    copy, weights = copy_rate(device), bytes_per_step(decoder)
    rates = f"{weights / 1e6:,.0f} MB of weights per step, copy {copy / 1e9:,.0f} GB/s"
    print(f"{arguments.config} on {device_name(device)}: {rates}\n")
    print_header("cached", "sequences", "variant", "ms per step", "tokens/s", "share of the copy rate")
    results = {"device": device_name(device), "torch": torch.__version__, "config": arguments.config}
    results |= {"weight_bytes": weights, "copy_bytes_per_second": copy, "steps": []}
    for cached in arguments.cached:
        for sequences in arguments.sequences:
            room = cached + steps + WARM_UP
            cache = KeyValueCache(config, sequences, room, device=device, dtype=torch.bfloat16)
            cache.keys.normal_()
            cache.values.normal_()
            # Keys and values of every filled position are read once, halfway through the steps that are timed.
            read = weights + 2 * cache.keys.nbytes // room * (cached + WARM_UP + steps // 2)
            for variant in VARIANTS:
                row = {"cached": cached, "sequences": sequences, "variant": variant, "bytes": read}
                try:
                    row |= measure(variant, decoder, cache, cached, steps)
                except Exception as error:  # whatever the compiler or the capture of a graph may raise
                    row["not_run"] = describe(error)
                cells = f"not run: {row.get('not_run')}", "", ""
                if "seconds" in row:
                    row["share_of_copy_rate"] = read / row["seconds"] / copy
                    speeds = f"{row['seconds'] * 1e3:.3f}", f"{sequences / row['seconds']:,.0f}"
                    cells = *speeds, f"{row['share_of_copy_rate']:.0%}"
                print_row(cached, sequences, variant + ("" if row.get("graph", True) else ", no graph"), *cells)
                results["steps"].append(row)
    print(json.dumps(results))


def measure(variant: str, decoder: Decoder, cache: KeyValueCache, cached: int, steps: int) -> dict:
    """`seconds` of a step and whether it was a graph; RuntimeError if the fused step cannot run here."""
    device, sequences = cache.keys.device, cache.keys.shape[1]
    token = torch.ones(sequences, 1, dtype=torch.int64, device=device)
    if variant == "decoder":
        return {"seconds": time_steps(lambda: decoder(token, cache=cache), cache, cached, steps)}
    if variant == "fused":
        if (reason := kernels.triton_unavailable_reason(device)) is not None:
            raise RuntimeError(reason)
        step = DecodeStep(decoder, cache)
        seconds = time_steps(lambda: step(token, None), cache, cached, steps)
        if step.unavailable_reason is not None:  # what was timed is the decoder
            raise RuntimeError(step.unavailable_reason)
        return {"seconds": seconds, "graph": step.graph is not None, "no_graph_because": step.graph_unavailable_reason}
    kernels.use("reference", device)
    try:
        step = StaticDecoder(decoder, cache, variant == COMPILED)
        return {"seconds": time_steps(lambda: step(token), cache, cached, steps), "graph": step.graph is not None}
    finally:
        kernels.use("auto", device)
        torch.compiler.reset()


def time_steps(step: Callable[[], Tensor], cache: KeyValueCache, cached: int, steps: int) -> float:
    """Median seconds of a step, from its start until its first logit is on the host."""
    cache.length = cached
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()[0, 0, 0].item()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
