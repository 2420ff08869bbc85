"""Units: files of about 64 MB or more that are read, tokenized and written once, by any number of processes.

    KEY.bin     ids: BOS a a a EOS BOS b b EOS; without a BOS in the tokenizer EOS a a a EOS b b EOS
    KEY.docs    a row of `DOCUMENT` for each document
    KEY.json    sums, and what was skipped; it is written last, so a unit that has it is complete

A lock per unit lets processes of several machines share a folder. What a killed process has not completed is made anew.
"""

import contextlib
import functools
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from data.readers import Document, read_documents
from data.sources import TextFile
from data.tokenizer import Tokenizer
from errors import UserError, fsync_directory, read_json, replace_text, replacing

VERSION = 4  # of the files; raised when the same text and tokenizer would give other files
UNIT_BYTES = 64_000_000
BATCH = 4_000_000  # characters that are encoded together, on all cores of a process
MAX_REASONS = 5  # why something was skipped, in KEY.json
DOCUMENT = np.dtype([("hash", "<u8"), ("bytes", "<u8"), ("tokens", "<u8")])


@dataclass(frozen=True)
class Unit:
    """Files that are tokenized together."""

    files: tuple[TextFile, ...]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and times: the same hash means the same text, without reading it."""
        return digest(*self.files)

    @property
    def text_bytes(self) -> int:
        """The length of its text, roughly."""
        return sum(file.text_bytes for file in self.files)


def group_files(files: Iterable[TextFile]) -> list[Unit]:
    """Units of neighbouring files, each of `UNIT_BYTES` or more but for the last."""
    groups, size = [[]], 0
    for file in files:
        if size >= UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [Unit(tuple(group)) for group in groups]


@dataclass(frozen=True)
class Store:
    """The units of one tokenizer in a folder."""

    folder: Path
    tokenizer: Tokenizer

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")

    @property
    def lead(self) -> int:
        """Ids before the first document of a unit: EOS where the tokenizer has no BOS."""
        return int(self.tokenizer.bos_id is None)

    def path(self, unit: Unit, suffix: str) -> Path:
        """One of the files of a unit."""
        return self.folder / f"{digest(VERSION, unit.fingerprint, self.tokenizer.hash)}{suffix}"

    def facts(self, unit: Unit) -> dict | None:
        """What KEY.json says; None for a unit that is not complete."""
        facts, ids = read_json(self.path(unit, ".json")), self.path(unit, ".bin")
        complete = facts and ids.is_file() and ids.stat().st_size == facts["tokens"] * self.dtype.itemsize
        return facts if complete else None

    def documents(self, unit: Unit) -> np.ndarray:
        """The rows of KEY.docs."""
        return np.fromfile(self.path(unit, ".docs"), DOCUMENT)

    def prepare(self, unit: Unit, report: Callable[[int], object]) -> bool:
        """Make a unit complete; False if another process is at it.

        report: receives the characters of text as they are done.
        """
        lock = FileLock(self.path(unit, ".lock"))
        try:
            with lock.acquire(timeout=0):
                if self.facts(unit) is None:
                    self._write(unit, report)
                with contextlib.suppress(OSError):  # Windows removes no file that is open
                    self.path(unit, ".lock").unlink()
        except Timeout:
            return False
        return True

    def _write(self, unit: Unit, report: Callable[[int], object]) -> None:
        skipped: list[str] = []
        with replacing(self.path(unit, ".bin")) as ids_file:
            writer = UnitWriter(ids_file, self, report)
            for file in unit.files:
                for document in read_documents(file, skipped):
                    writer.add(document)
            documents = writer.finish()
            if not all(file.is_unchanged for file in unit.files):
                raise UserError(
                    "the text changed while it was read; run the same command again when nothing writes it."
                )
        with replacing(self.path(unit, ".docs")) as file:
            file.write(documents.tobytes())
        fsync_directory(self.folder, files=False)
        facts = {
            "documents": len(documents),
            "bytes": int(documents["bytes"].sum()),
            "tokens": int(documents["tokens"].sum()) + self.lead,
            "skipped": len(skipped),
            "reasons": skipped[:MAX_REASONS],
        }
        replace_text(self.path(unit, ".json"), json.dumps(facts))


class UnitWriter:
    """Encodes documents, a few MB at a time, and appends their ids to an open file."""

    def __init__(self, file: BinaryIO, store: Store, report: Callable[[int], object]):
        self._file, self._report, self._tokenizer, self._dtype = file, report, store.tokenizer, store.dtype
        self._begin = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        self._hashes, self._lengths, self._starts = array("Q"), array("Q"), array("Q")
        self._pending: list[tuple[str, bool]] = []  # blocks not yet encoded, each with whether a document starts there
        self._characters = self._tokens = 0  # pending, written
        self._write([self._tokenizer.eos_id] * store.lead)

    def add(self, document: Document) -> None:
        """Append a document."""
        content, length = hashlib.blake2b(digest_size=8), 0
        for number, block in enumerate(document):
            encoded = block.encode("utf-8")
            content.update(encoded)
            length += len(encoded)
            self._pending.append((block, number == 0))
            self._characters += len(block)
            if self._characters >= BATCH:
                self._encode_pending()
        self._hashes.append(int.from_bytes(content.digest(), "little"))
        self._lengths.append(length)

    def finish(self) -> np.ndarray:
        """Write what is pending; a row of `DOCUMENT` for each document."""
        self._encode_pending()
        self._write([self._tokenizer.eos_id] * bool(self._starts))
        tokens = np.diff(self._starts, append=self._tokens)
        return np.rec.fromarrays([self._hashes, self._lengths, tokens], DOCUMENT)

    def _encode_pending(self) -> None:
        encoded = self._tokenizer.encode_batch([block for block, _ in self._pending])
        for (_, starts_document), ids in zip(self._pending, encoded, strict=True):
            if starts_document:
                self._write([self._tokenizer.eos_id] * bool(self._starts))
                self._starts.append(self._tokens)
                self._write(self._begin)
            self._write(ids)
        self._report(self._characters)
        self._pending, self._characters = [], 0

    def _write(self, ids: Sequence[int]) -> None:
        self._file.write(np.asarray(ids, self._dtype))
        self._tokens += len(ids)


def digest(*parts: object) -> str:
    """A hash of values that have the same `repr` wherever they are equal."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def content_hash(text: str) -> int:
    """The hash of a document."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")
