"""Training steps and their parts in every variant of the code, side by side: `python -m benchmarks.training`.

Variants: the reference in plain PyTorch, torch.compile of it, our functions for the device and, if it is asked for,
transformers' LLaMA of the same shape. They take turns in blocks of a few calls on random tokens; a step has one
micro-batch.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import kernels
from ablation.plan import arm_settings, load_plan
from benchmarks import timing
from benchmarks.timing import Timing
from errors import UserError, exit_on_user_error, read_toml
from model.config import ModelConfig
from model.count import flops_per_token
from model.decoder import Decoder
from model.device import choose_device, choose_training_dtype, device_name, keep_freed_memory, why_not_compile
from model.fused_decode import describe
from model.norm import Norm
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path
from training.step import train_step

PARTS = ("norm forward", "norm backward", "forward", "forward and backward", "step")
REFERENCE = "reference, eager"
PEER = "transformers"
PEERS = {PEER: ("auto", False), f"{PEER} and torch.compile": ("auto", True)}  # as in `variants`


def variants(device: torch.device) -> dict[str, tuple[str, bool]]:
    """Name: what `kernels.use` is told, and whether the model is compiled."""
    found = {REFERENCE: ("reference", False)}
    compiles = why_not_compile(device) is None
    if compiles:
        found["torch.compile"] = ("reference", True)
    if device.type == "cuda" and kernels.triton_unavailable_reason(device) is None:
        found["Triton"] = ("triton", False)
        if compiles:
            found["Triton and torch.compile"] = ("triton", True)
    elif device.type == "cpu":
        found["CPU functions"] = ("torch", False)
    return found


def read_settings(name: str) -> Settings:
    """The settings in a file of configs/, without the command line's library, which would also check their types."""
    types = {field.name: field.type for field in dataclasses.fields(Settings)}
    return Settings(**{table: types[table](**values) for table, values in read_toml(config_path(name)).items()})


def transformers_model(config: ModelConfig) -> nn.Module:
    """A LLaMA of the same shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in fields}))


class Peer(nn.Module):
    """transformers' LLaMA called like our decoder. Its users train float32 weights under autocast."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = transformers_model(config), compute_dtype

    def forward(self, tokens: Tensor, targets: Tensor | None = None, token_weights: Tensor | None = None) -> Tensor:
        """The mean loss, which is what the `token_weights` of a training step ask for."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(input_ids=tokens, labels=tokens, shift_labels=targets, use_cache=False).loss


def step_tokens(settings: Settings) -> int:
    """Tokens of a step that is timed: one micro-batch."""
    data = settings.data
    return min(data.micro_batch_size or data.batch_size, data.batch_size) * data.sequence_length


def make_calls(
    settings: Settings, compiled: bool, device: torch.device, peer: bool = False
) -> dict[str, Callable[[], object]]:
    """What is timed, by name of the part: one norm at the model's shape, the model's passes, and an optimizer step.

    With `peer` the model is transformers'; the norm stays ours.
    """
    data, config = settings.data, settings.model
    dtype = choose_training_dtype(settings.machine.dtype, device)
    sequences = step_tokens(settings) // data.sequence_length
    small = Decoder(dataclasses.replace(config, num_hidden_layers=1, vocab_size=1), seed=1).to(device)
    norm = next(module for module in small.modules() if isinstance(module, Norm))
    if peer:
        model = Peer(config, dtype).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.optimizer.learning_rate, fused=True)
    else:
        model = Decoder(config, seed=1, compute_dtype=dtype).to(device)
        model.activation_checkpointing = settings.machine.activation_checkpointing
        optimizer = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    run, normalize = (torch.compile(module, fullgraph=not peer) if compiled else module for module in (model, norm))

    x = (torch.randn(sequences, data.sequence_length, config.hidden_size, device=device) + 0.3).to(dtype)
    residual, upstream, upstream_residual = (torch.randn_like(x) for _ in range(3))
    inputs = [x.requires_grad_(), residual.requires_grad_(), *norm.parameters()]
    outputs = normalize(x, residual)
    shape, pinned = (sequences, data.sequence_length), device.type == "cuda"
    on_host = [torch.randint(config.vocab_size, shape, pin_memory=pinned) for _ in range(2)]  # tokens and targets
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
    failures: dict[tuple[str, str], str] | None = None,
    deadline: float = math.inf,
) -> list[Timing]:
    """Time the parts of every (variant, arm), all of them taking turns; leaves `kernels.use` at auto.

    With `failures`, those that cannot run are left out, and the reasons are added there.
    """
    how, calls, timings = variants(device) | PEERS, {}, []

    def run(variant: str, call: Callable[[], object]) -> object:
        kernels.use(how[variant][0], device)
        return call()

    try:
        for (variant, arm), settings in entries.items():
            kernels.use(how[variant][0], device)
            try:
                made = make_calls(settings, how[variant][1], device, variant in PEERS)
                for part in parts:
                    made[part]()
            except Exception as error:  # whatever a compiler may raise
                if failures is None:
                    raise
                failures[variant, arm] = describe(error)
                continue
            calls[variant, arm] = made
        for part in parts:
            timed = {key: partial(run, key[0], calls[key][part]) for key in calls}
            for (variant, arm), seconds in timing.interleaved(timed, device, blocks, deadline).items():
                peak = timing.peak_bytes(timed[variant, arm], device)
                timings.append(Timing(os.getpid(), variant, part, arm, seconds, peak))
        return timings
    finally:
        kernels.use("auto", device)


def time_arms(name: str, variants: list[str], device: torch.device, blocks: int) -> Path:
    """Add the times of every part of training, for all arms of a plan, to timings.jsonl, which the report reads.

    It lies in the folder that `python ablate.py PLAN` makes. A process gives one value: intervals take several calls.
    """
    plan = load_plan(name)
    entries = {(variant, arm.name): arm_settings(plan, arm) for variant in variants for arm in plan.compared.values()}
    path = Path("runs") / f"ablation-{plan.name}" / "timings.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    timings = time_together(entries, PARTS, device, blocks)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(timing)) + "\n" for timing in timings)
    return path


def profile(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """Print where the time of two steps goes, by operator and kernel, and write their trace."""
    for _ in range(4):  # compiles
        step()
    on_gpu, activity = device.type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * on_gpu]) as found:
        for _ in range(2):
            step()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))
    found.export_chrome_trace(str(path))


def main() -> None:
    """Measure what the command line asks for; prints a table in Markdown, and one JSON object last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="tiny", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--norms", nargs="+", default=["rms", "layer"], help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help=f"default: all but {', '.join(PEERS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=10, help="turns of 4 steps each (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="TRACE.json.gz", help="instead, trace one variant and norm")
    parser.add_argument("--arms", metavar="PLAN", help="instead, time the arms of a comparison, for its report")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    keep_freed_memory()
    settings = read_settings(arguments.config)
    known = variants(device) | PEERS
    chosen = arguments.variants or [*variants(device)]
    if unknown := set(chosen) - set(known):
        raise UserError(f"--variants {', '.join(unknown)}: on this device there are {', '.join(known)}.")
    if arguments.arms is not None:
        print(f"written: {time_arms(arguments.arms, chosen, device, arguments.blocks)}")
        return None
    entries = {
        (variant, norm): dataclasses.replace(settings, model=dataclasses.replace(settings.model, norm=norm))
        for variant in chosen
        for norm in arguments.norms
        if variant not in PEERS or norm == "rms"
    }
    if arguments.profile is not None:
        (variant, _), settings = next(iter(entries.items()))
        kernels.use(known[variant][0], device)
        calls = make_calls(settings, known[variant][1], device, variant in PEERS)
        return profile(calls["step"], device, arguments.profile)
    print(f"{arguments.config} on {device_name(device)}\n")
    results = compare(entries, device, arguments.blocks)
    timing.print_json(device, config=arguments.config, **results)
    if results["failures"]:
        sys.exit(1)


def compare(
    entries: dict[tuple[str, str], Settings], device: torch.device, blocks: int, deadline: float = math.inf
) -> dict:
    """Time a step of every (variant, arm), and print a table: speed relative to the arm's first variant.

    The limit is torch's product of square matrices in the dtype of the step, measured here.
    """
    failures, dtypes = {}, [choose_training_dtype(one.machine.dtype, device) for one in entries.values()]
    products = {dtype: timing.product_rate(device, dtype) for dtype in dict.fromkeys(dtypes)}
    limits = {key: products[dtype] for key, dtype in zip(entries, dtypes, strict=True)}
    timings = time_together(entries, ("step",), device, blocks, failures, deadline)
    first = {one.arm: one.seconds for one in reversed(timings)}
    columns = ("arm", "variant", "ms per step", "tokens/s", f"speed relative to {next(iter(entries))[0]}")
    timing.print_header(*columns, "of the products' rate", "peak GB without weights and optimizer")
    for one in timings:
        key, seconds = (one.variant, one.arm), statistics.median(one.seconds)
        rate = step_tokens(entries[key]) / seconds
        flops = rate * flops_per_token(entries[key].model, entries[key].data.sequence_length)
        memory = "not known" if one.peak_bytes is None else f"{one.peak_bytes / 1e9:.2f}"
        cells = f"{seconds * 1e3:,.1f}", f"{rate:,.0f}", timing.relative_speed(first[one.arm], one.seconds)
        timing.print_row(one.arm, one.variant, *cells, f"{flops / limits[key]:.0%}", memory)
    for (variant, arm), reason in failures.items():
        timing.print_row(arm, variant, f"not run: {reason}", *[""] * 4)
    rates = {str(dtype): rate for dtype, rate in products.items()}
    rows = [dataclasses.asdict(one) | {"tokens": step_tokens(entries[one.variant, one.arm])} for one in timings]
    reasons = [{"variant": variant, "arm": arm, "not_run": reason} for (variant, arm), reason in failures.items()]
    return {"product_flops_per_second": rates, "timings": rows, "failures": reasons}


if __name__ == "__main__":
    with exit_on_user_error():
        main()
