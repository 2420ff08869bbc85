"""The command line of serve.py. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from flags import arg


@dataclass(frozen=True)
class ServerSettings:
    """Serve models to a browser, two side by side, and to clients of OpenAI's API under /v1."""

    runs: Annotated[tuple[str, ...], arg(metavar="RUN"), tyro.conf.Positional]
    """Runs, checkpoint directories or models of the Hugging Face Hub."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets the whole network in, without a password."""
    port: int = 8000
    """Port to listen on (0: any)."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Refuse to start without a chat template. Default: such a model continues texts."""
    device: str = "auto"
    """As in generate.py."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """As in generate.py."""
