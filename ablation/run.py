"""One run of a comparison: the training loop's own steps, with evaluations and probes between them, to one row. Writes
nothing: a run that is killed starts again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kernels
from ablation.plan import Plan, Run, replace_settings, run_settings
from ablation.records import Row
from data.batches import Batch
from model.attention import Attention
from model.decoder import Decoder
from model.device import processor
from model.norm import Norm, is_norm_parameter
from training.evaluate import evaluate
from training.loop import train_steps
from training.session import Session, initial_model, no_log, set_up
from training.settings import Settings, changed_fields
from training.step import Diverged

CURVE_TOKENS = 16_384  # of the validation set, for points along a run; the final loss uses all
SPIKE = 0.5  # nats above the median of the 20 steps before


def train_run(plan: Plan, run: Run, device: str, threads: int | None, workers: int) -> Row:
    """Train a run and return its row. threads: of a CPU; workers: how many runs are made at once."""
    start, settings = time.perf_counter(), run_settings(plan, run)
    torch.set_num_threads(threads or torch.get_num_threads())
    session = set_up(replace_settings(settings, {"device": device}), Path(), resume=False, log=no_log)
    if run.perturbation:
        perturb(session.model, run.seed, run.perturbation)
    row = measure(session, run, settings_hash(settings), workers)
    return dataclasses.replace(row, all_seconds=time.perf_counter() - start)


def measure(session: Session, run: Run, hash_of_settings: str, workers: int, *, train: bool = True) -> Row:
    """The row of a session, which is trained to its end first; train: False only evaluates the model as it is."""
    settings, losses, points, found = session.settings, [], {}, {"status": "completed"}
    try:
        for result in train_steps(session) if train else ():
            losses.append(result.loss)
            if result.step % settings.run.evaluate_every == 0 or result.step == session.steps:
                windows = first_windows(session, CURVE_TOKENS)
                points[result.step] = evaluate(session.model, windows, None, session.device).loss
        final = evaluate(session.model, first_windows(session), session.corpus.validation_bytes, session.device)
        if not math.isfinite(final.loss):
            raise Diverged(f"the validation loss is {final.loss:g}, not finite")
        found |= {"loss": final.loss, "bits_per_byte": final.bits_per_byte} | probe(session)
    except Diverged as error:
        found = {"status": "diverged", "reason": str(error).partition(";")[0]}
    return Row(
        **vars(run),
        **found,
        curve=[(step, six_digits(loss)) for step, loss in points.items() if math.isfinite(loss)],
        spikes=count_spikes(losses),
        seconds=session.state.seconds,
        tokens=session.state.tokens,
        parameters=session.model.num_parameters(),
        settings_hash=hash_of_settings,
        weights_hash=weights_hash(settings),
        batches_hash=digest(array for step in range(session.state.step) for array in session.batch(step)[:2]),
        text_hash=session.corpus.text_hash,
        device=hardware(str(session.device)),
        kernels=kernels.describe(session.device),
        dtype=settings.machine.dtype,
        commit=commit(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        threads=None if session.device.type == "cuda" else torch.get_num_threads(),
        workers=workers,
    )


def hardware(device: str) -> str:
    """The model of the GPU, or else of the CPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else processor()


def commit() -> str:
    """The commit of this project that trains, with a + if files have changed since; empty where git knows none."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""


def first_windows(session: Session, tokens: int | None = None) -> Iterable[Batch]:
    """The first so many tokens of the validation set, at least a batch, or all of them."""
    length, sequences = session.settings.data.sequence_length, session.micro_batch_size
    windows = session.corpus.validation_batches(length, sequences)
    return itertools.islice(windows, None if tokens is None else max(1, tokens // (sequences * length)))


@torch.no_grad()
def probe(session: Session) -> dict[str, float]:
    """What `Row` says of the stream (with pre, the input of norms) and attention, on a batch of the validation set."""
    of_norms, first_token = [], []

    def probe_stream(module: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        x = outputs[1].float().flatten(0, 1)  # (N, D)
        mean, squares = x.mean(-1).abs(), x.square()
        length, channels = squares.mean(-1).sqrt().clamp(min=1e-20), squares.mean(0).sqrt()
        over_std = (mean / x.std(-1, correction=0).clamp(min=1e-20)).mean()
        kurtosis = (x / length[:, None]).pow(4).mean()
        largest = channels.max() / channels.median().clamp(min=1e-20)
        of_norms.append([value.item() for value in (over_std, (mean / length).mean(), kurtosis, largest)])

    def probe_attention(module: Attention, inputs: tuple, output: Tensor) -> None:
        x, cos, sin, mask, _ = inputs
        q, k, _ = module.queries_keys_values(x, cos, sin)  # (B, H, T, d), (B, K, T, d)
        scores = (q @ k.repeat_interleave(module.heads // module.kv_heads, 1).mT).float() / math.sqrt(q.shape[-1])
        visible = torch.ones_like(scores, dtype=torch.bool).tril() if mask is None else mask
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)  # (B, H, T, T)
        first_token.append(weights[..., weights.shape[-1] // 2 :, 0].mean().item())

    hooks = {Norm: probe_stream, Attention: probe_attention}
    with contextlib.ExitStack() as handles:
        for module in session.model.modules():
            if type(module) in hooks:
                handles.enter_context(module.register_forward_hook(hooks[type(module)]))
        evaluate(session.model, first_windows(session, 1), None, session.device)
    mean_over_std, cosine, kurtosis, channel = np.array(of_norms).T
    found = {
        "mean_over_std": mean_over_std[len(of_norms) // 2 :].mean(),
        "cosine_with_ones": cosine.mean(),
        "kurtosis": kurtosis.max(),
        "largest_channel": channel.max(),
        "first_token_attention": np.mean(first_token),
    }
    return {name: six_digits(value) for name, value in found.items() if np.isfinite(value)}


def count_spikes(losses: list[float]) -> int:
    """Steps whose loss is far above the median of the 20 before; consecutive ones count as one."""
    high = [not losses[step] <= np.median(losses[step - 20 : step]) + SPIKE for step in range(20, len(losses))]
    return sum(now and not before for before, now in itertools.pairwise([False, *high]))


def six_digits(value: float) -> float:
    """A number rounded to six digits, for what no verdict depends on: all digits would double the size of a row."""
    return float(f"{value:.6g}")


@torch.no_grad()
def perturb(model: Decoder, seed: int, size: float) -> None:
    """Multiply every weight by 1 + size times a normal number."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        factors = 1 + size * torch.randn(parameter.shape, generator=generator)
        parameter.mul_(factors.to(parameter.device))


def settings_hash(settings: Settings) -> str:
    """Hash of a run's settings that are not the default, whatever device it ran on and in which folder."""
    return digest(["\n".join(changed_fields(Settings(), replace_settings(settings, {"device": "auto"}))).encode()])


def weights_hash(settings: Settings) -> str:
    """Hash of the weights that training starts from, without the norms: what the arms of a seed share."""
    weights = sorted(initial_model(settings, torch.float32, log=no_log).named_parameters())
    shared = [(name.encode(), weight.detach().numpy()) for name, weight in weights if not is_norm_parameter(name)]
    return digest(part for pair in shared for part in pair)


def digest(parts: Iterable[bytes | np.ndarray]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
