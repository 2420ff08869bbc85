"""What `train.py` can be asked for: train, resume, evaluate, or estimate."""

import sys
from pathlib import Path

from data import tokens as token_files
from data.tokenizer import load_tokenizer
from errors import UserError
from generation.checkpoints import find_checkpoint
from generation.device import choose_device
from model.pretrained import load_pretrained
from training import machine
from training.estimate import estimate
from training.evaluate import evaluate
from training.loop import train
from training.settings import Command, Settings


def do(command: Command) -> int:
    """Do what the command line asks for; returns the exit status."""
    actions, settings = command.actions, command.settings
    if actions.dry_run:
        print(estimate(settings))
        return 0
    if actions.eval_only:
        evaluate_checkpoint(settings)
        return 0
    if actions.resume is not None:
        stopped_by = train(settings, Path(actions.resume), resume=True)
    else:
        stopped_by = train(settings, new_run(settings, Path(actions.config).stem))
    return 128 + stopped_by if stopped_by else 0


def new_run(settings: Settings, config: str) -> Path:
    """The folder of a new run: what `--out` says if nothing is there, else runs/CONFIG-NORM with a free number."""
    if settings.run.out is not None:
        run = Path(settings.run.out)
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise UserError(f"{run} exists already and is never overwritten; give another --out, or --resume {run}.")
        return run
    name = f"{config}-{settings.model.norm}"
    numbered = (Path("runs") / (f"{name}-{number}" if number > 1 else name) for number in range(1, sys.maxsize))
    return next(run for run in numbered if not run.exists())


def evaluate_checkpoint(settings: Settings) -> None:
    """Print the loss of the checkpoint --init-from on all of --data."""
    if settings.run.init_from is None:
        raise UserError("--eval-only needs --init-from: the run folder or checkpoint directory to evaluate.")
    directory = find_checkpoint(Path(settings.run.init_from))
    device = choose_device(settings.machine.device)
    dtype = machine.choose_dtype(settings.machine.dtype, device)
    tokenizer = load_tokenizer(Path(settings.data.tokenizer) if settings.data.tokenizer else directory)
    model = load_pretrained(directory, device=device, compute_dtype=dtype)
    tokens, text_bytes = token_files.tokenize(list(settings.data.data), tokenizer, settings.data.text_field)
    windows = token_files.validation_windows(tokens, settings.data.sequence_length, settings.data.batch_size)
    evaluation = evaluate(model, windows, text_bytes, device)
    print(f"{directory} on {', '.join(settings.data.data)}, in windows of {settings.data.sequence_length} tokens")
    print(evaluation)
