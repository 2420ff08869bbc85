"""What all benchmarks share: checked command-line values, and results that are printed, kept and compared."""

import argparse
import json
import re
from pathlib import Path

from benchmarks.goals import OURS
from errors import UserError
from files import replace_text

RESULTS = Path(__file__).parent / "results"
MAX_SLOWDOWN = 1.05  # of ours, against committed results
PARTS = ("forward", "backward", "both")


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def pattern(text: str) -> str:
    """A regular expression, for argparse."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid pattern ({error})") from None
    return text


def check_out(path: Path | None) -> None:
    """Raise `UserError` before anything is measured where the results could not be written afterwards."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UserError(f"--out {path} cannot be written; give a file in a folder that exists.")


def write(results: dict, path: Path | None) -> None:
    """Print results as one line of JSON, and write the same line to `path`."""
    print(json.dumps(results))
    if path is not None:
        write_atomically(path, results)


def write_atomically(path: Path, results: dict) -> None:
    """Write results to a file as one line of JSON; after a kill it has either the old results or the new ones."""
    replace_text(path, json.dumps(results) + "\n")


def same_device(one: dict, other: dict) -> bool:
    """Whether two results are of the same device model; the host of a GPU does not matter."""
    keys = ("device", "processor") if other["device"].startswith("CPU") else ("device",)
    return all(one.get(key) == other[key] for key in keys)


def committed_results(machine: dict, against: Path | None) -> dict[str, dict]:
    """Cases by name of the file `against`, or of the one in benchmarks/results/ that was measured on this device."""
    if against is None:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("kernels-*.json"))]
        chosen = next((results for results in found if same_device(results["machine"], machine)), {"cases": []})
    else:
        chosen = read_results(against, "--against")
    return {case["name"]: case for case in chosen["cases"]}


def read_results(path: Path, flag: str) -> dict:
    """Results that this command wrote. Raises UserError where the file holds something else."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not {"machine", "cases"} <= results.keys():
            raise ValueError("it holds no cases")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{flag} {path} holds no results of this command ({error}); give another file.") from None
    return results


def regressions(name: str, found: dict, committed: dict[str, dict]) -> list[str]:
    """One line for each part of ours that takes over 5% longer than in committed results."""
    before = committed.get(name, {"baselines": {}})["baselines"].get(OURS, {})
    now = found[OURS]
    slower = [part for part in PARTS if part in before and part in now and now[part] > MAX_SLOWDOWN * before[part]]
    return [
        f"SLOWER {name}, {part}: {now[part] * 1e6:,.1f} µs, committed {before[part] * 1e6:,.1f} µs, "
        f"{now[part] / before[part] - 1:.0%} more"
        for part in slower
    ]
