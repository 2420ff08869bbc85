"""Everything a run needs before its first step: device, text, model, optimizer, and the state to resume from."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import kernels
from checkpoints import pretrained
from data.batches import Batch
from data.conversations import Conversations
from data.corpus import Corpus, prepare
from data.tokenizer import check_vocabulary
from data.units import digest
from errors import UserError, reading
from model.decoder import Decoder, attend_to_previous_token, center_residual_writers
from model.device import choose_device, choose_training_dtype, device_name, keep_freed_memory, why_not_compile
from model.lora import add_lora
from training import checkpoint
from training.checkpoint import State
from training.metrics import Metrics
from training.optimizer import build_optimizer, freeze_parameters
from training.processes import Processes, start_processes
from training.schedule import sequence_length
from training.settings import Settings, changed_fields, load_settings, save_settings
from training.shard import shard


@dataclass
class Session:
    """What one process works with during a run."""

    settings: Settings
    run_dir: Path
    processes: Processes
    device: torch.device
    dtype: torch.dtype
    """Dtype of the activations."""
    corpus: Corpus | Conversations
    model: Decoder
    """The weights: what is evaluated and saved."""
    forward: nn.Module
    """The same weights, compiled and wrapped for several processes as the settings ask: what is trained."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    state: State
    saver: checkpoint.BackgroundSave

    @property
    def steps(self) -> int:
        """Optimizer steps of the complete run."""
        return self.settings.optimizer.steps

    @property
    def micro_batch_size(self) -> int:
        """Sequences of --sequence-length that go through the model at once."""
        data = self.settings.data
        return min(data.micro_batch_size or math.inf, data.batch_size // self.processes.count)

    def batch(self, step: int) -> Batch:
        """This process's share of a step, arrays of int64 (b, t): windows, cut into equal parts of the scheduled t."""
        data, processes = self.settings.data, self.processes
        share = data.batch_size // processes.count
        # What was read counts, not the steps: a resumed run may have had another batch size.
        before = self.state.tokens // data.sequence_length + (step - self.state.step) * data.batch_size
        first, seed = before + processes.rank * share, self.settings.run.seed
        batch = self.corpus.batch(seed=seed, first=first, size=share, sequence_length=data.sequence_length)
        length = sequence_length(step, self.steps, data)
        return tuple(array.reshape(-1, length) for array in batch)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured."""

    step: int
    """Steps done so far, this one included."""
    loss: float
    """Mean loss of the batch before the update, nats per token."""
    gradient_norm: float
    """Norm of the gradient before clipping; infinite when float16 overflowed and the update was skipped."""
    learning_rate: float
    """Learning rate of the update, before the multiplier of a parameter group."""
    seconds: float
    """Wall-clock time of the step."""


def set_up(settings: Settings, run_dir: Path, *, resume: bool, log: Callable[[str], None] = print) -> Session:
    """Build the session of a new run, or of the last checkpoint in `run_dir` when resuming. Writes nothing there."""
    processes = start_processes(settings.machine.device, settings.machine.timeout_minutes)
    device = processes.device or choose_device(settings.machine.device)
    kernels.use(settings.machine.kernels, device)
    dtype = choose_training_dtype(settings.machine.dtype, device)
    settings = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, dtype=str(dtype)[6:]))
    keep_freed_memory()
    if settings.model.norm == "batch" and processes.count > 1:
        raise UserError("--norm batch has statistics of its own in each process; use one process.")
    if settings.data.batch_size % processes.count:
        raise UserError(f"--batch-size {settings.data.batch_size} cannot be divided by {processes.count} processes.")
    if settings.machine.compile and (reason := why_not_compile(device)):
        raise UserError(f"--compile: {reason}.")
    log = log if processes.is_main else no_log

    last = checkpoint.find_last(run_dir) if resume else None
    with processes.main_first("text"):
        corpus = prepare_corpus(settings, last)
    size, length = settings.data.batch_size, settings.data.sequence_length
    if is_text := isinstance(corpus, Corpus):
        tokens = len(corpus.train)
        if tokens // length < size:
            raise UserError(
                f"the text has {tokens:,} tokens to train on, but one batch of {size} sequences of {length} needs "
                f"{size * length:,}; give more text, or a smaller --batch-size or --sequence-length."
            )
    elif settings.data.first_sequence_length not in (None, settings.data.sequence_length):
        raise UserError("--first-sequence-length would cut conversations into parts; use --first-sequence-length None.")
    steps, sequences = settings.optimizer.steps, len(corpus.train) // length if is_text else corpus.train.shape[1]
    log(f"text: {corpus.description}\n  {steps:,} steps read what is to train on {steps * size / sequences:.3g} times")
    if last is None and settings.run.init_from is None and settings.data.tokenizer is None:  # a small text has fewer
        model = dataclasses.replace(settings.model, vocab_size=corpus.tokenizer.vocab_size)
        settings = dataclasses.replace(settings, model=model)
    model = initial_model(settings, dtype, log, load=not resume)
    state = State(0, 0, 0.0, None, corpus.text_hash, fixed_hash=digest(fixed_settings(settings)))
    if last is not None:
        state = check_unchanged(settings, run_dir, last, corpus.text_hash, log)
        pretrained.load_weights(model, last)
    if processes.count > 1:
        given = dataclasses.replace(settings.data, data=(), tokenizer=None, cache="")  # paths may differ
        run = dataclasses.replace(settings.run, out=None, init_from=None)
        processes.check_equal(
            texts=corpus.text_hash,
            tokenizers=(corpus.tokenizer.hash, corpus.tokenizer.chat_template),
            settings=(settings.model, settings.optimizer, given, settings.machine.dtype, run),
            saves=state,
        )
    model.activation_checkpointing = settings.machine.activation_checkpointing
    freeze_parameters(model, settings.run.train_only)
    if sharded := settings.machine.shard and processes.count > 1:
        shard(model, device, compiled=settings.machine.compile)
    optimizer = build_optimizer(model.to(device), settings.optimizer, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    forward = kernels.compile_model(model) if settings.machine.compile and not sharded else model
    forward = model if sharded else processes.wrap(forward)
    saver = checkpoint.BackgroundSave(model, optimizer, corpus.tokenizer, processes, sharded, state)
    if last is not None:
        checkpoint.load_moments(last, model, optimizer)
        if state.scaler is not None and scaler.is_enabled():
            scaler.load_state_dict(state.scaler)
        log(f"resuming from {last}, step {state.step} of {settings.optimizer.steps}")
    log(
        f"model: {model.num_parameters() / 1e6:.2f}M parameters, {settings.model.norm} norm; "
        f"{device_name(device)}, {settings.machine.dtype} activations, kernels: {kernels.describe(device)}"
    )
    return Session(settings, run_dir, processes, device, dtype, corpus, model, forward, optimizer, scaler, state, saver)


def no_log(_: str) -> None:
    """A `log` that prints nothing."""


def open_run(session: Session) -> Metrics:
    """Make the run folder, finish an interrupted save, write settings.toml, and open the metrics."""
    run_dir = session.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("last", "best"):
        checkpoint.recover_interrupted_save(run_dir / name)
    metrics = Metrics(run_dir, after_step=session.state.step)
    save_settings(session.settings, run_dir / "settings.toml")  # once nothing else can refuse to start
    return metrics


def prepare_corpus(settings: Settings, last: Path | None = None) -> Corpus | Conversations:
    """The text as tokens, by the tokenizer of `last`, else --tokenizer, else that of --init-from, else a new one."""
    data = settings.data
    try:
        corpus = prepare(
            list(data.data),
            text_field=data.text_field,
            tokenizer=last or data.tokenizer or settings.run.init_from,
            vocab_size=settings.model.vocab_size,
            cache_dir=data.cache,
            validation_fraction=data.validation_fraction,
            validation_salt=data.validation_salt,
            document_mask=data.document_mask,
            sequence_length=data.sequence_length,
        )
    except OSError as error:
        raise UserError(f"the text cannot be kept in --cache {data.cache} ({error}); give another folder.") from error
    check_vocabulary(corpus.tokenizer, size := settings.model.vocab_size)
    if isinstance(corpus, Conversations) and max(corpus.train[0].max(), corpus.validation[0].max()) >= size:
        raise UserError("the chat template writes tokens that the model has no embeddings of; give another one.")
    return corpus


def initial_model(settings: Settings, dtype: torch.dtype, log: Callable[[str], None], *, load: bool = True) -> Decoder:
    """The model that training starts from, on the CPU; `load`: with the weights of --init-from, if there is one."""
    run = settings.run
    if run.lora is not None:
        with reading(run.init_from, "the adapter needs the model that its run was started from, at the same path"):
            model = pretrained.load_pretrained(run.init_from, compute_dtype=dtype, cast=True)
        if model.config != settings.model:
            raise UserError("--lora leaves the model as it is; leave out --norm and other flags of its shape.")
        log(f"weights: those of {run.init_from}, frozen; LoRA of rank {run.lora}")
        fields = {"r": run.lora, "lora_alpha": run.lora_alpha or 2 * run.lora, "base_model_name_or_path": run.init_from}
        return add_lora(model, fields, run.seed)
    model = Decoder(settings.model, seed=run.seed, compute_dtype=dtype)
    if run.previous_token_head and settings.model.attention_bias:
        attend_to_previous_token(model)
    if run.init_from is None or not load:
        return model
    new, dropped = pretrained.load_weights(model, run.init_from)
    before = pretrained.load_config(run.init_from)
    log(f"weights: those of {run.init_from}")
    for what, names in (("new", new), ("dropped", dropped)):
        if names:
            log(f"  {len(names)} {what}: {', '.join(names)}")
    converted = (before.norm, before.norm_placement, model.config.norm) == ("layer", "pre", "rms")
    if converted and run.center_weights:
        log("  LayerNorm to RMSNorm: weights centered")
        center_residual_writers(model)
    return model


def fixed_settings(settings: Settings) -> dict[str, object]:
    """What a resumed run must keep. Another split would validate on documents that were trained on, and another seed
    train on some of them again.
    """
    values = vars(settings.run) | vars(settings.data) | vars(settings.optimizer)
    names = ("optimizer", "lora", "lora_alpha", "seed", "validation_fraction", "validation_salt")
    fixed = {name: values[name] for name in names} | vars(settings.model)
    # A config.json may have 10000 where settings.toml then has 10000.0: equal, but not as text.
    return {name: float(value) if type(value) is int else value for name, value in fixed.items()}


def check_unchanged(settings: Settings, run_dir: Path, directory: Path, text_hash: str, log: Callable) -> State:
    """The state of the checkpoint `directory`, if the text, the model and the optimizer have not changed."""
    saved, before = checkpoint.read_state(directory), load_settings(run_dir / "settings.toml")
    changed = changed_fields(before, settings)
    fixed = fixed_settings(settings)
    problems = [change for change in changed if change.partition(":")[0] in {*fixed, "tokenizer"}]
    if saved.text_hash != text_hash:
        problems.insert(0, "the text differs")
    if saved.fixed_hash not in (None, digest(fixed)) and not problems:
        problems.append("settings.toml is not that of its start")
    if problems:
        raise UserError(f"{run_dir} cannot be resumed: {'; '.join(problems)}; start a new run in another --out.")
    if changed:
        log(f"changed since the run was started: {', '.join(changed)}")
    if saved.step >= settings.optimizer.steps:
        raise UserError(f"{run_dir} has already done {saved.step} steps; for more, raise --steps.")
    return saved
