"""Serve models to a browser and to OpenAI's clients: `python serve.py RUN [RUN]`. See `python serve.py --help`."""

if __name__ == "__main__":
    from errors import run_main

    run_main("serve", "serve.py")

import gc
import os
import signal
import socket
from typing import Annotated

import tyro

from checkpoints.find import find_checkpoint, find_files, newest_run
from errors import UserError
from flags import optional
from generation.settings import Dtype


def stop(*_: object) -> None:
    """End the process, when uvicorn, which handles Ctrl-C first, raises it again: a long prompt may be running."""
    os.write(2, b"stopped.\n")
    os._exit(130)


def main(
    runs: Annotated[tuple[str, ...], optional("[RUN ...]"), tyro.conf.Positional] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve models to a browser, two side by side, and to clients of OpenAI's API under /v1.

    Args:
        runs: Runs, checkpoint directories or models of the Hugging Face Hub. Default: the newest run in runs/.
        host: Address to listen on. 0.0.0.0 lets the whole network in, without a password.
        port: Port to listen on (0: any).
        device: As in generate.py.
        dtype: As in generate.py.
    """
    directories = {run.rstrip("/"): find_checkpoint(run) for run in runs or [str(newest_run())]}
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on port {port} of {host} ({reason}); give another --port or --host.") from None
    from serving.server import Server  # imports torch

    server = Server(directories, host, dtype, device)
    print(f"http://{host}:{listener.getsockname()[1]}/ (Ctrl-C ends it) serves")
    for name, model in server.models.items():
        computed = str(model.decoder.compute_dtype).removeprefix("torch.")
        print(f"  {name}: {find_files(directories[name])} on {model.device} in {computed}", flush=True)
    gc.freeze()  # else a body of many lists stops all answers for half a second, to look for cycles in all of torch
    signal.signal(signal.SIGINT, stop)
    server.run(sockets=[listener])
