"""From text to token streams on disk, through the cache.

The text is read three times (which documents, the tokenizer's sample, ids) and never held: memory does not grow with
it. A second run with the same text and tokenizer reads no text at all.
"""

import hashlib
import lzma
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import cache
from data.corpus import TextFile, fingerprint, resolve, stream
from data.packing import Piece, TokenStream, pack, token_dtype
from data.split import TRAIN, VALIDATION, Split, by_side, scan, split
from data.tokenizer import TRAINER, SentencePieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from errors import UserError

VERSION = 1  # of the cache's files; raised when the same text and tokenizer would give others

# Text to train a tokenizer on. Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
TOKENIZER_BYTES = 10_000_000
# Bytes of text below which no bar is shown: it would be over before it could be read.
SHOW_PROGRESS = 32_000_000


@dataclass(frozen=True)
class TokenizedCorpus:
    """A text as two token streams, one for training and one for validation."""

    train: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536; memory-mapped, read-only
    validation: np.ndarray
    tokenizer: Tokenizer
    text_hash: str  # of the documents, in order
    documents: int  # without copies
    copies: int  # documents equal to an earlier one, dropped
    validation_documents: int
    divided: bool  # the validation text is the end of the longest document, for want of documents small enough
    bytes: int  # of UTF-8 text, training and validation together
    validation_bytes: int
    xz_bits_per_byte: float  # what `xz -9e` makes of the validation text
    underscores_2581: int  # characters U+2581 in the text, which SentencePiece cannot tell from spaces

    @property
    def description(self) -> str:
        """One line to print."""
        tokens = len(self.train) + len(self.validation)
        held_out = "the end of the longest document" if self.divided else f"{self.validation_documents:,} documents"
        parts = [
            f"{self.documents:,} documents ({self.copies:,} copies dropped), {self.bytes / 1e6:.2f} MB, "
            f"hash {self.text_hash[:12]}",
            f"{len(self.train):,} tokens for training",
            f"{len(self.validation):,} for validation ({held_out}, {self.validation_bytes / 1e6:.2f} MB, "
            f"xz -9e: {self.xz_bits_per_byte:.3f} bits per byte)",
            f"{self.bytes / tokens:.2f} bytes per token, vocabulary {self.tokenizer.vocab_size:,}",
        ]
        if self.underscores_2581 and isinstance(self.tokenizer, SentencePieceTokenizer):
            parts.append(f"{self.underscores_2581:,} characters U+2581, which SentencePiece reads as spaces")
        return "; ".join(parts)


# What meta.json says: all but the streams themselves and the tokenizer, and how long the streams are.
FACTS = {field.name for field in fields(TokenizedCorpus)} - {"train", "validation", "tokenizer"} | {"tokens"}


def prepare(
    sources: list[str],
    *,
    text_field: str = "text",
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    cache_dir: str | Path = ".cache",
    validation_fraction: float = 0.05,
) -> TokenizedCorpus:
    """Text to token streams, from the cache where it has them.

    sources: names, paths, folders and patterns (see `data.corpus.resolve`); text_field: of jsonl and parquet rows;
    tokenizer: a file or folder to load, or None to train a SentencePiece BPE of `vocab_size` pieces on the training
    documents. Raises `UserError` for text, tokenizers and places that cannot be used.
    """
    given = load_tokenizer(tokenizer) if tokenizer else None
    files = resolve(sources, text_field)
    try:
        return _prepare(files, given, vocab_size, Path(cache_dir), validation_fraction)
    except OSError as error:
        raise UserError(
            f"the prepared text cannot be kept in {cache_dir} ({error.strerror or error}); "
            f"make room there or name another folder for the cache."
        ) from error


def tokenize(sources: list[str], tokenizer: Tokenizer, text_field: str = "text") -> tuple[np.ndarray, int]:
    """All documents of the sources as one token stream, and its bytes of UTF-8 text: for evaluation, without a split.

    The stream is (tokens,) uint16 or uint32, memory-mapped to a temporary file that goes away with it.
    """
    files, watch = resolve(sources, text_field), _Watch()
    try:
        with tempfile.TemporaryFile() as file:
            target = TokenStream(file, tokenizer)
            pack(watch((text, first, TRAIN) for text, first in stream(files)), [target], tokenizer)
            if not target.tokens:
                raise UserError(f"there is no text in {', '.join(sources)}; give some that holds text.")
            return np.memmap(file, target.dtype, mode="r"), watch.bytes[TRAIN]
    except OSError as error:
        raise UserError(
            f"the text's ids cannot be kept in a temporary file ({error.strerror or error}); "
            f"make room there or name another folder in the environment variable TMPDIR."
        ) from error


def _prepare(
    files: list[TextFile], given: Tokenizer | None, vocab_size: int, folder: Path, fraction: float
) -> TokenizedCorpus:
    before = fingerprint(files)
    seen = folder / "sources" / f"{before}.json"
    text_hash = (cache.read_json(seen) or {}).get("text_hash")
    if text_hash:
        place = _tokenizer_place(folder, text_hash, fraction, vocab_size)
        ready = given or (load_tokenizer(place) if place.is_dir() else None)
        if ready and (corpus := _open(_tokens_place(folder, text_hash, fraction, ready), ready)):
            return corpus

    division = split(*scan(_with_bar(files)), fraction)
    ready = given or _trained(files, before, division, vocab_size, folder, fraction)
    place = _tokens_place(folder, division.text_hash, fraction, ready)
    if place.is_dir() and _open(place, ready) is None:
        shutil.rmtree(place, ignore_errors=True)  # damaged from outside: what is put there is whole
    if not place.is_dir():
        with cache.whole_folder(place) as new:
            _build(new, files, division, ready)
            _check_unchanged(files, before)
    cache.write_json(seen, {"text_hash": division.text_hash})
    if corpus := _open(place, ready):
        return corpus
    raise UserError(f"the prepared text in {place} is damaged; delete that folder and run the same command again.")


def _trained(
    files: list[TextFile], before: str, division: Split, vocab_size: int, folder: Path, fraction: float
) -> Tokenizer:
    place = _tokenizer_place(folder, division.text_hash, fraction, vocab_size)
    if not place.is_dir():
        print(f"training a tokenizer of {vocab_size:,} pieces (once, some seconds) ...", file=sys.stderr, flush=True)
        share, chance = TOKENIZER_BYTES / division.bytes, random.Random(0)
        training = (text for text, _, side in by_side(files, division) if side == TRAIN and chance.random() < share)
        with cache.whole_folder(place) as new:
            train_tokenizer(training, vocab_size, new / "tokenizer.model")
            _check_unchanged(files, before)
    return load_tokenizer(place)


def _build(folder: Path, files: list[TextFile], division: Split, tokenizer: Tokenizer) -> None:
    watch = _Watch(total=division.bytes)
    with open(folder / "train.bin", "wb") as train, open(folder / "validation.bin", "wb") as validation:
        streams = [TokenStream(train, tokenizer), TokenStream(validation, tokenizer)]
        pack(watch(by_side(files, division)), streams, tokenizer)
    if not all(watch.bytes):
        raise UserError(f"the text is too short to train and to validate on (bytes: {division.bytes}); give more.")
    facts = {
        "tokens": [one.tokens for one in streams],
        "text_hash": division.text_hash,
        "documents": division.documents,
        "copies": len(division.side) - division.documents,
        "validation_documents": watch.documents[VALIDATION],
        "divided": division.cut is not None,
        "bytes": sum(watch.bytes),
        "validation_bytes": watch.bytes[VALIDATION],
        "xz_bits_per_byte": 8 * watch.xz_bytes() / watch.bytes[VALIDATION],
        "underscores_2581": watch.underscores,
    }
    cache.write_json(folder / "meta.json", facts)


def _open(folder: Path, tokenizer: Tokenizer) -> TokenizedCorpus | None:
    """What the folder holds, or None where it is not there, its facts are others, or its files have other sizes."""
    facts = cache.read_json(folder / "meta.json")
    if facts is None or facts.keys() != FACTS:
        return None
    paths, dtype = [folder / "train.bin", folder / "validation.bin"], token_dtype(tokenizer)
    for path, tokens in zip(paths, facts.pop("tokens"), strict=True):
        if not path.is_file() or path.stat().st_size != tokens * dtype.itemsize:
            return None
    train, validation = (np.memmap(path, dtype, mode="r") for path in paths)
    return TokenizedCorpus(train=train, validation=validation, tokenizer=tokenizer, **facts)


class _Watch:
    """Lets pieces through and keeps count: bytes and documents by side, U+2581, and xz of the validation text."""

    def __init__(self, total: int | None = None):
        self.bytes, self.documents, self.underscores = [0, 0], [0, 0], 0
        self._total = total
        # `xz -9e`, but with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24}]
        self._xz, self._xz_bytes = lzma.LZMACompressor(filters=filters), 0

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        with _bar("tokenizing", self._total, hide=(self._total or 0) < SHOW_PROGRESS) as bar:
            for piece in pieces:
                text, first, side = piece
                encoded = text.encode("utf-8")
                self.bytes[side] += len(encoded)
                self.documents[side] += first
                self.underscores += text.count("▁")
                if side == VALIDATION:
                    self._xz_bytes += len(self._xz.compress(encoded))
                bar.update(len(encoded))
                yield piece

    def xz_bytes(self) -> int:
        return self._xz_bytes + len(self._xz.flush())


def _with_bar(files: list[TextFile]) -> Iterator[tuple[str, bool]]:
    size = sum(file.path.stat().st_size for file in files)
    plain = all(file.format == "text" for file in files)  # else the text is longer or shorter than the files
    with _bar("reading", size if plain else None, hide=size < SHOW_PROGRESS) as bar:
        for text, first in stream(files):
            bar.update(len(text.encode("utf-8")))
            yield text, first


def _bar(what: str, total: int | None, hide: bool) -> tqdm:
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=hide)


def _check_unchanged(files: list[TextFile], before: str) -> None:
    if fingerprint(files) != before:
        raise UserError("the text changed while it was being read; run the same command again when it is at rest.")


def _tokenizer_place(folder: Path, text_hash: str, fraction: float, vocab_size: int) -> Path:
    return folder / "tokenizers" / _key(VERSION, text_hash, fraction, vocab_size, sorted(TRAINER.items()))


def _tokens_place(folder: Path, text_hash: str, fraction: float, tokenizer: Tokenizer) -> Path:
    return folder / "tokens" / _key(VERSION, text_hash, fraction, tokenizer.hash)


def _key(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=12).hexdigest()
