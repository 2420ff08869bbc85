"""The benchmarks for this machine, in about a quarter of an hour: `python -m benchmarks`.

On a CPU: decoding beside other programs, then training beside transformers in float32 and bfloat16. Prints the tables
of docs/generate.md and docs/kernels.md, and writes what was measured as JSON. On a GPU: runs `benchmarks/gpu.sh`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.programs import TRANSFORMERS
from errors import exit_on_user_error, printable

FOLDER = Path(__file__).parent
TRAINING_SHARE = 0.3  # of the minutes; the rest is for decoding


def run(name: str, *flags: object) -> dict:
    """Run a benchmark in a process of its own and print what it prints, except for the JSON in its last line."""
    command, line = [sys.executable, "-m", f"benchmarks.{name}", *map(str, flags)], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line if not line.startswith("{") else "", end="", flush=True)
    return json.loads(line) | {"exit_status": process.returncode}


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=14, help="after that no fourth turn begins (default: 14)")
    parser.add_argument("--quick", action="store_true", help="tiny models and one turn, to see that all of it runs")
    parser.add_argument("--llama2c", type=Path, metavar="PATH", help="llama2.c's program, built with `make runomp`")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder of the JSON (default: results)")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        environment = os.environ | {"LIMIT": str(int(60 * arguments.minutes)), "PYTHON": sys.executable}
        return subprocess.run(["bash", FOLDER / "gpu.sh"], env=environment).returncode
    shapes, shape, sizes = ["15m", "26m", "135m"], "26m", ["--turns", 7, "--tokens", 64]
    if arguments.quick:
        shapes, shape, sizes = ["260k"], "260k", ["--turns", 1, "--tokens", 8]
    decoding = [*sizes, "--shapes", *shapes, "--minutes", arguments.minutes * (1 - TRAINING_SHARE)]
    decoding += ["--llama2c", arguments.llama2c] if arguments.llama2c else []
    training = [*sizes[:2], "--config", "small", "--shape", shape, "--minutes", arguments.minutes * TRAINING_SHARE]
    training += ["--norms", "rms", "--dtypes", "float32", "bfloat16", "--variants", TRANSFORMERS, "CPU functions"]
    results = {"decoding": run("decoding", *decoding), "training": run("training", *training)}
    name = "cpu {processor} {threads} threads".format(**results["decoding"]["machine"]) + " quick" * arguments.quick
    path = arguments.out / (re.sub(r"\W+", "-", name).lower() + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(printable(f"\nwritten: {path}"))
    return max(result["exit_status"] for result in results.values())


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
