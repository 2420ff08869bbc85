"""The operations on files that all packages share: read JSON and TOML, replace a file atomically, lock a folder."""

import contextlib
import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from errors import UserError, reading

LOCK = ".lock"  # name of the lock file in a folder; the system releases the lock when the process ends, however it ends


def read_json(path: Path) -> dict:
    """The JSON object in a file; an empty one if there is no file."""
    with reading(path):
        return parse_object(path.read_bytes()) if path.is_file() else {}  # not of a named pipe


def parse_object(text: bytes | dict) -> dict:
    value = text if isinstance(text, dict) else json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}, not an object")
    return value


def read_toml(path: Path) -> dict:
    with reading(path, "correct it, or give another file"):
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # which may begin with a byte order mark


def digest(*parts: object) -> str:
    """A hash of values that have the same `repr` wherever they are equal, to name a file after what it was made of."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write to `path` in this block: what the system says of it, such as a full disk, names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write instead of `path`: a kill at any instant leaves its old content or the new. Makes its folder."""
    new = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.unlink(missing_ok=True)  # in a folder of others it may be a link to any file
    with writing(new), new.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # else the file may be empty after a power failure, although it has its new name
    new.replace(path)


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def fsync(*paths: Path) -> None:
    """fsync files and directories (Windows can fsync only files that are open for writing)."""
    for path in paths:
        if path.is_file() or os.name != "nt":
            descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock. An empty one is deleted at the end. `UserError`: another process has it."""
    from filelock import FileLock, Timeout  # here, as it takes a tenth of a second to import

    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} is in use by another process; wait until it ends, or give another folder.") from None
    with lock:
        try:
            yield
        finally:
            if os.listdir(folder) == [LOCK]:
                shutil.rmtree(folder, ignore_errors=True)
