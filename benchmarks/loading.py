"""Memory and time of loading a checkpoint, beside transformers: `python -m benchmarks.loading`. Linux alone counts the
peak memory of a process. Prints a line of JSON for each measurement, and the medians last.

The checkpoint has the shape of a tied 135M LLaMA and random weights. Each measurement is a fresh process, which has
loaded a tiny checkpoint and called its model before. Its peak is that of the resident memory minus what it was then, as
a multiple of the weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.arguments import positive
from checkpoints.pretrained import open_checkpoint, save_pretrained
from errors import UserError, exit_on_user_error
from generation.session import load_decoder
from generation.settings import Settings
from model.config import ModelConfig
from model.decoder import Decoder

SHAPE = ModelConfig(49152, 576, 1536, 30, 9, 3, max_position_embeddings=2048)
TINY = ModelConfig(256, 64, 64, 1, 4, 2, max_position_embeddings=64)
STATUS = Path("/proc/self/status")


def main() -> None:
    """Measure both readers in turn, in float32 and bfloat16."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--one", nargs=3, metavar=("READER", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not STATUS.exists():
        raise UserError("peak memory is read from /proc/self/status, which this system lacks; run it on Linux.")
    if arguments.one is not None:
        print(json.dumps(measure(*arguments.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            save_pretrained(Decoder(SHAPE, seed=1).to(getattr(torch, dtype)), Path(folder) / dtype)
            results = {"ours": [], "transformers": []}
            for _ in range(arguments.repeats):
                for reader, found in results.items():
                    found.append(in_fresh_process(reader, f"{folder}/{dtype}", dtype))
                    print(dtype, reader, json.dumps(found[-1]), flush=True)
            for reader, found in results.items():
                medians = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
                print(f"median of {len(found)}:", dtype, reader, json.dumps(medians), flush=True)


def in_fresh_process(reader: str, folder: str, dtype: str) -> dict[str, float]:
    """What `measure` returns, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", "--one", reader, folder, dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the process that loads with {reader} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


@torch.no_grad()
def measure(reader: str, folder: str, dtype: str) -> dict[str, float]:
    """Seconds of loading, and the peak after it and after a forward pass, as multiples of the weights."""
    with tempfile.TemporaryDirectory() as tiny:  # what is imported and set up once is no part of a load
        save_pretrained(Decoder(TINY, seed=1), tiny)
        load(reader, tiny, dtype)(torch.arange(8)[None])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: now it is what the process has
    before, start = peak(), time.perf_counter()
    model = load(reader, folder, dtype)
    seconds = time.perf_counter() - start
    weights = sum(parameter.nbytes for parameter in model.parameters())
    loaded = peak() - before
    model(torch.arange(8)[None])
    return {"seconds": seconds, "loaded": loaded / weights, "after_forward": (peak() - before) / weights}


def load(reader: str, folder: str, dtype: str) -> nn.Module:
    """The checkpoint's model, by our reader or by that of transformers."""
    if reader == "ours":
        return load_decoder(open_checkpoint(folder), Settings(device="cpu", dtype=dtype))
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def peak() -> int:
    """The peak of this process's resident memory, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    with exit_on_user_error():
        main()
