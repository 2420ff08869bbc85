"""What a run would need, without training: its text, parameters, FLOPs, memory, and its time from measured steps."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from types import ModuleType

import torch

import kernels
from data.conversations import find_conversations
from data.corpus import TooLittleText
from data.sources import HUB_TEXTS, resolve
from errors import counted, note
from model.count import adapter_parameters, flops_per_token, layer_matrices, num_parameters
from model.machine import device_name
from training.processes import ALONE
from training.session import epochs, open_text, prepare_training, use_machine
from training.settings import Settings
from training.step import train_step
from training.weights import initial_model

STEPS = 3
MAX_SECONDS = 20  # of measuring: no further step begins
QUICK_FLOPS, MAX_FLOPS = 5e11, 5e12  # work of a pass that a CPU measures: seconds, and at most a minute
MAX_TEXT = 30e6  # bytes of the files that a dry run prepares as training does: seconds
BYTES_PER_TOKEN = 3.5  # of a larger text: see SAMPLE_SIZE in data/train_tokenizer.py


def estimate(settings: Settings, last: Path | None = None, *, advises: bool = True) -> float:
    """Print what one process needs, and return the seconds of all steps, NaN where they are not measured.

    last: the save of a resumed run, whose tokenizer it keeps. advises: print better flags. `TooLittleText` comes last.
    """
    device, dtype = use_machine(settings)
    data, steps, rank = settings.data, settings.optimizer.steps, settings.run.lora
    tokens = steps * data.batch_size * data.sequence_length
    corpus = problem = None
    is_here = not any(name in HUB_TEXTS or name.startswith("hub:") for name in data.data)
    files = resolve(data) if is_here else []
    size = sum(file.size for file in files)
    if is_here and (size < MAX_TEXT or find_conversations(files)):
        try:
            settings, corpus = open_text(settings, last, advises=advises)
        except TooLittleText as error:  # raised last: the rest hardly depends on the text
            problem = error
    elif is_here:
        print(f"text: {epochs(tokens, size / BYTES_PER_TOKEN)}, if a token has {BYTES_PER_TOKEN} bytes")
    model = settings.model
    flops = flops_per_token(model, data.sequence_length)
    adapter = "" if rank is None else f", all frozen; {adapter_parameters(model, rank):,} of an adapter learn"
    print(f"model     {num_parameters(model):,} parameters, {model.norm} norm{adapter}")
    batch = f"{data.batch_size} sequences of {data.sequence_length}"
    print(f"training  {tokens:,} tokens in {counted(steps, 'step')} of {batch}")
    print(f"compute   {flops * tokens:.2e} FLOPs, {flops / 1e6:,.1f} million per token")
    print_memory(settings, dtype, kernels.implementation(device, compiled=settings.machine.compile))
    is_chat = corpus is not None and corpus.chat is not None
    seconds = measure_time(settings, device, dtype, has_documents=is_chat or data.document_mask)
    if is_chat:
        print(f"a row of conversations, in which lines with + are learned:\n{corpus.show_row()}")
    if problem is not None:
        raise problem
    return seconds


def print_memory(settings: Settings, dtype: torch.dtype, implementation: ModuleType) -> None:
    """Print the memory of a process alone and, with --shard, of one of several."""
    sizes = memory(settings, dtype, implementation)
    listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in sizes.items() if size > 0)
    micro_batch = f"a micro-batch of {settings.data.micro_batch()} in {str(dtype).removeprefix('torch.')}"
    model = settings.model
    counts_all = model.is_plain and not model.qk_norm and implementation is not kernels.reference
    at_least = "" if counts_all else "at least "
    print(f"memory    {at_least}{format_bytes(sum(sizes.values()))}: {listed} for {micro_batch}", flush=True)
    if settings.machine.shard:
        # Undivided: also the gathered weights of embedding, head and two layers, and their gradients; no other copies.
        each = sizes["activations"] + 8 * num_parameters(dataclasses.replace(model, num_hidden_layers=2))
        divided = sizes["weights"] + sizes["gradients"] + sizes["moments"]
        if settings.optimizer.optimizer == "muon":  # a process has the complete matrices that it orthogonalizes
            divided += 8 * num_parameters(model)
        shares = {count: format_bytes(divided / count + each) for count in (2, 4, 8)}
        print("sharded   " + ", ".join(f"{share} on each of {count}" for count, share in shares.items()))


def memory(settings: Settings, dtype: torch.dtype, implementation: ModuleType) -> dict[str, int]:
    """Bytes of the weights and their copies in `dtype`, and of gradients, moments and activations."""
    model, data, rank = settings.model, settings.data, settings.run.lora
    learned = 4 * (num_parameters(model) if rank is None else adapter_parameters(model, rank))
    frozen = 0 if rank is None else dtype.itemsize * num_parameters(model)
    matrices = model.num_hidden_layers * layer_matrices(model)
    head = model.vocab_size * model.hidden_size
    tokens = data.micro_batch() * data.sequence_length
    logits = tokens * dtype.itemsize * model.vocab_size  # or their gradient
    copied = matrices + head
    if implementation is kernels.gpu:  # some tokens at a time; gradients of head and input at once, in float32
        logits = min(logits, kernels.gpu.WORKSPACE) + 4 * (tokens * model.hidden_size + head)
        copied = matrices
    return {
        "weights": learned + frozen,
        "copies of them": dtype.itemsize * copied if rank is None and dtype != torch.float32 else 0,  # of products
        "gradients": learned,
        "moments": 2 * learned - (4 * matrices if settings.optimizer.optimizer == "muon" else 0),  # Muon has one
        "activations": tokens * dtype.itemsize * kept_elements(settings, dtype, implementation) + logits,
    }


def kept_elements(settings: Settings, dtype: torch.dtype, implementation: ModuleType) -> int:
    """Elements that the forward pass keeps per token, without logits: in a layer the inputs and outputs of two norms;
    q, k and v, rotated; the attention's output; and SwiGLU's packed gate and up. With checkpointing: its two inputs.
    """
    config, length = settings.model, settings.data.sequence_length
    fused = implementation is kernels.gpu
    layers, width, hidden = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads = (config.num_attention_heads + config.num_key_value_heads) * config.resolved_head_dim
    layer = 4 * width + 2 * (heads + hidden)
    if not fused:  # silu(gate), and the attention's output in another order or its probabilities
        head_dim, is_cpu = config.resolved_head_dim, implementation is kernels.cpu
        keeps_probabilities = is_cpu and implementation.keeps_probabilities(dtype, length, head_dim)
        layer += hidden + config.num_attention_heads * (length if keeps_probabilities else head_dim)
    if not fused or settings.run.lora is not None:  # the product of gate and up
        layer += hidden
    if settings.machine.activation_checkpointing:
        return layers * 2 * width + layer + 2 * width  # the last: of the final norm
    return layers * layer + 2 * width


def measure_time(settings: Settings, device: torch.device, dtype: torch.dtype, *, has_documents: bool) -> float:
    """Print and return the seconds of all steps: NaN, or from the fastest step of a quick number of sequences."""
    data = settings.data
    sequences = data.micro_batch()
    if device.type == "cpu":
        flops = data.sequence_length * flops_per_token(settings.model, data.sequence_length)
        if flops > MAX_FLOPS:
            print(f"time      not measured: the model is too large for {device_name(device)}")
            return math.nan
        sequences = min(sequences, max(1, int(QUICK_FLOPS / flops)))
    with contextlib.redirect_stdout(None):
        model = initial_model(settings, dtype)
    forward, optimizer, scaler = prepare_training(model, settings, device, ALONE)
    micro_batch = [*torch.randint(settings.model.vocab_size, (2, sequences, data.sequence_length))]
    if has_documents:
        micro_batch.append(torch.zeros_like(micro_batch[0]))

    def time_step(micro_batches: int) -> float:
        start = time.perf_counter()
        train_step(forward, [micro_batch] * micro_batches, optimizer, scaler, settings.optimizer.clip, ALONE, device)
        return time.perf_counter() - start

    note(f"measuring {STEPS} steps, or fewer once they took {MAX_SECONDS} seconds (a step is not broken off) ...")
    end = time.perf_counter() + MAX_SECONDS
    time_step(1)  # the first takes longer
    with_one, with_two = [], []
    for _ in range(STEPS):
        with_one.append(time_step(1))
        if sequences < data.batch_size:
            with_two.append(time_step(2))
        if time.perf_counter() >= end:
            break
    step = min(with_one)
    if with_two:  # each micro-batch after the first takes as much longer as the second
        step += (data.batch_size / sequences - 1) * (min(with_two) - min(with_one))
    how = f"{step:,.2f} s a step, the fastest of {len(with_one)} at a batch size of {sequences}"
    if data.first_sequence_length is not None:
        how += "; the first steps, whose sequences are shorter, take less"
    print(f"time      {format_time(step * settings.optimizer.steps)} on {device_name(device)}: {how}")
    return step * settings.optimizer.steps


def format_time(seconds: float) -> str:
    """A duration in the unit that people would say it in."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return "a time that is not measured" if math.isnan(seconds) else f"{seconds:.0f} seconds"


def format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
