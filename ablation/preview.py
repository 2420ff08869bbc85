"""The plan in words before it runs: arms, runs, tokens, and how long it will take here."""

import statistics

import torch

from ablation import speed
from ablation.conduct import Conduct, threads
from ablation.plan import Run, arms_of, rate_runs, settings_of
from model.device import choose_device, choose_training_dtype


def text(conduct: Conduct) -> str:
    """A few lines."""
    plan, device = conduct.plan, choose_device(conduct.device)
    arms = arms_of(plan)
    settings = settings_of(plan, Run(arms[0], "final", 1, 1e-3))
    choosing = len(rate_runs(plan)) if len(plan.learning_rates) > 1 else 0
    final = plan.seeds * len(arms)
    tokens = settings.optimizer.steps * settings.data.batch_size * settings.data.sequence_length
    done = len(conduct.rows)
    left = max(choosing + final - done, 0)
    minutes = left * seconds_of_a_run(conduct) / conduct.jobs / 60
    rates = ", ".join(f"{rate:g}" for rate in plan.learning_rates) or "that of the config"
    return "\n".join(
        [
            f"arms: {'; '.join(arm.label for arm in arms)}",
            f"runs: {choosing} to choose rates ({rates}) and {final} to compare ({plan.seeds} paired seeds), "
            f"{done} done; {tokens:,} tokens each",
            f"measure: validation loss; differences within {plan.bound:g} nats per token count as none",
            f"time: about {minutes:.0f} minutes, {conduct.jobs} at once on {device}"
            + (f", {threads(conduct, device)} threads each" if device.type == "cpu" else ""),
        ]
    )


def seconds_of_a_run(conduct: Conduct) -> float:
    """From the runs that are done, or from a few steps now."""
    if conduct.rows:
        return statistics.median(row["seconds"] for row in conduct.rows)
    device = choose_device(conduct.device)
    arms = arms_of(conduct.plan)
    settings = settings_of(conduct.plan, Run(arms[0], "final", 1, 1e-3))
    dtype = choose_training_dtype(arms[0].dtype, device)
    before, share = torch.get_num_threads(), threads(conduct, device)
    torch.set_num_threads(share or before)
    step = speed.parts(settings, "rms", device, dtype, compiled=False)["step"]
    seconds = statistics.median(speed.interleaved({"rms": step}, device, 3)["rms"])
    torch.set_num_threads(before)
    return seconds * settings.optimizer.steps
