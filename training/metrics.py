"""What a run measures: one JSON object per line in metrics.jsonl.

Resuming first removes the lines that are newer than the checkpoint, so the file reads as if the run had never stopped.
"""

import json
import math
from pathlib import Path

from errors import reading
from files import replace_text, writing


class Metrics:
    """Appends to `run_dir/metrics.jsonl`."""

    def __init__(self, run_dir: Path, *, after_step: int) -> None:
        """Keep the lines of steps up to `after_step`."""
        path = run_dir / "metrics.jsonl"
        replace_text(path, "".join(json.dumps(line) + "\n" for line in read(run_dir) if line["step"] <= after_step))
        # Line buffering: a kill loses no line, so a checkpoint is never ahead of the lines that led to it.
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, **values: float) -> None:
        """Add one line; infinity and NaN, which JSON lacks, are written as strings."""
        line = {key: value if math.isfinite(value) else str(value) for key, value in values.items()}
        with writing(Path(self.file.name)):
            self.file.write(json.dumps({"step": step, **line}) + "\n")


def read(run_dir: Path) -> list[dict]:
    """The lines of `run_dir/metrics.jsonl`, without an incomplete last one that a kill may leave."""
    path = run_dir / "metrics.jsonl"
    with reading(path, "delete the damaged line"):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []
