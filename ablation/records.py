"""What a run leaves behind: one flat row, a line of runs.jsonl. plan.toml, runs.jsonl and changes.jsonl are all that a
comparison keeps; everything else is derived from them.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ablation.plan import Run
from errors import reading


@dataclass(frozen=True)
class Row(Run):
    """One run that has ended. None: not measured, or it did not complete."""

    status: Literal["completed", "diverged", "failed"] = "completed"
    reason: str | None = None
    """Why it did not complete."""
    loss: float | None = None
    """On the whole validation set after the last step, nats per token."""
    bits_per_byte: float | None = None
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """(step, nats per token) on the first part of the validation set, 12 times along the run."""
    spikes: int = 0
    """Steps whose loss is far above the median of the 20 steps before; consecutive steps count as one."""
    seconds: float = 0.0
    """Of training, without evaluations."""
    mean_over_std: float | None = None
    """|mean| over the standard deviation of the residual stream, at the norms of the second half of the depth."""
    cosine_with_ones: float | None = None
    """|cosine| of the residual stream with the vector of ones, mean over all norms."""
    kurtosis: float | None = None
    """E[x^4] / E[x^2]^2 over the channels of the residual stream, mean over tokens, at the norm where it is largest."""
    largest_channel: float | None = None
    """Root mean square of the largest channel of the residual stream over that of the median channel, at the norm where
    it is largest."""
    largest_activation: float | None = None
    """Largest absolute value in the residual stream."""
    first_token_attention: float | None = None
    """Share of their attention that the queries of the second half of the context give to the first token, mean over
    heads and layers."""
    steps: int = 0
    tokens: int = 0
    """That it trained on."""
    parameters: int = 0
    settings_hash: str = ""
    """Of its settings but for device and folder."""
    weights_hash: str = ""
    """Of the initial weights without those of the norms."""
    batches_hash: str = ""
    """Of all tokens that it trained on, in their order."""
    text_hash: str = ""
    device: str = ""
    """Model of the GPU or CPU. Arms of a pair never come from different ones."""
    kernels: str = ""
    dtype: str = ""
    """Of the activations."""
    torch: str = ""
    python: str = ""
    """Its standard library is the default text."""
    threads: int | None = None
    """Of the CPU."""
    workers: int = 1
    """Runs that were made at once."""


@dataclass(frozen=True)
class Change:
    """A field of the plan that was changed after runs had finished."""

    field: str
    before: str
    after: str
    finished_runs: int


def append(path: Path, *records: Row | Change) -> None:
    """Append one line for each. A line cut short by a kill is removed first; a disk has the lines on return."""
    lines = "".join(json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n" for record in records)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, kind: type = Row) -> list[dict]:
    """The complete lines of a file of records as their fields; none if there is no file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    with reading(path, "delete the line that is damaged"):
        return [dataclasses.asdict(msgspec.json.decode(line, type=kind)) for line in lines]
