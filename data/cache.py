"""Folders and files of the cache that are either complete or absent.

Everything is written under a temporary name in the same folder and then renamed, so neither `kill -9` at any moment nor
a second process that prepares the same thing leaves something that a later run takes for complete.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".new-"  # what temporary names begin with
ABANDONED = 24 * 3600  # seconds without a write after which no process uses a temporary folder any more


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a new empty folder to fill; it is renamed to `path` when the block ends without an exception.

    Files must be closed by then (Windows renames no folder with open files). If another process was first, its folder
    stays and ours is deleted: both were made from the same text, because `path` is named after a hash of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
    try:
        yield temporary
        try:
            os.rename(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, content: dict) -> None:
    """Write a small JSON file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: Path) -> dict:
    """The content; empty where the file is absent or holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed runs left; what was written to within a day may still be in use by another process."""
    for path in folder.glob(TEMPORARY + "*"):
        with contextlib.suppress(OSError):
            written = [path, *path.iterdir()] if path.is_dir() else [path]
            if time.time() - max(entry.stat().st_mtime for entry in written) > ABANDONED:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
