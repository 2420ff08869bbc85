"""Everything a run needs before its first step: device, text, model, optimizer, and the state to resume from."""

import dataclasses
import hashlib
import math
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kernels
from checkpoints.weights import find_weight_files
from data.batches import Batch
from data.corpus import Text, prepare
from data.settings import DataSettings
from data.tokenizer import load_tokenizer
from errors import UserError, counted, reading
from model.decoder import Decoder
from model.device import choose_device, choose_dtype, keep_freed_memory
from model.machine import device_name
from training import checkpoint
from training.checkpoint import State
from training.optimizer import build_optimizer, freeze_parameters
from training.processes import ALONE, Processes, shard, start_processes
from training.settings import Settings, changed_fields, load_settings, replace_settings
from training.step import split_batch
from training.weights import initial_model

SHORTER = 0.4  # share of the steps with shorter sequences than --sequence-length, with --first-sequence-length
COMPILERS = ("g++", "clang++", "c++", "cl")
KEPT_SETTINGS = (  # which a resumed run must keep; `fixed_settings` adds the model
    "optimizer", "lora", "lora_alpha", "seed", "tokenizer",
    "validation_fraction", "validation_salt",  # else it would validate on what it was trained on
    "sequence_length",  # else it would read text twice or never
    "document_mask",  # else its losses would mean something else
)  # fmt: skip


@dataclass
class Session:
    """What one process works with during a run."""

    settings: Settings
    run_dir: Path
    processes: Processes
    device: torch.device
    corpus: Text
    model: Decoder  # the weights: what is evaluated and saved
    forward: nn.Module  # the same weights, compiled and wrapped for several processes: what is trained
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    state: State

    @property
    def steps(self) -> int:
        return self.settings.optimizer.steps

    def batch(self, step: int) -> Batch:
        """The sequences of a step for this process, int64 (b, t): of --sequence-length tokens, cut into parts of t."""
        data = self.settings.data
        size = data.batch_size // self.processes.count
        # Up to `state.step` what was read counts, not the steps: a resumed run may have had another batch size.
        sequences_read = self.state.tokens // data.sequence_length + (step - self.state.step) * data.batch_size
        options = {"first": sequences_read + self.processes.rank * size, "size": size}
        batch = self.corpus.batch(seed=self.settings.run.seed, sequence_length=data.sequence_length, **options)
        length = sequence_length(step, self.steps, data)
        return Batch(*(array.reshape(-1, length) for array in batch if array is not None))

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, ...]]:
        """The same sequences, cut into what goes through the model at once; still on the host."""
        batch = self.batch(step)
        data = self.settings.data
        sequences = data.micro_batch(self.processes.count) * data.sequence_length // batch.inputs.shape[1]
        return split_batch(batch, sequences, self.device)


def sequence_length(step: int, steps: int, data: DataSettings) -> int:
    """Tokens per sequence of step 0 <= step < steps: twice as many after each of equal parts of SHORTER of the steps.

    A curriculum that saves time in attention: Li et al. 2022, The Stability-Efficiency Dilemma, arXiv 2108.06084.
    """
    first = data.first_sequence_length or data.sequence_length
    doublings = round(math.log2(data.sequence_length / first))
    return first * 2 ** min(doublings, int(step * doublings / (SHORTER * steps)))


def set_up(settings: Settings, run_dir: Path, *, resume: bool) -> Session:
    """Print and build the session of a new run, or of the last checkpoint in `run_dir`, in which it writes nothing."""
    processes = start_processes(settings.machine)
    device, dtype = use_machine(settings, processes)
    keep_freed_memory()
    settings = replace_settings(settings, {"dtype": str(dtype).removeprefix("torch.")})

    last = checkpoint.find_last(run_dir) if resume else None
    with processes.main_first(run_dir) as run_dir:  # it writes the tokens, which the others then read
        settings, corpus = open_text(settings, last)
    state = initial_state(settings, run_dir, last, corpus.text_hash)
    check_processes_agree(processes, settings, corpus, state)
    model = initial_model(settings, dtype, last)
    forward, optimizer, scaler = prepare_training(model, settings, device, processes)
    if last is not None:
        checkpoint.load_moments(last, model, optimizer)
        if state.scaler is not None:
            scaler.load_state_dict(state.scaler)  # does nothing where the dtype needs none
        print(f"resuming from {last}, step {state.step} of {settings.optimizer.steps}")
    if processes.count > 1:
        print(f"{processes.count} processes, each with {'its part' if processes.sharded else 'a copy'} of the weights")
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    words = kernels.describe(device, compiled=settings.machine.compile)
    computed = f"{device_name(device)}, {settings.machine.dtype} activations, kernels: {words}"
    print(f"model: {size:.2f}M parameters, {settings.model.norm} norm; {computed}")
    return Session(settings, run_dir, processes, device, corpus, model, forward, optimizer, scaler, state)


def use_machine(settings: Settings, processes: Processes = ALONE) -> tuple[torch.device, torch.dtype]:
    """Use the kernels of the settings; returns device and dtype. `UserError` for what these processes cannot train."""
    machine = settings.machine
    device = processes.device or choose_device(machine.device)
    kernels.use(machine.kernels, device)
    if settings.model.norm == "batch" and processes.count > 1:
        raise UserError("--norm batch has statistics of its own in each process; use one process.")
    if settings.data.batch_size % processes.count:
        raise UserError(f"--batch-size {settings.data.batch_size} cannot be divided by {processes.count} processes.")
    if machine.compile and device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise UserError(f"--compile needs a C++ compiler: one of {', '.join(COMPILERS)}.")
    if machine.compile and device.type != "cpu" and kernels.gpu is None:
        raise UserError("--compile needs Triton, which is not installed: pip install triton.")
    return device, choose_dtype(machine.dtype, device)


def check_processes_agree(processes: Processes, settings: Settings, corpus: Text, state: State) -> None:
    """`UserError` in all processes unless they train on the same text, from the same save, with the same settings."""
    data = dataclasses.replace(settings.data, data=(), tokenizer=None, cache="")  # paths may differ
    run = dataclasses.replace(settings.run, out=None, init_from=None, sample_prompts=())  # those of the text
    starts_from_others = processes.count > 1 and state.step == 0 and settings.run.init_from is not None
    files = find_weight_files(Path(settings.run.init_from)) if starts_from_others else []
    processes.check_equal(
        texts=corpus.text_hash,
        tokenizers=(corpus.tokenizer.hash, corpus.tokenizer.chat_template),
        settings=(settings.model, settings.optimizer, data, settings.machine.dtype, run),
        saves=(state.step, state.seconds),
        weights=[file_hash(path) for path in files],
    )


def open_text(settings: Settings, last: Path | None, *, advises: bool = True) -> tuple[Settings, Text]:
    """Print and return the text to train on, and the settings with its prompts and the size of its vocabulary."""
    corpus = prepare_corpus(settings, last)
    data, steps = settings.data, settings.optimizer.steps
    tokens = corpus.count_sequences(data) * data.sequence_length
    read = epochs(steps * data.batch_size * data.sequence_length, tokens)
    print("text:", "\n  ".join([corpus.description, *corpus.advice, f"{counted(steps, 'step')}: {read}"]))
    if last is None and advises:
        print_advice(settings, corpus, tokens)
    changes = {"sample_prompts": settings.run.sample_prompts or tuple(corpus.prompts)}
    if last is None and settings.run.init_from is None:
        changes["vocab_size"] = corpus.tokenizer.vocab_size
    return replace_settings(settings, changes), corpus


def print_advice(settings: Settings, corpus: Text, tokens: int) -> None:
    """Print what a new run on this text of so many tokens could do better."""
    optimizer, lora = settings.optimizer, settings.run.lora
    rate, steps, warmup = optimizer.learning_rate, optimizer.steps, optimizer.warmup_steps
    fewer = max(50, 10 * tokens // (settings.data.batch_size * settings.data.sequence_length))  # 10 epochs
    if steps >= 2 * fewer:
        shorter = f"--steps {fewer}" + (f" --warmup-steps {fewer // 10}" if 4 * warmup > fewer else "")
        print(f"note: a text is learned by heart when it is read so often; give more text, or {shorter}")
    if settings.run.evaluate_every >= steps > max(9, fewer // 5):  # from 2 epochs on, more may be worse
        print(f"note: give --evaluate-every {steps // 5}, and best/ keeps the best weights of the way, not the last")
    if 2 * warmup > steps >= 10:
        print(f"note: the learning rate rises until step {min(warmup, steps)}; better is --warmup-steps {steps // 10}")
    is_tuned = corpus.chat is not None and settings.run.init_from is not None
    is_new_to_chats = is_tuned and load_tokenizer(settings.run.init_from).chat_template is None
    if is_new_to_chats and lora is not None:
        print("note: the model has not seen the tokens of the roles, which an adapter hardly teaches; leave out --lora")
    elif is_new_to_chats and rate < 3e-4:
        print("note: the model has not seen the tokens of the roles; --learning-rate 1e-3 teaches them faster")
    elif lora is not None and rate < 1e-4:
        print("note: an adapter learns little at this learning rate; --learning-rate 3e-4 is usual")


def epochs(read: float, tokens: float) -> str:
    """How often a text is read, in words."""
    times = f"{read / tokens:,.0f}" if read >= 10 * tokens else f"{read / tokens:.3g}"
    size = f"{tokens / 1e6:.3g}M" if tokens >= 1e5 else f"{tokens:,.0f}"
    return f"{times} epochs of {size} tokens"


def prepare_corpus(settings: Settings, last: Path | None = None) -> Text:
    """The text as tokens, by the tokenizer of `last`, else --tokenizer, else that of --init-from, else a new one."""
    init_from, vocab_size = settings.run.init_from, settings.model.vocab_size
    if last is None and init_from is None and settings.data.tokenizer:
        vocab_size = None  # the model is made for the tokenizer
    return prepare(settings.data, last or settings.data.tokenizer or init_from, vocab_size)


def prepare_training(
    model: Decoder, settings: Settings, device: torch.device, processes: Processes
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    """Bring the model to the device; returns what is called in training (`Session.forward`), optimizer and scaler."""
    machine = settings.machine
    model.activation_checkpointing = machine.activation_checkpointing
    freeze_parameters(model, settings.run.freeze)
    if processes.sharded:
        shard(model, device, compiled=machine.compile)
    forward = model.to(device)
    if not processes.sharded and machine.compile:
        forward = kernels.compile_model(model)
    if not processes.sharded and processes.count > 1:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 renames broadcast_buffers
            forward = DistributedDataParallel(forward, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, settings.optimizer)
    return forward, optimizer, torch.amp.GradScaler(device.type, enabled=model.compute_dtype == torch.float16)


def fixed_settings(settings: Settings) -> dict[str, object]:
    """What a resumed run must keep: settings, and the weights below an adapter, which means nothing on others."""
    run, values = settings.run, settings.by_name()
    fixed = {name: values[name] for name in KEPT_SETTINGS} | vars(settings.model)
    if run.lora is not None and Path(run.init_from).is_dir():  # if it is gone, `weights.lora_model` says so
        fixed["base_weights"] = " ".join(map(file_hash, find_weight_files(Path(run.init_from))))
    return fixed


def file_hash(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def initial_state(settings: Settings, run_dir: Path, last: Path | None, text_hash: str) -> State:
    """The state of a new run, or of `last`: `UserError` if that has ended, or text, model or optimizer have changed."""
    fixed = fixed_settings(settings)
    if last is None:
        return State(0, 0, 0.0, None, text_hash, fixed)
    state = checkpoint.read_state(last)
    if state.step >= settings.optimizer.steps:
        raise UserError(f"{run_dir} has already done {counted(state.step, 'step')}; for more, raise --steps.")
    problems = ["the text differs"] if state.text_hash != text_hash else []
    for name, value in fixed.items():
        if state.fixed.get(name, value) != value:
            problems.append(f"{name}: {state.fixed[name]} -> {value}")
    if problems:
        raise UserError(f"{run_dir} cannot be resumed: {'; '.join(problems)}; start a new run in another --out.")
    changed = changed_fields(load_settings(run_dir / "settings.toml"), settings)
    if changed:
        print(f"changed since the run was started: {', '.join(changed)}")
    return state
