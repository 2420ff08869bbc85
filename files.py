"""Reading JSON with one-line errors, and writing files that a kill or a power failure leaves complete."""

import json
import os
from pathlib import Path

from errors import UserError


def read_json(path: Path) -> dict:
    """The JSON object in a file, empty if there is no file. Raises `UserError` for anything else in it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); download or save it again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object; download or save it again.")
    return fields


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
