"""Reading small files, JSON and TOML, with one-line errors, and writing files that a kill leaves complete."""

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
MAX_BYTES = 2**24  # of a file that is read whole; the index of a model of 700 billion parameters has half of them


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The contents of a file of at most `limit` bytes; `UserError` if it is longer, or cannot be read.

    Devices and pipes, which might never end, are refused. `FileNotFoundError` if there is nothing at all.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file; put the file itself there.")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or get it again.") from None
    if len(content) > limit:
        raise UserError(f"{path} is longer than {limit:,} bytes; get the file again.")
    return content


def parse_json(content: bytes, kind: type[T]) -> T:
    """JSON in UTF-8 as `kind`: a type, or a dataclass with one field for each key. `ValueError` for anything else.

    So is a key that is there twice, half a character (a lone surrogate), and anything nested thousands of levels deep.
    Integers beyond 64 bits become floats (tokenizers have 10^30 for "no limit").
    """
    try:
        value = json.loads(
            content.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_constant=_refuse
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
    for key, part in value.items():
        if not hasattr(record, key):
            raise ValueError(f"{key!r:.80} is not one of its keys")
        if dataclasses.is_dataclass(field := getattr(record, key)):
            _check_keys(part, field)


def _object(pairs: list[tuple[str, object]]) -> dict:
    fields = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"it has the key {key!r:.80} twice")
        fields[key] = value
    return fields


def _integer(digits: str) -> int | float:
    value = int(digits) if len(digits) <= 20 else float(digits)
    return value if abs(value) < 2**63 else float(value)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number of JSON")


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
        return tomllib.loads(read_bytes(path, limit=2**20).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}.") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: after a kill at any instant it has either its old text or the new one."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the file may be empty after a power failure, although it has its new name
    new.replace(path)


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
