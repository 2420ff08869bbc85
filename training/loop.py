"""One run, as a recipe: steps, evaluations, checkpoints.

The order of the batches and the learning rate are functions of the step, so the state of a run is its weights, the
optimizer's moments and the number of the step: a resumed run continues exactly. No callbacks, no hooks.
"""

import dataclasses
import math
import statistics
import time
from pathlib import Path

from tqdm import tqdm

from data import tokens as token_files
from errors import UserError
from generation.generate import complete
from model.config import flops_per_token
from training import checkpoint, machine, plot, processes
from training import settings as settings_file
from training.evaluate import evaluate
from training.metrics import Metrics
from training.schedule import learning_rate
from training.settings import Settings
from training.setup import Session, set_up
from training.signals import StopSignals
from training.step import Diverged, backward, micro_batches, update

STEPS_TO_TIME = 20  # after these a run with max_minutes knows how fast this machine is
SAMPLE_TOKENS = 64, 200  # length of the samples of text: at evaluations, and at the end


def train(settings: Settings, run: Path, *, resume: bool = False) -> int:
    """Train a run in the folder `run`; returns 0, or the number of the signal that stopped it (all is saved then).

    Raises `UserError` for what a user can mend, with the last whole checkpoint still in place.
    """
    session = set_up(settings, run, resume=resume)
    main = session.processes.is_main
    log = open_run(session) if main else None
    with StopSignals() as stop, progress_bar(session) as bar:
        if due(session):
            look(session, log, bar)  # the stop that this run goes on from came in place of this evaluation
        while session.state.step < session.state.steps:
            step(session, log, bar)
            stopping = session.processes.sum([stop.received], session.device)[0]
            looking = due(session) and (not stopping or session.state.step == session.state.steps)
            if looking:
                look(session, log, bar)
            if main and (looking or stopping):
                log.flush()
                s = session
                checkpoint.save_last(run, s.state, s.model, s.optimizer, s.corpus.tokenizer)
            if stopping:
                break
    processes.finish(session.processes)
    if main:
        log.close()
        farewell(session)
    return 0 if session.state.step == session.state.steps else stop.received


def open_run(session: Session) -> Metrics:
    """Make the run folder with its settings, and open its metrics."""
    run, settings = session.run, session.settings
    run.mkdir(parents=True, exist_ok=True)
    log = Metrics(run, after_step=session.state.step, tensorboard=settings.run.tensorboard)
    settings_file.save(settings, run / "settings.toml")
    print(f"run: {run} (loss.png, metrics.jsonl, settings.toml); Ctrl-C stops and saves")
    return log


def progress_bar(session: Session) -> tqdm:
    """The bar of steps, on the main process alone."""
    state, silent = session.state, not session.processes.is_main
    return tqdm(total=state.steps, initial=state.step, unit="step", disable=silent, dynamic_ncols=True)


def due(session: Session) -> bool:
    """Whether the weights are to be evaluated after the step they have come to, and have not been."""
    state, every = session.state, session.settings.run.evaluate_every
    return state.step > state.evaluated_at and (state.step % every == 0 or state.step == state.steps)


def step(session: Session, log: Metrics | None, bar: tqdm) -> None:
    """Take one optimizer step and write down what it measured."""
    began = time.perf_counter()
    state, settings, data = session.state, session.settings, session.settings.data
    rate = learning_rate(state.step, state.steps, settings.optimizer)
    for group in session.optimizer.param_groups:
        group["lr"] = rate
    batch = token_files.batch(
        session.corpus.train,
        seed=settings.run.seed,
        step=state.step,
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        rank=session.processes.rank,
        world_size=session.processes.count,
    )
    batches = micro_batches(*batch, session.micro_batch, session.device)
    loss = backward(session.forward, batches, session.scaler, session.processes, session.device)
    try:
        norm = update(session.model, session.optimizer, session.scaler, settings.optimizer.clip, loss)
    except Diverged as error:
        raise UserError(
            f"step {state.step + 1}: {error}. {session.run} keeps its last checkpoint; "
            f"try a --learning-rate below {settings.optimizer.learning_rate:g}, or --dtype float32."
        ) from None

    seconds = time.perf_counter() - began
    tokens = data.batch_size * data.sequence_length
    session.state = dataclasses.replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + tokens,
        seconds=state.seconds + seconds,
        scaler=session.scaler.state_dict() or None,
    )
    session.recent_seconds.append(seconds)
    if session.state.step == STEPS_TO_TIME and settings.optimizer.max_minutes is not None:
        fit(session, bar)
    if log is not None:
        state = session.state
        log.write(
            state.step, loss=loss, learning_rate=rate, gradient_norm=norm, tokens=state.tokens, seconds=state.seconds
        )
        if math.isinf(norm):
            bar.write(f"step {state.step}: float16 overflow, update skipped; loss scale {session.scaler.get_scale():g}")
        show(session, bar, loss)


def fit(session: Session, bar: tqdm) -> None:
    """Shorten the run if its steps, at the speed of the recent ones, would need more than `max_minutes`."""
    seconds = statistics.median(session.recent_seconds) if session.processes.is_main else 0.0
    seconds = session.processes.sum([seconds], session.device)[0]  # the main process decides for all
    minutes = session.settings.optimizer.max_minutes
    steps = max(2 * STEPS_TO_TIME, int(60 * minutes / seconds))
    if steps < session.state.steps:
        bar.write(
            f"{seconds:.2f} s a step is too slow for {session.state.steps} steps in {minutes:g} minutes of training: "
            f"doing {steps} (--max-minutes lifts this)"
        )
        session.state = dataclasses.replace(session.state, steps=steps)
        bar.total = steps


def show(session: Session, bar: tqdm, loss: float) -> None:
    """Advance the bar: loss, tokens per second, and the share of the device's peak (MFU) where that is known."""
    settings = session.settings
    tokens = settings.data.batch_size * settings.data.sequence_length
    speed = tokens / statistics.median(session.recent_seconds)
    shown = {"loss": f"{loss:.3f}", "tok/s": f"{speed:,.0f}"}
    peak = machine.peak_flops(session.device, session.dtype)
    if peak is not None:
        flops = flops_per_token(settings.model, settings.data.sequence_length)
        shown["MFU"] = f"{speed * flops / (peak * session.processes.count):.1%}"
    bar.set_postfix(shown, refresh=session.state.step == 1)
    bar.update()


def look(session: Session, log: Metrics | None, bar: tqdm) -> None:
    """Evaluate; the main process reports, redraws the picture, samples text, and saves the best weights so far."""
    corpus, state = session.corpus, session.state
    windows = token_files.validation_windows(
        corpus.validation, session.settings.data.sequence_length, session.micro_batch
    )
    session.evaluation = evaluate(session.model, windows, corpus.validation_bytes, session.device, session.processes)
    better = state.best_validation_loss is None or session.evaluation.loss < state.best_validation_loss
    best = session.evaluation.loss if better else state.best_validation_loss
    session.state = dataclasses.replace(state, best_validation_loss=best, evaluated_at=state.step)
    if log is None:
        return
    log.write(
        state.step,
        validation_loss=session.evaluation.loss,
        perplexity=session.evaluation.perplexity,
        bits_per_byte=session.evaluation.bits_per_byte,
    )
    log.flush()
    plot.draw([session.run], session.run / "loss.png")
    bar.write(f"step {state.step}: validation {session.evaluation}")
    if state.step < state.steps:
        bar.write(sample(session, SAMPLE_TOKENS[0]))
    if better:
        checkpoint.save_best(session.run, session.state, session.model, corpus.tokenizer)


def sample(session: Session, length: int) -> str:
    """A sample of text from the weights as they are, the same for the same seed and step."""
    text = complete(
        session.model,
        session.corpus.tokenizer,
        session.settings.run.sample_prompt,
        max_new_tokens=min(length, session.settings.model.max_position_embeddings - 1),
        seed=session.settings.run.seed + session.state.step,
    )
    return "  | " + text.replace("\n", "\n  | ")


def farewell(session: Session) -> None:
    """Say how the run ended and what to type next."""
    state, run = session.state, session.run
    if state.step < state.steps:
        print(f"stopped and saved at step {state.step} of {state.steps}; go on: python train.py --resume {run}")
        return
    print(f"\n{sample(session, SAMPLE_TOKENS[1])}\n")
    print(f"validation: {session.evaluation}")
    print(f"xz -9e on the same text: {session.corpus.xz_bits_per_byte:.4f} bits per byte")
    print(f"{state.tokens:,} tokens in {state.seconds:.0f} s of training, {state.tokens / state.seconds:,.0f} tokens/s")
    print(f'next: python generate.py {run} --prompt "def "')
