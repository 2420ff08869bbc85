"""What a save writes: the weights, the moments and the progress of a session, as `last/` and `best/`.

With --shard every process writes its share of the tensors, else the main one all. Training waits meanwhile: in the
default run 0.04 to 0.1 s, six times in four minutes.
"""

import dataclasses
import math
import shutil
from pathlib import Path

from safetensors import safe_open

from checkpoints import pretrained
from checkpoints.find import candidates
from checkpoints.pretrained import save_tensors, write_json
from files import fsync, read_json
from generation.settings import SMALL_MODELS
from training.checkpoint import State, describe_saves, finish_save
from training.session import Session
from training.shard import share_out


def save(session: Session, validation_loss: float | None = None) -> bool:
    """Save all that a resumed run needs as `last/`, and a model with the lowest loss so far as `best/` too.

    All processes call it. Where a file cannot be written it prints a line, the saves before stay, and it returns False.
    """
    processes, state, targets, error = session.processes, session.state, [session.run_dir / "last"], None
    best = math.inf if state.best_validation_loss is None else state.best_validation_loss
    if validation_loss is not None and validation_loss < best:
        state = dataclasses.replace(state, best_validation_loss=validation_loss)
        targets = [session.run_dir / "best", *targets]
    try:
        write_tensors(session, targets)
    except OSError as caught:
        error = caught
    all_processes_wrote = not processes.max(error is not None)
    if all_processes_wrote and processes.is_main:
        try:
            complete(session, state, targets)
        except OSError as caught:
            error = caught
    saved = not processes.max(error is not None)
    if saved:
        session.state = state
    if error is not None:
        for target in targets:
            shutil.rmtree(candidates(target)[1], ignore_errors=True)  # it may fill the disk
        print(f"note: step {state.step} is not saved ({error}); {describe_saves(session.run_dir)}", flush=True)
    return saved


def write_tensors(session: Session, targets: list[Path]) -> None:
    """Write this process's share of the tensors, and config.json, which is the same in all processes."""
    model, rank, count = session.model, session.processes.rank, session.processes.count
    lora, tokenizer = model.lora is not None, session.corpus.tokenizer
    weights = {name: tensor for name, tensor in model.state_dict().items() if not lora or ".lora_" in name}
    moments = {  # as `load_moments` reads them
        f"{moment}.{name}": value
        for name, parameter in model.named_parameters()
        for moment, value in session.optimizer.state.get(parameter, {}).items()
    }
    writers = count if session.sharded and not lora else 1  # an adapter is one file
    weights, moments = (share_out(tensors, writers, rank, "cpu")[1] for tensors in (weights, moments))
    if rank >= writers:
        return
    part = f"-{rank + 1:05}-of-{count:05}" if session.sharded else ""
    ids = dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    for target in targets:
        _, directory, _ = candidates(target)
        pretrained.save_pretrained(model, directory, **ids, state=weights, file=f"model{part}.safetensors")
        if target.name == "last":
            save_tensors(moments, directory / f"training_state{part}.safetensors")
        fsync(*directory.glob(f"*{part}.safetensors"))


def complete(session: Session, state: State, targets: list[Path]) -> None:
    """Write all other files, and the indexes of what several processes wrote, and replace the saves before."""
    for target in targets:
        _, directory, _ = candidates(target)
        session.corpus.tokenizer.save(directory)  # it may have a generation_config.json of its own
        path = directory / "generation_config.json"
        recommended = read_json(path)
        if recommended and not {"do_sample", "temperature"} & recommended.keys():
            write_json(path, recommended | {"do_sample": True} | vars(SMALL_MODELS))
        for kind in ("model", "training_state"):
            files = [*directory.glob(f"{kind}-*.safetensors")]
            names = {key: file.name for file in files for key in safe_open(file, "pt").keys()}  # noqa: SIM118
            if names:
                write_json(directory / f"{kind}.safetensors.index.json", {"metadata": {}, "weight_map": names})
        finish_save(target, state)
