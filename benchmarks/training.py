"""Training steps in every variant of the code, side by side: `python -m benchmarks.training`.

Variants: the reference in plain PyTorch, torch.compile of it, our functions for the device and, if it is asked for,
transformers' LLaMA of the same shape. They take turns in blocks of a few steps. Exit status 1: a variant did not run.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import kernels
from benchmarks import timing
from benchmarks.decoding import COMPILED, TRANSFORMERS, transformers_model
from model.config import ModelConfig
from model.count import flops_per_token
from model.decoder import Decoder
from model.device import choose_dtype, keep_freed_memory
from training.optimizer import build_optimizer
from training.processes import Processes
from training.settings import Settings, config_path, load_settings, replace_settings
from training.step import train_step


class Variant(NamedTuple):
    kernels: str | None  # what `kernels.use` is told; None: it is transformers
    compiled: bool = False


VARIANTS = {
    "reference, eager": Variant("reference"),
    "torch.compile": Variant("reference", compiled=True),
    "CPU functions": Variant("torch"),
    "Triton": Variant("triton"),
    "Triton and torch.compile": Variant("triton", compiled=True),
    TRANSFORMERS: Variant(None),
    COMPILED: Variant(None, compiled=True),
}


class TransformersBaseline(nn.Module):
    """transformers' LLaMA called like our decoder. Its users train float32 weights under autocast."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.model = transformers_model(config)
        self.dtype = compute_dtype

    def forward(self, tokens: Tensor, targets: Tensor | None = None, token_weight: Tensor | None = None) -> Tensor:
        """The mean loss, which is what the `token_weight` of a training step ask for."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(input_ids=tokens, labels=tokens, shift_labels=targets, use_cache=False).loss


def make_step(settings: Settings, variant: Variant, device: torch.device) -> timing.Blocks:
    """The block of training steps on random tokens, of one micro-batch each."""
    dtype = choose_dtype(settings.machine.dtype, device)
    if variant.kernels is None:
        model = TransformersBaseline(settings.model, dtype).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.optimizer.learning_rate, fused=True)
        run = torch.compile(model) if variant.compiled else model
    else:
        timing.use_kernels(variant.kernels, device)
        model = Decoder(settings.model, seed=1, compute_dtype=dtype).to(device)
        model.activation_checkpointing = settings.machine.activation_checkpointing
        optimizer = build_optimizer(model, settings.optimizer)
        run = kernels.compile_model(model) if variant.compiled else model
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    shape = (2, settings.data.micro_batch(), settings.data.sequence_length)
    batch = [*torch.randint(settings.model.vocab_size, shape, pin_memory=device.type == "cuda")]  # tokens, targets

    step = partial(train_step, run, [batch], optimizer, scaler, settings.optimizer.clip, Processes(), device)

    def time_steps() -> float:
        if variant.kernels is not None:
            kernels.use(variant.kernels, device)
        return timing.block([step], device)

    return {"step": time_steps}


def compare(
    config: str, changes: dict[str, Any], norms: Sequence[str], variants: Sequence[str], turns: int = 10
) -> timing.Table:
    """Time every norm in every variant of a changed configuration, 4 steps in a turn, and print and return a table."""
    keep_freed_memory()
    if any(VARIANTS[name].kernels is None for name in variants):
        changes = {**changes, "optimizer": "adamw"}  # that of transformers' users, for all variants
    settings = replace_settings(load_settings(config_path(config)), changes)
    device = timing.default_device()
    makers = {}
    for norm, name in itertools.product(norms, variants):
        variant = VARIANTS[name]
        step = partial(make_step, replace_settings(settings, {"norm": norm}), variant, device)
        if variant.kernels is not None:
            makers[f"{name}, {norm}"] = step
        elif norm == "rms":
            makers[name] = step
    length = settings.data.sequence_length
    dtype = choose_dtype(settings.machine.dtype, device)
    tokens = settings.data.micro_batch() * length
    work = {"step": tokens * flops_per_token(settings.model, length)}
    title = f"training {config}, {settings.optimizer.optimizer}, {str(dtype).removeprefix('torch.')}"
    return timing.compare(title, makers, work, partial(timing.multiplying, device, dtype), turns, tokens)


def measure(
    config: str = "tiny",
    dtypes: tuple[str, ...] = ("auto",),
    norms: tuple[str, ...] = ("rms", "layer"),
    variants: tuple[Literal[*VARIANTS], ...] = (),
) -> list[timing.Table]:
    """Time training steps in every variant of the code, side by side.

    Args:
        config: A name in configs/.
        variants: By default those of this device without transformers.
    """
    choice = "triton" if timing.default_device().type == "cuda" else "torch"
    usual = [name for name, variant in VARIANTS.items() if variant.kernels in ("reference", choice)]
    return [compare(config, {"dtype": dtype}, norms, variants or usual) for dtype in dtypes]


if __name__ == "__main__":
    timing.run(measure, "benchmarks.training")
