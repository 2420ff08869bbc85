"""What is made of a text once and kept: the tokenizer that is trained on a sample of it, and the ids of its documents.

CACHE/tokenizers/KEY/    the tokenizer
CACHE/tokens/KEY.bin     ids: BOS a a a EOS BOS b b EOS, or without a BOS in the tokenizer a a a EOS b b EOS
CACHE/tokens/KEY.docs    a row of `DOCUMENT` for each document; written last, so it says that the ids are complete
"""

import hashlib
import io
import itertools
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from data.readers import BLOCK, Document, read_documents
from data.settings import DataSettings
from data.sources import TextFile
from data.special_tokens import TURNS
from data.split import MAX_VALIDATION, candidates
from data.tokenizer import Tokenizer, load_tokenizer
from errors import UserError
from files import replacing

VERSION = 6  # raised when the same text and tokenizer would give other files
BATCH = 4_000_000  # characters that are encoded together, on all cores
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
    """A tokenizer that is trained on a sample of the files, unless the cache has it."""
    split = (settings.validation_fraction, settings.validation_salt)
    key = digest(VERSION, vocab_size, split, sorted(TRAINER_OPTIONS.items()), files)
    folder = Path(settings.cache, "tokenizers", key)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "tokenizer.json").is_file():  # the last file that is saved
            print(f"training a tokenizer of {vocab_size:,} pieces (once) ...", file=sys.stderr, flush=True)
            train_tokenizer(sample_text(files, settings), vocab_size, folder / "tokenizer.model").save(folder)
    return load_tokenizer(folder)


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


def prepare_tokens(files: Sequence[TextFile], tokenizer: Tokenizer, folder: Path) -> tuple[Path, np.ndarray]:
    """The file of all ids and its rows of `DOCUMENT`, written unless the cache has them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest(VERSION, tuple(files), tokenizer.hash)}.bin"  # names, sizes and times stand for the text
    table_file = path.with_suffix(".docs")
    with FileLock(path.with_suffix(".lock")):
        if not (table_file.is_file() and path.is_file()):
            progress = tqdm(files, "tokenizing", unit="file", delay=2, disable=None)  # None: shown on terminals alone
            with replacing(path) as file:
                table = write_ids(file, itertools.chain.from_iterable(map(read_documents, progress)), tokenizer)
            with replacing(table_file) as file:
                file.write(table.tobytes())
    table = np.fromfile(table_file, DOCUMENT)
    if int(table["tokens"].sum()) * tokenizer.dtype.itemsize != path.stat().st_size:
        raise UserError(f"{path} is damaged: its table has other ids; delete {folder}, which is made anew.")
    if len(table) == 0:
        raise UserError("there is no text in the files that were named; give files that contain text.")
    return path, table


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


class TokenStream:
    """The ids of chosen documents, end to end, read when they are asked for."""

    def __init__(self, path: Path, dtype: np.dtype, tokens: np.ndarray, chosen: np.ndarray):
        """tokens: the ids of each document in the file; chosen: whether it is in the stream."""
        borders = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # of runs of chosen neighbours
        starts, ends = np.append(0, np.cumsum(tokens, dtype=np.int64))[borders].reshape(-1, 2).T
        self._path, self._dtype = path, dtype
        self._ends = np.cumsum(ends - starts)  # of each run in the stream,
        self._shifts = ends - self._ends  # and how much later it is in the file
        self.length = int((ends - starts).sum())  # in ids; may be set to fewer

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids of a slice with step 1, read anew: pages that stay mapped would count as memory of the process."""
        start, stop, _ = places.indices(len(self))
        ids, run = [np.empty(0, self._dtype)], int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            end = min(stop, int(self._ends[run]))
            first = start + int(self._shifts[run])
            ids.append(np.fromfile(self._path, self._dtype, end - start, offset=first * self._dtype.itemsize))
            start, run = end, run + 1
        return np.concatenate(ids)


def digest(*parts: object) -> str:
    """A hash of values that have the same `repr` wherever they are equal."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def content_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
