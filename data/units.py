"""Units: files of about 64 MB or more that are read, tokenized and written once, by any number of processes.

    KEY.bin     ids: BOS a a a EOS BOS b b EOS, or without a BOS in the tokenizer a a a EOS b b EOS
    KEY.docs    a row of `DOCUMENT` for each document; it is written last, so a unit that has it is complete

Each process goes through all units in order, and a lock per unit decides who makes it, so other commands and other
machines may join at any time. What a killed process has not completed is made anew.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data.readers import Document, read_documents
from data.sources import TextFile
from data.tokenizer import Tokenizer
from errors import UserError, is_main_process, usable_cores
from files import replacing

VERSION = 6  # of the files; raised when the same text and tokenizer would give other files
UNIT_BYTES = 64_000_000
BATCH = 4_000_000  # characters that are encoded together, on all cores of a process
SPAWN = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
DOCUMENT = np.dtype([("hash", "<u8"), ("bytes", "<u8"), ("tokens", "<u8")])


@dataclass(frozen=True)
class Unit:
    """Files that are tokenized together."""

    files: tuple[TextFile, ...]
    tokenizer: Tokenizer
    folder: Path

    @functools.cached_property
    def key(self) -> str:
        """A hash of the files' names, sizes and times, so of the text without reading it, and of the tokenizer."""
        return digest(VERSION, self.files, self.tokenizer.hash)

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.key}{suffix}"

    def is_complete(self) -> bool:
        return self.path(".docs").is_file() and self.path(".bin").is_file()

    def read_table(self) -> np.ndarray:
        """The rows of its documents; `UserError` unless its ids are as many as they say."""
        table, path = np.fromfile(self.path(".docs"), DOCUMENT), self.path(".bin")
        if int(table["tokens"].sum()) * self.tokenizer.dtype.itemsize != path.stat().st_size:
            raise damaged(path)
        return table

    def prepare(self, *, wait: bool) -> None:
        """Make it complete. If another process is at it: wait for that one, or leave it to that one."""
        with contextlib.suppress(Timeout), FileLock(self.path(".lock")).acquire(timeout=-1 if wait else 0):
            if not self.is_complete():
                self._write()

    def _write(self) -> None:
        documents = itertools.chain.from_iterable(map(read_documents, self.files))
        with replacing(self.path(".bin")) as file:
            rows = write_ids(file, documents, self.tokenizer)
        with replacing(self.path(".docs")) as file:
            file.write(rows.tobytes())


def damaged(path: Path) -> UserError:
    """The error for a file of ids that is shorter or longer than its table says."""
    return UserError(f"{path} is damaged: it has not the ids of its table; delete {path.parent}, which is made anew.")


def group_files(files: Iterable[TextFile]) -> list[tuple[TextFile, ...]]:
    """Groups of neighbouring files, each of `UNIT_BYTES` or more but for the last."""
    groups, size = [[]], 0
    for file in files:
        if size >= UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [tuple(group) for group in groups]


class TokenStream:
    """Pieces of the ids of units, end to end, read when they are asked for."""

    def __init__(self, units: Sequence[Unit], pieces: np.ndarray, length: int | None = None):
        """pieces: int64 (n, 3): a unit's number, the first id in it and the one after the last; length: in ids."""
        self._paths, self._dtype = [unit.path(".bin") for unit in units], units[0].tokenizer.dtype
        self._pieces = pieces
        self._ends = np.cumsum(pieces[:, 2] - pieces[:, 1])
        self._length = int(self._ends[-1]) if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids of a slice with step 1, read anew: pages that stay mapped would count as memory of the process."""
        start, stop, _ = places.indices(len(self))
        found, number = [np.empty(0, self._dtype)], int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            unit, _, last = self._pieces[number].tolist()
            first = last - (int(self._ends[number]) - start)
            count = min(stop - start, last - first)
            ids = np.fromfile(self._paths[unit], self._dtype, count, offset=first * self._dtype.itemsize)
            if len(ids) < count:
                raise damaged(self._paths[unit])
            found.append(ids)
            start, number = start + count, number + 1
        return np.concatenate(found)


def write_ids(file: BinaryIO, documents: Iterable[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Append the ids of documents to an open file; a row of `DOCUMENT` for each."""
    dtype, rows = tokenizer.dtype, array("Q")
    begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
    end = np.array([tokenizer.eos_id], dtype)
    for _, batch in itertools.groupby(numbered_blocks(documents), itemgetter(0)):
        _, texts, starts = zip(*batch, strict=True)
        for block, starts_document, ids in zip(texts, starts, tokenizer.encode_batch(texts), strict=True):
            if starts_document:
                file.write(end if rows else b"")
                file.write(begin)
                content = hashlib.blake2b(digest_size=8)
                rows.extend((0, 0, len(begin) + len(end)))
            encoded = block.encode("utf-8")
            content.update(encoded)
            rows[-3] = int.from_bytes(content.digest(), "little")
            rows[-2] += len(encoded)
            rows[-1] += len(ids)
            file.write(np.asarray(ids, dtype))
    file.write(end if rows else b"")
    return np.array(rows, "<u8").view(DOCUMENT)


def numbered_blocks(documents: Iterable[Document]) -> Iterator[tuple[int, str, bool]]:
    """The blocks of documents, each with the number of its batch and whether a document starts there."""
    characters = 0
    for document in documents:
        for number, block in enumerate(document):
            characters += len(block)
            yield characters // BATCH, block, number == 0


def prepare_units(files: Iterable[TextFile], tokenizer: Tokenizer, folder: Path) -> list[Unit]:
    """The units of files, made complete by a process per core; this one is one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    units = [Unit(group, tokenizer, folder) for group in group_files(files)]
    missing = [unit for unit in units if not unit.is_complete()]
    count = min(usable_cores(), len(missing))
    for _ in range(count - 1):
        SPAWN.Process(target=work, args=(missing, usable_cores() // count), daemon=True).start()
    hidden = None if is_main_process() else True  # None: hidden where standard error is no terminal
    for unit in tqdm(missing, "tokenizing", unit="unit", delay=2, disable=hidden):
        unit.prepare(wait=False)
    for unit in missing:
        unit.prepare(wait=True)
    return units


def work(units: list[Unit], threads: int) -> None:
    """What each other process does. Where something is wrong it just ends, and the main process meets that, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
    end_with_parent()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizers library
    with contextlib.suppress(Exception):
        for unit in units:
            unit.prepare(wait=False)


def end_with_parent() -> None:
    """End this process, in whatever it is doing, when the one that started it has died."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def digest(*parts: object) -> str:
    """A hash of values that have the same `repr` wherever they are equal."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def content_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")
