"""The ids of a text, made once and kept in units: files of about 64 MB of text that are tokenized together.

    CACHE/units/KEY.bin     ids: BOS a a a EOS BOS b b EOS, or without a BOS in the tokenizer a a a EOS b b EOS
    CACHE/units/KEY.skipped what was left out, a line each: files with the reason, and how many rows have no text
    CACHE/units/KEY.docs    a row of `DOCUMENT` for each document; written last

A lock per unit decides who makes it, so several commands share the work, also on several machines. A unit that lacks a
file, as its command was killed, is made again.
"""

import bisect
import contextlib
import functools
import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data.readers import Document, read_documents, why_left_out
from data.sources import TextFile
from data.split import DOCUMENT
from data.tokenizer import Tokenizer
from errors import UserError, counted, note, printable
from files import digest, replace_text, replacing

VERSION = 9  # raised when the same text and tokenizer would give other files
UNIT_BYTES = 64_000_000
GROUP = 4_000_000  # characters that are encoded together, on all cores


@dataclass(frozen=True)
class Unit:
    """Files that are tokenized together."""

    files: Sequence[TextFile]
    tokenizer: Tokenizer
    path: Path  # file of the ids; the table lies beside it

    def is_complete(self) -> bool:
        return all(self.path.with_suffix(suffix).is_file() for suffix in (".bin", ".skipped", ".docs"))

    def prepare(self, timeout: float) -> None:
        """Make it complete; wait `timeout` seconds (negative: any time) if another process makes it."""
        with contextlib.suppress(Timeout), FileLock(self.path.with_suffix(".lock")).acquire(timeout):
            if self.is_complete():
                return
            documents = itertools.chain.from_iterable(map(read_documents, self.files))
            with replacing(self.path) as file:
                table, empty = write_ids(file, documents, self.tokenizer)
            reasons = [f"{reason}\n" for reason in map(why_left_out, self.files) if reason]
            if empty:
                others = " and others" if len(self.files) > 1 else ""
                reasons.append(f"{counted(empty, 'row')} without text in {printable(self.files[0].name)}{others}\n")
            replace_text(self.path.with_suffix(".skipped"), "".join(reasons))
            with replacing(self.path.with_suffix(".docs")) as file:
                file.write(table.tobytes())

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The rows of its documents; `UserError` unless its ids are as many as they say."""
        table = np.fromfile(self.path.with_suffix(".docs"), DOCUMENT)
        if int(table["tokens"].sum()) * self.tokenizer.dtype.itemsize != self.path.stat().st_size:
            fix = f"delete {self.path.parent}; it is made again"
            raise UserError(f"{self.path} is damaged: its table has other ids; {fix}.")
        return table


def write_ids(file: BinaryIO, documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Write the ids of documents to an open file; a row of `DOCUMENT` for each with text, and how many have none."""
    count = 0

    def numbered_blocks() -> Iterator[tuple[int, str]]:
        nonlocal count
        for count, document in enumerate(documents, 1):
            for block in document:
                yield count, block

    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], tokenizer.dtype)
    eos = np.array([tokenizer.eos_id], tokenizer.dtype)
    table = array("Q")  # row after row
    for _, blocks in itertools.groupby(encode_blocks(numbered_blocks(), tokenizer), lambda block: block[0]):
        content = hashlib.blake2b(digest_size=8)  # as in `content_hash`
        size, start = 0, file.tell()
        file.write(bos)
        for _, text, ids in blocks:
            encoded = text.encode("utf-8")
            content.update(encoded)
            size += len(encoded)
            file.write(np.asarray(ids, tokenizer.dtype))
        file.write(eos)
        tokens = (file.tell() - start) // tokenizer.dtype.itemsize
        table.extend((int.from_bytes(content.digest(), "little"), size, tokens))
    rows = np.array(table, "<u8").view(DOCUMENT)
    return rows, count - len(rows)


def encode_blocks(blocks: Iterable[tuple[int, str]], tokenizer: Tokenizer) -> Iterator[tuple[int, str, Sequence[int]]]:
    """Blocks with the number of their document, and with their ids, too; `GROUP` characters at a time."""
    for group in group_by_size(blocks, lambda numbered: len(numbered[1]), GROUP):
        numbers, texts = zip(*group, strict=True)
        yield from zip(numbers, texts, tokenizer.encode_batch(texts), strict=True)


def group_by_size(items: Iterable, size_of: Callable[[Any], int], limit: int) -> Iterator[list]:
    """Neighbours in groups that end where their size reaches `limit`."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def prepare_units(files: Sequence[TextFile], tokenizer: Tokenizer, folder: Path) -> list[Unit]:
    """The units of files, made complete: first those that no other command is at, then what is left."""
    units = []
    for group in group_by_size(files, lambda file: file.size, UNIT_BYTES):
        key = digest(VERSION, tuple(group), tokenizer.hash)  # names, sizes and times of files stand for their text
        units.append(Unit(group, tokenizer, folder / f"{key}.bin"))
    missing = [unit for unit in units if not unit.is_complete()]
    for unit in tqdm(missing, "tokenizing", unit="unit", delay=2, disable=None):
        unit.prepare(timeout=0)
    for unit in missing:
        unit.prepare(timeout=-1)
    for unit in units:
        for reason in unit.path.with_suffix(".skipped").read_text(encoding="utf-8").splitlines():
            note(f"skipped: {reason}")
    if not any(len(unit.table) for unit in units):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    return units


class TokenStream:
    """The ids of documents, end to end, read when they are asked for."""

    def __init__(self, units: Sequence[Unit], *parts: tuple[np.ndarray, np.ndarray]):
        """parts: which ids of a document are in the stream, from where to where, for each row of the units' tables."""
        self._dtype = units[0].tokenizer.dtype
        self._spans = []  # of ids that are neighbours in a file: the file, and where they begin in it
        self._starts = [0]  # where each span begins in the stream; the last is where the stream ends
        rows = zip(*(zip(starts.tolist(), stops.tolist(), strict=True) for starts, stops in parts), strict=True)
        for unit in units:
            document = 0  # where it begins in the file
            end_of_span = None
            for tokens in unit.table["tokens"].tolist():
                for start, stop in next(rows):
                    if start < stop:
                        if document + start != end_of_span:
                            self._spans.append((unit.path, document + start))
                            self._starts.append(self._starts[-1])
                        self._starts[-1] += stop - start
                        end_of_span = document + stop
                document += tokens

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, positions: slice) -> np.ndarray:
        """The ids of a slice with step 1. Read each time, since mapped pages would count as memory of the process."""
        start, stop, _ = positions.indices(len(self))
        ids = [np.empty(0, self._dtype)]
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            path, file_start = self._spans[index]
            end = min(stop, self._starts[index + 1])
            offset = (file_start + start - self._starts[index]) * self._dtype.itemsize
            ids.append(np.fromfile(path, self._dtype, end - start, offset=offset))
            start = end
            index += 1
        return np.concatenate(ids)
