"""The actions of `train.py`: train, resume, evaluate, or estimate."""

import contextlib
import itertools
import os
import re
from pathlib import Path

from tqdm import tqdm

from checkpoints.families import load_config
from checkpoints.pretrained import load_pretrained
from errors import UserError, is_main_process
from files import LOCK, locked, read_json
from model.device import explain_out_of_memory
from training.checkpoint import find_last
from training.estimate import estimate
from training.evaluate import evaluate
from training.loop import train
from training.processes import explain_lost_process
from training.session import prepare_corpus, use_machine
from training.settings import Command, Settings

LESS_MEMORY = "use a smaller --micro-batch-size, --activation-checkpointing, a smaller model, or less --data"


def run(command: Command) -> int:
    """Run what the command line asks for; returns the exit status, 128 + the number of the signal that stopped it."""
    actions, settings = command.actions, command.settings
    last = find_last(Path(actions.resume)) if actions.resume else None
    with explain_out_of_memory(f"too little memory; {LESS_MEMORY}."), explain_lost_process():
        if not (actions.dry_run or actions.prepare or actions.eval_only):
            stopped_by = train_in_folder(command)
            return 128 + stopped_by if stopped_by else 0
        if not is_main_process():
            return 0
        if actions.dry_run:
            if actions.resume is None and settings.run.out is not None and Path(settings.run.out).exists():
                print(f"note: {settings.run.out} exists; without --dry-run, give another --out")
            estimate(settings, last)
        elif actions.prepare:
            corpus = prepare_corpus(settings, last)
            print("text:", "\n  ".join([corpus.description, *corpus.advice]))
        else:
            evaluate_checkpoint(settings)
    return 0


def train_in_folder(command: Command) -> int:
    """Train in a folder that no other run uses: the one to resume, or a new one, which a failed start deletes."""
    settings, resume = command.settings, command.actions.resume
    if not is_main_process():  # it prints nothing, and gets the folder of a new run from the main process
        with contextlib.redirect_stdout(None):
            return train(settings, Path(resume or "unused"), resume=resume is not None)
    run_dir = Path(resume or settings.run.out or make_run_dir(settings, command.actions.config))
    with locked(run_dir):
        if resume is None and os.listdir(run_dir) != [LOCK]:
            raise UserError(f"{run_dir} is not empty, and runs are never overwritten; use another --out, or --resume.")
        return train(settings, run_dir, resume=resume is not None)


def make_run_dir(settings: Settings, config: str) -> Path:
    """The folder of a new run, runs/CONFIG-NORM or runs/TEXT-NORM with a number, made here so that no other gets it."""
    path = Path(settings.data.data[0])  # a file, folder or data set; of papers/*.txt the folder
    names = [re.sub(r"\W+", "-", name)[:64].strip("-") for name in (path.stem, path.parent.name)]
    text = names[0] or names[1]
    name = f"{Path(config).stem if text in ('', 'python') else text}-{settings.model.norm}"
    for count in itertools.count(1):
        run_dir = Path("runs", name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(parents=True)
            return run_dir


def evaluate_checkpoint(settings: Settings) -> None:
    """Print the loss of the checkpoint --init-from on all of --data (`--eval-only`)."""
    data, directory = settings.data, settings.run.init_from
    if directory is None:
        raise UserError("--eval-only needs --init-from: the run folder, checkpoint directory or Hub id to evaluate.")
    model_as_it_is = vars(load_config(directory))
    changed = [name for name, value in vars(settings.model).items() if value != model_as_it_is[name]]
    if changed:
        raise UserError(f"--eval-only takes the model as it is; leave out --{changed[0].replace('_', '-')}.")
    device, dtype = use_machine(settings)
    corpus = prepare_corpus(settings)
    model = load_pretrained(directory, device=device, compute_dtype=dtype)
    print("text:", "\n  ".join([corpus.description.partition("\n")[0], *corpus.advice]))
    print(f"{directory} on all of {', '.join(data.data)}, in windows of {data.sequence_length} tokens")
    if read_json(Path(directory) / "state.json").get("text_hash") == corpus.text_hash:
        print("note: it was trained on this text, but for what was held out")
    sizes = data.sequence_length, data.micro_batch()
    count = sum(1 for _ in corpus.all_batches(*sizes))
    batches = tqdm(corpus.all_batches(*sizes), "evaluating", count, unit="batch", leave=False, disable=None)
    print(evaluate(model, batches, corpus.everything_bytes, device))
