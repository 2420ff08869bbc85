"""Folders of the cache that are either complete or absent.

They are written under a temporary name beside their place and then renamed, so a kill or a power failure at any moment
leaves nothing that a later run takes for complete. Only the process that holds the lock of the cache writes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from errors import fsync_directory

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
        fsync_directory(temporary)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
