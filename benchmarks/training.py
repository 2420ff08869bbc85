"""Training steps and their parts in every variant of the code, side by side: `python -m benchmarks.training`.

Variants: the reference in plain PyTorch, torch.compile of it, our functions for the device and, if it is asked for,
transformers' LLaMA of the same shape. They take turns in blocks of a few calls on random tokens; a step has one
micro-batch. Exit status 1: a variant did not run.
"""

import argparse
import itertools
import json
import math
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import kernels
from ablation.plan import arm_settings, load_plan, replace_settings
from benchmarks import timing
from benchmarks.decoding import SHAPES, TRANSFORMERS, transformers_model
from errors import UserError, exit_on_user_error, printable
from model.config import ModelConfig
from model.count import flops_per_token
from model.decoder import Decoder
from model.device import choose_training_dtype, device_name, keep_freed_memory
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path, load_settings
from training.step import train_step

VARIANTS = {  # what `kernels.use` is told, and whether the model is compiled
    "reference, eager": ("reference", False),
    "torch.compile": ("reference", True),
    "CPU functions": ("torch", False),
    "Triton": ("triton", False),
    "Triton and torch.compile": ("triton", True),
    TRANSFORMERS: ("auto", False),
    f"{TRANSFORMERS} and torch.compile": ("auto", True),
}
USUAL = {
    "cpu": ["reference, eager", "torch.compile", "CPU functions"],
    "cuda": ["reference, eager", "torch.compile", "Triton", "Triton and torch.compile"],
}
PARTS = "forward", "forward and backward", "step"


class TransformersModel(nn.Module):
    """transformers' LLaMA called like our decoder. Its users train float32 weights under autocast."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = transformers_model(config), compute_dtype

    def forward(self, tokens: Tensor, targets: Tensor | None = None, token_weights: Tensor | None = None) -> Tensor:
        """The mean loss, which is what the `token_weights` of a training step ask for."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(input_ids=tokens, labels=tokens, shift_labels=targets, use_cache=False).loss


def micro_batch(settings: Settings) -> tuple[int, int]:
    """Sequences and their length in a step that is timed."""
    data = settings.data
    return min(data.micro_batch_size or data.batch_size, data.batch_size), data.sequence_length


def make_blocks(settings: Settings, variant: str, device: torch.device, *parts: str) -> dict[str, timing.Block]:
    """The blocks of parts of PARTS: the model's passes on random tokens, and an optimizer step."""
    choice, compiled = VARIANTS[variant]
    kernels.use(choice, device)
    dtype = choose_training_dtype(settings.machine.dtype, device)
    if variant.startswith(TRANSFORMERS):
        model = TransformersModel(settings.model, dtype).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.optimizer.learning_rate, fused=True)
        run = torch.compile(model) if compiled else model
    else:
        model = Decoder(settings.model, seed=1, compute_dtype=dtype).to(device)
        model.activation_checkpointing = settings.machine.activation_checkpointing
        optimizer = build_optimizer(model, settings.optimizer, device)
        run = kernels.compile_model(model) if compiled else model
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    shape, pinned = micro_batch(settings), device.type == "cuda"
    on_host = [torch.randint(settings.model.vocab_size, shape, pin_memory=pinned) for _ in range(2)]  # tokens, targets
    batch = [part.to(device) for part in on_host]
    mean = torch.full((), 1 / batch[1].numel(), device=device)
    calls = {
        "forward": lambda: run(*batch),
        "forward and backward": lambda: run(*batch, token_weights=mean).backward(),
        "step": lambda: train_step(run, [on_host], optimizer, scaler, settings.optimizer.clip, Processes(), device),
    }

    def use_and_time(part: str) -> float:
        kernels.use(choice, device)
        return timing.block([calls[part]], device)

    return {part: partial(use_and_time, part) for part in parts}


def time_arms(folder: Path, variants: list[str], device: torch.device, turns: int) -> None:
    """Add the times of every part of training, for all arms of a study, to its timings.jsonl, which its report reads.

    A process gives one value: intervals take several.
    """
    plan = load_plan(folder / "plan.toml")
    makers = {
        (variant, name): partial(make_blocks, arm_settings(plan, arm), variant, device, *PARTS)
        for variant in variants
        for name, arm in plan.compared.items()
    }
    found, failures = timing.measure(makers, turns)
    for (variant, arm), reason in failures.items():
        raise UserError(f"{variant}, {arm}: {reason}")
    process = uuid.uuid4().hex  # the ids of processes in two containers may be equal
    with (folder / "timings.jsonl").open("a", encoding="utf-8") as file:
        for (variant, arm), parts in found.items():
            for part, seconds in parts.items():
                row = {"process": process, "variant": variant, "part": part, "arm": arm, "seconds": seconds}
                file.write(json.dumps(row) + "\n")


def main(flags: list[str] | None = None) -> dict:
    """Measure what the command line asks for, and print it as tables in Markdown; returns all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="tiny", help="a name in configs/ (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="instead, this model and 8 sequences of 256 tokens")
    parser.add_argument("--dtypes", nargs="+", metavar="DTYPE", help="default: that of the configuration")
    parser.add_argument("--norms", nargs="+", default=["rms", "layer"], help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help=f"default: all but {TRANSFORMERS}")
    parser.add_argument("--turns", type=int, default=10, help="of 4 steps each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no fourth turn begins")
    parser.add_argument("--arms", type=Path, metavar="FOLDER", help="instead, time the arms of a study, for its report")
    arguments = parser.parse_args(flags)
    device, tables = torch.device("cuda" if torch.cuda.is_available() else "cpu"), []
    keep_freed_memory()
    variants = arguments.variants or USUAL[device.type]
    if arguments.arms is not None:
        time_arms(arguments.arms, variants, device, arguments.turns)
        print(printable(f"written: {arguments.arms / 'timings.jsonl'}"))
        return timing.results(device, tables=tables)
    settings = load_settings(config_path(arguments.config))
    if arguments.shape is not None:
        data = {"batch_size": 8, "sequence_length": 256}
        settings = replace_settings(settings, vars(SHAPES[arguments.shape]) | data)
    kinds = [*itertools.product(arguments.dtypes or [settings.machine.dtype], arguments.norms)]
    for dtype, norm in kinds:
        product = timing.product_rate(device, choose_training_dtype(dtype, device))  # the limit is at this rate
        title = f"A step of {arguments.shape or arguments.config}, {norm} norm, {dtype}, on {device_name(device)}; "
        title += f"products at {product / 1e12:.2f} TFLOP/s"
        of_kind, tokens = replace_settings(settings, {"dtype": dtype, "norm": norm}), math.prod(micro_batch(settings))
        limit = tokens * flops_per_token(of_kind.model, settings.data.sequence_length) / product
        able = [variant for variant in variants if norm == "rms" or not variant.startswith(TRANSFORMERS)]
        makers = {variant: partial(make_blocks, of_kind, variant, device, "step") for variant in able}
        limits = {variant: {"step": limit} for variant in able}
        end = time.monotonic() + 60 * arguments.minutes / len(kinds)
        tables.append(timing.compare(title, makers, limits, arguments.turns, end, tokens))
    return timing.results(device, tables=tables)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(timing.finish(main()))
