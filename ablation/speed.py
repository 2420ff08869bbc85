"""How long both norms take, apart from training: blocks of one process that take turns, A B A B, and their ratio.

Three builds: the specification in plain PyTorch, torch.compile of it, and our own functions (Triton on a GPU, those for
a CPU otherwise). In each, both norms come from one source: torch's own `F.layer_norm` and `F.rms_norm` are no arms,
since on a CPU one of them is fused and the other is not.
"""

import dataclasses
import statistics as plain
import time
from collections.abc import Callable, Iterator

import torch

import kernels
from ablation import statistics
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import choose_training_dtype, why_not_compile
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings
from training.step import train_step

BLOCK = 4  # calls in a row; their median is one block
NORMS = ("rms", "layer")


def builds(device: torch.device) -> dict[str, tuple[bool, bool]]:
    """Name: whether the specification runs, and whether it is compiled."""
    found = {"eager": (True, False)}
    if why_not_compile(device) is None:
        found["torch.compile"] = (True, True)
    return found | {kernels.describe(device): (False, False)}


def measure(settings: Settings, device: torch.device, blocks: int) -> dict:
    """The tables `speed`, `norm_share` and `memory` of results.json."""
    dtype = choose_training_dtype(settings.machine.dtype, device)
    rows, shares, memory = [], {}, {}
    for build, (specified, compiled) in builds(device).items():
        kernels.use("reference" if specified else "auto", device)
        try:
            calls = {norm: parts(settings, norm, device, dtype, compiled) for norm in NORMS}
            for part in next(iter(calls.values())):
                seconds = interleaved({norm: calls[norm][part] for norm in NORMS}, device, blocks)
                found = statistics.ratio(seconds["rms"], seconds["layer"])
                medians = {norm: plain.median(seconds[norm]) for norm in NORMS}
                common = {"build": build, "part": part, **medians, "n": found.n}
                rows.append(common | {"ratio": found.ratio, "interval": list(found.interval)})
            if not specified:
                memory = {norm: peak_bytes(calls[norm]["step"], device) for norm in NORMS}
                of = {(row["part"]): row for row in rows if row["build"] == build}
                count = config_of(settings.model, "rms").num_norms
                for norm in NORMS:
                    norms = count * (of["norm forward"][norm] + of["norm backward"][norm])
                    shares[norm] = norms / of["step"][norm]
        finally:
            kernels.use("auto", device)
    return {"speed": rows, "norm_share": shares, "memory": memory}


def config_of(config: ModelConfig, norm: str) -> ModelConfig:
    """The same model with a norm."""
    return dataclasses.replace(config, norm=norm)


def parts(
    settings: Settings, norm: str, device: torch.device, dtype: torch.dtype, compiled: bool
) -> dict[str, Callable[[], object]]:
    """Calls to time: one norm's two passes at the model's shape, and a training step and its two passes."""
    data, config = settings.data, config_of(settings.model, norm)
    shape = data.batch_size, data.sequence_length
    x = (torch.randn(*shape, config.hidden_size, device=device) + 0.3).to(dtype).requires_grad_()
    residual = torch.randn_like(x).requires_grad_()
    gains = [torch.ones(config.hidden_size, device=device).requires_grad_() for _ in config.norm_parameters]
    weight, bias = [*gains, None][:2]
    upstream = torch.randn_like(x), torch.randn_like(x)

    def normalize(x, residual, weight, bias):
        return kernels.normalize(x, weight, bias, residual, kind=norm, eps=config.norm_eps)

    run = torch.compile(normalize, fullgraph=True) if compiled else normalize
    inputs = [tensor for tensor in (x, residual, weight, bias) if tensor is not None]

    model = Decoder(config, seed=1, compute_dtype=dtype).to(device)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    adamw = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    tokens = torch.randint(config.vocab_size, (shape[0], shape[1] + 1), device=device)
    batch = [(tokens[:, :-1], tokens[:, 1:])]

    def step():
        train_step(forward, batch, adamw, scaler, 1.0, Processes(), device)

    outputs = run(x, residual, weight, bias)
    return {
        "norm forward": lambda: run(x, residual, weight, bias),
        "norm backward": lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True),
        "forward": lambda: forward(*batch[0]),
        "forward and backward": lambda: forward(*batch[0]).sum().backward(),
        "step": step,
    }


def interleaved(calls: dict[str, Callable[[], object]], device: torch.device, blocks: int) -> dict[str, list[float]]:
    """Seconds of each block of each call, in turns; the order within a turn alternates."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for block in range(blocks):
        names: Iterator[str] = iter(calls) if block % 2 else reversed(calls)
        for name in names:
            times = []
            for _ in range(BLOCK):
                wait()
                start = time.perf_counter()
                calls[name]()
                wait()
                times.append(time.perf_counter() - start)
            seconds[name].append(plain.median(times))
    return seconds


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes in use during a step, where the device counts them."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device)
