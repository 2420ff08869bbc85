"""The state of a run on disk: `last/` to go on from, `best/` to use, and a way of saving that can be cut anywhere.

    last/    config.json model.safetensors generation_config.json tokenizer.* : what the ecosystem opens
             training_state.safetensors : the optimizer's moments and the random state
             state.json : step, tokens, hashes; written last, so a directory that has it is whole
    best/    the same without training_state.safetensors

Saving `last` writes `last.new`, brings it to the disk, renames `last` to `last.old` and `last.new` to `last`, and then
deletes `last.old`. Wherever this is cut, one of the three is whole, and readers take the first of last, last.new,
last.old that is. Nothing here is ever pickled.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data.tokenizer import Tokenizer
from errors import UserError
from model import pretrained
from model.decoder import Decoder
from model.find_checkpoint import candidates
from training import optimizer as optimizers
from training.settings import Settings


@dataclass(frozen=True)
class State:
    """Where a run stands. Everything else that decides how it goes on is in settings.toml and the tensors."""

    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps in all, after any shortening to fit max_minutes."""
    tokens: int
    """Tokens trained on."""
    seconds: float
    """Seconds of training so far, over all sessions."""
    best_validation_loss: float | None
    """Lowest validation loss so far, nats per token; None before the first evaluation."""
    evaluated_at: int
    """Step of the newest evaluation."""
    text_hash: str
    """Hash of the text."""
    tokenizer_hash: str
    """Hash of the tokenizer."""
    settings_hash: str
    """Hash of all settings, for people who compare runs."""
    weights_hash: str = ""
    """Hash of model.safetensors; filled in on saving."""
    training_state_hash: str = ""
    """Hash of training_state.safetensors; filled in on saving, empty where there is none."""
    scaler: dict | None = None
    """State of the float16 gradient scaler."""


def settings_hash(settings: Settings) -> str:
    """Hash of all settings but the folder's name."""
    settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, out=None))
    return hashlib.blake2b(json.dumps(dataclasses.asdict(settings)).encode(), digest_size=16).hexdigest()


def file_hash(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def save_last(run: Path, state: State, model: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer) -> None:
    """Save everything that `resume` needs as `run/last`."""

    def write(directory: Path) -> None:
        tensors = optimizers.state_tensors(optimizer, model) | random_state()
        save_file(
            {key: value.detach().contiguous() for key, value in tensors.items()},
            directory / "training_state.safetensors",
        )
        hashed = dataclasses.replace(state, training_state_hash=file_hash(directory / "training_state.safetensors"))
        write_model(directory, hashed, model, tokenizer)

    replace_directory(run / "last", write)


def save_best(run: Path, state: State, model: Decoder, tokenizer: Tokenizer) -> None:
    """Save the model alone as `run/best`."""
    replace_directory(run / "best", lambda directory: write_model(directory, state, model, tokenizer))


def write_model(directory: Path, state: State, model: Decoder, tokenizer: Tokenizer) -> None:
    """Write the model, its tokenizer, and last of all state.json."""
    pretrained.save_pretrained(model, directory, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(directory)
    state = dataclasses.replace(state, weights_hash=file_hash(directory / "model.safetensors"))
    (directory / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")


def replace_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Replace the directory `target` by what `write` puts into an empty one; at no instant is there no whole one."""
    new, old = candidates(target)[1:]
    try:
        recover_interrupted_save(target)
        new.mkdir(parents=True)
        write(new)
        fsync_directory(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
        fsync_directory(target.parent, files=False)
    except (OSError, SafetensorError) as error:
        if not target.exists() and old.exists():
            old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        kept = "still holds the save before" if target.exists() else "had not been saved before"
        raise UserError(f"{target} could not be saved ({error}) and {kept}; make room, then use --resume.") from error
    shutil.rmtree(old, ignore_errors=True)


def recover_interrupted_save(target: Path) -> None:
    """Undo or finish a save that was cut: afterwards only `target` is left, if any of the three was whole."""
    for candidate in candidates(target)[1:]:
        if not is_complete(target) and is_complete(candidate):
            shutil.rmtree(target, ignore_errors=True)
            candidate.rename(target)
        shutil.rmtree(candidate, ignore_errors=True)


def is_complete(directory: Path) -> bool:
    """Whether a save into this directory came to its end."""
    return (directory / "state.json").is_file()


def fsync_directory(directory: Path, files: bool = True) -> None:
    """fsync a directory and, if `files`, the files in it (Windows cannot fsync a directory and needs no such thing)."""
    paths = [path for path in directory.iterdir() if path.is_file()] if files else []
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    if os.name != "nt":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_last(run: Path) -> Path:
    """The whole checkpoint that a run goes on from."""
    for candidate in candidates(run / "last"):
        if is_complete(candidate):
            return candidate
    raise UserError(
        f"{run} has no whole last/ to go on from: nothing had been saved there; delete it and start the run again."
    )


def read_state(directory: Path) -> State:
    """Read state.json, after checking that the tensors beside it are those that were saved with it."""
    path = directory / "state.json"
    try:
        state = State(**json.loads(path.read_text(encoding="utf-8")))
        for name, saved in (
            ("model.safetensors", state.weights_hash),
            ("training_state.safetensors", state.training_state_hash),
        ):
            if saved and file_hash(directory / name) != saved:
                raise UserError(f"{directory / name} is not the file that was saved there: its hash differs.")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a readable training state ({error}); the run cannot go on from it.") from None
    return state


def load_last(directory: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Put the weights, the optimizer's moments and the random state of a checkpoint back, bit for bit."""
    pretrained.load_weights(model, directory)
    path = directory / "training_state.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); the run cannot go on from it.") from None
    restore_random_state({key: tensors.pop(key) for key in list(tensors) if key.startswith("random.")})
    optimizers.load_state_tensors(optimizer, model, tensors)


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's global random generators."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what `random_state` gave, as far as this machine has the same devices."""
    torch.set_rng_state(state["random.cpu"])
    if "random.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["random.cuda"])
