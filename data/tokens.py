"""From text to token streams on disk, through the cache.

The text is read three times (to split it, to train a tokenizer, to write ids), always as a stream: memory does not
grow with it. A second run with the same text and tokenizer reads no text at all.
"""

import hashlib
import json
import lzma
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import cache
from data.chunks import chunks
from data.corpus import TextFile, drop_non_utf8, fingerprint, read_documents, resolve, status_of
from data.packing import TokenWriter, token_dtype
from data.split import TRAIN, VALIDATION, CorpusSplit, hash_documents, kept_documents, split_corpus
from data.tokenizer import (
    TRAINER_OPTIONS,
    Tokenizer,
    VocabularyTooLarge,
    load_tokenizer,
    train_tokenizer,
)
from errors import UserError, locked, read_json, replace_text

VERSION = 3  # of the cache's files; raised when the same text and tokenizer would give other files

# Text to train a tokenizer on. Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
TOKENIZER_BYTES = 10_000_000
# Bytes of text below which no progress bar is shown: the work ends before a user could read it.
SHOW_PROGRESS = 32_000_000


@dataclass(frozen=True)
class TokenizedCorpus:
    """A text as two token streams, one for training and one for validation."""

    train: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536; memory-mapped, read-only
    validation: np.ndarray
    tokenizer: Tokenizer
    text_hash: str  # of the documents, in order
    documents: int  # without duplicates
    duplicates: int  # documents equal to an earlier one, dropped
    validation_documents: int
    divided: bool  # the validation text is the end of the longest document: no document is small enough
    bytes: int  # of UTF-8 text, training and validation together
    validation_bytes: int
    xz_bits_per_byte: float  # what `xz -9e` makes of the validation text
    u2581_count: int  # characters U+2581 in the text, which SentencePiece cannot tell from spaces
    special_tokens: dict[str, int]  # how often the text contains each special token of a tokenizer.json

    @property
    def description(self) -> str:
        """One line to print."""
        tokens = len(self.train) + len(self.validation)
        held_out = "the end of the longest document" if self.divided else f"{self.validation_documents:,} documents"
        parts = [
            f"{self.documents:,} documents ({self.duplicates:,} duplicates dropped), {self.bytes / 1e6:.2f} MB, "
            f"hash {self.text_hash[:12]}",
            f"{len(self.train):,} tokens for training",
            f"{len(self.validation):,} for validation ({held_out}, {self.validation_bytes / 1e6:.2f} MB, "
            f"xz -9e: {self.xz_bits_per_byte:.3f} bits per byte)",
            f"{self.bytes / tokens:.2f} bytes per token, vocabulary {self.tokenizer.vocab_size:,}",
        ]
        if self.u2581_count and self.tokenizer.is_sentencepiece:
            parts.append(f"{self.u2581_count:,} characters U+2581, which SentencePiece reads as spaces")
        if self.special_tokens:
            parts.append(
                f"{sum(self.special_tokens.values()):,} special tokens in the text ({' '.join(self.special_tokens)}): "
                f"they are encoded as ordinary text, so the model does not learn them; remove them "
                f"(document boundaries are added automatically)"
            )
        return "; ".join(parts)


# meta.json holds all but the streams and the tokenizer, and how long the streams are.
STREAMS = ("train.bin", "validation.bin")
META_KEYS = {field.name for field in fields(TokenizedCorpus)} - {"train", "validation", "tokenizer"} | {"tokens"}


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

    sources: names, paths, folders and patterns (see `data.corpus.resolve`); text_field: of JSONL and Parquet rows;
    tokenizer: a file or folder to load, or None to train a SentencePiece BPE of `vocab_size` pieces on the training
    documents. Raises `UserError` for text, tokenizers and cache folders that cannot be used.
    """
    given = load_tokenizer(tokenizer) if tokenizer else None
    files = resolve(sources, text_field)
    try:
        return _prepare(files, given, vocab_size, Path(cache_dir), validation_fraction)
    except OSError as error:
        raise UserError(
            f"the prepared text cannot be written to {cache_dir} ({error.strerror or error}); "
            f"free some disk space or name another folder for the cache."
        ) from error


def tokenize(sources: list[str], tokenizer: Tokenizer, text_field: str = "text") -> tuple[np.ndarray, int]:
    """All documents of the sources as one token stream, and its bytes of UTF-8 text: for evaluation, without a split.

    The stream is (tokens,) uint16 or uint32, memory-mapped to a temporary file that is deleted with it.
    """
    files, text_bytes = drop_non_utf8(resolve(sources, text_field)), 0
    try:
        with tempfile.TemporaryFile() as file:
            writer = TokenWriter(file, tokenizer)
            for document in read_documents(files, report=True):
                for number, chunk in enumerate(chunks(document)):
                    writer.add(chunk, starts_document=number == 0)
                    text_bytes += len(chunk.encode("utf-8"))
            writer.finish()
            if not writer.tokens:
                raise UserError(f"there is no text in {', '.join(sources)}; give files that contain text.")
            return np.memmap(file, writer.dtype, mode="r"), text_bytes
    except OSError as error:
        raise UserError(
            f"the text's ids cannot be written to a temporary file ({error.strerror or error}); "
            f"free some disk space or name another folder in the environment variable TMPDIR."
        ) from error


def _prepare(
    files: list[TextFile], given: Tokenizer | None, vocab_size: int, cache_dir: Path, fraction: float
) -> TokenizedCorpus:
    files_hash = fingerprint(files)
    hash_file = cache_dir / "sources" / f"{files_hash}.json"

    def cached() -> TokenizedCorpus | None:
        """The streams, if this text was prepared before."""
        text_hash = read_json(hash_file).get("text_hash")
        folder = _tokenizer_folder(cache_dir, text_hash, fraction, vocab_size)
        if text_hash is None or not (given or folder.is_dir()):
            return None
        tokenizer = given or load_tokenizer(folder)
        return _open(_tokens_folder(cache_dir, text_hash, fraction, tokenizer), tokenizer)

    if corpus := cached():
        return corpus
    with locked(cache_dir, wait=f"waiting for another process that prepares a text in {cache_dir} ..."):
        return cached() or _build(files, files_hash, hash_file, given, vocab_size, cache_dir, fraction)


def _build(
    files: list[TextFile],
    files_hash: str,
    hash_file: Path,
    given: Tokenizer | None,
    vocab_size: int,
    cache_dir: Path,
    fraction: float,
) -> TokenizedCorpus:
    """Split the text, train a tokenizer unless one is given, and write the streams, all into the cache."""
    all_files, files = files, drop_non_utf8(files)
    size = sum(status_of(file).st_size for file in files)
    plain = all(file.format == "text" for file in files)  # else the text is longer or shorter than the files
    with _progress_bar("reading", size, total=size if plain else None) as bar:
        hashes, lengths = hash_documents(read_documents(files, report=True), bar.update)
    corpus_split = split_corpus(hashes, lengths, fraction)

    tokenizer = given
    if tokenizer is None:
        folder = _tokenizer_folder(cache_dir, corpus_split.text_hash, fraction, vocab_size)
        if not folder.is_dir():
            with cache.atomic_folder(folder) as new:
                _train_tokenizer(new, files, corpus_split, vocab_size)
                _check_unchanged(all_files, files_hash)
        tokenizer = load_tokenizer(folder)

    folder = _tokens_folder(cache_dir, corpus_split.text_hash, fraction, tokenizer)
    if _open(folder, tokenizer) is None:
        if folder.is_dir():
            print(f"note: {folder} is damaged; it is prepared again", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        with cache.atomic_folder(folder) as new:
            _write_streams(new, files, corpus_split, tokenizer)
            _check_unchanged(all_files, files_hash)
    hash_file.parent.mkdir(exist_ok=True)
    replace_text(hash_file, json.dumps({"text_hash": corpus_split.text_hash}))
    return _open(folder, tokenizer)


def _train_tokenizer(folder: Path, files: list[TextFile], corpus_split: CorpusSplit, vocab_size: int) -> None:
    """Train on a random sample of the chunks for training, about `TOKENIZER_BYTES` of them."""
    print(f"training a tokenizer of {vocab_size:,} pieces (once, some seconds) ...", file=sys.stderr, flush=True)
    fraction, generator = TOKENIZER_BYTES / corpus_split.bytes, random.Random(0)
    sample = [
        chunk
        for split, document in kept_documents(read_documents(files), corpus_split)
        if split == TRAIN
        for chunk in document
        if generator.random() < fraction
    ]
    try:
        train_tokenizer(sample, vocab_size, folder / "tokenizer.model")
    except VocabularyTooLarge as error:
        reason = f"the text is too small for a vocabulary of {vocab_size:,}"
        print(f"note: {reason}; the tokenizer has {error.maximum:,} pieces instead", file=sys.stderr, flush=True)
        train_tokenizer(sample, error.maximum, folder / "tokenizer.model")


def _write_streams(folder: Path, files: list[TextFile], corpus_split: CorpusSplit, tokenizer: Tokenizer) -> None:
    """Write both token streams, and a meta.json that says what they are."""
    u2581_count, validation_text = 0, bytearray()  # 8 MB at most, see `split_corpus`
    special_pattern, special_tokens = _special_tokens(tokenizer), Counter()
    with (
        open(folder / STREAMS[0], "wb") as train_file,
        open(folder / STREAMS[1], "wb") as validation_file,
        _progress_bar("tokenizing", corpus_split.bytes, total=corpus_split.bytes) as bar,
    ):
        writers = {TRAIN: TokenWriter(train_file, tokenizer), VALIDATION: TokenWriter(validation_file, tokenizer)}
        for split, document in kept_documents(read_documents(files), corpus_split):
            for number, chunk in enumerate(document):
                writers[split].add(chunk, starts_document=number == 0)
                u2581_count += chunk.count("\u2581")
                if special_pattern:
                    special_tokens.update(special_pattern.findall(chunk))
                encoded = chunk.encode("utf-8")
                if split == VALIDATION:
                    validation_text += encoded
                bar.update(len(encoded))
        for writer in writers.values():
            writer.finish()
    if not all(writer.tokens for writer in writers.values()):
        raise UserError(f"the text is too short to train and to validate on (bytes: {corpus_split.bytes}); give more.")

    # `xz -9e`, but with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24}]
    meta = {
        "tokens": [writer.tokens for writer in writers.values()],
        "text_hash": corpus_split.text_hash,
        "documents": corpus_split.documents,
        "duplicates": len(corpus_split.splits) - corpus_split.documents,
        "validation_documents": writers[VALIDATION].documents,
        "divided": corpus_split.divided is not None,
        "bytes": corpus_split.bytes,
        "validation_bytes": len(validation_text),
        "xz_bits_per_byte": 8 * len(lzma.compress(validation_text, filters=filters)) / len(validation_text),
        "u2581_count": u2581_count,
        "special_tokens": special_tokens,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern | None:
    """A pattern that matches the special tokens of a `tokenizer.json`."""
    added = () if tokenizer.is_sentencepiece else tokenizer.added_tokens.values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def _open(folder: Path, tokenizer: Tokenizer) -> TokenizedCorpus | None:
    """What the folder holds; None where it is absent, its meta.json has other keys, or its streams other lengths."""
    meta = read_json(folder / "meta.json")
    paths, dtype = [folder / name for name in STREAMS], token_dtype(tokenizer)
    sizes = [path.stat().st_size // dtype.itemsize for path in paths if path.is_file()]
    if meta.keys() != META_KEYS or meta.pop("tokens") != sizes:
        return None
    train, validation = (np.memmap(path, dtype, mode="r") for path in paths)
    return TokenizedCorpus(train=train, validation=validation, tokenizer=tokenizer, **meta)


def _progress_bar(description: str, size: int, *, total: int | None) -> tqdm:
    return tqdm(desc=description, total=total, unit="B", unit_scale=True, disable=size < SHOW_PROGRESS)


def _check_unchanged(files: list[TextFile], files_hash: str) -> None:
    if fingerprint(files) != files_hash:
        raise UserError("the text changed while it was being read; run the same command again when nothing writes it.")


def _tokenizer_folder(cache_dir: Path, text_hash: str, fraction: float, vocab_size: int) -> Path:
    return cache_dir / "tokenizers" / _key(VERSION, text_hash, fraction, vocab_size, sorted(TRAINER_OPTIONS.items()))


def _tokens_folder(cache_dir: Path, text_hash: str, fraction: float, tokenizer: Tokenizer) -> Path:
    return cache_dir / "tokens" / _key(VERSION, text_hash, fraction, tokenizer.hash)


def _key(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=12).hexdigest()
