"""One run, as a recipe: steps, evaluations, checkpoints.

The order of the batches and the learning rate are functions of the step, so the state of a run is its weights, the
optimizer's moments and the number of the step: a resumed run continues exactly. No callbacks, no hooks.
"""

import dataclasses
import math
import platform
import shlex
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from data.batches import batch, validation_windows
from errors import UserError
from generation.generate import complete
from model.config import flops_per_token
from model.device import device_name, peak_flops
from training import checkpoint, plot
from training import processes as process_group
from training import settings as settings_file
from training.evaluate import evaluate
from training.metrics import Metrics
from training.schedule import learning_rate
from training.session import Session, set_up
from training.settings import Settings
from training.signals import StopSignals
from training.step import Diverged, backward, micro_batches, update

STEPS_TO_TIME = 40  # after these a run with max_minutes knows how fast this machine is; the first are slower
SKIPS_TO_STOP = 100  # float16 updates skipped in a row: the scale has been halved to nothing, the gradient is broken
SAMPLE_TOKENS = 64, 200  # length of the samples of text: at evaluations, and at the end


def train(settings: Settings, run: Path, *, resume: bool = False) -> int:
    """Train a run in the folder `run`; returns 0, or the number of the signal that stopped it (all is saved then).

    Raises `UserError` for what a user can mend, with the last whole checkpoint still in place.
    """
    session = set_up(settings, run, resume=resume)
    processes, device = session.processes, session.device
    try:
        log = open_run(session) if processes.is_main else None
        with StopSignals(heed_repeats=processes.count == 1) as stop, progress_bar(session) as bar:
            if evaluation_due(session):
                evaluate_and_save(session, log, bar)  # the stop that this run goes on from came in place of it
            while session.state.step < session.state.steps:
                step(session, log, bar)
                stopped_by = int(processes.max(stop.received, device=device)[0])
                finished = session.state.step == session.state.steps
                if evaluation_due(session) and (finished or not stopped_by):
                    evaluate_and_save(session, log, bar)
                elif stopped_by:
                    save(session, log)
                if stopped_by:
                    break
        if log is not None:
            log.close()
            report_end(session)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device_name(device)} has too little memory for this; use a smaller --micro-batch-size "
            f"(now {session.micro_batch}) or --activation-checkpointing."
        ) from None
    except OSError as error:
        raise UserError(f"{run} cannot be written ({error}); make room there and go on with --resume {run}.") from error
    process_group.finish(processes)
    return 0 if session.state.step == session.state.steps else stopped_by


def open_run(session: Session) -> Metrics:
    """Make the run folder with its settings, finish a save that was cut, and open the metrics."""
    run, state, corpus = session.run, session.state, session.corpus
    run.mkdir(parents=True, exist_ok=True)
    for save_name in ("last", "best"):
        checkpoint.recover_interrupted_save(run / save_name)
    settings_file.save(session.settings, run / "settings.toml")
    facts = {
        "text": f"{corpus.bytes:,} bytes of text, hash {corpus.text_hash}, Python {platform.python_version()}",
        "machine": device_name(session.device),
    }
    print(f"run: {run} (loss.png, metrics.jsonl, settings.toml); Ctrl-C stops and saves")
    return Metrics(
        run,
        after_step=state.step,
        evaluated_at=state.evaluated_at,
        facts=facts,
        tensorboard=session.settings.run.tensorboard,
    )


def progress_bar(session: Session) -> tqdm:
    """The bar of steps, on the main process alone."""
    state, silent = session.state, not session.processes.is_main
    return tqdm(total=state.steps, initial=state.step, unit="step", disable=silent, dynamic_ncols=True)


def step(session: Session, log: Metrics | None, bar: tqdm) -> None:
    """Take one optimizer step and write down what it measured."""
    began = time.perf_counter()
    state, settings, data = session.state, session.settings, session.settings.data
    processes, device = session.processes, session.device
    rate = learning_rate(state.step, state.steps, settings.optimizer)
    for group in session.optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
    inputs, targets = batch(
        session.corpus.train,
        seed=settings.run.seed,
        step=state.step,
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        rank=processes.rank,
        world_size=processes.count,
    )
    predicted = processes.sum((targets >= 0).sum(), device=device)[0]
    batches = micro_batches(inputs, targets, session.micro_batch, device)
    loss = backward(session.forward, batches, predicted, session.scaler, processes, device)
    try:
        norm = update(session.model, session.optimizer, session.scaler, settings.optimizer.clip, loss)
    except Diverged as error:
        raise diverged(session, state.step + 1, str(error)) from None

    seconds = time.perf_counter() - began
    session.recent_seconds.append(seconds)
    session.state = dataclasses.replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + data.batch_size * data.sequence_length,
        seconds=state.seconds + seconds,
        scaler=session.scaler.state_dict() or None,
    )
    if session.state.step == STEPS_TO_TIME and settings.optimizer.max_minutes is not None:
        fit(session, bar)
    count_skips(session, norm, bar)
    if log is not None:
        state = session.state
        log.write(
            state.step, loss=loss, learning_rate=rate, gradient_norm=norm, tokens=state.tokens, seconds=state.seconds
        )
        show(session, bar, loss)


def diverged(session: Session, step: int, what: str) -> Diverged:
    """The sentence for a loss, gradient or evaluation that is not finite."""
    kept = "keeps its last save" if checkpoint.is_complete(session.run / "last") else "had not been saved yet"
    return Diverged(
        f"step {step}: {what}; {session.run} {kept}. "
        f"Try a --learning-rate below {session.settings.optimizer.learning_rate:g}, or --dtype float32."
    )


def count_skips(session: Session, norm: float, bar: tqdm) -> None:
    """Say that float16 overflowed and an update was skipped; give up when that does not end."""
    session.skipped = session.skipped + 1 if math.isinf(norm) else 0
    if session.skipped:
        scale = session.scaler.get_scale()
        bar.write(f"step {session.state.step}: float16 overflow, update skipped; loss scale {scale:g}")
    if session.skipped == SKIPS_TO_STOP:
        raise diverged(session, session.state.step, f"the gradient has overflowed in {SKIPS_TO_STOP} steps in a row")


def fit(session: Session, bar: tqdm) -> None:
    """Shorten the run if its steps, at the speed of the recent ones, would need more than `max_minutes`."""
    seconds = statistics.median(session.recent_seconds)
    seconds = session.processes.max(seconds, device=session.device)[0]  # all processes decide alike
    minutes = session.settings.optimizer.max_minutes
    steps = max(2 * STEPS_TO_TIME, int(60 * minutes / seconds))
    if steps < session.state.steps:
        bar.write(
            f"{seconds:.2f} s a step is too slow for {session.state.steps} steps in {minutes:g} minutes of training: "
            f"doing {steps} (--max-minutes None does them all)"
        )
        session.state = dataclasses.replace(session.state, steps=steps)
        bar.total = steps


def show(session: Session, bar: tqdm, loss: float) -> None:
    """Advance the bar: loss, tokens per second, and the share of the device's peak (MFU) where that is known."""
    settings = session.settings
    tokens = settings.data.batch_size * settings.data.sequence_length
    speed = tokens / statistics.median(session.recent_seconds)
    shown = {"loss": f"{loss:.3f}", "tok/s": f"{speed:,.0f}"}
    peak = peak_flops(session.device, session.dtype)
    if peak is not None:
        flops = flops_per_token(settings.model, settings.data.sequence_length)
        shown["MFU"] = f"{speed * flops / (peak * session.processes.count):.1%}"
    bar.set_postfix(shown, refresh=session.state.step == 1)
    bar.update()


def evaluation_due(session: Session) -> bool:
    """Whether the weights are to be evaluated after the step they have come to, and have not been."""
    state, every = session.state, session.settings.run.evaluate_every
    return state.step > state.evaluated_at and (state.step % every == 0 or state.step == state.steps)


def evaluate_and_save(session: Session, log: Metrics | None, bar: tqdm) -> None:
    """Evaluate; then the main process saves, reports, redraws the picture and samples text."""
    corpus, state = session.corpus, session.state
    windows = validation_windows(corpus.validation, session.settings.data.sequence_length, session.micro_batch)
    found = evaluate(session.model, windows, corpus.validation_bytes, session.device, session.processes)
    session.evaluation = found
    if not math.isfinite(found.loss):
        raise diverged(session, state.step, f"the validation loss is {found.loss:g}")
    better = state.best_validation_loss is None or found.loss < state.best_validation_loss
    best = found.loss if better else state.best_validation_loss
    session.state = dataclasses.replace(state, best_validation_loss=best, evaluated_at=state.step)
    if log is None:
        return
    log.write(state.step, validation_loss=found.loss, perplexity=found.perplexity, bits_per_byte=found.bits_per_byte)
    if better:
        checkpoint.save_best(session.run, session.state, session.model, corpus.tokenizer)
    save(session, log)
    plot.draw([session.run], session.run / "loss.png")
    bar.write(f"step {state.step}: validation {found}")
    if state.step < state.steps:
        bar.write(sample(session, SAMPLE_TOKENS[0]))


def save(session: Session, log: Metrics | None) -> None:
    """Save all that a resumed run needs; the main process does."""
    if log is not None:
        log.flush()  # first: a checkpoint must never be ahead of the lines that led to it
        checkpoint.save_last(session.run, session.state, session.model, session.optimizer, session.corpus.tokenizer)


def sample(session: Session, length: int) -> str:
    """A sample of text from the weights as they are, the same for the same seed and step."""
    session.model.eval()
    text = complete(
        session.model,
        session.corpus.tokenizer,
        session.settings.run.sample_prompt,
        max_new_tokens=min(length, session.settings.model.max_position_embeddings - 1),
        seed=session.settings.run.seed + session.state.step,
    )
    session.model.train()
    return "  | " + text.replace("\n", "\n  | ")


def report_end(session: Session) -> None:
    """Say how the run ended and what to type next."""
    state, corpus, run = session.state, session.corpus, shlex.quote(str(session.run))
    if state.step < state.steps:
        print(f"stopped and saved at step {state.step} of {state.steps}; go on: python train.py --resume {run}")
        return
    print(f"\n{sample(session, SAMPLE_TOKENS[1])}\n")
    print(f"validation: {session.evaluation}")
    print(f"xz -9e on the same text: {corpus.xz_bits_per_byte:.4f} bits per byte; hash {corpus.text_hash}")
    print(f"{state.tokens:,} tokens in {state.seconds:.0f} s of training, {state.tokens / state.seconds:,.0f} tokens/s")
    print(f"next: python generate.py {run} --prompt {shlex.quote(session.settings.run.sample_prompt or 'def ')}")
