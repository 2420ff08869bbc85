"""Train a LLaMA-style decoder: `python train.py --norm rms`.

Thin: reads the settings, chooses the deed, and leaves it to training/.
"""

import sys

from errors import exit_on_user_error
from training import settings as settings_file

DESCRIPTION = """Train a small LLaMA-style transformer on text, on whatever this machine has.

python train.py --norm rms: a few minutes on a laptop, on Python's own library

python train.py --norm layer: the same run with LayerNorm

python train.py --data my/texts --steps 3000: your own text

python train.py --config small --dry-run: what a larger model would need

python train.py --resume runs/tiny-rms: go on with a stopped run"""


def main() -> int:
    """Do what the command line says; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # samples hold any character, consoles may not
    command = settings_file.parse(sys.argv[1:], DESCRIPTION)
    from training import commands  # imports torch, which --help does not wait for

    return commands.run(command)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
