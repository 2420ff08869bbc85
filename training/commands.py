"""The actions of `train.py`: train, resume, evaluate, or estimate."""

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

from checkpoints.pretrained import load_pretrained
from errors import UserError, is_main_process
from files import LOCK, locked
from model.device import explain_out_of_memory
from training.estimate import estimate
from training.evaluate import evaluate
from training.loop import train
from training.processes import explain_lost_process
from training.session import choose_machine, prepare_corpus
from training.settings import Command, Settings

LESS_MEMORY = "use a smaller --micro-batch-size, --activation-checkpointing, a smaller model, or less --data"


def run(command: Command) -> int:
    """Run what the command line asks for; returns the exit status, 128 + the number of the signal that stopped it."""
    actions, settings, action, stopped_by = command.actions, command.settings, None, 0
    if actions.dry_run:
        action = estimate
    elif actions.prepare:
        action = prepare_text
    elif actions.eval_only:
        action = evaluate_checkpoint
    with explain_out_of_memory(f"too little memory; {LESS_MEMORY}."), explain_lost_process():
        if action is not None:
            if is_main_process():
                action(settings)
        elif is_main_process():
            stopped_by = train_in_own_folder(command)
        else:
            with contextlib.redirect_stdout(None):
                stopped_by = train(settings, Path(actions.resume or "runs"), resume=actions.resume is not None)
    return 128 + stopped_by if stopped_by else 0


def train_in_own_folder(command: Command) -> int:
    """Train in a folder that no other process uses: the one to resume, or a new one, which a failed start deletes."""
    actions, settings, resume = command.actions, command.settings, command.actions.resume is not None
    run_dir = Path(actions.resume) if resume else make_run_dir(settings, Path(actions.config).stem)
    with locked(run_dir):
        if not resume and os.listdir(run_dir) != [LOCK]:
            raise UserError(f"{run_dir} is not empty, and runs are never overwritten; use another --out, or --resume.")
        try:
            return train(settings, run_dir, resume=resume)
        finally:
            if os.listdir(run_dir) == [LOCK]:
                shutil.rmtree(run_dir, ignore_errors=True)


def make_run_dir(settings: Settings, config: str) -> Path:
    """The folder of a new run: `--out`, or runs/CONFIG-NORM with a number, made here so that no other run gets it."""
    if settings.run.out is not None:
        return Path(settings.run.out)
    text = re.sub(r"\W+", "-", Path(settings.data.data[0]).stem)[:64].strip("-")  # name of a file, folder or data set
    first = Path("runs", f"{config if text in ('', 'python') else text}-{settings.model.norm}")
    for copy in itertools.count(1):
        run_dir = first if copy == 1 else first.with_name(f"{first.name}-{copy}")
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(parents=True)
            return run_dir


def prepare_text(settings: Settings) -> None:
    print(f"text: {prepare_corpus(settings).description}")


def evaluate_checkpoint(settings: Settings) -> None:
    """Print the loss of the checkpoint --init-from on all of --data (`--eval-only`)."""
    data, directory = settings.data, settings.run.init_from
    if directory is None:
        raise UserError("--eval-only needs --init-from: the run folder, checkpoint directory or Hub id to evaluate.")
    device, dtype = choose_machine(settings.machine)
    corpus, model = prepare_corpus(settings), load_pretrained(Path(directory), device=device, compute_dtype=dtype)
    windows = f"in windows of {data.sequence_length} tokens"
    print(f"{directory} on all of {', '.join(data.data)}, also what a run on it trains on, {windows}")
    batches = corpus.all_batches(data.sequence_length, data.micro_batch())
    print(evaluate(model, batches, corpus.everything_bytes, device))
