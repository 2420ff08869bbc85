"""The actions of `train.py`: train, resume, evaluate, or estimate."""

import contextlib
import itertools
import shutil
from pathlib import Path

from checkpoints.pretrained import load_pretrained
from data.batches import validation_windows
from data.tokenizer import check_vocabulary, load_tokenizer
from data.tokens import tokenize
from errors import LOCK, UserError, is_main_process, locked
from model.device import choose_device, choose_kernels, choose_training_dtype, explain_out_of_memory
from training.estimate import estimate
from training.evaluate import evaluate
from training.loop import train
from training.processes import explain_lost_process
from training.settings import Command, Settings


def run(command: Command) -> int:
    """Run what the command line asks for; returns the exit status, 128 + the number of the signal that stopped it."""
    actions, settings = command.actions, command.settings
    if (actions.dry_run or actions.eval_only) and not is_main_process():
        return 0
    if actions.dry_run:
        print(estimate(settings))
        return 0
    if actions.eval_only:
        with explain_out_of_memory("too little memory; use a smaller --micro-batch-size, or less --data at once."):
            evaluate_checkpoint(settings)
        return 0
    resume, out, optimizer = actions.resume is not None, settings.run.out, settings.optimizer
    if not is_main_process():
        with explain_lost_process(None):
            return exit_status(train(settings, Path(actions.resume or out or "runs"), resume=resume))
    out_existed = out is not None and Path(out).exists()
    run_dir = Path(actions.resume) if resume else make_run_dir(settings, Path(actions.config).stem)
    with locked(run_dir):
        if not resume and files_in(run_dir):
            raise UserError(
                f"{run_dir} is not empty, and runs are never overwritten; use another --out, or --resume {run_dir}."
            )
        if actions.config == "finetune" and not resume:
            recipe = f"{optimizer.optimizer}, learning rate {optimizer.learning_rate:g}, {optimizer.steps} steps"
            print(f"fine-tuning with configs/finetune.toml ({recipe}); --config chooses another recipe, such as tiny")
        try:
            with explain_lost_process(run_dir):
                return exit_status(train(settings, run_dir, resume=resume))
        finally:
            if not out_existed and run_dir.is_dir() and not files_in(run_dir):  # it failed before its first file
                shutil.rmtree(run_dir, ignore_errors=True)


def exit_status(stopped_by: int) -> int:
    """What the shell is told of a run that the signal `stopped_by` stopped, or 0."""
    return 128 + stopped_by if stopped_by else 0


def files_in(run_dir: Path) -> list[Path]:
    """The contents of a run folder, without its lock."""
    return [path for path in run_dir.iterdir() if path.name != LOCK]


def make_run_dir(settings: Settings, config: str) -> Path:
    """The folder of a new run: `--out`, or runs/CONFIG-NORM with a number that is not taken.

    The latter is made here, so that two runs that start at the same time get different folders.
    """
    if settings.run.out is not None:
        return Path(settings.run.out)
    name = f"{config}-{settings.model.norm}"
    for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            (Path("runs") / (name + suffix)).mkdir(parents=True)
            return Path("runs") / (name + suffix)
    raise AssertionError("out of numbers")


def evaluate_checkpoint(settings: Settings) -> None:
    """Print the loss of the checkpoint --init-from on all of --data (`--eval-only`)."""
    if settings.run.init_from is None:
        raise UserError("--eval-only needs --init-from: the run folder, checkpoint directory or Hub id to evaluate.")
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
