"""What is made of a text once and kept: the tokenizer that is trained on a sample of it, and its ids in units, files of
about 64 MB of text or more that are read, tokenized and written once, by any number of processes.

    CACHE/tokenizers/KEY/   the tokenizer
    CACHE/units/KEY.bin     ids: BOS a a a EOS BOS b b EOS, or without a BOS in the tokenizer a a a EOS b b EOS
    CACHE/units/KEY.docs    a row of `DOCUMENT` for each document; written last, so a unit that has it is complete

Each process goes through all units, and a lock per unit decides who makes it, so other commands and machines may join
at any time. What a killed process has not completed is made anew.
"""

import bisect
import contextlib
import functools
import hashlib
import io
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data.readers import BLOCK, Document, read_documents
from data.settings import DataSettings
from data.sources import TextFile
from data.special_tokens import TURNS
from data.split import MAX_VALIDATION, candidates
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_json import read_model
from errors import UserError, is_main_process, reading, usable_cores
from files import replacing

VERSION = 6  # raised when the same text and tokenizer would give other files
UNIT_BYTES = 64_000_000
BATCH = 4_000_000  # characters that are encoded together, on all cores of a process
SPAWN = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
DOCUMENT = np.dtype([("hash", "<u8"), ("bytes", "<u8"), ("tokens", "<u8")])
END = ""  # stands after the blocks of a document
# Text to train a tokenizer on. Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
TOKENIZER_BYTES = 10_000_000
SAMPLE_BYTES = 64_000  # bytes of a larger text that are read in one place
TRAINER_OPTIONS = dict(
    model_type="bpe",
    byte_fallback=True,  # a character without a piece becomes its UTF-8 bytes, so no text is unknown
    character_coverage=0.9995,  # the rarest characters are left to the bytes
    required_chars="▁",  # a space, which would come back as ▁ where a text has few
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,  # indentation: one id for a run of spaces
    split_by_unicode_script=False,  # pieces such as "(self" and "):": 7 % more bytes per token on Python sources
    max_sentence_length=1 << 16,  # bytes; longer lines would be left out, so they are cut
    unk_id=0,
    bos_id=1,
    eos_id=2,
    pad_id=-1,
    control_symbols=[*TURNS],
    hard_vocab_limit=False,  # a small text has fewer pieces
    minloglevel=2,
)


def trained_tokenizer(files: list[TextFile], settings: DataSettings, vocab_size: int) -> Tokenizer:
    """A tokenizer that is trained on a sample of the files, unless the cache has it, complete."""
    split = (settings.validation_fraction, settings.validation_salt)
    key = digest(VERSION, vocab_size, split, sorted(TRAINER_OPTIONS.items()), files)
    folder = Path(settings.cache, "tokenizers", key)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        with contextlib.suppress(UserError), reading(folder):
            tokenizer = load_tokenizer(folder / "tokenizer.json")  # the last file that is saved
            read_model(tokenizer.files["tokenizer.model"])  # it goes into every checkpoint
            return tokenizer
        print(f"training a tokenizer of {vocab_size:,} pieces (once) ...", file=sys.stderr, flush=True)
        tokenizer = train_tokenizer(sample_text(files, settings), vocab_size, folder / "tokenizer.model")
        tokenizer.save(folder)
        return tokenizer


def sample_text(files: list[TextFile], settings: DataSettings) -> list[str]:
    """About `TOKENIZER_BYTES` of text from places all over the files, without documents that may be for validation."""
    texts, due = [], 0.0
    fraction = TOKENIZER_BYTES / max(1, sum(file.size for file in files))
    for file in files:
        due += fraction * file.size  # what the sample lacks up to here
        if due < SAMPLE_BYTES and fraction < 1:
            continue
        for document in read_documents(file):
            texts.append("".join(itertools.islice(document, 1 + 2 * MAX_VALIDATION // BLOCK)))
            due -= len(texts[-1])
            if due <= 0:
                break
    held_out = candidates(np.array([content_hash(text) for text in texts], np.uint64), settings)
    return [text for text, is_held_out in zip(texts, held_out, strict=True) if not is_held_out] or texts


def train_tokenizer(texts: Sequence[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-pair encoding of `vocab_size` pieces, or of all that the texts have; write it to the file `path`.

    The same texts in the same order give the same file. No piece contains a newline or a tab: those are bytes.
    """
    import sentencepiece

    if not any(texts):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    model, options = io.BytesIO(), TRAINER_OPTIONS | {"vocab_size": vocab_size}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines(texts), model_writer=model, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"no tokenizer could be trained on this text ({error}); give more text.") from None
    Path(path).write_bytes(model.getvalue())
    return load_tokenizer(path)


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that the trainer does not skip: without newline, tab and NUL, and not too long."""
    max_length = TRAINER_OPTIONS["max_sentence_length"] // 4  # a character has at most 4 bytes
    for text in texts:
        for line in re.split("[\n\t\0]+", text):
            yield from (line[start : start + max_length] for start in range(0, len(line), max_length))


@dataclass(frozen=True)
class Unit:
    """Files that are tokenized together."""

    files: tuple[TextFile, ...]
    tokenizer: Tokenizer
    path: Path  # file of the ids; the table lies beside it

    def is_complete(self) -> bool:
        return self.path.with_suffix(".docs").is_file() and self.path.is_file()

    def prepare(self, timeout: float) -> None:
        """Make it complete; if another process is at it, wait so many seconds for that one, any time if negative."""
        with contextlib.suppress(Timeout), FileLock(self.path.with_suffix(".lock")).acquire(timeout):
            if self.is_complete():
                return
            documents = itertools.chain.from_iterable(map(read_documents, self.files))
            with replacing(self.path) as file:
                table = write_ids(file, documents, self.tokenizer)
            with replacing(self.path.with_suffix(".docs")) as file:
                file.write(table.tobytes())

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The rows of its documents; `UserError` unless its ids are as many as they say."""
        table, path = np.fromfile(self.path.with_suffix(".docs"), DOCUMENT), self.path
        if int(table["tokens"].sum()) * self.tokenizer.dtype.itemsize != path.stat().st_size:
            raise UserError(f"{path} is damaged: its table has other ids; delete {path.parent}, which is made anew.")
        return table


def write_ids(file: BinaryIO, documents: Iterable[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Append the ids of documents to an open file; a row of `DOCUMENT` for each that is not empty."""
    begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], tokenizer.dtype)
    end = np.array([tokenizer.eos_id], tokenizer.dtype)
    table = array("Q")
    content, size, tokens = hashlib.blake2b(digest_size=8), 0, 0  # hash and sizes of the document so far
    for blocks in batches(documents):
        for block, ids in zip(blocks, tokenizer.encode_batch(blocks), strict=True):
            if block != END:
                if size == 0:
                    file.write(begin)
                file.write(np.asarray(ids, tokenizer.dtype))
                encoded = block.encode("utf-8")
                content.update(encoded)
                size += len(encoded)
                tokens += len(ids)
            elif size > 0:
                file.write(end)
                hash = int.from_bytes(content.digest(), "little")
                table.extend((hash, size, len(begin) + tokens + len(end)))
                content, size, tokens = hashlib.blake2b(digest_size=8), 0, 0
    return np.array(table, "<u8").view(DOCUMENT)


def batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """The blocks of documents, with `END` after each document, in lists of about `BATCH` characters."""
    blocks, characters = [], 0
    for document in documents:
        for block in itertools.chain(document, [END]):
            blocks.append(block)
            characters += len(block)
            if characters >= BATCH:
                yield blocks
                blocks, characters = [], 0
    yield blocks


def prepare_units(files: Iterable[TextFile], tokenizer: Tokenizer, folder: Path) -> list[Unit]:
    """The units of files, made complete by a process per core; this one is one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    units = []
    for group in group_files(files):  # names, sizes and times of files stand for their text
        units.append(Unit(group, tokenizer, folder / f"{digest(VERSION, group, tokenizer.hash)}.bin"))
    missing = [unit for unit in units if not unit.is_complete()]
    count = min(usable_cores(), len(missing))
    for _ in range(count - 1):
        SPAWN.Process(target=work, args=(missing, usable_cores() // count), daemon=True).start()
    hidden = None if is_main_process() else True  # None: hidden where standard error is no terminal
    for unit in tqdm(missing, "tokenizing", unit="unit", delay=2, disable=hidden):
        unit.prepare(timeout=0)
    for unit in missing:
        unit.prepare(timeout=-1)
    if not any(len(unit.table) for unit in units):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    return units


def group_files(files: Iterable[TextFile]) -> Iterator[tuple[TextFile, ...]]:
    """Groups of neighbouring files, each of `UNIT_BYTES` or more but for the last."""
    group, size = [], 0
    for file in files:
        group.append(file)
        size += file.size
        if size >= UNIT_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def work(units: list[Unit], threads: int) -> None:
    """Prepare units in another process. On an error it only ends: the main process meets the same error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
    end_with_parent()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # threads of the tokenizers library
    with contextlib.suppress(Exception):
        for unit in units:
            unit.prepare(timeout=0)


def end_with_parent() -> None:
    """End this process, in whatever it is doing, when the one that started it has died."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class TokenStream:
    """The ids of documents, end to end, read when they are asked for."""

    def __init__(self, units: Sequence[Unit], chosen: list[bool]):
        """chosen: whether a document is in the stream, for each row of the units' tables."""
        self._dtype, self.length = units[0].tokenizer.dtype, 0  # in ids; may be set to fewer
        # For each run of neighbouring documents: its file, its end in the stream, and how much later it is in the file.
        self._paths, self._ends, self._shifts = [], [], []
        row = 0
        for unit in units:
            place, is_open, last = 0, False, row + len(unit.table)
            for tokens, is_chosen in zip(unit.table["tokens"].tolist(), chosen[row:last], strict=True):
                if is_chosen:
                    if not is_open:
                        self._paths.append(unit.path)
                        self._ends.append(self.length)
                        self._shifts.append(place - self.length)
                    self.length += tokens
                    self._ends[-1] = self.length
                place += tokens
                is_open = is_chosen
            row = last

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids of a slice with step 1, read anew: pages that stay mapped would count as memory of the process."""
        start, stop, _ = places.indices(len(self))
        ids, run = [np.empty(0, self._dtype)], bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[run])
            first = start + self._shifts[run]
            ids.append(np.fromfile(self._paths[run], self._dtype, end - start, offset=first * self._dtype.itemsize))
            start, run = end, run + 1
        return np.concatenate(ids)


def digest(*parts: object) -> str:
    """A hash of values that have the same `repr` wherever they are equal."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def content_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
