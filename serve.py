"""Serve models to a browser and to OpenAI's clients: `python serve.py RUN [RUN]`. See `python serve.py --help`."""

import contextlib
import os
import sys

from errors import UserError, exit_on_user_error


def main() -> None:
    """Parse the command line, find the checkpoints, take the port; then import torch, load the models, and serve."""
    with exit_on_user_error():
        import socket

        import tyro

        from checkpoints.find import find_checkpoint
        from generation.settings import Settings
        from serving.settings import ServerSettings

        settings = tyro.cli(ServerSettings, prog="serve.py")
        directories = [find_checkpoint(run) for run in settings.runs]
        try:
            listener = socket.create_server((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {settings.host}, port {settings.port} ({error}); give another --port."
            ) from None
        from serving.server import ServedModel, Server  # imports torch

        loading = Settings(chat=settings.chat, device=settings.device, dtype=settings.dtype)
        models = [ServedModel(*pair, loading) for pair in zip(settings.runs, directories, strict=True)]
        print(f"http://{settings.host}:{listener.getsockname()[1]}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            Server(models, settings.host).run(sockets=[listener])
        print("stopped.", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for the thread, which may be in the middle of a long prompt


if __name__ == "__main__":
    main()
