"""What a run leaves behind: one flat row, a line of runs.jsonl. What its machine and versions were stands once in
machine.toml, for all rows with the same. With plan.toml and changes.jsonl that is all that a study keeps: everything
else is derived from it.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ablation.plan import Run
from errors import reading
from files import read_toml, replace_text, replacing

MACHINE = ("device", "kernels", "dtype", "commit", "torch", "python", "threads", "workers", "text_hash")


@dataclass(frozen=True)
class Row(Run):
    """One run that has ended. None: not measured, or it did not complete."""

    status: Literal["completed", "diverged", "failed"] = "completed"
    reason: str | None = None  # why it did not complete
    loss: float | None = None  # on the whole validation set after the last step, nats per token
    bits_per_byte: float | None = None
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (step, nats per token), 12 along the run
    spikes: int = 0  # steps whose loss is far above the median of the 20 before; consecutive ones count as one
    seconds: float = 0.0  # time of training, without evaluations
    all_seconds: float = 0.0  # with set-up, evaluations and probes; 0 in older records
    mean_over_std: float | None = None  # |mean| / std of the residual stream, at the norms of the deeper half
    cosine_with_ones: float | None = None  # |cosine| of the stream with the vector of ones, mean over all norms
    kurtosis: float | None = None  # E[x^4] / E[x^2]^2 over channels, mean over tokens, at the norm where it is largest
    largest_channel: float | None = None  # root mean square over that of the median channel, likewise
    first_token_attention: float | None = None  # that queries of the later half pay to it, mean over all heads
    tokens: int = 0  # that it trained on
    parameters: int = 0
    settings_hash: str = ""  # hash of its settings but for device and folder
    weights_hash: str = ""  # hash of the initial weights without those of the norms
    batches_hash: str = ""  # hash of all tokens that it trained on, in their order; empty if there were none
    text_hash: str = ""
    device: str = ""  # model of the GPU or CPU; arms of a pair never come from different ones
    kernels: str = ""
    dtype: str = ""  # dtype of the activations
    commit: str = ""  # commit of this project
    torch: str = ""
    python: str = ""  # its standard library is the default text
    threads: int | None = None  # CPU threads of PyTorch
    workers: int = 1  # runs that were made at once


def append(path: Path, *records: dict) -> None:
    """Append one line for each, atomically."""
    before = path.read_bytes() if path.is_file() else b""
    with replacing(path) as file:
        file.write(before[: before.rfind(b"\n") + 1] + msgspec.json.Encoder().encode_lines(records))


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a file of JSON; none if there is no file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    with reading(path, "delete the line that is damaged"):
        return [msgspec.json.decode(line, type=dict) for line in lines]


def append_rows(folder: Path, *rows: Row) -> None:
    """Append rows to runs.jsonl, without what has its default, and their machines to machine.toml."""
    import tomli_w

    defaults = {field.name: field.default for field in dataclasses.fields(Row)}
    machines, lines = read_machines(folder), []
    for row in rows:
        line = {name: value for name, value in vars(row).items() if value != defaults[name]}
        machine = {name: line.pop(name) for name in MACHINE if name in line}
        if machine and machine not in machines.values():
            machines[str(len(machines) + 1)] = machine
        if machine:
            line["machine"] = next(number for number, known in machines.items() if known == machine)
        lines.append(line)
    replace_text(folder / "machine.toml", tomli_w.dumps(machines))  # first: a row names a machine that is there
    append(folder / "runs.jsonl", *lines)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study; none if there is no runs.jsonl."""
    machines, lines = read_machines(folder), read_lines(folder / "runs.jsonl")
    with reading(folder / "runs.jsonl", "delete the line that is damaged"):
        return [msgspec.convert(line | machines.get(line.get("machine"), {}), Row) for line in lines]


def read_machines(folder: Path) -> dict[str, dict]:
    path = folder / "machine.toml"
    return read_toml(path) if path.is_file() else {}
