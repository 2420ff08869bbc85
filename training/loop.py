"""The training loop: `train_steps` takes optimizer steps, `train` logs, evaluates and saves between them.

Batches and learning rates are functions of the step number: weights, moments and that number are all of a run's state.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from errors import UserError, is_main_process
from training import checkpoint, metrics
from training.evaluate import evaluate
from training.optimizer import learning_rate
from training.processes import finish_processes
from training.progress import report_end, show_evaluation, show_step
from training.session import Session, set_up
from training.settings import Settings, save_settings
from training.step import Diverged, StepResult, train_step


def train_steps(session: Session) -> Iterator[StepResult]:
    """Take a step per iteration: weights and `session.state` include it, and the caller may save, change or stop."""
    data, settings, state = session.settings.data, session.settings.optimizer, session.state
    optimizer, scaler, processes, device = session.optimizer, session.scaler, session.processes, session.device
    while state.step < session.steps:
        start = time.perf_counter()
        lr = learning_rate(state.step, session.steps, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        batch = session.micro_batches(state.step)
        try:
            loss, norm = train_step(session.forward, batch, optimizer, scaler, settings.clip, processes, device)
        except Diverged as error:
            raise Diverged(f"step {state.step + 1}: {error}") from None
        seconds = time.perf_counter() - start
        state.step += 1
        state.tokens += data.batch_size * data.sequence_length
        state.seconds += seconds
        state.scaler = scaler.state_dict() or None
        yield StepResult(state.step, loss, norm, lr, seconds)


def train(settings: Settings, run_dir: Path, *, resume: bool = False) -> int:
    """Train a run in the folder `run_dir`; returns 0, or the number of the signal that stopped it after a save."""
    session = set_up(settings, run_dir, resume=resume)
    processes, state = session.processes, session.state
    processes.wait()  # all have read the save that `open_run` may rename
    if is_main_process():
        open_run(session)
    hidden = None if is_main_process() else True  # None: hidden where standard error is no terminal
    bar = tqdm(total=session.steps, initial=state.step, unit="step", disable=hidden, dynamic_ncols=True)
    stopped_by = 0
    try:
        with stop_signals(second_interrupts=processes.count == 1) as received, bar:
            if settings.run.init_from is not None and not resume:
                evaluate_and_save(session)
            for result in train_steps(session):
                if is_main_process():
                    metrics.write(session.run_dir, **vars(result), tokens=state.tokens, seconds=state.seconds)
                    show_step(session, bar, result)
                stopped_by = int(processes.max(received()))
                if result.step % settings.run.evaluate_every == 0 or result.step == session.steps:
                    evaluate_and_save(session)
                elif stopped_by:
                    save(session)
                if stopped_by:
                    break
    except Diverged as error:
        saves = checkpoint.describe_saves(session.run_dir)
        raise UserError(f"{error}; {saves}. Try a lower --learning-rate, or --dtype float32.") from None
    if is_main_process():
        report_end(session)
    finish_processes(processes)
    return 0 if state.step == session.steps else stopped_by


@contextlib.contextmanager
def stop_signals(*, second_interrupts: bool) -> Iterator[Callable[[], int]]:
    """A function that returns the last SIGINT (Ctrl-C), SIGTERM or SIGHUP (a closed terminal) of the block, or else 0.
    A second one raises `KeyboardInterrupt`, or nothing where each process gets two: of the terminal and of torchrun.
    """
    received = 0

    def receive(signum: int, _: object) -> None:
        nonlocal received
        if received and second_interrupts:
            raise KeyboardInterrupt
        received = signum
        if signum == signal.SIGINT and second_interrupts:
            with contextlib.suppress(OSError):  # who reads it may have ended; not by print, which may be interrupted
                os.write(2, b"\nstopping after this step, with a save; a second Ctrl-C stops at once, without one\n")

    signums = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
    with contextlib.ExitStack() as at_exit:
        for signum in signums:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup sets it
                at_exit.callback(signal.signal, signum, signal.signal(signum, receive))  # its handler before
        yield lambda: received


def open_run(session: Session) -> None:
    """Make the run folder, finish an interrupted save, shorten metrics.jsonl to it, and write settings.toml."""
    run_dir = session.run_dir
    for name in ("last", "best"):
        checkpoint.recover_interrupted_save(run_dir / name)
    metrics.keep_until(run_dir, session.state.step)
    save_settings(session.settings, run_dir / "settings.toml")  # once nothing else can refuse to start
    print(f"run: {run_dir} (metrics.jsonl, settings.toml); Ctrl-C stops and saves", flush=True)


def evaluate_and_save(session: Session) -> None:
    """Evaluate on all processes and save, also `best/` if the loss is the lowest so far."""
    corpus, data, processes = session.corpus, session.settings.data, session.processes
    windows = corpus.validation_batches(data.sequence_length, data.micro_batch(processes.count))
    result = evaluate(session.model, windows, corpus.validation_bytes, session.device, processes)
    if not math.isfinite(result.loss):
        raise Diverged(f"step {session.state.step}: the validation loss is {result.loss:g}")
    if is_main_process():
        means = dict(validation_loss=result.loss, perplexity=result.perplexity, bits_per_byte=result.bits_per_byte)
        metrics.write(session.run_dir, session.state.step, **means)
    save(session, result.loss)
    if is_main_process():
        show_evaluation(session, result)


def save(session: Session, validation_loss: float | None = None) -> None:
    """Save what a resumed run needs as `last/` and, if its loss is the lowest so far, the model as `best/` too."""
    processes, state, tokenizer = session.processes, session.state, session.corpus.tokenizer
    best = state.best_validation_loss
    is_best = validation_loss is not None and (best is None or validation_loss < best)
    if is_best:
        state.best_validation_loss = validation_loss
    last = session.run_dir / "last"
    try:
        checkpoint.write_tensors(last, session.model, session.optimizer, tokenizer, processes)
        processes.wait()  # what follows needs the files of all processes
        if is_main_process():
            checkpoint.publish_save(last, state, tokenizer, is_best=is_best)
    except OSError as error:
        saves = checkpoint.describe_saves(session.run_dir)
        raise UserError(f"step {state.step} cannot be saved ({error}); {saves}.") from error
