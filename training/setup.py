"""Everything that stands before the first step: device, text, model, optimizer, and the state to go on from."""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from data import tokens as token_files
from data.tokens import TokenizedCorpus
from errors import UserError
from generation.checkpoints import find_checkpoint
from generation.device import choose_device
from model import pretrained
from model.decoder import Decoder
from training import checkpoint, machine, optimizer, processes
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
    evaluation: Evaluation | None = None
    """The newest evaluation."""

    @property
    def micro_batch(self) -> int:
        """Sequences that go through the model at once."""
        return self.settings.data.micro_batch_size or self.settings.data.batch_size


def set_up(settings: Settings, run: Path, *, resume: bool) -> Session:
    """Build a session for a fresh run, or for the checkpoint in `run` when resuming."""
    ours, device_name = processes.start(settings.machine.device)
    say = print if ours.is_main else lambda *_: None
    device = choose_device(device_name)
    machine.keep_freed_memory()
    dtype = machine.choose_dtype(settings.machine.dtype, device)
    settings = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, dtype=str(dtype)[6:]))
    if settings.data.batch_size % ours.count:
        raise UserError(f"--batch-size {settings.data.batch_size} cannot be divided by {ours.count} processes.")

    torch.manual_seed(settings.run.seed)  # nothing draws from it today; a checkpoint has it all the same
    corpus = prepare(settings, ours)
    say(corpus.description)
    model = Decoder(settings.model, seed=settings.run.seed, compute_dtype=dtype).to(device)
    model.activation_checkpointing = settings.machine.activation_checkpointing
    if settings.run.init_from is not None and not resume:
        start_from(model, settings.run.init_from, say)
    optimizer.choose_trained(model, settings.run.train_only)
    adamw = optimizer.build(model, settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = State(
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
    if resume:
        state = go_on(state, run, settings, model, adamw, scaler, say)
    say(
        f"model: {model.num_parameters() / 1e6:.2f}M parameters, {settings.model.norm} norm; "
        f"{machine.device_name(device)}, {settings.machine.dtype} activations, kernels: plain PyTorch"
    )
    forward = ours.wrap(compiled(model, settings, device, say))
    return Session(settings, run, ours, device, dtype, corpus, model, forward, adamw, scaler, state)


def prepare(settings: Settings, ours: Processes) -> TokenizedCorpus:
    """Text as tokens; the main process prepares them, and the others then find them prepared."""
    if not ours.is_main:
        ours.barrier()
    data = settings.data
    corpus = token_files.prepare(
        list(data.data),
        text_field=data.text_field,
        tokenizer=data.tokenizer or tokenizer_beside(settings.run.init_from),
        vocab_size=settings.model.vocab_size,
        cache_dir=data.cache,
        validation_fraction=data.validation_fraction,
    )
    if ours.is_main:
        ours.barrier()
    if corpus.tokenizer.vocab_size > settings.model.vocab_size:
        raise UserError(
            f"the tokenizer has {corpus.tokenizer.vocab_size} tokens and the model {settings.model.vocab_size}; "
            f"use --vocab-size {corpus.tokenizer.vocab_size}."
        )
    return corpus


def tokenizer_beside(checkpoint_path: str | None) -> str | None:
    """The tokenizer that the weights of --init-from were trained with."""
    return None if checkpoint_path is None else str(find_checkpoint(Path(checkpoint_path)))


def start_from(model: Decoder, path: str, say: Callable[[str], None]) -> None:
    """Load the weights of --init-from and list what was not there or not used."""
    directory = find_checkpoint(Path(path))
    report = pretrained.load_weights(model, directory)
    say(f"weights: {len(report.kept)} tensors kept from {directory}")
    for what, names in (("new", report.new), ("dropped", report.dropped)):
        if names:
            say(f"  {len(names)} {what}: {', '.join(names)}")


def go_on(
    fresh: State,
    run: Path,
    settings: Settings,
    model: Decoder,
    adamw: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    say: Callable[[str], None],
) -> State:
    """Load the last checkpoint of a run, after checking that it is of this text, tokenizer and shape."""
    directory = checkpoint.find_last(run)
    saved = checkpoint.read_state(directory)
    before = settings_file.load(run / "settings.toml")
    wrong = [
        f"the {what} differs (hash {old} then, {new} now)"
        for what, old, new in (
            ("text", saved.text_hash, fresh.text_hash),
            ("tokenizer", saved.tokenizer_hash, fresh.tokenizer_hash),
        )
        if old != new
    ]
    changed = settings_file.differences(before, settings)
    shape = settings_file.differences(dataclasses.replace(settings, model=pretrained.load_config(directory)), settings)
    wrong += [f"the model's shape differs ({', '.join(shape)})"] if shape else []
    if wrong:
        raise UserError(
            f"{run} cannot go on: {'; '.join(wrong)}. Give it what it was started with, or start a new run."
        )
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
    if not machine.can_compile(device):
        say("--compile: no C++ compiler found, so the model runs eagerly (install g++, clang++ or Visual C++)")
        return model
    return torch.compile(model, fullgraph=True)
