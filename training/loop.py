"""The training loop: `train_steps` takes optimizer steps, `train` logs, evaluates and saves between them.

The batches and the learning rate are functions of the step number. So weights, optimizer moments and the step number
are the whole state of a run, and a resumed run continues bit for bit.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from errors import UserError
from training import checkpoint, metrics
from training.evaluate import evaluate
from training.metrics import Metrics
from training.processes import finish_processes
from training.progress import report_end, samples, show_step
from training.schedule import learning_rate
from training.session import Session, StepResult, open_run, set_up
from training.settings import Settings
from training.signals import stop_signals
from training.step import Diverged, split_batch, train_step

RISING = (
    "note: the validation loss has risen twice: the model learns its text by heart. best/ keeps the best weights; give "
    "more text, fewer --steps or a smaller model"
)


def train_steps(session: Session) -> Iterator[StepResult]:
    """Take one optimizer step per iteration, from `session.state.step` to `session.steps`.

    Whenever a result is yielded, the weights and `session.state` include its step: the caller can evaluate, `save`,
    change `session.state`, or stop iterating. Writes nothing to disk and prints nothing.
    Raises `Diverged` when the loss or gradient is not finite; the weights are then those of the step before.
    """
    data, optimizer, scaler = session.settings.data, session.optimizer, session.scaler
    while session.state.step < session.steps:
        start = time.perf_counter()
        state = session.state
        lr = learning_rate(state.step, session.steps, session.settings.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        batch = session.batch(state.step)
        sequences = session.micro_batch_size * data.sequence_length // batch[0].shape[1]
        micro_batches = split_batch(batch, sequences, session.device)
        clip, processes = session.settings.optimizer.clip, session.processes
        try:
            loss, norm = train_step(session.forward, micro_batches, optimizer, scaler, clip, processes, session.device)
        except Diverged as error:
            raise diverged(session, state.step + 1, str(error)) from None
        seconds = time.perf_counter() - start
        session.state = dataclasses.replace(
            state,
            step=state.step + 1,
            tokens=state.tokens + data.batch_size * data.sequence_length,
            seconds=state.seconds + seconds,
            scaler=scaler.state_dict() or None,
        )
        yield StepResult(session.state.step, loss, norm, lr, seconds)


def train(settings: Settings, run_dir: Path, *, resume: bool = False) -> int:
    """Train a run in the folder `run_dir`; returns 0, or the number of the signal that stopped it after a save.

    Raises `UserError` for what a user can fix; the last complete checkpoint is then still there.
    """
    session = set_up(settings, run_dir, resume=resume)
    processes = session.processes
    stopped_by = int(processes.max(0))  # waits: all have read the save that `open_run` may rename
    log = open_run(session) if processes.is_main else None
    if log is not None:
        print(f"run: {run_dir} (metrics.jsonl, settings.toml); Ctrl-C stops and saves", flush=True)
    hidden = True if log is None else None  # None: hidden where standard error is no terminal
    progress = tqdm(total=session.steps, initial=session.state.step, unit="step", disable=hidden, dynamic_ncols=True)
    with stop_signals(second_interrupts=processes.count == 1) as received, progress as bar, session.saver.pool:
        if settings.run.init_from is not None and not resume:
            evaluate_and_save(session, log, bar)
        for result in train_steps(session):
            session.saver.finish(wait=False)
            if log is not None:
                if not run_dir.is_dir():
                    raise UserError(f"{run_dir} was deleted or moved, so the run ends at step {result.step}.")
                log.write(**vars(result) | {"tokens": session.state.tokens, "seconds": session.state.seconds})
                show_step(session, bar, result)
            stopped_by = int(processes.max(received[-1]))
            if result.step % settings.run.evaluate_every == 0 or result.step == session.steps:
                evaluate_and_save(session, log, bar)
            elif stopped_by:
                save(session)
            if stopped_by:
                break
        if not session.saver.finish():
            raise UserError(f"{run_dir}: the end is not saved, as noted; {checkpoint.describe_saves(run_dir)}.")
    if log is not None:
        log.file.close()
        report_end(session)
    finish_processes(processes)
    return 0 if session.state.step == session.steps else stopped_by


def diverged(session: Session, step: int, what: str) -> Diverged:
    """The error for a loss, gradient or evaluation that is not finite; all processes come here and finish a save."""
    session.saver.finish()
    kept = checkpoint.describe_saves(session.run_dir)
    return Diverged(f"step {step}: {what}; {kept}. Try a lower --learning-rate, or --dtype float32.")


def evaluate_and_save(session: Session, log: Metrics | None, bar: tqdm) -> None:
    """Evaluate on all processes and save; then the main one prints a text sample."""
    corpus, state = session.corpus, session.state
    windows = corpus.validation_batches(session.settings.data.sequence_length, session.micro_batch_size)
    result = evaluate(session.model, windows, corpus.validation_bytes, session.device, session.processes)
    if not math.isfinite(result.loss):
        raise diverged(session, state.step, f"the validation loss is {result.loss:g}")
    measured = {"validation_loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
    if log is not None:
        log.write(state.step, **{name: value for name, value in measured.items() if value is not None})
    save(session, result.loss)
    if log is not None:
        bar.write(f"step {state.step}: validation {result}")
        losses = [line["validation_loss"] for line in metrics.read(session.run_dir) if "validation_loss" in line]
        rises = [after > before for before, after in itertools.pairwise(losses)]
        if rises[-2:] == [True, True] and rises[-3:-2] != [True]:
            bar.write(RISING)
        if not session.saver.sharded and state.step < session.steps:  # else each token would gather all weights
            bar.write(samples(session))


def save(session: Session, validation_loss: float = math.inf) -> None:
    """Begin to save all that a resumed run needs as `last/`, and a model with the lowest loss so far as `best/` too."""
    session.saver.finish()
    best = session.saver.saved.best_validation_loss  # if that save failed, of the one before
    better = validation_loss < (math.inf if best is None else best)
    session.state = dataclasses.replace(session.state, best_validation_loss=validation_loss if better else best)
    session.saver.start(session.state, session.run_dir, ["best", "last"] if better else ["last"])
