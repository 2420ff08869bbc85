"""A text as token streams, one for training and one for validation, kept on disk between runs.

CACHE/tokenizers/KEY/   trained on a sample        CACHE/units/    see `units`
CACHE/texts/KEY.*       how units are split        CACHE/hub/      lists of files of the Hub
"""

import dataclasses
import hashlib
import json
import lzma
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from data.readers import BLOCK, read_documents
from data.sources import resolve
from data.split import (
    DUPLICATE,
    MAX_COMPARED,
    MAX_VALIDATION,
    TRAIN,
    VALIDATION,
    Split,
    TokenStream,
    cut_pieces,
    find_pieces,
    split_documents,
)
from data.tokenizer import TRAINER_OPTIONS, Tokenizer, load_tokenizer, train_tokenizer
from data.units import VERSION, Store, Unit, content_hash, digest, group_files
from data.workers import Workers, prepare_units
from errors import UserError, fsync_directory, is_main_process, locked, read_json, replace_text, replacing

# Text to train a tokenizer on. Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
TOKENIZER_BYTES = 10_000_000
SAMPLE_BYTES = 64_000  # of a larger text that are read in one place
AHEAD = 3  # units of a data set of the Hub that are prepared while an earlier one is trained on
WAIT = "waiting for another process that prepares a text ..."
NO_TEXT = "there is no text in the files that were named; give files that contain text."


@dataclass(frozen=True)
class Corpus:
    """A text that can be trained on."""

    text_hash: str  # of the documents, in order
    documents: int  # without duplicates
    duplicates: int  # documents equal to an earlier one, dropped
    validation_documents: int  # 0: the end of the text is for validation
    bytes: int  # of UTF-8 text, training and validation together
    validation_bytes: int
    xz_bits_per_byte: float  # what `xz -9e` makes of the validation text
    tokenizer: Tokenizer
    train: Sequence[TokenStream]  # one; of a data set of the Hub one per unit, each made when it is asked for
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    held_out: np.ndarray  # uint64, hashes of the documents for validation

    @property
    def description(self) -> str:
        """Three lines to print."""
        tokens, text = len(self.train[0]), self.bytes - self.validation_bytes
        apart = "" if self.documents < MAX_COMPARED else ", compared within each file"
        more = f" in the first of {len(self.train):,} parts" if len(self.train) > 1 else ""
        held_out = f"{self.validation_documents:,} documents" if self.validation_documents else "the end of the text"
        return (
            f"{self.documents:,} documents ({self.duplicates:,} duplicates dropped{apart}), "
            f"{self.bytes / 1e6:.2f} MB{more}, hash {self.text_hash[:12]}\n"
            f"  {tokens:,} tokens to train on, {text / max(1, tokens):.2f} bytes per token, "
            f"vocabulary {self.tokenizer.vocab_size:,}\n"
            f"  {len(self.validation):,} for validation ({held_out}, {self.validation_bytes / 1e6:.2f} MB, "
            f"xz -9e: {self.xz_bits_per_byte:.3f} bits per byte)"
        )


def prepare(
    sources: list[str],
    *,
    text_field: str = "text",
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    cache_dir: str | Path = ".cache",
    validation_fraction: float = 0.05,
    validation_salt: int = 0,
    complete: bool = False,
) -> Corpus:
    """Text to token streams; what the cache has is not made again.

    sources: see `data.sources.resolve`; text_field: of jsonl and parquet rows; tokenizer: a file or folder to load, or
    None to train one of `vocab_size` pieces on the text; complete: prepare all of a data set of the Hub, not only its
    first unit. Raises `UserError` for text and tokenizers that cannot be used.
    """
    cache_dir, split = Path(cache_dir), Split(validation_fraction, validation_salt)
    units = group_files(resolve(sources, text_field, cache_dir))
    is_streamed = len(units) > 1 and any(file.dataset for unit in units for file in unit.files)
    first = units[:1] if is_streamed else units
    tokenizer = load_tokenizer(tokenizer or trained_tokenizer(first, vocab_size, split, cache_dir))
    store = Store(cache_dir / "units", tokenizer)
    prepare_units(store, units if complete else first)
    corpus = load_corpus(store, first, split)
    if not is_streamed:
        return corpus
    whole_hash = digest(corpus.text_hash, [unit.fingerprint for unit in units])
    return dataclasses.replace(corpus, train=HubStreams(store, units, split, corpus), text_hash=whole_hash)


def tokenize(
    sources: list[str], tokenizer: Tokenizer, text_field: str = "text", cache_dir: str | Path = ".cache"
) -> tuple[TokenStream, int]:
    """All documents as one token stream, and their bytes of UTF-8 text: for evaluation, without a split."""
    units = group_files(resolve(sources, text_field, Path(cache_dir)))
    store = Store(Path(cache_dir) / "units", tokenizer)
    prepare_units(store, units)
    facts = [store.facts(unit) for unit in units]
    if not any(one["documents"] for one in facts):
        raise UserError(NO_TEXT)
    pieces = [(number, min(number, 1) * store.lead, one["tokens"]) for number, one in enumerate(facts)]
    stream = TokenStream([store.path(unit, ".bin") for unit in units], store.dtype, np.array(pieces))
    return stream, sum(one["bytes"] for one in facts)


class HubStreams(Sequence[TokenStream]):
    """The units of a data set of the Hub, each a stream; another process prepares the next ones."""

    def __init__(self, store: Store, units: list[Unit], split: Split, first: Corpus):
        self._store, self._units, self._split, self._held_out = store, units, split, first.held_out
        self._streams = [*first.train]
        self._workers = Workers(store, units, 1, 1 + AHEAD) if is_main_process() else None

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, number: int) -> TokenStream:
        while number >= len(self._streams):
            unit = self._units[len(self._streams)]
            if self._workers:
                self._workers.limit.value = len(self._streams) + 1 + AHEAD
            while self._store.facts(unit) is None:
                if self._workers and not self._workers.are_working():
                    prepare_units(self._store, [unit])
                time.sleep(0.1)
            self._streams += load_corpus(self._store, [unit], self._split, self._held_out).train
        return self._streams[number]


def trained_tokenizer(units: list[Unit], vocab_size: int, split: Split, cache_dir: Path) -> Path:
    """The folder of a tokenizer that is trained on a sample of the units, unless it was before."""
    texts = [unit.fingerprint for unit in units]
    folder = cache_dir / "tokenizers" / digest(VERSION, vocab_size, split, sorted(TRAINER_OPTIONS.items()), texts)
    if not folder.is_dir():
        with locked(cache_dir, wait=WAIT):
            if folder.is_dir():  # made while this process waited
                return folder
            new = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(new, ignore_errors=True)  # of a killed process
            new.mkdir(parents=True)
            print(f"training a tokenizer of {vocab_size:,} pieces (once) ...", file=sys.stderr, flush=True)
            train_tokenizer(sample_text(units, split), vocab_size, new / "tokenizer.model").save(new)
            fsync_directory(new)
            new.rename(folder)
    return folder


def sample_text(units: list[Unit], split: Split) -> list[str]:
    """About `TOKENIZER_BYTES` of text from places all over the units, without documents that may be for validation."""
    texts, due = [], 0.0
    fraction = TOKENIZER_BYTES / max(1, sum(unit.text_bytes for unit in units))
    for file in [file for unit in units for file in unit.files]:
        due += fraction * file.text_bytes  # what the sample lacks up to here
        if due < SAMPLE_BYTES and fraction < 1:
            continue
        for document in read_documents(file, []):
            texts.append("".join(islice(document, 1 + 2 * MAX_VALIDATION // BLOCK)))
            due -= len(texts[-1])
            if due <= 0:
                break
    if not texts:
        raise UserError(NO_TEXT)
    held_out = split.candidates(np.array([content_hash(text) for text in texts], np.uint64))
    return [text for text, is_held_out in zip(texts, held_out, strict=True) if not is_held_out] or texts


def load_corpus(store: Store, units: list[Unit], split: Split, held_out: np.ndarray | None = None) -> Corpus:
    """The streams of complete units, split unless they were before.

    held_out: the hashes of the documents for validation, where other units have given all of them.
    """
    others = None if held_out is None else held_out.tolist()
    key = digest(VERSION, split, others, store.tokenizer.hash, [unit.fingerprint for unit in units])
    cache_dir, paths = store.folder.parent, [store.path(unit, ".bin") for unit in units]
    facts_file, arrays_file = cache_dir / "texts" / f"{key}.json", cache_dir / "texts" / f"{key}.npz"
    if not facts_file.is_file():
        with locked(cache_dir, wait=WAIT):
            facts_file.parent.mkdir(exist_ok=True)
            facts, arrays = split_units(store, units, split, held_out)
            with replacing(arrays_file) as file:
                np.savez(file, **arrays)
            replace_text(facts_file, json.dumps(facts))
    with np.load(arrays_file) as arrays:
        train = [TokenStream(paths, store.dtype, arrays["train"])]
        given = dict(tokenizer=store.tokenizer, train=train, validation=arrays["validation"])
        return Corpus(**read_json(facts_file), **given, held_out=arrays["held_out"])


def split_units(
    store: Store, units: list[Unit], split: Split, held_out: np.ndarray | None
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """The fields of a `Corpus` of these units: facts, and arrays (the pieces for training in place of the stream)."""
    tables = [store.documents(unit) for unit in units]
    table, unit = np.concatenate(tables), np.repeat(np.arange(len(units)), [len(one) for one in tables])
    if not len(table):
        raise UserError(NO_TEXT)
    kinds = split_documents(table, unit, split, held_out)
    train, validation = (find_pieces(table, unit, kinds == kind, store.lead) for kind in (TRAIN, VALIDATION))
    documents = {kind: int((kinds == kind).sum()) for kind in (TRAIN, VALIDATION, DUPLICATE)}
    sizes = {kind: int(table["bytes"][kinds == kind].sum()) for kind in (TRAIN, VALIDATION)}
    if held_out is None and not documents[VALIDATION]:
        tokens = int(table["tokens"][kinds == TRAIN].sum())
        share = min(split.fraction, MAX_VALIDATION / sizes[TRAIN])
        train, validation = cut_pieces(train, tokens - max(2, round(share * tokens)))
    ids = TokenStream([store.path(unit, ".bin") for unit in units], store.dtype, validation)[:]
    text = store.tokenizer.decode(ids).encode("utf-8")
    # `xz -9e`, but with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24}]
    facts = dict(
        text_hash=hashlib.blake2b(table["hash"][kinds != DUPLICATE].tobytes(), digest_size=16).hexdigest(),
        documents=documents[TRAIN] + documents[VALIDATION],
        duplicates=documents[DUPLICATE],
        validation_documents=documents[VALIDATION],
        bytes=sizes[TRAIN] + sizes[VALIDATION],
        validation_bytes=sizes[VALIDATION] or len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, filters=filters)) / max(1, len(text)),
    )
    return facts, {"train": train, "validation": ids, "held_out": table["hash"][kinds == VALIDATION]}
