"""Everything that stands before the first step: device, text, model, optimizer, and the state to go on from."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import kernels
from data import tokens as token_files
from data.tokenizer import check_vocabulary, load_tokenizer
from data.tokens import TokenizedCorpus
from errors import UserError
from model import pretrained
from model.decoder import Decoder
from model.device import (
    choose_device,
    choose_kernels,
    choose_training_dtype,
    device_name,
    keep_freed_memory,
    why_not_compile,
)
from training import checkpoint, optimizer
from training import processes as process_group
from training import settings as settings_file
from training.checkpoint import State
from training.evaluate import Evaluation
from training.processes import Processes
from training.settings import Settings


@dataclass
class Session:
    """What one process works with while a run trains."""

    settings: Settings
    run: Path
    processes: Processes
    device: torch.device
    dtype: torch.dtype
    corpus: TokenizedCorpus
    model: Decoder
    """The weights: what is evaluated and saved."""
    forward: nn.Module
    """The same weights, compiled or wrapped for several processes as the settings say: what is trained."""
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    state: State
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    """Seconds of the last steps."""
    skipped: int = 0
    """Updates that float16 has skipped in a row."""
    evaluation: Evaluation | None = None
    """The newest evaluation."""

    @property
    def micro_batch(self) -> int:
        """Sequences that go through the model at once."""
        data = self.settings.data
        return min(data.micro_batch_size or math.inf, data.batch_size // self.processes.count)


def set_up(settings: Settings, run: Path, *, resume: bool) -> Session:
    """Build a session for a fresh run, or for the last checkpoint in `run` when resuming."""
    processes, local_device = process_group.start(settings.machine.device)
    device = choose_device(local_device)
    choose_kernels(settings.machine.kernels, device)
    dtype = choose_training_dtype(settings.machine.dtype, device)
    settings = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, dtype=str(dtype)[6:]))
    keep_freed_memory()
    torch.manual_seed(settings.run.seed)  # nothing draws from it today; a checkpoint has its state all the same
    if settings.data.batch_size % processes.count:
        raise UserError(f"--batch-size {settings.data.batch_size} cannot be divided by {processes.count} processes.")
    say = print if processes.is_main else lambda _: None

    before = checkpoint.find_last(run) if resume else None
    corpus = prepare(settings, processes, before)
    say(f"text: {corpus.description}")
    model = Decoder(settings.model, seed=settings.run.seed, compute_dtype=dtype).to(device)
    model.activation_checkpointing = settings.machine.activation_checkpointing
    if settings.run.init_from is not None and not resume:
        start_from(model, settings.run.init_from, say)
    optimizer.freeze_parameters(model, settings.run.train_only)
    adamw = optimizer.build(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = fresh_state(settings, corpus)
    if before is not None:
        state = restore(before, state, run, settings, model, adamw, scaler, say)
    say(
        f"model: {model.num_parameters() / 1e6:.2f}M parameters, {settings.model.norm} norm; "
        f"{device_name(device)}, {settings.machine.dtype} activations, kernels: {kernels.describe(device)}"
    )
    forward = processes.wrap(compiled(model, settings, device, say))
    return Session(settings, run, processes, device, dtype, corpus, model, forward, adamw, scaler, state)


def prepare(settings: Settings, processes: Processes, before: Path | None) -> TokenizedCorpus:
    """Text as tokens; the main process prepares them, and the others then find them prepared.

    The tokenizer is that of the checkpoint to go on from, else the given one, else that of the weights to start from,
    else one trained on the text.
    """
    if not processes.is_main:
        processes.barrier()
    data = settings.data
    tokenizer = before or data.tokenizer or settings.run.init_from
    corpus = token_files.prepare(
        list(data.data),
        text_field=data.text_field,
        tokenizer=str(tokenizer) if tokenizer else None,
        vocab_size=settings.model.vocab_size,
        cache_dir=data.cache,
        validation_fraction=data.validation_fraction,
    )
    if processes.is_main:
        processes.barrier()
    check_vocabulary(corpus.tokenizer, settings.model.vocab_size)
    return corpus


def fresh_state(settings: Settings, corpus: TokenizedCorpus) -> State:
    """The state of a run before its first step."""
    return State(
        step=0,
        steps=settings.optimizer.steps,
        tokens=0,
        seconds=0.0,
        best_validation_loss=None,
        evaluated_at=0,
        text_hash=corpus.text_hash,
        tokenizer_hash=corpus.tokenizer.hash,
        settings_hash=checkpoint.settings_hash(settings),
    )


def start_from(model: Decoder, directory: str, say: Callable[[str], None]) -> None:
    """Load the weights of --init-from and list what was not there or not used."""
    report = pretrained.load_weights(model, directory)
    say(f"weights: {len(report.kept)} tensors kept from {directory}")
    for what, names in (("new", report.new), ("dropped", report.dropped)):
        if names:
            say(f"  {len(names)} {what}: {', '.join(names)}")


def restore(
    directory: Path,
    fresh: State,
    run: Path,
    settings: Settings,
    model: Decoder,
    adamw: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    say: Callable[[str], None],
) -> State:
    """Load the checkpoint of a run, after checking that it is of this text, tokenizer and shape; returns its state."""
    saved = checkpoint.read_state(directory)
    before = settings_file.load(run / "settings.toml")
    given, tokenizer_hash = settings.data.tokenizer, fresh.tokenizer_hash
    if given not in (None, before.data.tokenizer):  # the run's own need not be there any more: its saves hold it
        tokenizer_hash = load_tokenizer(given).hash
    wrong = [
        f"the {what} differs (hash {old} then, {new} now)"
        for what, old, new in (
            ("text", saved.text_hash, fresh.text_hash),
            ("tokenizer", saved.tokenizer_hash, tokenizer_hash),
        )
        if old != new
    ]
    as_saved = dataclasses.replace(settings, model=pretrained.load_config(directory))
    shape = settings_file.differences(as_saved, settings)
    wrong += [f"the model's shape differs ({', '.join(shape)})"] if shape else []
    if wrong:
        raise UserError(f"{run} cannot go on: {'; '.join(wrong)}; give it what it was started with, or a new --out.")
    changed = settings_file.differences(before, settings)
    if changed:
        say(f"changed since the run was started: {', '.join(changed)}")
    steps = saved.steps if settings.optimizer.steps == before.optimizer.steps else settings.optimizer.steps
    if saved.step >= steps:
        raise UserError(f"{run} is finished: it has done its {saved.step} steps; go further with a larger --steps.")
    checkpoint.load_last(directory, model, adamw)
    if saved.scaler is not None and scaler.is_enabled():
        scaler.load_state_dict(saved.scaler)
    say(f"going on from {directory}, step {saved.step} of {steps}")
    return dataclasses.replace(saved, steps=steps, settings_hash=fresh.settings_hash)


def compiled(model: Decoder, settings: Settings, device: torch.device, say: Callable[[str], None]) -> nn.Module:
    """The model through torch.compile when asked for and possible, else as it is."""
    if not settings.machine.compile:
        return model
    lacking = why_not_compile(device)
    if lacking is not None:
        say(f"--compile: {lacking}, so the model runs eagerly")
        return model
    return torch.compile(model, fullgraph=True)
