"""One run of a plan, to one row. Writes nothing: a run that is killed starts again."""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kernels
from ablation.plan import CURVE_TOKENS, Plan, Run, replace_settings, run_settings
from ablation.records import Row
from ablation.stats import six_digits
from data.batches import Batch
from model.decoder import Decoder
from model.machine import machine
from model.norm import Norm, is_norm_parameter
from training.evaluate import evaluate
from training.loop import train_steps
from training.session import Session, set_up
from training.settings import Settings, changed_fields
from training.step import Diverged
from training.weights import initial_model

CODE = ("checkpoints", "data", "kernels", "model", "training")  # packages that decide what a run gives


def train_run(plan: Plan, run: Run, torch_device: str, threads: int | None, workers: int) -> Row:
    """Train a run and return its row. threads: of a CPU; workers: how many runs are made at once."""
    start = time.perf_counter()
    code = code_hash()
    settings = run_settings(plan, run)
    torch.set_num_threads(threads or torch.get_num_threads())
    with contextlib.redirect_stdout(None):
        session = set_up(replace_settings(settings, {"device": torch_device}), Path(), resume=False)
    if run.perturbation:
        perturb(session.model, run.seed, run.perturbation)
    row = make_row(session, run)
    of_plan = {"settings_hash": settings_hash(settings), "code_hash": code, "workers": workers}
    return dataclasses.replace(row, **of_plan, all_seconds=time.perf_counter() - start)


def make_row(session: Session, run: Run, *, train: bool = True) -> Row:
    """The row of a session, which is trained to its end first; train: False only evaluates the model as it is."""
    curve = []
    try:
        for result in train_steps(session) if train else ():
            if result.step % session.settings.run.evaluate_every == 0 or result.step == session.steps:
                loss = evaluate(session.model, first_windows(session, CURVE_TOKENS), None, session.device).loss
                curve.append((result.step, six_digits(loss)))
        final = evaluate(session.model, first_windows(session), session.corpus.validation_bytes, session.device)
        if not math.isfinite(final.loss):
            raise Diverged(f"the validation loss is {final.loss:g}, not finite")
        outcome = {"loss": final.loss, "bits_per_byte": final.bits_per_byte} | probe(session)
    except Diverged as error:
        outcome = {"status": "diverged", "reason": str(error)}
    # For the hashes all batches are read again, and the initial model is made again: training keeps neither.
    batches = map(session.batch, range(session.state.step))
    ids = (array for batch in batches for array in (batch.inputs, batch.targets))
    with contextlib.redirect_stdout(None):
        initial = sorted(initial_model(session.settings, torch.float32).named_parameters())
    shared = ((name.encode(), weight.detach().numpy()) for name, weight in initial if not is_norm_parameter(name))
    return Row(
        **vars(run),
        **outcome,
        **machine(session.device),
        curve=[(step, loss) for step, loss in curve if math.isfinite(loss)],
        seconds=session.state.seconds,
        tokens=session.state.tokens,
        vocab_size=session.settings.model.vocab_size,
        weights_hash=digest(itertools.chain.from_iterable(shared)),
        batches_hash=digest(ids),
        text_hash=session.corpus.text_hash,
        kernels=kernels.describe(session.device, compiled=session.settings.machine.compile),
        dtype=session.settings.machine.dtype,
    )


def first_windows(session: Session, tokens: int | None = None) -> Iterable[Batch]:
    """The first so many tokens of the validation set, at least a batch, or all of them."""
    data = session.settings.data
    count = None if tokens is None else max(1, tokens // (data.micro_batch() * data.sequence_length))
    return itertools.islice(session.corpus.validation_batches(data.sequence_length, data.micro_batch()), count)


@torch.no_grad()
def probe(session: Session) -> dict[str, float]:
    """What `Row` says of the residual stream (with pre, the input of norms), on a batch of the validation set."""
    over_std, cosines = [], []

    def probe_stream(norm: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        x = outputs[1].float().flatten(0, 1)  # (N, D)
        mean, std, length = x.mean(-1).abs(), x.std(-1, correction=0), x.square().mean(-1).sqrt()
        over_std.append((mean / std.clamp(min=1e-20)).mean().item())
        cosines.append((mean / length.clamp(min=1e-20)).mean().item())

    hooks = [norm.register_forward_hook(probe_stream) for norm in session.model.modules() if isinstance(norm, Norm)]
    evaluate(session.model, first_windows(session, tokens=1), None, session.device)  # one batch, as it has a token
    for hook in hooks:
        hook.remove()
    deeper = over_std[len(over_std) // 2 :]
    return {"mean_over_std": six_digits(np.mean(deeper)), "cosine_with_ones": six_digits(np.mean(cosines))}


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


def code_hash() -> str:
    """Hash of the source files of `CODE`, such as a norm's formula: runs of other formulas are no pairs."""
    root = Path(__file__).parent.parent
    return digest(path.read_bytes() for package in CODE for path in sorted((root / package).glob("*.py")))


def digest(chunks: Iterable[bytes | np.ndarray]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()
