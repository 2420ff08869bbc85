"""Training steps and their parts in every variant of the code, side by side: `python -m benchmarks.training`.

Variants: the reference in plain PyTorch, torch.compile of it, our functions for the device and, if it is asked for,
transformers' LLaMA of the same shape. They take turns in blocks of a few calls on random tokens; a step has one
micro-batch.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import kernels
from ablation.plan import arm_settings, load_plan
from benchmarks import timing
from benchmarks.programs import SHAPES, TRANSFORMERS, transformers_model
from errors import UserError, exit_on_user_error
from model.config import ModelConfig
from model.count import flops_per_token
from model.decoder import Decoder
from model.device import choose_device, choose_training_dtype, device_name, keep_freed_memory, why_not_compile
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path, load_settings
from training.step import train_step

REFERENCE, CPU_FUNCTIONS = "reference, eager", "CPU functions"
VARIANTS = {  # what `kernels.use` is told, and whether the model is compiled
    REFERENCE: ("reference", False),
    "torch.compile": ("reference", True),
    CPU_FUNCTIONS: ("torch", False),
    "Triton": ("triton", False),
    "Triton and torch.compile": ("triton", True),
    TRANSFORMERS: ("auto", False),
    f"{TRANSFORMERS} and torch.compile": ("auto", True),
}


def our_variants(device: torch.device) -> list[str]:
    """Those that run on a device, without transformers."""
    how = ["reference", "torch" if device.type == "cpu" else "triton"]
    compiles = why_not_compile(device) is None
    return [name for name, (choice, compiled) in VARIANTS.items() if choice in how and (compiles or not compiled)]


class TransformersModel(nn.Module):
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


def make_calls(settings: Settings, variant: str, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name of the part: the model's passes on random tokens, and an optimizer step."""
    choice, compiled = VARIANTS[variant]
    kernels.use(choice, device)
    data, config = settings.data, settings.model
    dtype = choose_training_dtype(settings.machine.dtype, device)
    if variant.startswith(TRANSFORMERS):
        model = TransformersModel(config, dtype).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.optimizer.learning_rate, fused=True)
    else:
        model = Decoder(config, seed=1, compute_dtype=dtype).to(device)
        model.activation_checkpointing = settings.machine.activation_checkpointing
        optimizer = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    compile_it = torch.compile if variant.startswith(TRANSFORMERS) else kernels.compile_model
    run = compile_it(model) if compiled else model

    shape, pinned = (step_tokens(settings) // data.sequence_length, data.sequence_length), device.type == "cuda"
    on_host = [torch.randint(config.vocab_size, shape, pin_memory=pinned) for _ in range(2)]  # tokens and targets
    batch = tuple(part.to(device) for part in on_host)
    mean = torch.full((), 1 / batch[1].numel(), device=device)
    calls = {
        "forward": lambda: run(*batch),
        "forward and backward": lambda: run(*batch, token_weights=mean).backward(),
        "step": lambda: train_step(run, [on_host], optimizer, scaler, settings.optimizer.clip, Processes(), device),
    }

    def use_and_call(call: Callable[[], object]) -> object:
        kernels.use(choice, device)
        return call()

    return {part: partial(use_and_call, call) for part, call in calls.items()}


def time_arms(name: str, variants: list[str], device: torch.device, turns: int) -> Path:
    """Add the times of every part of training, for all arms of a plan, to timings.jsonl, which the report reads.

    It lies in the folder that `python ablate.py PLAN` makes. A process gives one value: intervals take several.
    """
    plan = load_plan(name)
    entries = {(variant, arm.name): arm_settings(plan, arm) for variant in variants for arm in plan.compared.values()}
    path = Path("runs") / f"ablation-{plan.name}" / "timings.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    peaks = {}

    def make(variant: str, arm: str) -> dict[str, timing.Block]:
        calls = make_calls(entries[variant, arm], variant, device)
        peaks[variant, arm] = {part: timing.peak_bytes(call, device) for part, call in calls.items()}
        return {part: partial(timing.block, [call], device) for part, call in calls.items()}

    found, failures = timing.measure({key: partial(make, *key) for key in entries}, turns)
    for (variant, arm), reason in failures.items():
        raise UserError(f"{variant}, {arm}: {reason}")
    with path.open("a", encoding="utf-8") as file:
        for (variant, arm), parts in found.items():
            for part, seconds in parts.items():
                row = {"process": os.getpid(), "variant": variant, "part": part, "arm": arm, "seconds": seconds}
                file.write(json.dumps(row | {"peak_bytes": peaks[variant, arm][part]}) + "\n")
    return path


def compare(
    title: str, settings: Settings, chosen: list[str], device: torch.device, turns: int, minutes: float
) -> dict:
    """Time a step of every variant, and print a table. The limit is the rate of torch's product, measured here."""
    deadline = time.monotonic() + 60 * minutes
    product = timing.product_rate(device, choose_training_dtype(settings.machine.dtype, device))
    tokens = step_tokens(settings)
    flops = tokens * flops_per_token(settings.model, settings.data.sequence_length)

    def make(variant: str) -> dict[str, timing.Block]:
        return {"step": partial(timing.block, [make_calls(settings, variant, device)["step"]], device)}

    makers = {variant: partial(make, variant) for variant in chosen}
    title += f"; products at {product / 1e12:.2f} TFLOP/s"
    return timing.compare(title, makers, {name: {"step": flops / product} for name in chosen}, turns, deadline, tokens)


def main() -> int:
    """Measure what the command line asks for; prints tables in Markdown, and one JSON object last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="tiny", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="instead, this model and 8 sequences of 256 tokens")
    parser.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="default: that of the configuration")
    parser.add_argument("--norms", nargs="+", default=["rms", "layer"], help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help=f"default: all but {TRANSFORMERS}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=10, help="of 4 steps each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no fourth turn begins")
    parser.add_argument("--arms", metavar="PLAN", help="instead, time the arms of a comparison, for its report")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    keep_freed_memory()
    settings = load_settings(config_path(arguments.config))
    chosen = arguments.variants or our_variants(device)
    if arguments.arms is not None:
        print(f"written: {time_arms(arguments.arms, chosen, device, arguments.turns)}")
        return 0
    name = arguments.shape or arguments.config
    if arguments.shape is not None:
        data = replace(settings.data, batch_size=8, sequence_length=256)
        settings = replace(settings, model=SHAPES[arguments.shape], data=data)
    tables, kinds = [], [*itertools.product(arguments.dtypes or [settings.machine.dtype], arguments.norms)]
    for dtype, norm in kinds:
        model, machine = replace(settings.model, norm=norm), replace(settings.machine, dtype=dtype)
        one = replace(settings, model=model, machine=machine)
        title = f"A training step of {name}, {norm} norm, {dtype}, on {device_name(device)}"
        able = [variant for variant in chosen if norm == "rms" or not variant.startswith(TRANSFORMERS)]
        tables.append(compare(title, one, able, device, arguments.turns, arguments.minutes / len(kinds)))
    timing.print_json(device, tables=tables)
    return int(any(table["not_run"] for table in tables))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
