"""What a finished run leaves behind: one typed record, one line of runs.jsonl, one row of a table.

runs.jsonl, timings.jsonl and plan.toml are all that a comparison keeps; everything else is derived from them.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import pandas as pd

from ablation.plan import Arm
from benchmarks.timing import Timing
from errors import reading

Record = TypeVar("Record")
Curve = list[tuple[int, float]]  # (step, value)
CURVES = ("validation_curve", "training_curve", "gradient_norm", "update_ratio")  # fields of RunResult


@dataclass(frozen=True)
class Text:
    """The text of a run; losses on different texts are not compared."""

    hash: str
    bytes: int
    validation_tokens: int
    validation_bytes: int


@dataclass(frozen=True)
class Machine:
    """Where a run was made. A comparison resumes only on the same processor, torch version and kernels."""

    device: str
    processor: str
    processes: int
    threads: int | None
    torch: str
    python: str
    system: str
    kernels: str
    dtype: str


@dataclass(frozen=True)
class Probes:
    """Measurements inside the model at the end of a run, means over tokens; one value per norm, in order of depth."""

    mean_over_std: list[float]
    """|mean| of the norm's input, the residual stream, over its standard deviation."""
    cosine_with_ones: list[float]
    """|cosine| of the norm's input with the vector of ones."""
    largest_activation: float
    """Largest absolute value in the residual stream."""


@dataclass(frozen=True)
class RunResult:
    """One finished run."""

    arm: Arm
    phase: Literal["sweep", "pilot", "noise", "final", "conversion"]
    """noise: as another run of the same arm, seed and learning rate, but from perturbed initial weights."""
    seed: int
    learning_rate: float
    steps: int
    status: Literal["completed", "diverged"]
    reason: str | None
    """Why it diverged."""
    validation_loss: float | None
    """On the whole validation set after the last step, nats per token; None when the run diverged."""
    bits_per_byte: float | None
    validation_curve: Curve
    """Loss on the first part of the validation set along the run; empty in older records."""
    training_curve: Curve
    """Training loss, each point the mean of the steps since the one before. At most 60 points: every loss of 2,400
    steps would take 20 KB, and neighboring steps differ by their batches, which are those of every arm of the seed."""
    gradient_norm: Curve
    update_ratio: Curve
    """Length of a step's change of the weights over the length of the weights."""
    spikes: int
    """Steps whose loss is far above the median of the 20 steps before; consecutive steps count as one."""
    seconds: float
    probes: Probes | None
    settings_hash: str
    initial_weights_hash: str
    """Of the initial weights without the norms; equal for runs of one seed with the same MLP and initial scale."""
    text: Text
    machine: Machine
    variant: str | None = None
    """Conversions: how the norm was converted."""
    loss_before: float | None = None
    """Conversions: validation loss before, nats per token."""
    # Records of earlier versions lack the following fields and are read with these defaults.
    own_weights_hash: str = ""
    """Of all weights that training starts from, including the norms and what a conversion changed."""
    batches_hash: str = ""
    """Of all tokens that were trained on, in their order; equal for the arms of a seed."""
    clipped: float | None = None
    """Share of the steps whose gradient was longer than the clip and was scaled down to it."""
    validation_blocks: list[float] = dataclasses.field(default_factory=list)
    """Nats per token of at most 64 consecutive blocks of the validation set, equally many tokens each but for the last:
    from these the noise of the evaluation can be bootstrapped."""
    measured_curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    """Of a run that is converted: by variant, what each conversion that trains nothing would change along the run."""

    def __post_init__(self) -> None:
        losses = (self.validation_loss, self.bits_per_byte, self.loss_before if self.phase == "conversion" else 0.0)
        if self.status == "completed" and not all(loss is not None and math.isfinite(loss) for loss in losses):
            raise ValueError("a completed run has finite losses")

    @property
    def key(self) -> tuple:
        """What makes it the result of one particular run."""
        return self.arm, self.phase, self.seed, self.learning_rate, self.variant


@dataclass(frozen=True)
class Change:
    """A field of the plan that was changed after runs had finished."""

    field: str
    before: object
    after: object
    finished_runs: int
    """How many there were."""


def append_lines(path: Path, *records: RunResult | Timing | Change) -> None:
    """Append records, one line each. A line cut short by a kill is ignored when read and removed by the next append."""
    lines = "".join(json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n" for record in records)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # a line that a kill cut short
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path) -> list[RunResult]:
    """The finished runs of runs.jsonl, each once: of records of one run the first counts."""
    return list({result.key: result for result in reversed(_read_lines(path, RunResult))}.values())[::-1]


def read_timings(path: Path) -> list[Timing]:
    """The timings of timings.jsonl."""
    return _read_lines(path, Timing)


def read_changes(path: Path) -> list[Change]:
    """The changes of changes.jsonl."""
    return _read_lines(path, Change)


def _read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """One record a line; a last line that a kill cut short does not count. No records if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        with reading(f"line {number} of {path}", "delete that line"):
            records.append(msgspec.convert(json.loads(line), kind))
    return records


def as_table(results: list[RunResult]) -> pd.DataFrame:
    """A row for each run with the scalar fields as columns; `arm` and `result` hold the objects."""
    scalars = [
        *("phase", "seed", "learning_rate", "steps", "status", "validation_loss", "bits_per_byte", "spikes", "seconds"),
        *("variant", "loss_before", "arm"),
    ]
    rows = [{name: getattr(result, name) for name in scalars} | {"result": result} for result in results]
    table = pd.DataFrame(rows, columns=[*scalars, "result"])
    numbers = ["learning_rate", "validation_loss", "bits_per_byte", "seconds", "loss_before"]
    return table.astype(dict.fromkeys(numbers, float))
