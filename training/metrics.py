"""What a run measures: one JSON object per line in metrics.jsonl of its folder."""

import json
import math
from pathlib import Path

from errors import reading
from files import replace_text, writing

NAME = "metrics.jsonl"


def write(run_dir: Path, step: int, **values: float | None) -> None:
    """Add one line, without what is None; infinity and NaN, which JSON lacks, are written as strings."""
    line = {key: value if math.isfinite(value) else str(value) for key, value in values.items() if value is not None}
    with writing(run_dir / NAME), (run_dir / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **line}) + "\n")


def read(run_dir: Path) -> list[dict]:
    """All lines, without an incomplete last one that a kill may leave."""
    path = run_dir / NAME
    with reading(path, "delete the damaged line"):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def validation_losses(run_dir: Path) -> dict[int, float]:
    """Those of a run so far by step, also before it was resumed."""
    return {line["step"]: line["validation_loss"] for line in read(run_dir) if "validation_loss" in line}


def keep_until(run_dir: Path, step: int) -> None:
    """Remove the lines of later steps: the file of a resumed run reads as if it had never stopped."""
    with reading(run_dir / NAME, "delete the damaged line"):
        lines = [json.dumps(line) + "\n" for line in read(run_dir) if line["step"] <= step]
    replace_text(run_dir / NAME, "".join(lines))
