"""Start groups of processes of train.py one after another, as torchrun would: `python run_processes.py`.

groups.json has for each group its number of processes, its arguments, and what happens to the last process at a step:
`stop` (a signal to all), `kill` and `fail` (in a save), or `hang`. They are forked from one that has imported torch.
Prints the exit statuses of each group. Each process writes how many elements it holds to rank-K.json.
"""

import json
import os
import signal
import socket
import sys
import threading
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


def disturb(rank: int, count: int, what: str, step: int) -> None:
    """Let `what` happen at the step."""
    train_steps, save_tensors = loop.train_steps, checkpoint.save_tensors
    done = [0]

    def steps(session):
        for result in train_steps(session):
            done[0] = result.step
            if result.step == step and what == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if result.step == step and what == "hang" and rank == count - 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield result
        tensors = [*session.model.parameters(), *(t for s in session.optimizer.state.values() for t in s.values())]
        held = sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in tensors)
        Path(f"rank-{rank}.json").write_text(json.dumps([held, sum(t.numel() for t in tensors)]))

    def save(tensors, path):
        if done[0] == step and rank == count - 1 and what == "kill":
            path.write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        if done[0] == step and rank == count - 1 and what == "fail":
            raise OSError(28, "No space left on device", str(path))
        save_tensors(tensors, path)

    loop.train_steps, checkpoint.save_tensors = steps, save


def run(count: int, arguments: list[str], what: str = "", step: int = 0) -> list[int]:
    """The exit statuses of the processes; one process has no group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        names = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        disturb(rank, count, what, step)
        sys.argv[1:] = arguments
        status = 1
        try:
            with exit_on_user_error():
                status = train.main()
        except SystemExit as exit:
            status = exit.code
        finally:
            sys.stdout.flush()
            os._exit(status)
    if what == "hang":  # all others must end by themselves
        threading.Timer(200, lambda: os.kill(children[-1], signal.SIGKILL)).start()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children[:-1]]
        os.kill(children[-1], signal.SIGKILL)
        return [*statuses, os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1])]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    for group in json.loads(Path("groups.json").read_text()):
        print("statuses", json.dumps(run(*group)), flush=True)
    os._exit(0)  # not by the timer's thread
