"""Decoding speed beside the time it takes to read the weights: `python -m benchmarks.decoding --config 1b`.

Two variants with random bfloat16 weights: the decoder called step by step, and the fused step (five kernels per layer,
one graph on CUDA). Prints a table in Markdown, and one JSON object last.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

import kernels
from benchmarks.output import check_out, positive, write
from benchmarks.timing import copy_rate
from errors import UserError, exit_on_user_error
from generation.weights import bytes_per_step, cast_weights
from model.cache import KeyValueCache
from model.decoder import Decoder
from model.device import choose_device, device_name
from model.fused_decode import DecodeStep
from training.settings import config_path, load_settings


@torch.inference_mode()
def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="1b", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--sequences", type=positive, nargs="+", default=[1, 4, 8, 16], help="batch sizes (default: %(default)s)"
    )
    parser.add_argument(
        "--cached", type=positive, default=128, help="tokens in the KV cache at the start (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=64, help="steps to time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there")
    arguments = parser.parse_args()
    check_out(arguments.out)
    device = choose_device(arguments.device)
    config = load_settings(config_path(arguments.config)).model
    positions, limit = arguments.cached + arguments.steps + 8, config.max_position_embeddings
    if positions > limit:
        raise UserError(
            f"--cached, --steps and 8 warm-up steps need {positions} positions and the context has {limit}; use fewer."
        )
    decoder = Decoder(config, seed=1).to(device).eval()
    cast_weights(decoder, torch.bfloat16)
    copy, weights = copy_rate(device), bytes_per_step(decoder)
    rates = f"{weights / 1e6:,.0f} MB of weights per step, copy {copy / 1e9:,.0f} GB/s"
    print(f"{arguments.config} on {device_name(device)}: {rates}")
    print(
        "\n| sequences | variant | ms per step | tokens/s | weights read at, of the copy rate |\n|---|---|---|---|---|"
    )
    rows = []
    for sequences in arguments.sequences:
        cache = KeyValueCache(config, sequences, positions, device=device, dtype=torch.bfloat16)
        cache.keys.normal_()
        cache.values.normal_()
        token = torch.ones(sequences, 1, dtype=torch.int64, device=device)
        steps = {"decoder": lambda token, cache=cache: decoder(token, cache=cache)}
        if kernels.find_triton_obstacle(device) is None:
            fused = DecodeStep(decoder, cache, None)
            steps["fused"] = lambda token, fused=fused: fused(token, None)
        for name, step in steps.items():
            cache.length = arguments.cached
            for _ in range(4):
                step(token)
            seconds = []
            for _ in range(arguments.steps):
                start = time.perf_counter()
                step(token)[0, 0, 0].item()
                seconds.append(time.perf_counter() - start)
            median = statistics.median(seconds)
            share = weights / median / copy
            print(f"| {sequences} | {name} | {median * 1e3:.3f} | {sequences / median:,.0f} | {share:.0%} |")
            rows.append({"sequences": sequences, "variant": name, "seconds": median, "share_of_copy_rate": share})
    about = {"device": device_name(device), "torch": torch.__version__, "config": arguments.config}
    write(about | {"weight_bytes": weights, "copy_bytes_per_second": copy, "steps": rows}, arguments.out)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
