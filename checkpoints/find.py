"""What a RUN argument means: a directory on disk or on the Hub, and an adapter's model. Imports no torch."""

import difflib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from checkpoints.weights import ADAPTER_CONFIG, OTHER_FORMATS, check_format, has_weights
from errors import UserError, note
from files import read_json

RUNS = Path("runs")
# org/name or org/name@revision
HUB_ID = re.compile(r"(?P<id>(?!runs/)\w[\w.-]*/(?P<name>\w[\w.-]*))(?:@(?P<revision>.+))?", re.ASCII)


class ModelFiles(NamedTuple):
    """The directories of a model and of its adapter, if it has one."""

    model: Path
    adapter: Path | None

    def __str__(self) -> str:
        return str(self.model) if self.adapter is None else f"{self.model} with the adapter {self.adapter}"

    @property
    def tokenizer(self) -> Path:
        """The directory with the tokenizer: the adapter's, if it has one."""
        return self.adapter if self.adapter is not None and any(self.adapter.glob("tokenizer.*")) else self.model

    @property
    def generation_config(self) -> Path:
        """The generation_config.json: the adapter's, if it has one."""
        path = (self.adapter or self.model) / "generation_config.json"
        return path if path.is_file() else self.model / path.name


def find_checkpoint(name: Path | str) -> Path:
    """The checkpoint or adapter that `name` means: itself, the best one of a run, or a download from the Hub."""
    path = Path(name)
    if (path / "config.json").is_file() or (path / ADAPTER_CONFIG).is_file():
        return path
    saves = saves_in(path)
    if saves:
        return saves[0]
    hub_id = HUB_ID.fullmatch(str(name))
    if hub_id and not path.exists() and not Path(path.parts[0]).is_dir():
        run = RUNS / hub_id["name"]
        if run.is_dir():
            raise UserError(f"{path} does not exist; did you mean {run}?")
        return download(hub_id["id"], hub_id["revision"])
    if path.is_file() and path.suffix == ".gguf":
        raise UserError(f"{path} has {OTHER_FORMATS[b'GGUF']}.")
    if path.is_file():
        raise UserError(f"{path} is a file; give the directory of a checkpoint or a run.")
    if path.is_dir():
        check_format(path)  # says so if there are weights in another format
    problem = f"{path} has no" if path.is_dir() else f"{path} does not exist; give a directory with"
    raise UserError(f"{problem} config.json, best/ or last/.{newest_runs(path.parent, path.name)}")


def find_files(directory: Path, adapter: str | None = None) -> ModelFiles:
    """A model with its adapter, if any; an adapter as `directory` holds or names its model."""
    is_adapter = (directory / ADAPTER_CONFIG).is_file() and not has_weights(directory)
    if adapter is not None and is_adapter:
        raise UserError(f"{directory} is an adapter; leave out --adapter, or give its model.")
    if adapter is not None:
        adapter_directory = find_checkpoint(adapter)
        if not (adapter_directory / ADAPTER_CONFIG).is_file():
            raise UserError(f"{adapter} is no adapter, as it has no {ADAPTER_CONFIG}; give one of --lora or PEFT.")
        base = read_json(adapter_directory / ADAPTER_CONFIG).get("base_model_name_or_path")
        is_here = isinstance(base, str) and Path(base).is_dir()
        if is_here and not any(place.samefile(directory) for place in (Path(base), *saves_in(Path(base)))):
            note(f"{adapter} was trained on {base}, not on {directory}: it fits only if their weights are equal")
        return ModelFiles(directory, adapter_directory)
    if not is_adapter:  # one beside weights is used, as in transformers
        return ModelFiles(directory, directory if (directory / ADAPTER_CONFIG).is_file() else None)
    return ModelFiles(find_base(directory), directory)


def find_base(adapter: Path) -> Path:
    """The directory of the model that an adapter names, also where both were moved, or of the Hub."""
    fields = read_json(adapter / ADAPTER_CONFIG)
    base = fields.get("base_model_name_or_path")
    advice = f"Give the model itself: python generate.py MODEL --adapter {shlex.quote(str(adapter))}"
    if not isinstance(base, str) or Path(base) in (Path(), adapter):
        raise UserError(f"{adapter} is an adapter of {base!r}, which is no model. {advice}")
    if not Path(base).exists():
        parts = Path(base).parts
        ends = [Path(*parts[start:]) for start in range(max(1, len(parts) - 1))]
        moved = (folder / end for folder in adapter.resolve().parents for end in ends)
        hub_name = f"{base}@{fields['revision']}" if fields.get("revision") else base
        base = next(filter(Path.is_dir, moved), hub_name)
    try:
        return find_checkpoint(base)
    except UserError as error:
        reason = str(error).partition(" Did you mean")[0]
        raise UserError(f"{adapter} is an adapter of a model that is not here: {reason} {advice}") from None


def download(name: str, revision: str | None) -> Path:
    """The directory of a Hub model's files that are read here, after downloading those that its cache lacks."""
    from huggingface_hub import snapshot_download

    patterns = ["model.safetensors", "model-*.safetensors", "adapter_model.safetensors", "*.json", "*.model", "*.jinja"]
    try:
        # `*` matches `/` too, so that folders such as original/ and onnx/ are excluded separately
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"))
    except Exception as error:  # a network fails in many ways, and each version of the library has other classes
        reason = " ".join(str(error).split()).rstrip(".")
        problem = f"{name} is no local path, and the Hugging Face Hub gives no model: {reason}"
        raise UserError(f"{problem}.{newest_runs()}") from error


def newest_run(folder: Path = RUNS) -> Path:
    """The run folder in `folder` whose newest checkpoint was saved last."""
    runs = runs_in(folder)
    if not runs:
        fix = "train one with `python train.py`, or give a run folder or a checkpoint"
        raise UserError(f"there is no run in {folder}/; {fix}.")
    return runs[0]


def newest_runs(folder: Path = RUNS, wanted: str = "") -> str:
    """A sentence for an error: the run that is called almost as wanted, or the newest, in `folder` or else in runs/."""
    runs = runs_in(folder) or runs_in(RUNS)
    close = difflib.get_close_matches(wanted, [run.name for run in runs], n=1)
    if close:
        return f" Did you mean {runs[0].parent / close[0]}?"
    return f" Newest runs: {', '.join(map(str, runs[:5]))}." if runs else ""


def runs_in(folder: Path) -> list[Path]:
    """The run folders in `folder`, that with the newest checkpoint first."""
    runs = [run for run in folder.glob("*") if saves_in(run)]
    return sorted(runs, key=lambda run: max(save.stat().st_mtime for save in saves_in(run)), reverse=True)


def saves_in(run: Path) -> list[Path]:
    """The complete checkpoints in a run folder, in the order in which they are preferred."""
    return [path for name in ("best", "last") for path in save_paths(run / name) if is_complete(path)]


def is_complete(directory: Path) -> bool:
    """Whether a save into this directory was finished: state.json is written last."""
    return (directory / "state.json").is_file()


def save_paths(target: Path) -> list[Path]:
    """The directories that may hold checkpoint `target`, in this order: an interrupted save leaves .new or .old."""
    return [target.with_name(target.name + suffix) for suffix in ("", ".new", ".old")]
