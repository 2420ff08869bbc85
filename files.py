"""Reading small files, JSON and TOML, with one-line errors, and writing files that a kill leaves complete."""

import contextlib
import dataclasses
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from errors import UserError

T = TypeVar("T")
MAX_BYTES = 2**24  # of a file that is read at once; the index of a model of 700 billion parameters has 9 million


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The contents of a file of at most `limit` bytes; `UserError` if it is longer, or cannot be read.

    Devices and pipes, which might never end, are refused. `FileNotFoundError` if there is no file.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file; put the file itself there.")
        with path.open("rb") as file:
            content = file.read(min(limit, status.st_size) + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or get it again.") from None
    if len(content) > limit:
        raise UserError(f"{path} is longer than {limit:,} bytes, more than such a file needs; give another file.")
    return content


def parse_json(content: bytes, kind: type[T], *, constants: bool = False) -> T:
    """JSON in UTF-8 as `kind`: a type, or a dataclass with one field for each key.

    Raises `ValueError` for anything else, also for a key with two values, a lone surrogate, values nested thousands of
    levels deep, and without `constants` for NaN and Infinity, which JSON lacks and other programs write all the same.
    Integers beyond 64 bits become floats (tokenizers have 10^30 for "no limit"), numbers beyond those infinite.
    """
    refuse_or_read = float if constants else _refuse
    try:
        value = json.loads(
            content.decode("utf-8"), object_pairs_hook=_object, parse_int=json_integer, parse_constant=refuse_or_read
        )
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    record = msgspec.convert(value, kind)
    if dataclasses.is_dataclass(record):
        _check_keys(value, record)
    return record


def _check_keys(value: dict, record: object) -> None:
    """Raise `ValueError` for a key that a dataclass, or one inside it, has no field for: perhaps a damaged name."""
    names = {field.name for field in dataclasses.fields(record)}
    for key, part in value.items():
        if key not in names:
            raise ValueError(f"{key!r:.80} is not one of its keys")
        if dataclasses.is_dataclass(inner := getattr(record, key)):
            _check_keys(part, inner)


def _object(pairs: list[tuple[str, object]]) -> dict:
    fields = {}
    for key, value in pairs:
        if key in fields and fields[key] != value:
            raise ValueError(f"its key {key!r:.80} has two values")
        fields[key] = value
    return fields


def json_integer(digits: str) -> int | float:
    """An integer of JSON; a float if it has more than 64 bits (Python refuses those of more than 4,300 digits)."""
    value = int(digits) if len(digits) <= 20 else float(digits)
    return value if abs(value) < 2**63 else float(value)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def read_json(path: Path, kind: type[T] = dict) -> T:
    """The JSON object in a file as `kind`, see `parse_json`; an empty one if there is no file. Else `UserError`."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b"{}"
    try:
        return parse_json(content, kind, constants=True)
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}); download or save it again.") from None


def read_toml(path: Path) -> dict:
    """The tables and keys of a TOML file. `UserError` for anything else, `FileNotFoundError` if there is none."""
    try:
        return tomllib.loads(read_bytes(path, limit=2**20).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}.") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: after a kill at any instant it has either its old text or the new one.

    `OSError`, with the file's name, if it cannot be written, for example because the disk is full.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else the file may be empty after a power failure, although it has its new name
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        error.filename = str(path)  # the system names no file when a write fails
        raise


def fsync_directory(directory: Path, files: bool = True) -> None:
    """fsync a directory and, if `files`, the files in it (Windows can fsync only files)."""
    paths = [path for path in directory.iterdir() if path.is_file()] if files else []
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    if os.name != "nt":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
