"""A whole training step of each build of the model, side by side: `python -m benchmarks.training --config tiny`.

Builds: the specification in plain PyTorch, our functions for the device, and torch.compile, each with both norms.
They take turns in blocks of a few steps on random tokens. Prints a table in Markdown, and everything as JSON in its
last line.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kernels
from benchmarks.output import check_out, positive, write
from errors import exit_on_user_error
from model.config import flops_per_token
from model.decoder import Decoder
from model.device import choose_device, choose_training_dtype, device_name, keep_freed_memory, peak_flops
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path, load_settings
from training.step import train_step


def builds(device: torch.device) -> dict[str, tuple[str, bool]]:
    """Name: what `kernels.use` is told, and whether it is compiled."""
    found = {"specification, eager": ("reference", False), "torch.compile": ("reference", True)}
    if device.type == "cuda" and kernels.find_triton_obstacle(device) is None:
        found |= {"Triton": ("triton", False), "Triton and torch.compile": ("triton", True)}
    elif device.type == "cpu":
        found |= {"CPU functions": ("torch", False)}
    return found


def stepper(settings: Settings, norm: str, build: tuple, device: torch.device) -> Callable[[], float]:
    """A function that does one optimizer step and returns its seconds."""
    choice, compiled = build
    fields = dict(vars(settings.model), norm=norm)
    dtype = choose_training_dtype("auto", device)
    model = Decoder(type(settings.model)(**fields), seed=1, compute_dtype=dtype).to(device)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    adamw = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    data = settings.data
    size = min(data.micro_batch_size or data.batch_size, data.batch_size)
    shape = size, data.sequence_length + 1

    def run() -> float:
        tokens = torch.randint(settings.model.vocab_size, shape, device=device)
        kernels.use(choice, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        train_step(forward, [(tokens[:, :-1], tokens[:, 1:])], adamw, scaler, 1.0, Processes(), device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return run


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="tiny", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--blocks", type=positive, default=8, help="turns of 5 steps each (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there")
    arguments = parser.parse_args()
    check_out(arguments.out)
    device = choose_device(arguments.device)
    keep_freed_memory()
    settings = load_settings(config_path(arguments.config))
    data = settings.data
    size = min(data.micro_batch_size or data.batch_size, data.batch_size)
    tokens = size * data.sequence_length
    runs = {
        (build, norm): stepper(settings, norm, how, device)
        for build, how in builds(device).items()
        for norm in ("rms", "layer")
    }
    seconds = {key: [] for key in runs}
    peaks = {}
    for key, run in runs.items():
        for _ in range(3):
            run()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            run()
            peaks[key] = torch.cuda.max_memory_allocated(device)
    for _ in range(arguments.blocks):
        for key, run in runs.items():
            seconds[key] += [run() for _ in range(5)]
    kernels.use("auto", device)
    flops = flops_per_token(settings.model, data.sequence_length) * tokens
    peak = peak_flops(device, choose_training_dtype("auto", device))
    print(f"{arguments.config}: steps of {tokens:,} tokens on {device_name(device)}\n")
    print("| build | norm | ms a step | tokens/s | of the specification's time | of peak FLOP/s |")
    print("|---|---|---|---|---|---|")
    rows = []
    for (build, norm), found in seconds.items():
        median = statistics.median(found)
        base = seconds["specification, eager", norm]
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        share = "" if peak is None else f"{flops / median / peak:.1%}"
        print(f"| {build} | {norm} | {median * 1e3:,.1f} | {tokens / median:,.0f} | {ratio:.3f} | {share} |")
        row = {"build": build, "norm": norm, "seconds": found, "ratio": ratio}
        rows.append(row | {"peak_bytes": peaks.get((build, norm))})
    about = {"device": device_name(device), "torch": torch.__version__, "config": arguments.config}
    write(about | {"tokens": tokens, "flops": flops, "builds": rows}, arguments.out)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
