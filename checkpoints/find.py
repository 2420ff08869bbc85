"""Which checkpoint directory a RUN argument means: itself, the best one in a run folder, or a download of the Hub's.

Reads only file names, JSON and headers; `checkpoints.pretrained` and `data.tokenizer` load the rest.
Imports no torch.
"""

import contextlib
import sys
from pathlib import Path

from checkpoints import hub
from checkpoints.weight_files import check_format, explain_other_format, read_entries
from errors import UserError, read_json


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint directory that `path` means: itself, or in a run folder the best complete one.

    A path that does not exist may be the id of a model on the Hugging Face Hub, which is then downloaded. Prints a note
    when a better checkpoint is damaged; raises `UserError` when there is none.
    """
    name, path = str(path), Path(path)
    if path.is_file():
        raise UserError(explain_file(path))
    if not path.exists() and (model := hub.parse_id(name)) is not None:
        return hub.download(model)
    path = hub.cached_snapshot(path) or path
    if (path / "config.json").is_file():
        check_format(path)
        return path
    damaged = []
    for checkpoint in checkpoints_in(path):
        damage = find_damage(checkpoint)
        if damage is None:
            if damaged:
                note = f"note: using {checkpoint}, because preferred checkpoints are damaged ({'; '.join(damaged)})"
                print(note, file=sys.stderr)
            return checkpoint
        damaged.append(f"{checkpoint.name}: {damage}")
    if damaged:
        raise UserError(
            f"no checkpoint in the run folder {path} is complete ({'; '.join(damaged)}); "
            f"train again or give another run."
        )
    expected = "a checkpoint (a directory with config.json) {} a run folder (one with best/ or last/)"
    if not path.exists():
        raise UserError(f"{path} does not exist; give {expected.format('or')}.{suggest_runs(path)}")
    check_format(path)
    raise UserError(f"{path} is neither {expected.format('nor')}.{suggest_runs(path)}")


def explain_file(path: Path) -> str:
    """What to give instead of a file."""
    if path.suffix == ".safetensors":
        return f"{path} is one file of a checkpoint; give its directory, {path.parent}."
    return f"{path} {explain_other_format([path.name]) or 'is a file; give the directory of a checkpoint or a run.'}"


def newest_run(folder: Path) -> Path:
    """The run folder in `folder` whose newest checkpoint was saved last."""
    runs = runs_in(folder)
    if not runs:
        raise UserError(
            f"there is no run in {folder}/; train one with `python train.py`, or give a run folder or a checkpoint."
        )
    return max(runs, key=saved_at)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`, by name."""
    return sorted(run for run in folder.glob("*") if checkpoints_in(run))


def saved_at(run: Path) -> float:
    """When a run last saved a checkpoint, in seconds since 1970; one that is renamed meanwhile is ignored."""
    times = [0.0]
    for checkpoint in checkpoints_in(run):
        with contextlib.suppress(FileNotFoundError):
            times.append(checkpoint.stat().st_mtime)
    return max(times)


def checkpoints_in(run: Path) -> list[Path]:
    """The checkpoints in a run folder, complete or not, in the order in which they are preferred."""
    return [path for name in ("best", "last") for path in candidates(run / name) if path.is_dir()]


def candidates(target: Path) -> list[Path]:
    """The directories that may hold checkpoint `target`, in this order: an interrupted save leaves .new or .old."""
    return [target.with_name(target.name + suffix) for suffix in ("", ".new", ".old")]


def suggest_runs(path: Path) -> str:
    """` Existing runs: runs/A, runs/B.`, for a mistyped run; empty where there are none."""
    runs = runs_in(path.parent) or runs_in(Path("runs"))
    return f" Existing runs: {', '.join(map(str, runs))}." if runs else ""


def find_damage(directory: Path) -> str | None:
    """What is missing from a checkpoint, or None: all files must exist, and weight files have their full length."""
    if not (directory / "config.json").is_file():
        return "no config.json"
    if not has_tokenizer(directory):
        return "no tokenizer"
    try:
        read_entries(directory)
    except UserError as error:
        return str(error).removeprefix(str(directory)).lstrip("/\\ ").partition(";")[0]  # without place and advice
    return None


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has a tokenizer that `data.tokenizer` reads."""
    names = ("tokenizer.model", "tokenizer.json")
    return any((directory / name).is_file() for name in names)


def eos_ids(directory: Path, tokenizer_eos: int) -> frozenset[int]:
    """Every token id that ends a text: the tokenizer's EOS, and those of generation_config.json or else config.json.

    Chat models list several, while their tokenizer has only one EOS.
    """
    ids = {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos = read_json(path).get("eos_token_id")
        if eos is not None:
            listed = eos if isinstance(eos, list) else [eos]
            if not all(type(i) is int for i in listed):
                raise UserError(f"{path} has eos_token_id {eos!r}, which must be a token id or a list of them; fix it.")
            ids.update(listed)
            break
    return frozenset(ids)
