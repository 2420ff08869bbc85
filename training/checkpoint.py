"""The state of a run on disk: `last/` to resume from, `best/` to use. A kill at any instant of a save loses neither.

    last/    config.json model.safetensors generation_config.json tokenizer.* : what Hugging Face tools open
             training_state.safetensors : the optimizer's moments
             state.json : step, tokens, hashes; written last, so a directory that has it is complete
    best/    the same without training_state.safetensors; with LoRA, both have an adapter instead of a model

With --shard they have files such as model-00001-of-00004.safetensors and an index instead, as Hugging Face does.

Saving `last` writes `last.new`, fsyncs it, renames `last` to `last.old` and `last.new` to `last`, and then deletes
`last.old`. Wherever that is interrupted, one of the three is complete, and readers take the first complete one. Nothing
is pickled. There is no random state: nothing in training draws from torch's global generators.
"""

import contextlib
import dataclasses
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoints import pretrained
from checkpoints.find import candidates, is_complete
from checkpoints.pretrained import save_tensors, write_json
from checkpoints.weights import find_weight_files
from data.tokenizer import Tokenizer
from errors import UserError, reading
from files import fsync, read_json, replace_text
from generation.settings import SMALL_MODELS
from model.decoder import Decoder
from training.processes import Processes
from training.shard import divide, share_out


@dataclass(frozen=True)
class State:
    """The progress of a run. With settings.toml and the tensors, all that a resumed run needs."""

    step: int
    """Optimizer steps done so far."""
    tokens: int
    """Tokens trained on so far."""
    seconds: float
    """Seconds of training so far, from the first start over all resumes."""
    best_validation_loss: float | None
    """Lowest validation loss so far, nats per token; None before the first evaluation."""
    text_hash: str
    """Hash of the text that it trains on."""
    scaler: dict | None = None
    """State of the float16 gradient scaler, None in other dtypes."""
    fixed_hash: str | None = None
    """Hash of the settings that a resumed run must keep; settings.toml may have been edited."""


def finish_save(target: Path, state: State) -> None:
    """Write state.json into `target`.new and rename that to `target`. At any instant one directory is complete."""
    new, old = candidates(target)[1:]
    fsync(*new.iterdir(), new)  # before state.json, which says that everything else is there
    replace_text(new / "state.json", json.dumps(dataclasses.asdict(state), indent=1))
    fsync(new)
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    new.rename(target)
    fsync(target.parent)
    delete(old)


def delete(directory: Path) -> None:
    """Delete a directory; of a link or a file, which a run of others may have, only that."""
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def recover_interrupted_save(target: Path) -> None:
    """Finish or undo an interrupted save: afterwards only `target` is left, if any of the three was complete."""
    for candidate in candidates(target)[1:]:
        if not is_complete(target) and is_complete(candidate):
            delete(target)
            candidate.rename(target)
        delete(candidate)


def find_complete(target: Path) -> Path | None:
    """The complete directory of the save `target`: itself, or what an interrupted save left; None if there is none."""
    return next((candidate for candidate in candidates(target) if is_complete(candidate)), None)


def find_last(run_dir: Path) -> Path:
    """The complete checkpoint that a run resumes from."""
    if (last := find_complete(run_dir / "last")) is None:
        raise UserError(f"{run_dir} cannot be resumed: {describe_saves(run_dir)}; start a new run.")
    return last


def describe_saves(run_dir: Path) -> str:
    """Which of its saves a run has, and the flag that takes it."""
    if find_complete(run_dir / "last"):
        return f"the last save is kept: --resume {run_dir}"
    if find_complete(run_dir / "best"):
        return f"only best/ was saved, whose weights --init-from {run_dir} takes"
    return "nothing was saved yet"


def read_state(directory: Path) -> State:
    """Read state.json."""
    path = directory / "state.json"
    with reading(path, "the run cannot be resumed"):
        return State(**json.loads(path.read_bytes()))


def load_moments(directory: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> State:
    """Load the optimizer's moments, those of parameters that the model has; returns the state that they are of."""
    parameters = dict(model.named_parameters())
    for path in find_weight_files(directory, "training_state.safetensors"):
        with reading(path, "the run cannot be resumed"):
            tensors = load_file(path)
        for key, value in tensors.items():
            moment, name = key.split(".", 1)
            if name in parameters:
                value = value.to(parameters[name].device, copy=True)  # not the mapped file
                optimizer.state[parameters[name]][moment] = divide(value, parameters[name])
    return read_state(directory)


@dataclass
class BackgroundSave:
    """Saves in a thread. All processes call `start` and `finish`; the main one writes, or all if `sharded`."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer
    processes: Processes
    sharded: bool
    saved: State
    """Of the last save that is complete, or of the start."""
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    writing: Future | None = None

    def start(self, state: State, run_dir: Path, names: list[str]) -> None:
        """Copy everything to the host and begin to write it as the directories `names`; no save may be unfinished."""
        if self.sharded:  # in one file system; only the main process knows the folder
            if self.processes.is_main:
                self.processes.store.set("folder", str(run_dir.absolute()))
            run_dir = Path(self.processes.store.get("folder").decode())
        self.state, self.targets = state, [run_dir / name for name in names]
        lora = self.model.lora is not None  # an adapter is one file
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if not lora or ".lora_" in name}
        moments = {  # as `load_moments` reads them
            f"{moment}.{name}": value
            for name, parameter in self.model.named_parameters()
            for moment, value in self.optimizer.state.get(parameter, {}).items()
        }
        files = self.processes.count if self.sharded and not lora else 1
        shares = [share_out(part, files, self.processes.rank, "cpu")[1] for part in (weights, moments)]
        self.writing = self.pool.submit(self.write, *shares)

    def write(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
        """Write this process's share of the tensors, and config.json, which is the same in all processes."""
        part = f"-{self.processes.rank + 1:05}-of-{self.processes.count:05}" if self.sharded else ""
        ids = dict(bos_token_id=self.tokenizer.bos_id, eos_token_id=self.tokenizer.eos_id)
        for target in self.targets if weights or moments else ():
            directory = candidates(target)[1]
            pretrained.save_pretrained(self.model, directory, **ids, state=weights, file=f"model{part}.safetensors")
            if target.name == "last":
                save_tensors(moments, directory / f"training_state{part}.safetensors")
            fsync(*directory.glob(f"*{part}.safetensors"))
        if self.processes.is_main and not self.sharded:
            self.complete()

    def finish(self, *, wait: bool = True) -> bool:
        """Complete the save if all processes have written, or wait for them; False, with one line, if it failed."""
        if self.writing is None or (not wait and self.processes.max(not self.writing.done())):
            return True
        error, self.writing = self.writing.exception(), None  # waits
        if self.sharded and not self.processes.max(error is not None) and self.processes.is_main:
            error = self.pool.submit(self.complete).exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        number = self.processes.rank + 1
        failed = self.processes.max(number if error else 0)
        if failed == number:  # one of those with an error
            for target in self.targets:
                shutil.rmtree(candidates(target)[1], ignore_errors=True)  # it may fill the disk
            saved = describe_saves(self.targets[0].parent)
            print(f"note: step {self.state.step} is not saved ({error}); {saved}", flush=True)
        self.saved = self.saved if failed else self.state
        return not failed

    def complete(self) -> None:
        """Write the indexes, from the headers of the files, and replace the previous saves."""
        for target in self.targets:
            directory = candidates(target)[1]
            self.tokenizer.save(directory)  # after all have written: it may have a generation_config.json of its own
            recommended = read_json(path := directory / "generation_config.json")
            if recommended and not {"do_sample", "temperature"} & recommended.keys():
                write_json(path, recommended | {"do_sample": True} | vars(SMALL_MODELS))
            for kind in ("model", "training_state"):
                if paths := [*directory.glob(f"{kind}-*.safetensors")]:
                    names = {key: path.name for path in paths for key in safe_open(path, "pt").keys()}  # noqa: SIM118
                    write_json(directory / f"{kind}.safetensors.index.json", {"metadata": {}, "weight_map": names})
            finish_save(target, self.state)
