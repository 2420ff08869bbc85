"""One run of a comparison: the training loop's own steps, with evaluations and probes between them, to one row.

An unfinished run resumes from its last save; a finished one is never repeated, because its row is in runs.jsonl.
"""

import contextlib
import hashlib
import math
import platform
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kernels
from ablation.plan import Plan, Run, replace_settings, run_settings
from ablation.records import Row
from data.batches import validation_windows
from model.attention import Attention
from model.decoder import Decoder
from model.device import processor
from model.norm import Norm, is_norm_parameter
from training import checkpoint, metrics
from training.evaluate import evaluate
from training.loop import save, train_steps
from training.session import Session, initial_model, no_log, open_run, set_up
from training.settings import Settings, changed_fields, load_settings
from training.step import Diverged

CURVE_TOKENS = 16_384  # of the validation set, for the points along a run; the final loss uses all of it
SAVE_SECONDS = 30.0  # a killed run loses no more
SPIKE = 0.5  # nats above the median of the 20 steps before


def train_run(plan: Plan, run: Run, folder: Path, device: str, threads: int | None, workers: int) -> Row:
    """Train one run in `folder` and return its row. threads: of a CPU; workers: how many runs are made at once."""
    settings = run_settings(plan, run)
    resume = can_resume(folder, settings)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads or torch.get_num_threads())
    session = set_up(replace_settings(settings, {"device": device}), folder, resume=resume, log=no_log)
    if run.perturbation and not resume:
        perturb(session.model, run.seed, run.perturbation)
    return measure(session, run, settings_hash(settings), workers)


def measure(session: Session, run: Run, hash_of_settings: str, workers: int, *, train: bool = True) -> Row:
    """The row of a session, which is trained to its end first; train: False only evaluates the model as it is."""
    on_gpu = session.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(session.device)
    found = {"status": "completed"}
    try:
        if train:
            train_to_the_end(session)
        found |= final_loss(session) | probe(session)
    except Diverged as error:
        found = {"status": "diverged", "reason": str(error).partition(";")[0]}
    settings = session.settings
    return Row(
        **vars(run),
        **found,
        **curves(session.run_dir),
        seconds=session.state.seconds,
        peak_memory=torch.cuda.max_memory_allocated(session.device) if on_gpu else None,
        steps=session.state.step,
        tokens=session.state.tokens,
        parameters=session.model.num_parameters(),
        settings_hash=hash_of_settings,
        weights_hash=weights_hash(settings),
        batches_hash=batches_hash(session),
        text_hash=session.corpus.text_hash,
        device=hardware(session.device),
        kernels=kernels.describe(session.device),
        dtype=settings.machine.dtype,
        torch=torch.__version__,
        python=platform.python_version(),
        threads=None if on_gpu else torch.get_num_threads(),
        workers=workers,
    )


def hardware(device: torch.device) -> str:
    """The model of the GPU, or else of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def can_resume(folder: Path, settings: Settings) -> bool:
    """Whether the folder has a usable save of an unfinished run with these settings; otherwise the run starts again."""
    last = checkpoint.find_complete(folder / "last")
    if last is None:
        return False
    saved = replace_settings(load_settings(folder / "settings.toml"), {"dtype": settings.machine.dtype})
    unfinished = checkpoint.read_state(last).step < settings.optimizer.steps
    return unfinished and settings_hash(saved) == settings_hash(settings)


def train_to_the_end(session: Session) -> None:
    """Do all steps. What is measured goes to metrics.jsonl, which resumes too."""
    saved_at = time.perf_counter()
    with contextlib.closing(open_run(session)) as log:
        for step in train_steps(session):
            log.write(step.step, loss=step.loss)
            if step.step % session.settings.run.evaluate_every == 0 or step.step == session.steps:
                log.write(step.step, curve_loss=curve_loss(session))
            if time.perf_counter() - saved_at > SAVE_SECONDS:
                save(session)
                saved_at = time.perf_counter()


def validation(session: Session) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of the validation set, in batches."""
    length = session.settings.data.sequence_length
    return validation_windows(session.corpus.validation, length, session.micro_batch_size)


def curve_loss(session: Session) -> float:
    """Loss on the first CURVE_TOKENS tokens of the validation set, nats per token."""
    tokens = session.micro_batch_size * session.settings.data.sequence_length
    few = islice(validation(session), max(1, CURVE_TOKENS // tokens))
    return evaluate(session.model, few, session.corpus.validation_bytes, session.device).loss


def final_loss(session: Session) -> dict[str, float]:
    """Loss on the whole validation set, every token counted."""
    found = evaluate(session.model, validation(session), session.corpus.validation_bytes, session.device)
    if not math.isfinite(found.loss):
        raise Diverged(f"the validation loss is {found.loss:g}, not finite")
    return {"loss": found.loss, "bits_per_byte": found.bits_per_byte}


@torch.no_grad()
def probe(session: Session) -> dict[str, float]:
    """What `Row` says of the residual stream and of attention, on the first batch of the validation set.

    Nothing where a value is not finite. With other placements than pre the input of a norm is not the stream itself.
    """
    of_norms, first_token = [], []

    def probe_stream(module: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        x = outputs[1].float().flatten(0, 1)  # (N, D)
        mean, squares = x.mean(-1).abs(), x.square()
        length, channels = squares.mean(-1).sqrt().clamp(min=1e-20), squares.mean(0).sqrt()
        values = (
            (mean / x.std(-1, correction=0).clamp(min=1e-20)).mean(),
            (mean / length).mean(),
            (x / length[:, None]).pow(4).mean(),
            channels.max() / channels.median().clamp(min=1e-20),
            x.abs().max(),
        )
        of_norms.append([value.item() for value in values])

    def probe_attention(module: Attention, inputs: tuple, output: Tensor) -> None:
        x, cos, sin, mask, _ = inputs
        q, k, _ = module.queries_keys_values(x, cos, sin)  # (B, H, T, d), (B, K, T, d)
        k = k.repeat_interleave(module.heads // module.kv_heads, 1)
        scores = (q @ k.mT).float() / math.sqrt(q.shape[-1])  # (B, H, T, T)
        visible = torch.ones_like(scores, dtype=torch.bool).tril() if mask is None else mask
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        first_token.append(weights[..., weights.shape[-1] // 2 :, 0].mean().item())

    hooks = {Norm: probe_stream, Attention: probe_attention}
    handles = [m.register_forward_hook(hooks[type(m)]) for m in session.model.modules() if type(m) in hooks]
    try:
        evaluate(session.model, islice(validation(session), 1), 1, session.device)
    finally:
        for handle in handles:
            handle.remove()
    mean_over_std, cosine, kurtosis, channel, activation = np.array(of_norms).T
    found = {
        "mean_over_std": mean_over_std[len(of_norms) // 2 :].mean(),
        "cosine_with_ones": cosine.mean(),
        "kurtosis": kurtosis.max(),
        "largest_channel": channel.max(),
        "largest_activation": activation.max(),
        "first_token_attention": np.mean(first_token),
    }
    return {name: six_digits(value) for name, value in found.items() if np.isfinite(value)}


def curves(folder: Path) -> dict[str, list[tuple[int, float]] | int]:
    """The validation curve, and the number of loss spikes, from metrics.jsonl."""
    lines = metrics.read(folder)
    losses = np.array([float(line["loss"]) for line in lines if "loss" in line])
    high = [step for step in range(20, len(losses)) if not losses[step] <= np.median(losses[step - 20 : step]) + SPIKE]
    points = [(line["step"], six_digits(line["curve_loss"])) for line in lines if "curve_loss" in line]
    return {
        "curve": [point for point in points if math.isfinite(point[1])],
        "spikes": sum(step - 1 not in high for step in high),
    }


def six_digits(value: float | str) -> float:
    """A number rounded to six digits, for what no verdict depends on: all digits would double the size of a row."""
    return float(f"{float(value):.6g}")


@torch.no_grad()
def perturb(model: Decoder, seed: int, size: float) -> None:
    """Multiply every weight by 1 + size times a normal number."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        factors = 1 + size * torch.randn(parameter.shape, generator=generator)
        parameter.mul_(factors.to(parameter.device))


def settings_hash(settings: Settings) -> str:
    """Hash of a run's settings that are not the default, whatever device it ran on and in which folder."""
    return digest("\n".join(changed_fields(Settings(), replace_settings(settings, {"device": "auto"}))).encode())


def weights_hash(settings: Settings) -> str:
    """Hash of the weights that training starts from, without the norms: what the arms of a seed share."""
    model = initial_model(settings, torch.float32, log=no_log)
    shared = {name: p for name, p in sorted(model.named_parameters()) if not is_norm_parameter(name)}
    return digest(*(name.encode() + parameter.detach().numpy().tobytes() for name, parameter in shared.items()))


def batches_hash(session: Session) -> str:
    """Hash of the batches of all steps done."""
    batches = (session.batch(step) for step in range(session.state.step))
    return digest(*(inputs.tobytes() + targets.tobytes() for inputs, targets in batches))


def digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
