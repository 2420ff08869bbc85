"""One run of an ablation: the training loop's own steps, with probes between them and nothing on the screen.

It can be cut anywhere: a run that was stopped or killed goes on from its last save, and a finished one is never done
again, since its numbers are in results.json.
"""

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ablation import probes
from data.batches import validation_windows
from errors import UserError
from model.decoder import Decoder
from model.norm import is_norm_parameter
from training import checkpoint, metrics
from training.evaluate import evaluate
from training.loop import log_step, save, train_steps
from training.session import Session, open_run, set_up
from training.settings import Settings
from training.signals import StopSignals
from training.step import Diverged

CURVE_POINTS = 60  # of a run, in results.json
PROBES = 12  # looks at a step's length, over a run
SAVE_SECONDS = 30.0  # a killed run loses no more
SPIKE = 0.5  # nats above the median of the 20 steps before


def carry_out(settings: Settings, folder: Path, threads: int | None = None, keep: bool = False) -> dict | None:
    """Train one run in `folder` and return its row for results.json; None when a signal stopped it, saved.

    threads: of this process on a CPU; keep: leave the final weights in the folder.
    """
    whole = next((path for path in checkpoint.candidates(folder / "last") if checkpoint.is_complete(path)), None)
    if whole is not None and checkpoint.read_state(whole).step >= settings.optimizer.steps:
        shutil.rmtree(folder)  # it was trained to its end, and its row was lost before it was written down
        whole = None
    with quiet(folder, threads):
        session = set_up(settings, folder, resume=whole is not None)
        row = {"hashes": {"shared_weights": shared_weights_hash(settings), "text": session.corpus.text_hash}}
        try:
            shares = steps(session, keep)
            if shares is None:
                return None
            row |= {"status": "done", **final(session)}
        except Diverged as error:
            row |= {"status": "diverged", "validation_loss": None, "bits_per_byte": None, "why": str(error)}
            shares = []
        except torch.OutOfMemoryError:
            raise UserError("the device has too little memory for a run; use a smaller model or batch.") from None
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error}); make room there, then go on.") from None
        looked = row.setdefault("probes", {})
        curve, spikes, looked["gradient_norm"] = curves(folder)
        looked["update_share"] = shares
        return row | {"curve": curve, "spikes": spikes, "text": text_of(session), "seconds": session.state.seconds}


@contextlib.contextmanager
def quiet(folder: Path, threads: int | None) -> Iterator[None]:
    """Make the folder; what a run prints goes into its log.txt."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            yield
    finally:
        torch.set_num_threads(before)


def steps(session: Session, keep: bool) -> list[list[float]] | None:
    """All steps; returns [step, share of the weights' length that it moved], or None when a signal came."""
    shares, saved = [], time.perf_counter()
    every = max(1, session.state.steps // PROBES)
    log = open_run(session)
    before = probes.copy_of_weights(session.model) if session.state.step % every == every - 1 else None
    try:
        with StopSignals(second_signal_interrupts=False) as stop:
            for result in train_steps(session):
                log_step(log, result, session.state)
                if before is not None:
                    shares.append([result.step, probes.update_share(session.model, before)])
                before = probes.copy_of_weights(session.model) if result.step % every == every - 1 else None
                last = keep and session.state.step == session.state.steps
                if stop.received or last or time.perf_counter() - saved > SAVE_SECONDS:
                    save(session)
                    saved = time.perf_counter()
                if stop.received and session.state.step < session.state.steps:
                    return None
    finally:
        log.close()
    return shares


def final(session: Session) -> dict:
    """The whole validation set, every token counted, and a look at the streams of a few of its texts."""
    corpus, length = session.corpus, session.settings.data.sequence_length
    windows = validation_windows(corpus.validation, length, session.micro_batch_size)
    found = evaluate(session.model, windows, corpus.validation_bytes, session.device)
    if not math.isfinite(found.loss):
        raise Diverged(f"the validation loss is {found.loss:g}, not finite")
    inputs, _ = next(iter(validation_windows(corpus.validation, length, session.micro_batch_size)))
    looked = probes.of_streams(session.model, np.asarray(inputs), session.device)
    return {"validation_loss": found.loss, "bits_per_byte": found.bits_per_byte, "probes": looked}


def curves(folder: Path) -> tuple[list, int, list]:
    """Training loss in few points, each the mean of the steps around it; spikes; and the gradient's norm likewise."""
    lines = [line for line in metrics.read(folder) if "loss" in line]
    losses = np.array([float(line["loss"]) for line in lines])
    norms = np.array([float(line["gradient_norm"]) for line in lines])
    parts = np.array_split(np.arange(len(lines)), max(1, min(CURVE_POINTS, len(lines))))

    def points(values: np.ndarray) -> list[list[float]]:
        means = [(int(part[-1]) + 1, float(values[part].mean())) for part in parts if len(part)]
        return [[step, mean] for step, mean in means if math.isfinite(mean)]

    high = [step for step in range(20, len(losses)) if not losses[step] <= np.median(losses[step - 20 : step]) + SPIKE]
    spikes = sum(step - 1 not in high for step in high)  # steps in a row are one
    return points(losses), spikes, points(norms)


def text_of(session: Session) -> dict:
    """What the text was."""
    corpus = session.corpus
    return {
        "hash": corpus.text_hash,
        "bytes": corpus.bytes,
        "validation_tokens": len(corpus.validation) - 1,
        "validation_bytes": corpus.validation_bytes,
    }


def shared_weights_hash(settings: Settings) -> str:
    """Hash of the initial weights that all arms of a seed share: all but the norms'."""
    digest = hashlib.blake2b(digest_size=16)
    model = Decoder(settings.model, seed=settings.run.seed)
    for name, parameter in sorted(model.named_parameters()):
        if not is_norm_parameter(name):
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()
