"""Folders and files of the cache that are either whole or not there.

Everything is made beside its place under another name and renamed into it, so neither `kill -9` at any moment nor a
second process that prepares the same thing leaves something that a later run takes for whole.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".new-"
ABANDONED = 24 * 3600  # seconds without a write after which a temporary folder is nobody's


@contextlib.contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """Give a new empty folder to fill; it becomes `place` when the block ends without an exception.

    Files must be closed by then (Windows renames no folder with open files). If another process was first, its folder
    stays and ours is dropped: both were made from the same text, for `place` is named after a hash of it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place.parent)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=place.parent))
    try:
        yield temporary
        try:
            os.rename(temporary, place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(place: Path, content: dict) -> None:
    """Write a small JSON file at once or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=place.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(place: Path) -> dict | None:
    """The content, or None where there is no such file or it holds no JSON object."""
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed runs left; whatever was written to within a day may still be another process's."""
    for path in folder.glob(TEMPORARY + "*"):
        with contextlib.suppress(OSError):
            inside = [path, *path.iterdir()] if path.is_dir() else [path]
            if time.time() - max(entry.stat().st_mtime for entry in inside) > ABANDONED:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
