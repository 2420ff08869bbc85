"""Decoding beside other programs and training beside transformers, in a quarter of an hour: `python -m benchmarks`.

Prints the tables of docs/lab/decoding.md and docs/lab/training-cpu.md; what was measured goes to a JSON file in --out.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from errors import exit_on_user_error, printable


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=14, help="after that no fourth turn begins (default: 14)")
    parser.add_argument("--quick", action="store_true", help="tiny models and one turn, to see that all of it runs")
    parser.add_argument("--llama2c", metavar="PATH", help="llama2.c's program, built with `make runomp`")
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), help="folder of the JSON (default: runs/speed)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)  # now, not after a quarter of an hour
    import torch  # here, so that Ctrl-C at any time ends in one line

    from benchmarks import decoding, training

    decode, step, ours = "--shapes 15m 26m 135m --tokens 64", "--config small --shape 26m", "CPU functions"
    if torch.cuda.is_available():
        decode, step, ours = "--shapes 1b --tokens 64", "--config 124m", "Triton and torch.compile"
    if arguments.quick:
        decode, step = "--shapes 260k --tokens 8", "--config small --shape 260k"
    turns = "--turns 1" if arguments.quick else "--turns 7"
    decode = f"{decode} {turns} --minutes {0.7 * arguments.minutes}".split()
    step = f"{step} {turns} --minutes {0.3 * arguments.minutes}".split()
    if arguments.llama2c:
        decode += ["--llama2c", arguments.llama2c]
    step += ["--norms", "rms", "--dtypes", "float32", "bfloat16", "--variants", "transformers", ours]
    results = {"decoding": decoding.main(decode), "training": training.main(step)}
    machine = results["decoding"]["machine"]
    name = f"{machine['device']} {machine['processor']}{' quick' if arguments.quick else ''}"
    path = arguments.out / (re.sub(r"\W+", "-", name).lower() + ".json")
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(printable(f"\nwritten: {path}"))
    tables = [table for result in results.values() for table in result["tables"]]
    return int(any(table["not_run"] for table in tables))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
