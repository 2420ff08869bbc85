"""A finished LayerNorm run converted to RMSNorm, then evaluated without training, after training only the norms, and
after training all parameters.

RMSNorm lacks LayerNorm's mean and its bias, so there are also conversions that drop only one of them. With the bias and
centered weights nothing is lost, unless the embedding is tied to the head. The control keeps LayerNorm and trains for
as many steps as the others, so that what longer training brings does not count as recovery.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ablation.plan import Run
from ablation.results import Machine, RunResult
from ablation.run import curve_loss, train_run
from model.decoder import Decoder, center_residual_writers
from training.session import Session
from training.settings import Settings

STEPS_DIVISOR = 8  # converted models train for an eighth of the run's steps
LR_MULTIPLIER = 0.25  # of the run's peak, because its learning rate has already decayed
SEED_OFFSET = 5000  # so that the batches differ from those of the run


@dataclass(frozen=True)
class Variant:
    """How a run is converted."""

    norm: Literal["rms", "layer"]
    norm_bias: bool
    center_weights: bool = False
    train: Literal["none", "norms", "all"] = "none"
    """Which parameters are trained afterwards."""


VARIANTS = {
    "rms with bias and centered weights at once": Variant("rms", norm_bias=True, center_weights=True),
    "rms with bias at once": Variant("rms", norm_bias=True),
    "rms at once": Variant("rms", norm_bias=False),
    "layer without bias at once": Variant("layer", norm_bias=False),
    "rms, norms trained": Variant("rms", norm_bias=False, train="norms"),
    "rms, all trained": Variant("rms", norm_bias=False, train="all"),
    "layer, all trained": Variant("layer", norm_bias=True, train="all"),
}


def losses_at_once(session: Session) -> dict[str, float]:
    """What each conversion that trains nothing would change now, by variant: of `curve_loss`, nats per token."""
    before, changes = curve_loss(session), {}
    for name, how in VARIANTS.items():
        if how.train == "none":
            config = dataclasses.replace(session.model.config, norm=how.norm, norm_bias=how.norm_bias)
            model = Decoder(config, seed=0, compute_dtype=session.dtype).to(session.device)
            model.load_state_dict(session.model.state_dict(), strict=how.norm_bias)  # else the biases are dropped
            if how.center_weights:
                center_residual_writers(model)
            changes[name] = curve_loss(dataclasses.replace(session, model=model)) - before
    return changes


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
    how = VARIANTS[variant]
    steps = max(settings.optimizer.steps // STEPS_DIVISOR, 1)
    optimizer = dataclasses.replace(
        settings.optimizer,
        steps=steps,
        warmup_steps=min(settings.optimizer.warmup_steps, steps // 4),
        learning_rate=settings.optimizer.learning_rate * LR_MULTIPLIER,
    )
    converted = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, norm=how.norm, norm_bias=how.norm_bias),
        optimizer=optimizer,
        run=dataclasses.replace(
            settings.run,
            init_from=str(checkpoint),
            center_weights=how.center_weights,
            train_only="norms" if how.train == "norms" else "all",
            evaluate_every=steps,
            seed=settings.run.seed + SEED_OFFSET,
        ),
    )
    arm = dataclasses.replace(base.arm, norm=how.norm, norm_bias=how.norm_bias)
    run = Run(arm, "final", base.seed, base.learning_rate)
    result = train_run(run, converted, folder, machine, threads, evaluate_only=how.train == "none")
    if result is None:
        return None
    return dataclasses.replace(result, phase="conversion", variant=variant, loss_before=base.validation_loss)
