"""One run of an ablation: the training loop's own steps, with evaluations and probes between them.

It survives a kill anywhere: an unfinished run resumes from its last save, and a finished one is never repeated, because
its record is in runs.jsonl.
"""

import contextlib
import dataclasses
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ablation.plan import Run
from ablation.results import Curve, Machine, Probes, RunResult, Text
from data.batches import validation_windows
from errors import UserError
from model.decoder import Decoder
from model.device import explain_out_of_memory
from model.norm import Norm, is_norm_parameter
from training import checkpoint, metrics
from training.evaluate import Evaluation, evaluate
from training.loop import save, train_steps
from training.session import Session, initial_model, no_log, open_run, set_up
from training.settings import Settings, changed_fields, load_settings
from training.signals import StopSignals
from training.step import Diverged

CURVE_POINTS = 60  # of a training curve in a record
CURVE_TOKENS = 16_384  # of the validation set, for the points along a run; the final loss uses all of it
BLOCKS = 64  # parts of the validation set whose losses a record has, at most
UPDATE_RATIOS = 12  # measurements of a step's length, over a run
SAVE_SECONDS = 30.0  # a killed run loses no more
PERTURBATION = 1e-6  # relative, of the initial weights of the runs that measure the noise
MORE = "measured: "  # before the names of further numbers in metrics.jsonl
SPIKE = 0.5  # nats above the median of the 20 steps before


def train_run(
    run: Run,
    settings: Settings,
    folder: Path,
    machine: Machine,
    threads: int | None,
    *,
    keep_weights: bool = False,
    evaluate_only: bool = False,
    measure: Callable[[Session], dict[str, float]] | None = None,
) -> RunResult | None:
    """Train one run in `folder` and return its record; None if a signal stopped it, with its state saved.

    threads: of this process on a CPU; keep_weights: leave the final weights in the folder; evaluate_only: evaluate
    without training; measure: more numbers for the record at every evaluation along the run.
    """
    fields = {"status": "completed", "reason": None, "validation_loss": None, "bits_per_byte": None, "probes": None}
    try:
        resume = can_resume(folder, settings)
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        memory = explain_out_of_memory("the device has too little memory for a run; use a smaller model or batch.")
        with memory, limited_threads(threads), (folder / "log.txt").open("a", encoding="utf-8") as file:
            session = set_up(settings, folder, resume=resume, log=lambda line: print(line, file=file))
            if run.phase == "noise" and session.state.step == 0:
                perturb(session.model, run.seed)
            if not evaluate_only and not train_to_the_end(session, keep_weights, measure):
                return None
            fields |= final_loss(session)
            fields["probes"] = probe_streams(session)
    except Diverged as error:
        fields |= {"status": "diverged", "reason": str(error).partition(";")[0]}
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); free some space, then repeat the command.") from None
    return RunResult(
        arm=run.arm,
        phase=run.phase,
        seed=run.seed,
        learning_rate=run.learning_rate,
        steps=0 if evaluate_only else settings.optimizer.steps,
        **fields,
        **curves(folder),
        clipped=clipped(folder, settings.optimizer.clip),
        seconds=session.state.seconds,
        settings_hash=settings_hash(settings),
        **initial_weights_hashes(settings, run),
        batches_hash=batches_hash(session),
        text=text_of(session),
        machine=machine,
    )


def can_resume(folder: Path, settings: Settings) -> bool:
    """Whether the folder has a usable save of an unfinished run with these settings; otherwise the run starts again."""
    last = checkpoint.find_complete(folder / "last")
    if last is None:
        return False
    try:
        saved = load_settings(folder / "settings.toml")
        saved = dataclasses.replace(saved, machine=dataclasses.replace(saved.machine, dtype=settings.machine.dtype))
        unfinished = checkpoint.read_state(last).step < settings.optimizer.steps
    except UserError:  # damaged
        return False
    return unfinished and settings_hash(saved) == settings_hash(settings)


@contextlib.contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Use this many CPU threads inside the block, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_to_the_end(
    session: Session, keep_weights: bool, measure: Callable[[Session], dict[str, float]] | None
) -> bool:
    """Do all steps; False when a signal stopped it. Everything measured goes to metrics.jsonl, which resumes too."""
    state, saved_at = session.state, time.perf_counter()
    log = open_run(session)
    evaluate_every = session.settings.run.evaluate_every
    ratio_every = max(1, session.steps // UPDATE_RATIOS)

    def weights_before(step: int) -> list[Tensor] | None:
        """A copy of the weights, if the step after this one is to be measured."""
        due = (step + 1) % ratio_every == 0
        return [parameter.detach().clone() for parameter in session.model.parameters()] if due else None

    weights = weights_before(state.step)
    try:
        with StopSignals(second_signal_interrupts=False) as stop:
            for step in train_steps(session):
                measured = {"loss": step.loss, "gradient_norm": step.gradient_norm}
                if weights is not None:
                    measured["update_ratio"] = update_ratio(session.model, weights)
                last = step.step == session.steps
                if step.step % evaluate_every == 0 or last:
                    measured["curve_loss"] = curve_loss(session)
                    more = measure(session) if measure is not None else {}
                    measured |= {MORE + name: value for name, value in more.items()}
                log.write(step.step, **measured)
                weights = weights_before(step.step)
                if stop.received or (last and keep_weights) or time.perf_counter() - saved_at > SAVE_SECONDS:
                    save(session)
                    saved_at = time.perf_counter()
                if stop.received and not last:
                    return False
    finally:
        log.close()
    return True


def curve_loss(session: Session) -> float:
    """Loss on the first CURVE_TOKENS tokens of the validation set, nats per token."""
    corpus, length = session.corpus, session.settings.data.sequence_length
    windows = validation_windows(corpus.validation, length, session.micro_batch_size)
    few = islice(windows, max(1, CURVE_TOKENS // (session.micro_batch_size * length)))
    return evaluate(session.model, few, corpus.validation_bytes, session.device).loss


def final_loss(session: Session) -> dict[str, float | list[float]]:
    """Loss on the whole validation set, every token counted, and on each of at most BLOCKS parts of it."""
    corpus, length = session.corpus, session.settings.data.sequence_length
    windows = validation_windows(corpus.validation, length, session.micro_batch_size)
    batches = math.ceil((len(corpus.validation) - 1) / (session.micro_batch_size * length))
    blocks = []
    while block := list(islice(windows, math.ceil(batches / BLOCKS))):
        blocks.append(evaluate(session.model, block, corpus.validation_bytes, session.device))
    nats, tokens = sum(block.nats for block in blocks), sum(block.tokens for block in blocks)
    found = Evaluation(nats, tokens, corpus.validation_bytes)
    if not math.isfinite(found.loss):
        raise Diverged(f"the validation loss is {found.loss:g}, not finite")
    losses = [six_digits(block.loss) for block in blocks]
    return {"validation_loss": found.loss, "bits_per_byte": found.bits_per_byte, "validation_blocks": losses}


def probe_streams(session: Session) -> Probes | None:
    """Measure every norm's input on the first batch of the validation set."""
    windows = validation_windows(
        session.corpus.validation, session.settings.data.sequence_length, session.micro_batch_size
    )
    return probe_norm_inputs(session.model, next(iter(windows))[0], session.device)


@torch.no_grad()
def probe_norm_inputs(model: Decoder, tokens: np.ndarray, device: torch.device) -> Probes | None:
    """Of the residual stream at every norm, averaged over tokens (B, T) int64: see `Probes`; None if not finite."""
    means, cosines, largest = [], [], []

    def measure(module: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        stream = outputs[1].float()
        mean = stream.mean(-1).abs()
        means.append((mean / stream.std(-1, correction=0).clamp(min=1e-20)).mean().item())
        length = torch.linalg.vector_norm(stream, dim=-1).clamp(min=1e-20)
        cosines.append((mean * math.sqrt(stream.shape[-1]) / length).mean().item())
        largest.append(stream.abs().max().item())

    hooks = [module.register_forward_hook(measure) for module in model.modules() if isinstance(module, Norm)]
    training = model.training
    try:
        model.eval()(torch.from_numpy(tokens).to(device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    means, cosines = ([six_digits(value) for value in values] for values in (means, cosines))
    return Probes(means, cosines, max(largest)) if np.isfinite([*means, *cosines, *largest]).all() else None


@torch.no_grad()
def update_ratio(model: Decoder, before: list[Tensor]) -> float:
    """Length of a step's change of the weights over the length of the weights before it."""
    changes = zip(model.parameters(), before, strict=True)
    moved = sum((parameter - old).double().square().sum().item() for parameter, old in changes)
    return math.sqrt(moved / sum(old.double().square().sum().item() for old in before))


def curves(folder: Path) -> dict[str, Curve | dict[str, Curve] | int]:
    """The curves from metrics.jsonl, training curves as at most CURVE_POINTS means, and the number of loss spikes."""
    lines = [line for line in metrics.read(folder) if "loss" in line]
    losses = np.array([float(line["loss"]) for line in lines])
    norms = np.array([float(line["gradient_norm"]) for line in lines])
    parts = np.array_split(np.arange(len(lines)), max(1, min(CURVE_POINTS, len(lines))))

    def means(values: np.ndarray) -> Curve:
        points = [(int(part[-1]) + 1, six_digits(values[part].mean())) for part in parts if len(part)]
        return [point for point in points if math.isfinite(point[1])]

    def column(name: str) -> Curve:
        points = [(line["step"], six_digits(line[name])) for line in lines if name in line]
        return [point for point in points if math.isfinite(point[1])]

    more = dict.fromkeys(name for line in lines for name in line if name.startswith(MORE))
    high = [step for step in range(20, len(losses)) if not losses[step] <= np.median(losses[step - 20 : step]) + SPIKE]
    return {
        "training_curve": means(losses),
        "gradient_norm": means(norms),
        "validation_curve": column("curve_loss"),
        "update_ratio": column("update_ratio"),
        "measured_curves": {name.removeprefix(MORE): column(name) for name in more},
        "spikes": sum(step - 1 not in high for step in high),
    }


def six_digits(value: float | str) -> float:
    """A number rounded to six digits, for what no verdict depends on: all digits would double the size of a record."""
    return float(f"{float(value):.6g}")


def clipped(folder: Path, clip: float) -> float | None:
    """Share of the steps in metrics.jsonl whose gradient was longer than `clip`; None without steps."""
    norms = [float(line["gradient_norm"]) for line in metrics.read(folder) if "gradient_norm" in line]
    return six_digits(sum(norm > clip for norm in norms) / len(norms)) if norms else None


def settings_hash(settings: Settings) -> str:
    """Hash of a run's settings that are not the default, whatever device it ran on and in which folder."""
    changes = changed_fields(Settings(), on_device(settings, "auto"))
    return hashlib.blake2b("\n".join(changes).encode(), digest_size=16).hexdigest()


def on_device(settings: Settings, device: str) -> Settings:
    return dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, device=device))


def text_of(session: Session) -> Text:
    corpus = session.corpus
    return Text(corpus.text_hash, corpus.bytes, len(corpus.validation) - 1, corpus.validation_bytes)


@torch.no_grad()
def perturb(model: Decoder, seed: int) -> None:
    """Multiply every weight by 1 + PERTURBATION times a normal number."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        factors = 1 + PERTURBATION * torch.randn(parameter.shape, generator=generator)
        parameter.mul_(factors.to(parameter.device))


def initial_weights_hashes(settings: Settings, run: Run) -> dict[str, str]:
    """Hashes of the weights that training starts from: all of them, and without the norms, as arms of a seed share."""
    model = initial_model(settings, torch.float32, log=no_log)
    shared = hash_of(model, lambda name: not is_norm_parameter(name))
    if run.phase == "noise":
        perturb(model, run.seed)
    return {"own_weights_hash": hash_of(model, lambda _: True), "initial_weights_hash": shared}


def hash_of(model: Decoder, counts: Callable[[str], bool]) -> str:
    """Hash of the parameters whose names count."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        if counts(name):
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def batches_hash(session: Session) -> str:
    """Hash of the batches of all steps done; empty if there are none."""
    digest = hashlib.blake2b(digest_size=16)
    for step in range(session.state.step):
        inputs, targets = session.batch(step)
        digest.update(inputs.tobytes() + targets.tobytes())
    return digest.hexdigest() if session.state.step else ""
