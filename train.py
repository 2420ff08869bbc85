"""Train a LLaMA-style decoder: reads the command line and hands it to training/."""

import os
import sys

from errors import exit_on_user_error, printable
from terminal import fit_stdout

DESCRIPTION = """Train a small LLaMA-style transformer on text, on a GPU or a CPU.

  python train.py --norm rms                     on Python's standard library
  python train.py --norm layer                   the same run with LayerNorm
  python train.py --data my/texts --steps 3000   on your own text
  python train.py --init-from RUN --data chat.jsonl --learning-rate 1e-3
                                                 teach a small model to talk
  python train.py --config small --dry-run       what a larger model would need
  python train.py --resume runs/tiny-rms         resume a stopped or killed run

  --norm rms|layer     the norm (--help-all names others)
  --data PATH ...      files, folders, patterns, hub:OWNER/NAME, or a known text
  --config NAME        tiny, small, 124m, 1b or finetune of configs/, or a file
  --steps N            optimizer steps, each of --batch-size sequences
  --learning-rate X    its peak, also --lr X
  --out FOLDER         of the run; by default runs/CONFIG-NORM or runs/TEXT-NORM
  --resume RUN         resume this run exactly where it stopped
  --init-from RUN      start from the weights of a run or a model of the Hub
  --lora RANK          train only an adapter to --init-from, as PEFT saves it
  --device, --dtype    where it computes, and how precisely; default: auto
  --dry-run            only print the memory and the time that the run needs
  --eval-only          only evaluate --init-from on --data
  --help-all           all flags with their defaults"""


def main() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is one line, not a stack of C++ frames
    from training.settings import parse  # imported here, so that Ctrl-C at any time ends in one line

    command = parse(sys.argv[1:], DESCRIPTION)
    fit_stdout(printable)  # also what others wrote
    from training import commands  # imports torch, which --help does not wait for

    return commands.run(command)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
