"""Folders and files of the cache that are either complete or absent.

Everything is written under a temporary name in the same folder and then renamed, so a kill at any moment leaves nothing
that a later run takes for complete. What was damaged afterwards is found by its checksum. Only the process that holds
the lock of the cache writes.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from errors import UserError
from files import parse_json, read_bytes, replace_text

TEMPORARY = ".new-"  # what temporary names begin with


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a new empty folder to fill; it is renamed to `path` when the block ends without an exception.

    Files must be closed by then (Windows renames no folder with open files).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in path.parent.glob(TEMPORARY + "*"):  # by killed processes
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checksum(path: Path) -> str:
    """A checksum of a file, computed about as fast as memory is read; any single changed byte changes it.

    A hash of the sums, modulo 2^64, of the 64-bit words of every MiB: against damage, not against an attacker.
    """
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    hashed = hashlib.blake2b(digest_size=16)
    for start in range(0, len(content), 1 << 20):
        part = content[start : start + (1 << 20)]
        words = part[: len(part) // 8 * 8].view(np.uint64)
        hashed.update(words.sum(dtype=np.uint64).tobytes() + part[8 * len(words) :].tobytes())
    return hashed.hexdigest()


def write_json(path: Path, content: dict) -> None:
    """Write a small JSON file, with a checksum of its content, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"content": content, "checksum": _json_checksum(content)}, indent=2))


def read_json(path: Path) -> dict:
    """The content that `write_json` wrote; empty where the file is absent or damaged."""
    try:
        file = parse_json(read_bytes(path), dict)
        return file["content"] if file["checksum"] == _json_checksum(file["content"]) else {}
    except (OSError, ValueError, KeyError, UserError):
        return {}


def _json_checksum(content: object) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
