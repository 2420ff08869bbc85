"""What `train.py` can be asked for: train, resume, evaluate, or estimate."""

import sys
from pathlib import Path

from data.batches import validation_windows
from data.tokenizer import check_vocabulary, load_tokenizer
from data.tokens import tokenize
from errors import UserError
from model.device import choose_device, choose_kernels, choose_training_dtype
from model.pretrained import load_pretrained
from training import processes
from training.estimate import estimate
from training.evaluate import evaluate
from training.loop import train
from training.settings import Command, Settings


def run(command: Command) -> int:
    """Do what the command line asks for; returns the exit status, 128 + the signal's number where one stopped it."""
    actions, settings = command.actions, command.settings
    if actions.dry_run:
        print(estimate(settings))
        return 0
    if actions.eval_only:
        evaluate_checkpoint(settings)
        return 0
    if actions.resume is not None:
        stopped_by = train(settings, Path(actions.resume), resume=True)
        return 128 + stopped_by if stopped_by else 0
    folder = claim_folder(settings, Path(actions.config).stem)
    try:
        stopped_by = train(settings, folder)
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # it came to nothing before the first file
    return 128 + stopped_by if stopped_by else 0


def claim_folder(settings: Settings, config: str) -> Path:
    """Make the folder of a new run: what `--out` says if nothing is there, else runs/CONFIG-NORM with a free number.

    Making it here keeps two runs that start at once apart. Of several processes only the main one writes.
    """
    if not processes.is_main():
        return Path(settings.run.out or "runs")
    try:
        if settings.run.out is not None:
            folder = Path(settings.run.out)
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UserError(
                    f"{folder} is not empty and is never overwritten; use another --out, or --resume {folder}."
                )
            return folder
        for number in range(1, sys.maxsize):
            folder = Path("runs") / (f"{config}-{settings.model.norm}" + (f"-{number}" if number > 1 else ""))
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise UserError(f"the run's folder cannot be made ({error}); use another --out.") from None
    raise AssertionError("out of numbers")


def evaluate_checkpoint(settings: Settings) -> None:
    """Print the loss of the checkpoint --init-from on all of --data."""
    if settings.run.init_from is None:
        raise UserError("--eval-only needs --init-from: the run folder or checkpoint directory to evaluate.")
    directory = Path(settings.run.init_from)
    device = choose_device(settings.machine.device)
    choose_kernels(settings.machine.kernels, device)
    dtype = choose_training_dtype(settings.machine.dtype, device)
    tokenizer = load_tokenizer(settings.data.tokenizer or directory)
    model = load_pretrained(directory, device=device, compute_dtype=dtype)
    check_vocabulary(tokenizer, model.config.vocab_size)
    tokens, text_bytes = tokenize(list(settings.data.data), tokenizer, settings.data.text_field)
    size = settings.data.micro_batch_size or settings.data.batch_size
    windows = validation_windows(tokens, settings.data.sequence_length, size)
    evaluation = evaluate(model, windows, text_bytes, device)
    print(f"{directory} on {', '.join(settings.data.data)}, in windows of {settings.data.sequence_length} tokens")
    print(evaluation)
