"""A finished LayerNorm run switched to RMSNorm: at once, after training the norms alone, after training all.

The control trains on with LayerNorm for as many steps, so that what training longer brings is not counted as recovery.
"""

import dataclasses
from pathlib import Path

from ablation import train
from training import checkpoint
from training.session import set_up
from training.settings import Settings
from training.step import Diverged

SHARE = 8  # of the steps of a run, for getting used to the new norm
RATE_FACTOR = 0.25  # of the run's peak: the schedule had come to its end
VARIANTS = ("rms at once", "rms, norms trained", "rms, all trained", "layer, all trained")


def carry_out(settings: Settings, base: Path, folder: Path, variant: str, threads: int | None) -> dict | None:
    """Switch the checkpoint `base` and return a row: loss, and steps trained; None when a signal stopped it."""
    norm, _, what = variant.partition(", ")
    steps = max(settings.optimizer.steps // SHARE, 1)
    optimizer = dataclasses.replace(
        settings.optimizer,
        steps=steps,
        warmup_steps=min(settings.optimizer.warmup_steps, steps // 4),
        learning_rate=settings.optimizer.learning_rate * RATE_FACTOR,
    )
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, norm="rms" if norm == "rms at once" else norm),
        optimizer=optimizer,
        run=dataclasses.replace(
            settings.run,
            init_from=str(base),
            train_only="norms" if what == "norms trained" else "all",
            evaluate_every=steps,
            seed=settings.run.seed + 5000,  # other batches than those of the run
        ),
    )
    if what:
        row = train.carry_out(settings, folder, threads)
        return None if row is None else {"variant": variant, "steps": steps, **row}
    with train.quiet(folder, threads):
        session = set_up(settings, folder, resume=False)
        try:
            return {"variant": variant, "steps": 0, "status": "done", **train.final(session)}
        except Diverged:
            return {"variant": variant, "steps": 0, "status": "diverged", "validation_loss": None}


def base_of(folder: Path) -> Path:
    """The checkpoint of a finished run."""
    return next(path for path in checkpoint.candidates(folder / "last") if checkpoint.is_complete(path))
