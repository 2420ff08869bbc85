"""A finished LayerNorm run converted to RMSNorm, then evaluated without training, after training only the norms, and
after training all parameters.

The control trains on with LayerNorm for as many steps, so that what longer training brings does not count as recovery.
"""

import dataclasses
from pathlib import Path

from ablation.plan import Run
from ablation.results import Machine, RunResult
from ablation.run import train_run
from training.settings import Settings

STEPS_DIVISOR = 8  # converted models train for an eighth of the run's steps
LR_MULTIPLIER = 0.25  # of the run's peak, because its learning rate has already decayed
SEED_OFFSET = 5000  # so that the batches differ from those of the run
VARIANTS = {  # the norm afterwards, and which parameters are trained
    "rms at once": ("rms", "none"),
    "rms, norms trained": ("rms", "norms"),
    "rms, all trained": ("rms", "all"),
    "layer, all trained": ("layer", "all"),
}


def convert_norm(
    base: RunResult,
    settings: Settings,
    checkpoint: Path,
    folder: Path,
    variant: str,
    machine: Machine,
    threads: int | None,
) -> RunResult | None:
    """Convert the finished LayerNorm run `base`, whose weights are in `checkpoint`, and return the record of it.

    settings: those of the base. None when a signal stopped it.
    """
    norm, trained = VARIANTS[variant]
    steps = max(settings.optimizer.steps // STEPS_DIVISOR, 1)
    optimizer = dataclasses.replace(
        settings.optimizer,
        steps=steps,
        warmup_steps=min(settings.optimizer.warmup_steps, steps // 4),
        learning_rate=settings.optimizer.learning_rate * LR_MULTIPLIER,
    )
    converted = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, norm=norm),
        optimizer=optimizer,
        run=dataclasses.replace(
            settings.run,
            init_from=str(checkpoint),
            train_only="norms" if trained == "norms" else "all",
            evaluate_every=steps,
            seed=settings.run.seed + SEED_OFFSET,
        ),
    )
    run = Run(dataclasses.replace(base.arm, norm=norm), "final", base.seed, base.learning_rate)
    result = train_run(run, converted, folder, machine, threads, evaluate_only=trained == "none")
    if result is None:
        return None
    return dataclasses.replace(result, phase="conversion", variant=variant, loss_before=base.validation_loss)
