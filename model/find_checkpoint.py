"""Which directory a RUN means: a checkpoint itself, the best whole one in a run folder, or the newest run there is.

Reads names, JSON and the header of weight files only; `model.pretrained` and `data.tokenizer` load what they hold.
Imports no torch.
"""

import contextlib
import json
import sys
from pathlib import Path

from errors import UserError


def find_checkpoint(path: Path) -> Path:
    """The checkpoint directory that `path` means: itself, or in a run folder the best whole one."""
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    found, faults = None, {}
    for save in saves(path):
        fault = find_damage(save)
        if fault is None:
            found = save
            break
        faults[save.name] = fault
    listed = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    if found is not None:
        if faults:
            print(
                f"note: {found} is used, because something is wrong with what comes first ({listed})", file=sys.stderr
            )
        return found
    if faults:
        raise UserError(f"no checkpoint in the run folder {path} is whole ({listed}); train again or give another run.")
    expected = "a checkpoint (a directory with config.json) nor a run folder (one with best/ or last/)"
    if not path.exists():
        raise UserError(f"{path} does not exist; give {expected.replace(' nor ', ' or ')}.{hint(path)}")
    raise UserError(f"{path} is neither {expected}.{hint(path)}")


def newest_run(folder: Path) -> Path:
    """The run folder in `folder` that saved last."""
    runs = runs_in(folder)
    if not runs:
        raise UserError(
            f"there is no run in {folder}/ to take; train one with `python train.py`, or name a run or checkpoint."
        )
    return max(runs, key=saved_at)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`, by name."""
    return sorted(run for run in folder.glob("*") if saves(run))


def saved_at(run: Path) -> float:
    """When a run saved last, in seconds since 1970; a save that is renamed meanwhile does not count."""
    times = [0.0]
    for save in saves(run):
        with contextlib.suppress(FileNotFoundError):
            times.append(save.stat().st_mtime)
    return max(times)


def saves(run: Path) -> list[Path]:
    """The saves in a run folder, best first; whole or not."""
    return [save for name in ("best", "last") for save in candidates(run / name) if save.is_dir()]


def candidates(target: Path) -> list[Path]:
    """The places where the save `target` may be, best first: a save that was cut leaves it as .new or .old."""
    return [target.with_name(target.name + suffix) for suffix in ("", ".new", ".old")]


def hint(path: Path) -> str:
    """` There are: runs/A, runs/B` for someone who mistyped a run."""
    near = runs_in(path.parent) or runs_in(Path("runs"))
    return f" There are: {', '.join(map(str, near))}." if near else ""


def find_damage(directory: Path) -> str | None:
    """What a checkpoint lacks, or None: every file must be there, and the weights as long as their header says."""
    if not (directory / "config.json").is_file():
        return "no config.json"
    if not has_tokenizer(directory):
        return "no tokenizer"
    files = list(directory.glob("model*.safetensors"))
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = [directory / name for name in set(json.loads(index.read_text("utf-8"))["weight_map"].values())]
        cut = [file.name for file in files if file.stat().st_size != stated_size(file)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable weights, {error}"
    if not files:
        return "no model.safetensors"
    return f"{cut[0]} is cut short" if cut else None


def stated_size(file: Path) -> int:
    """Bytes that a safetensors file must have: 8 for the header's length, the header, and the last tensor's end."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length)) if length < file.stat().st_size else {}
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer that `data.tokenizer` reads lies in the directory."""
    names = ("tokenizer.model", "tokenizer.json", "sentencepiece.model")
    return any((directory / name).is_file() for name in names)


def eos_ids(directory: Path, tokenizer_eos: int) -> frozenset[int]:
    """Every id that ends a text: the tokenizer's, and those of generation_config.json or else config.json.

    Models tuned for chat list several, which their tokenizer's single EOS does not cover.
    """
    ids = {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        try:
            stated = json.loads((directory / name).read_text("utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{directory / name} is not a readable JSON object ({error}); restore it.") from None
        if stated is not None:
            ids.update(stated if isinstance(stated, list) else [stated])
            break
    return frozenset(ids)
