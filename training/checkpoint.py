"""The directories of a run, written so that a kill at any instant of a save loses neither, and read back.

    last/    config.json model.safetensors generation_config.json tokenizer.* : what Hugging Face tools open
             training_state.safetensors : the optimizer's moments
             state.json : step, tokens, hashes; written last, so a directory that has it is complete
    best/    a copy without training_state.safetensors; with LoRA, both have an adapter instead of a model

With --shard every process writes files like model-00001-of-00004.safetensors, with an index in Hugging Face's format.
A save writes `last.new`, fsyncs it, renames `last` to `last.old` and `last.new` to `last`, and deletes `last.old`:
wherever that is interrupted, one of the three is complete, and readers take the first complete one. Nothing is pickled,
and there is no random state: nothing in training draws from torch's global generators.
"""

import contextlib
import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoints.find import is_complete, save_paths
from checkpoints.pretrained import save_pretrained, save_tensors, write_json
from checkpoints.weights import find_weight_files
from data.chat import has_roles
from data.tokenizer import Tokenizer
from errors import UserError, reading
from files import fsync, replace_text
from generation.settings import small_model_sampling
from model.decoder import Decoder
from training.processes import Processes, distribute_like, owned_tensors


@dataclass
class State:
    """The progress of a run. With settings.toml and the tensors, all that a resumed run needs."""

    step: int  # optimizer steps done so far
    tokens: int  # trained on so far
    seconds: float  # time of training so far, from the first start over all resumes
    best_validation_loss: float | None  # lowest so far, nats per token; None before the first evaluation
    text_hash: str  # hash of the text that it trains on
    fixed: dict  # settings that a resumed run must keep, as settings.toml may have been edited
    scaler: dict | None = None  # state of the float16 gradient scaler, None in other dtypes


def write_tensors(
    last: Path, model: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer, processes: Processes
) -> None:
    """Write a process's share of the tensors into `last`.new, and config.json, which is the same in all processes."""
    _, new, _ = save_paths(last)
    rank = processes.rank
    writers = processes.count if processes.sharded and model.lora is None else 1  # an adapter is one file
    suffix = f"-{rank + 1:05}-of-{writers:05}.safetensors" if writers > 1 else ".safetensors"
    weights = {name: tensor for name, tensor in model.state_dict().items() if model.lora is None or ".lora_" in name}
    moments = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            moments[f"{moment}.{name}"] = value
    weights = owned_tensors(weights, writers, rank, "cpu")
    moments = owned_tensors(moments, writers, rank, "cpu")
    if rank < writers:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        save_pretrained(model, new, **ids, state=weights, file=f"model{suffix}")
        save_tensors(moments, new / f"training_state{suffix}")
        fsync(*new.glob(f"*{suffix}"))


def publish_save(last: Path, state: State, tokenizer: Tokenizer, *, is_best: bool) -> None:
    """Write the files beside the tensors, and the indexes of what several processes wrote, and publish the folder."""
    _, new, _ = save_paths(last)
    tokenizer.save(new)
    generation = tokenizer.fields("generation_config.json")
    is_model = (new / "config.json").is_file()  # an adapter keeps the sampling of its model, if that was not made here
    if (is_model or has_roles(tokenizer)) and not {"do_sample", "temperature"} & generation.keys():
        bos = {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
        sampling = {"do_sample": True} | vars(small_model_sampling(chat=tokenizer.chat_template is not None))
        write_json(new / "generation_config.json", bos | {"eos_token_id": tokenizer.eos_id} | generation | sampling)
    for kind in ("model", "training_state"):
        shards = [*new.glob(f"{kind}-*.safetensors")]
        names = {key: shard.name for shard in shards for key in safe_open(shard, "pt").keys()}  # noqa: SIM118
        if names:
            write_json(new / f"{kind}.safetensors.index.json", {"metadata": {}, "weight_map": names})
    if is_best:
        best = last.with_name("best")
        shutil.copytree(new, save_paths(best)[1], ignore=shutil.ignore_patterns("training_state*"), dirs_exist_ok=True)
        publish(best, state)
    publish(last, state)


def publish(target: Path, state: State) -> None:
    """Write state.json into `target`.new and rename that to `target`. At any instant one directory is complete."""
    _, new, old = save_paths(target)
    fsync(*new.iterdir(), new)  # before state.json, which says that everything else is there
    replace_text(new / "state.json", json.dumps(dataclasses.asdict(state), indent=1))
    fsync(new)
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    recover_interrupted_save(target)


def delete(directory: Path) -> None:
    """Delete a directory, or a link of that name, as to a larger disk."""
    if directory.is_symlink():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def recover_interrupted_save(target: Path) -> None:
    """Finish or undo a save: afterwards only `target` is left, if any of the three was complete."""
    for candidate in save_paths(target)[1:]:
        if not is_complete(target) and is_complete(candidate):
            delete(target)
            candidate.rename(target)
            fsync(target.parent)  # before what it replaces is deleted
        delete(candidate)


def find_complete(target: Path) -> Path | None:
    """The complete directory of the save `target`: itself, or what an interrupted save left; None if there is none."""
    return next(filter(is_complete, save_paths(target)), None)


def find_last(run_dir: Path) -> Path:
    last = find_complete(run_dir / "last")
    if last is None:
        raise UserError(f"{run_dir} cannot be resumed: {describe_saves(run_dir)}; start a new run in another --out.")
    return last


def describe_saves(run_dir: Path) -> str:
    """Which of its saves a run has, and the flag that takes it."""
    if find_complete(run_dir / "last"):
        return f"the last save is kept: --resume {run_dir}"
    if find_complete(run_dir / "best"):
        return f"only best/ was saved, whose weights --init-from {run_dir} takes"
    return "nothing was saved yet, as the first save is at the first evaluation (--evaluate-every)"


def read_state(directory: Path) -> State:
    with reading(directory / "state.json", "the run cannot be resumed"):
        return msgspec.json.decode((directory / "state.json").read_bytes(), type=State)


def load_moments(directory: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's moments, those of parameters that the model has."""
    parameters = dict(model.named_parameters())
    for path in find_weight_files(directory, "training_state.safetensors"):
        with reading(path, "the run cannot be resumed"):
            tensors = load_file(path)
        for key, value in tensors.items():
            moment, name = key.split(".", 1)
            if name in parameters:
                value = value.to(parameters[name].device, copy=True)  # not the mapped file
                optimizer.state[parameters[name]][moment] = distribute_like(value, parameters[name])
