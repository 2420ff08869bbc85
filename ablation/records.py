"""What a run leaves behind: one flat row, a line of runs.jsonl; its machine and versions stand once in machine.toml.
With plan.toml, changes.jsonl and the last judgement that is all that a study keeps: the rest is derived from it.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import pandas as pd
import tomli_w

from ablation.plan import Run
from errors import reading
from files import read_toml, replace_text, replacing

JUDGEMENT = "verdict.json"  # the file of the last judgement
KEY = [column.name for column in dataclasses.fields(Run)]  # the columns that make a row that of one particular run
MACHINE = ("device", "kernels", "dtype", "commit", "code_hash", "torch", "python", "threads", "workers", "text_hash")


@dataclass(frozen=True)
class Row(Run):
    """One run that has ended. None: not measured, or it did not complete."""

    status: Literal["completed", "diverged", "failed"] = "completed"
    reason: str | None = None  # why it did not complete
    loss: float | None = None  # on the whole validation set after the last step, nats per token
    bits_per_byte: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, nats per token) along the run
    seconds: float = 0.0  # time of training, without evaluations
    all_seconds: float = 0.0  # with set-up, evaluations and probes; 0: not measured
    mean_over_std: float | None = None  # |mean| / std of the residual stream, at the norms of the deeper half
    cosine_with_ones: float | None = None  # |cosine| of the stream with the vector of ones, mean over all norms
    tokens: int = 0  # that it trained on
    vocab_size: int | None = None  # that of its tokenizer; None: the config's
    settings_hash: str = ""  # hash of its settings but for device and folder
    weights_hash: str = ""  # hash of the initial weights without those of the norms
    batches_hash: str = ""  # hash of all tokens that it trained on, in their order; empty if there were none
    text_hash: str = ""
    device: str = ""  # model of the GPU or CPU; arms of a pair never come from different ones
    kernels: str = ""
    dtype: str = ""  # dtype of the activations
    commit: str = ""  # commit of this project
    code_hash: str = ""  # hash of the source files that training uses; empty: not measured, as other hashes
    torch: str = ""
    python: str = ""  # its standard library is the default text
    threads: int | None = None  # CPU threads of PyTorch
    workers: int = 1  # runs that were made at once


@dataclass(frozen=True)
class Worth:
    """A difference as a change of the baseline's steps, in percent: at least -50, at most 100."""

    percent: float
    low: float
    high: float
    source: Literal["length", "curve"]  # the slope of the loss is that of runs of other lengths, or along the runs

    def __str__(self) -> str:
        def words(percent: float, sign: str = "") -> str:
            limits = {-50: f"-50{sign} or less", 100: f"+100{sign} or more"}
            return limits.get(percent, f"{percent:+.1f}{sign}")

        return f"{words(self.percent, '%')} of the steps [{words(self.low)}, {words(self.high)}], by {self.source}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What judge says of an idea. As text: a line of JSON."""

    baseline: str  # the settings with which the idea is compared, or "default"
    idea: str  # its settings
    verdict: Literal["keep", "discard", "inconclusive"]
    reason: str
    difference: float | None = None  # loss of the idea minus that of the baseline, mean of the pairs
    interval: tuple[float, float] | None = None  # at this level and look
    unit: str  # of the difference
    steps: Worth | None = None  # the difference, in steps of the baseline
    pairs: int = 0
    looks: tuple[int, ...] = ()  # pairs at each look so far
    p: float = 1.0  # two-sided: the smallest level at which the last look would have decided
    level: float  # two-sided
    learning_rates: dict[str, float] = field(default_factory=dict)  # by arm
    hours: float | None = None  # that all runs took

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def read_judgement(folder: Path) -> Judgement | None:
    """What judge said last in this folder, None if it was not asked."""
    path = folder / JUDGEMENT
    with reading(path, "delete it"):
        return msgspec.json.decode(path.read_bytes(), type=Judgement) if path.is_file() else None


def as_table(rows: list[Row]) -> pd.DataFrame:
    """One row for each run, with the fields of `Row` as columns: of rows of the same run the last."""
    columns = dataclasses.fields(Row)
    numbers = [column.name for column in columns if column.type in (float, float | None)]
    table = pd.DataFrame(rows, columns=[column.name for column in columns]).astype(dict.fromkeys(numbers, float))
    return table.drop_duplicates(KEY, keep="last", ignore_index=True)


def append(path: Path, *records: dict) -> None:
    """Append one line for each, atomically."""
    before = b"".join(line + b"\n" for line in complete_lines(path))
    with replacing(path) as file:
        file.write(before + msgspec.json.Encoder().encode_lines(records))


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file of JSON, without a last one that was cut short; none if there is no file."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return lines if lines[-1].endswith(b"}") else lines[:-1]  # a complete last line may lack its line break


def read_lines(path: Path, line_type: type = dict) -> list:
    values = []
    for number, line in enumerate(complete_lines(path), 1):
        with reading(f"{path}, line {number},", "correct or delete the line"):
            values.append(msgspec.json.decode(line, type=line_type))
    return values


def append_rows(folder: Path, *rows: Row) -> None:
    """Append rows to runs.jsonl, without what has its default, and their machines to machine.toml."""
    path = folder / "machine.toml"
    lines = []
    machines = read_toml(path) if path.is_file() else {}
    defaults = {column.name: column.default for column in dataclasses.fields(Row)}
    for row in rows:
        line = {name: value for name, value in vars(row).items() if value != defaults[name]}
        machine = {name: line.pop(name) for name in MACHINE if name in line}
        if machine:
            line["machine"] = next((name for name in machines if machines[name] == machine), str(len(machines) + 1))
            machines[line["machine"]] = machine
        lines.append(line)
    replace_text(path, tomli_w.dumps(machines))  # first: a row names a machine that is there
    append(folder / "runs.jsonl", *lines)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study; none if there is no runs.jsonl."""
    lines = read_lines(folder / "runs.jsonl")
    machines = read_toml(folder / "machine.toml") if any("machine" in line for line in lines) else {}
    with reading(folder / "runs.jsonl", "delete the damaged line, or restore machine.toml beside it"):
        for line in lines:
            line |= machines[line["machine"]] if "machine" in line else {}
        return msgspec.convert(lines, list[Row])
