"""Reading small files, JSON and TOML, with one-line errors, and writing files that a kill leaves complete."""

import contextlib
import dataclasses
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import TypeVar

from errors import UserError

T = TypeVar("T")


def read_bytes(path: Path) -> bytes:
    """The contents of a file. `UserError` for a folder or device, or what cannot be read; `FileNotFoundError`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file; put the file itself there.")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or get it again.") from None


def parse_json(content: bytes, kind: type[T]) -> T:
    """JSON as `kind`: a type, or a dataclass with one field for each key. `ValueError` for anything else.

    NaN and Infinity, which JSON lacks and other programs write all the same, are read too. Integers beyond 64 bits
    become floats (tokenizers have 10^30 for "no limit"), numbers beyond those infinite.
    """
    value = json.loads(content, parse_int=_integer)
    record = convert(value, kind)
    if dataclasses.is_dataclass(record):
        _check_keys(value, record)
    return record


def convert(value: object, kind: type[T]) -> T:
    """What JSON gave, as `kind`; `ValueError` where it differs."""
    import msgspec  # here, so that a model can be built and measured without it

    return msgspec.convert(value, kind)


def _check_keys(value: dict, record: object) -> None:
    """Raise `ValueError` for a key that a dataclass, or one inside it, has no field for: perhaps a damaged name."""
    names = {field.name for field in dataclasses.fields(record)}
    for key, part in value.items():
        if key not in names:
            raise ValueError(f"{key!r:.80} is not one of its keys")
        if dataclasses.is_dataclass(inner := getattr(record, key)):
            _check_keys(part, inner)


def _integer(digits: str) -> int | float:
    """An integer of JSON; a float if it has more than 64 bits (Python refuses those of more than 4,300 digits)."""
    value = int(digits) if len(digits) <= 20 else float(digits)
    return value if abs(value) < 2**63 else float(value)


def read_json(path: Path, kind: type[T] = dict) -> T:
    """The JSON object in a file as `kind`, see `parse_json`; an empty one if there is no file. Else `UserError`."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b"{}"
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}); download or save it again.") from None


def read_toml(path: Path) -> dict:
    """The tables and keys of a TOML file. `UserError` for anything else, `FileNotFoundError` if there is none."""
    try:
        return tomllib.loads(read_bytes(path).decode("utf-8"))
    except ValueError as error:
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
