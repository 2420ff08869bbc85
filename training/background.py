"""Saves of a sharded run: each process writes its share of the whole tensors, in a thread, while training continues.

The files are Hugging Face's sharded format: model-00001-of-00004.safetensors and so on, with an index that names the
file of each tensor; the moments likewise. So any number of processes reads them as it reads other checkpoints, and so
does transformers. All processes must see one file system.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from checkpoints.find import candidates
from checkpoints.pretrained import save_pretrained, save_tensors, write_json
from errors import fsync_directory, replace_text
from training.checkpoint import replaced
from training.optimizer import optimizer_tensors
from training.session import Session
from training.shard import share_out


class BackgroundSave:
    """At most one save at a time. All processes must call `start` and `finish`."""

    def __init__(self, session: Session):
        self.session, self.processes, self.thread, self.error = session, session.processes, None, None
        if self.processes.is_main:
            self.processes.store.set("folder", str(session.run_dir.absolute()))
        self.run_dir = Path(self.processes.store.get("folder").decode())

    def start(self, names: list[str]) -> None:
        """Finish the save before; copy everything to the host and begin to write it as the directories `names`."""
        self.finish()
        self.state, self.error, self.unfinished = self.session.state, None, contextlib.ExitStack()
        self.directories = [candidates(self.run_dir / name)[1] for name in names]
        if self.processes.is_main:
            for name in names:
                self.attempt(self.unfinished.enter_context, replaced(self.run_dir / name))
        model = self.session.model
        weights = {name: tensor for name, tensor in model.state_dict().items() if not model.lora or ".lora_" in name}
        shares = [self.share(weights), self.share(optimizer_tensors(self.session.optimizer, model))]
        self.thread = threading.Thread(target=self.attempt, args=(self.write, *shares), daemon=True)
        self.thread.start()

    def share(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host of the tensors that this process writes; all of an adapter, which is one file."""
        count, names = 1 if self.session.model.lora else self.processes.count, [*tensors]
        _, share = share_out([tensor.detach() for tensor in tensors.values()], count)
        return {names[i]: tensor.to("cpu", copy=True).contiguous() for i, tensor in share.items()}

    def attempt(self, function: Callable, *arguments: object) -> None:
        """Call the function; what it cannot write is an error of the save, not of the run."""
        try:
            function(*arguments)
        except OSError as error:
            self.error = self.error or error

    def write(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Write this process's files, and config.json, the same from all."""
        number = f"-{self.processes.rank + 1:05}-of-{self.processes.count:05}.safetensors"
        tokenizer, model = self.session.corpus.tokenizer, self.session.model
        ids = dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
        for directory in self.directories if weights else ():
            if self.processes.is_main:
                tokenizer.save(directory)
            if directory.name == "last.new":
                save_tensors(moments, directory / f"training_state{number}")
            save_pretrained(model, directory, **ids, state=weights, file=f"model{number}")
            for path in directory.glob(f"*{number}"):
                with path.open("rb+") as file:
                    os.fsync(file.fileno())

    def finish(self, *, wait: bool = True) -> bool:
        """Complete the save if all processes have written, or wait for them; False, with one line, if it failed."""
        if self.thread is None or (not wait and self.agree(self.thread.is_alive())):
            return True
        self.thread.join()
        self.thread = None
        if not self.agree(self.error is not None) and self.processes.is_main:
            self.attempt(self.complete)
        failed = self.agree(self.error is not None and self.processes.rank + 1)
        if failed == self.processes.rank + 1:
            print(f"note: step {self.state.step} is not saved ({self.error}); the save before it is kept", flush=True)
        return not failed

    def agree(self, value: int) -> int:
        """The maximum over the processes."""
        return int(self.processes.max(value, device=self.session.device)[0])

    def complete(self) -> None:
        """Write the indexes, from the headers of the files, and state.json; give the directories their names."""
        for directory in self.directories:
            for kind in ("model", "training_state"):
                places = {}
                for path in directory.glob(f"{kind}-*.safetensors"):
                    with safe_open(path, framework="pt") as file:
                        places |= dict.fromkeys(file.keys(), path.name)
                if places:
                    write_json(directory / f"{kind}.safetensors.index.json", {"metadata": {}, "weight_map": places})
            fsync_directory(directory)
            replace_text(directory / "state.json", json.dumps(dataclasses.asdict(self.state), indent=1))
        self.unfinished.close()
