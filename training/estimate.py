"""What a run would need, without training: parameters, FLOPs, memory, and its time from three measured steps."""

import math
import time
from pathlib import Path

import torch

import kernels
from data.conversations import find_conversations
from data.sources import resolve
from model.config import ModelConfig
from model.count import flops_per_token, layer_matrices, num_parameters
from model.decoder import Decoder
from model.device import choose_device, choose_training_dtype, device_name
from training.optimizer import build_optimizer, freeze_parameters
from training.processes import ALONE
from training.session import prepare_corpus
from training.settings import Settings
from training.step import train_step

STEPS = 3
QUICK_FLOPS, MAX_FLOPS = 5e11, 5e12  # of a step that is measured on a CPU: seconds, and a minute


def estimate(settings: Settings) -> float:
    """Print what one process needs, and return the seconds, NaN where none were measured.

    It trains a model of the shape on random tokens for three steps if it can.
    """
    device = choose_device(settings.machine.device)
    kernels.use(settings.machine.kernels, device)
    dtype = choose_training_dtype(settings.machine.dtype, device)
    model, data, steps = settings.model, settings.data, settings.optimizer.steps
    tokens = steps * data.batch_size * data.sequence_length
    flops = flops_per_token(model, data.sequence_length)
    weights, moments, kept = memory(settings, dtype, device)
    lines = {
        "model": f"{num_parameters(model):,} parameters, {model.norm} norm",
        "training": f"{tokens:,} tokens in {steps:,} steps of {data.batch_size} sequences of {data.sequence_length}",
        "compute": f"{flops * tokens:.2e} FLOPs, {flops / 1e6:,.1f} million per token",
        "memory": f"{format_bytes(2 * weights + moments + kept)}: weights {format_bytes(weights)}, "
        f"gradients {format_bytes(weights)}, moments {format_bytes(moments)}, activations {format_bytes(kept)} "
        f"for {data.micro_batch_size or data.batch_size} sequences in {str(dtype)[6:]}",
    }
    if settings.machine.shard:
        lines["sharded"] = ", ".join(f"{format_bytes((2 * weights + moments) / n)} on each of {n}" for n in (2, 4, 8))
    print("\n".join(f"{name:9} {line}" for name, line in lines.items()), flush=True)
    seconds, how = measure_time(settings, device, dtype)
    print(f"{'time':9} {how}")
    if settings.run.init_from and find_conversations(resolve(data.data, data.text_field, Path(data.cache))):
        print(f"a row of conversations, in which lines with + are learned:\n{prepare_corpus(settings).show_row()}")
    return seconds


def memory(settings: Settings, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int]:
    """Bytes of the float32 weights (the gradients need as many), of the optimizer's moments, and of the activations."""
    model, data = settings.model, settings.data
    weights = 4 * num_parameters(model)
    of_muon = 4 * model.num_hidden_layers * layer_matrices(model)  # it keeps one moment, AdamW two
    moments = 2 * weights - (of_muon if settings.optimizer.optimizer == "muon" else 0)
    tokens = (data.micro_batch_size or data.batch_size) * data.sequence_length
    kept = tokens * dtype.itemsize * kept_elements(model, settings.machine.activation_checkpointing)
    logits = tokens * dtype.itemsize * model.vocab_size  # or their gradient
    if kernels.implementation(device) is kernels.gpu:  # some tokens at a time
        logits = min(logits, kernels.gpu.WORKSPACE)
    return weights, moments, kept + logits


def kept_elements(config: ModelConfig, checkpointing: bool) -> int:
    """Elements that the forward pass keeps per token, without logits. What is not fused keeps more.

    A layer keeps the inputs and outputs of two norms; the packed q, k and v, and these rotated; the attention's output;
    the MLP's packed gate and up, and their product.
    """
    width, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 4 * width + 3 * heads * config.resolved_head_dim + 3 * config.intermediate_size
    # With checkpointing: the two inputs of each layer, and one layer that is computed again.
    layers = config.num_hidden_layers * 2 * width + layer if checkpointing else config.num_hidden_layers * layer
    return layers + 2 * width  # the final norm


def measure_time(settings: Settings, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The seconds of all steps, from the fastest of three with as many sequences as are quick; or NaN; and in words."""
    data, name = settings.data, device_name(device)
    flops = data.sequence_length * flops_per_token(settings.model, data.sequence_length)
    sequences = data.micro_batch_size or data.batch_size
    if device.type == "cpu":
        sequences = min(sequences, max(1, int(QUICK_FLOPS / flops)))
        if flops > MAX_FLOPS:
            return math.nan, f"not measured: the model is too large for {name}"
    model = Decoder(settings.model, seed=1, compute_dtype=dtype).to(device)
    model.activation_checkpointing = settings.machine.activation_checkpointing
    freeze_parameters(model, settings.run.train_only)
    optimizer = build_optimizer(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    forward = kernels.compile_model(model) if settings.machine.compile else model
    batch = torch.randint(settings.model.vocab_size, (2, sequences, data.sequence_length))
    measured = []
    for _ in range(STEPS):
        start = time.perf_counter()
        train_step(forward, [tuple(batch)], optimizer, scaler, settings.optimizer.clip, ALONE, device)
        measured.append(time.perf_counter() - start)
    seconds = min(measured) * data.batch_size / sequences
    total = seconds * settings.optimizer.steps
    how = f"{seconds:,.2f} s a step, the fastest of {STEPS} with {sequences} sequences"
    return total, f"{format_time(total)} on {name}: {how}"


def format_time(seconds: float) -> str:
    """A duration in the unit that people would say it in."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return "a time that is not measured" if math.isnan(seconds) else f"{seconds:.0f} seconds"


def format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
