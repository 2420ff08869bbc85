"""Start groups of processes of train.py one after another, as torchrun would: `python run_processes.py`.

groups.json has for each group its number of processes, its arguments, in which RANK is the process's, and what happens
to the last process, by step: `stop` (a signal to all), `kill` and `fail` (in a save), or `hang`.
They are forked from one that has imported torch.
Prints the exit statuses of each group. Each process writes how many elements it holds to rank-K.json.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
sys.argv = ["train.py"]

import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import tyro  # noqa: E402, F401 - imported once for all

import train  # noqa: E402
from errors import exit_on_user_error  # noqa: E402
from training import checkpoint, commands, loop  # noqa: E402, F401

torch.set_num_threads(1)


def disturb(rank: int, count: int, happens: dict[str, str]) -> None:
    """Let the things happen."""
    train_steps, save_tensors = loop.train_steps, checkpoint.save_tensors
    now = [None]

    def steps(session):
        for result in train_steps(session):
            now[0] = happens.get(str(result.step))
            if now[0] == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if now[0] == "hang" and rank == count - 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield result
        tensors = [*session.model.parameters(), *(t for s in session.optimizer.state.values() for t in s.values())]
        held = sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in tensors)
        Path(f"rank-{rank}.json").write_text(json.dumps([held, sum(t.numel() for t in tensors)]))

    def write(tensors, path):
        if now[0] == "kill" and rank == count - 1:
            path.write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        if now[0] == "fail" and rank == count - 1:
            raise OSError(28, "No space left on device", str(path))
        save_tensors(tensors, path)

    loop.train_steps, checkpoint.save_tensors = steps, write


def run(count: int, arguments: list[str], happens: dict[str, str]) -> list[int]:
    """The exit statuses of the processes; one process has no group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        names = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
        os.environ.update(names, MASTER_PORT=port)
        disturb(rank, count, happens)
        sys.argv[1:] = [argument.replace("RANK", str(rank)) for argument in arguments]
        status = 1
        try:
            with exit_on_user_error():
                status = train.main()
        except SystemExit as exit:
            status = exit.code
        finally:
            os._exit(status)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children[:-1]]
    if "hang" in happens.values():  # all others have ended by themselves
        os.kill(children[-1], signal.SIGKILL)
    return [*statuses, os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1])]


if __name__ == "__main__":
    for group in json.loads(Path("groups.json").read_text()):
        print("statuses", json.dumps(run(*group)), flush=True)
