"""What a run measures, one JSON object a line in metrics.jsonl, and the same numbers for TensorBoard when asked.

Lines of steps after the checkpoint that a run resumes from are cut off first, so the file reads as if the run had
never stopped.
"""

import json
import math
from pathlib import Path

from errors import UserError
from training.settings import replace_text


class Metrics:
    """Appends to `run/metrics.jsonl`, and to TensorBoard's events."""

    def __init__(self, run: Path, *, after_step: int, evaluated_at: int, facts: dict, tensorboard: bool) -> None:
        """Keep the lines of steps up to `after_step` and of evaluations up to `evaluated_at`; `facts` is line 0."""
        path = run / "metrics.jsonl"
        kept = [line for line in read(run) if line["step"] <= (evaluated_at if is_evaluation(line) else after_step)]
        lines = kept or [{"step": 0, **facts}]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self.file = path.open("a", encoding="utf-8")
        self.board = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard.") from None
            self.board = SummaryWriter(run, purge_step=after_step + 1)

    def write(self, step: int, **values: float) -> None:
        """Add one line; numbers that JSON has no word for are written as strings."""
        line = {key: value if math.isfinite(value) else str(value) for key, value in values.items()}
        self.file.write(json.dumps({"step": step, **line}) + "\n")
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(key, value, step)

    def flush(self) -> None:
        """Hand the lines to the operating system, so that a kill loses none of them."""
        self.file.flush()
        if self.board is not None:
            self.board.flush()

    def close(self) -> None:
        """Write out what is left and close the files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def read(run: Path) -> list[dict]:
    """The whole lines of `run/metrics.jsonl`; a last line that a kill cut short is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{path} has a line that is not JSON ({error}); mend or delete that line.") from None


def is_evaluation(line: dict) -> bool:
    """Whether a line is of an evaluation rather than of a step."""
    return "validation_loss" in line
