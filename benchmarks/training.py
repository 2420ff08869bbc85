"""Training steps and their parts in every variant of the code, side by side: `python -m benchmarks.training`.

Variants: the reference in plain PyTorch, torch.compile of it, and our functions for the device. They take turns in
blocks of a few calls on random tokens. In each variant all norms come from one source: torch's own `F.layer_norm` and
`F.rms_norm` are not compared here, since on a CPU one of them is fused and the other is not.
"""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

import kernels
from benchmarks.output import check_out, positive, write
from benchmarks.timing import Timing, interleaved, peak_bytes
from errors import exit_on_user_error
from model.count import flops_per_token
from model.decoder import Decoder
from model.device import (
    choose_device,
    choose_training_dtype,
    device_name,
    keep_freed_memory,
    peak_flops,
    why_not_compile,
)
from model.norm import Norm
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path, load_settings
from training.step import train_step

PARTS = ("norm forward", "norm backward", "forward", "forward and backward", "step")
REFERENCE = "reference, eager"


def variants(device: torch.device) -> dict[str, tuple[str, bool]]:
    """Name: what `kernels.use` is told, and whether the model is compiled."""
    found = {REFERENCE: ("reference", False)}
    compiles = why_not_compile(device) is None
    if compiles:
        found["torch.compile"] = ("reference", True)
    if device.type == "cuda" and kernels.find_triton_obstacle(device) is None:
        found["Triton"] = ("triton", False)
        if compiles:
            found["Triton and torch.compile"] = ("triton", True)
    elif device.type == "cpu":
        found["CPU functions"] = ("torch", False)
    return found


def make_calls(settings: Settings, compiled: bool, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name of the part: one norm at the model's shape, the model's passes, and an optimizer step."""
    data, config = settings.data, settings.model
    dtype = choose_training_dtype(settings.machine.dtype, device)
    sequences = min(data.micro_batch_size or data.batch_size, data.batch_size)
    model = Decoder(config, seed=1, compute_dtype=dtype).to(device)
    one_layer = Decoder(dataclasses.replace(config, num_hidden_layers=1), seed=1).to(device)
    norm = next(module for module in one_layer.modules() if isinstance(module, Norm))
    optimizer = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    run, normalize = (torch.compile(module, fullgraph=True) if compiled else module for module in (model, norm))

    x = (torch.randn(sequences, data.sequence_length, config.hidden_size, device=device) + 0.3).to(dtype)
    residual, upstream, upstream_residual = (torch.randn_like(x) for _ in range(3))
    inputs = [x.requires_grad_(), residual.requires_grad_(), *norm.parameters()]
    outputs = normalize(x, residual)
    tokens = torch.randint(config.vocab_size, (sequences, data.sequence_length + 1))
    on_host = tokens[:, :-1], tokens[:, 1:]  # as the training loop gets them
    batch = tuple(part.to(device) for part in on_host)
    mean = torch.full((), 1 / batch[1].numel(), device=device)
    return {
        "norm forward": lambda: normalize(x, residual),
        "norm backward": lambda: torch.autograd.grad(outputs, inputs, (upstream, upstream_residual), retain_graph=True),
        "forward": lambda: run(*batch),
        "forward and backward": lambda: run(*batch, token_weights=mean).backward(),
        "step": lambda: train_step(run, [on_host], optimizer, scaler, settings.optimizer.clip, Processes(), device),
    }


def time_together(
    entries: dict[tuple[str, str], Settings],
    parts: tuple[str, ...],
    device: torch.device,
    blocks: int,
    on_block: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Time the parts of every (variant, arm), all of them taking turns; leaves `kernels.use` at auto."""
    how = variants(device)

    def choosing(variant: str, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            kernels.use(how[variant][0], device)
            return call()

        return run

    try:
        calls = {}
        for (variant, arm), settings in entries.items():
            kernels.use(how[variant][0], device)
            calls[variant, arm] = make_calls(settings, how[variant][1], device)
        timings = []
        for part in parts:
            timed = {key: choosing(key[0], calls[key][part]) for key in calls}
            for (variant, arm), seconds in interleaved(timed, device, blocks, on_block).items():
                peak = peak_bytes(timed[variant, arm], device)
                timings.append(Timing(os.getpid(), variant, part, arm, seconds, peak))
        return timings
    finally:
        kernels.use("auto", device)


def main() -> None:
    """Measure what the command line asks for; prints a table in Markdown, and one JSON object last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="tiny", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--norms", nargs="+", default=["rms", "layer"], help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--blocks", type=positive, default=10, help="turns of 4 steps each (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there")
    arguments = parser.parse_args()
    check_out(arguments.out)
    device = choose_device(arguments.device)
    keep_freed_memory()
    settings = load_settings(config_path(arguments.config))
    data = settings.data
    entries = {
        (variant, norm): dataclasses.replace(settings, model=dataclasses.replace(settings.model, norm=norm))
        for variant in variants(device)
        for norm in arguments.norms
    }
    with tqdm(total=arguments.blocks, unit="block", dynamic_ncols=True) as bar:
        timings = time_together(entries, ("step",), device, arguments.blocks, bar.update)

    tokens = min(data.micro_batch_size or data.batch_size, data.batch_size) * data.sequence_length
    flops = flops_per_token(settings.model, data.sequence_length) * tokens
    peak = peak_flops(device, choose_training_dtype(settings.machine.dtype, device))
    print(f"{arguments.config}: steps of {tokens:,} tokens on {device_name(device)}\n")
    print("| variant | norm | ms per step | tokens/s | time over the reference's | of peak FLOP/s |")
    print("|---|---|---|---|---|---|")
    reference = {timing.arm: timing.seconds for timing in timings if timing.variant == REFERENCE}
    for timing in timings:
        median = statistics.median(timing.seconds)
        ratio = statistics.median(a / b for a, b in zip(timing.seconds, reference[timing.arm], strict=True))
        share = "not known" if peak is None else f"{flops / median / peak:.1%}"
        cells = f"{median * 1e3:,.1f} | {tokens / median:,.0f} | {ratio:.3f} | {share}"
        print(f"| {timing.variant} | {timing.arm} | {cells} |")
    about = {"device": device_name(device), "torch": torch.__version__, "config": arguments.config}
    rows = [dataclasses.asdict(timing) for timing in timings]
    write(about | {"tokens": tokens, "flops": flops, "timings": rows}, arguments.out)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
