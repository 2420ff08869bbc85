"""A text as token streams, one for training and one for validation, and the tokenizer that is trained on a sample.

CACHE/tokenizers/KEY/   trained here     CACHE/units/   see `units`     CACHE/hub/   lists of files of the Hub
"""

import contextlib
import hashlib
import io
import lzma
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock

from data.batches import Batch, batch, number_documents, validation_windows
from data.conversations import Conversations, find_conversations, prepare_conversations
from data.readers import BLOCK, read_documents
from data.sources import TextFile, resolve
from data.split import DUPLICATE, MAX_VALIDATION, TRAIN, VALIDATION, Split, split_documents
from data.tokenizer import TURNS, Tokenizer, load_tokenizer
from data.tokenizer_json import read_model
from data.units import VERSION, TokenStream, Unit, content_hash, digest, prepare_units
from errors import UserError, reading

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


@dataclass(frozen=True)
class Corpus:
    """A text that can be trained on."""

    description: str  # three lines to print
    text_hash: str  # hash of the documents, in order
    tokenizer: Tokenizer
    train: TokenStream
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    validation_bytes: int  # bytes of its text in UTF-8
    document_start: int | None = None  # the id that begins a document, where attention keeps documents apart

    def xz_bits_per_byte(self) -> float:
        """What `xz -9e` makes of the validation text: a number to compare a model with."""
        text = self.tokenizer.decode(self.validation).encode("utf-8")
        # 7e is 9e with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
        return 8 * len(lzma.compress(text, preset=7 | lzma.PRESET_EXTREME)) / max(1, len(text))

    def first_words(self) -> list[str]:
        """The first words of up to three held-out documents."""
        starts = np.flatnonzero(self.validation == self.tokenizer.document_start)[:3].tolist() or [0]
        return [self.tokenizer.decode(self.validation[start : start + 8]).rstrip("\ufffd ") for start in starts]

    def batch(self, **order: int) -> Batch:
        """The sequences of one step, see `batches.batch`."""
        return number_documents(batch(self.train, **order), self.document_start)

    def validation_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        windows = validation_windows(self.validation, sequence_length, batch_size)
        return (number_documents(window, self.document_start) for window in windows)


def prepare(
    sources: list[str],
    *,
    text_field: str = "text",
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    cache_dir: str | Path = ".cache",
    validation_fraction: float = 0.05,
    validation_salt: int = 0,
    document_mask: bool = False,
    sequence_length: int = 256,
) -> Corpus | Conversations:
    """Text to token streams, or conversations to rows of `sequence_length`; what the cache has is not made again.

    sources: see `resolve`; tokenizer: to load, or None to train one; document_mask: batches number documents.
    """
    cache_dir, split = Path(cache_dir), Split(validation_fraction, validation_salt)
    files = resolve(sources, text_field, cache_dir)
    loaded = tokenizer and load_tokenizer(tokenizer)
    if found := find_conversations(files):
        if loaded is None:
            fix = f"give a model to teach them with --init-from, or leave out {found}"
            raise UserError(f"{', '.join(sources)} has conversations; {fix}.")
        return prepare_conversations(files, loaded, sequence_length, cache_dir, split)
    loaded = loaded or trained_tokenizer(files, vocab_size, split, cache_dir)
    units = prepare_units(files, loaded, cache_dir / "units")
    return split_units(units, split, loaded.document_start if document_mask else None)


def tokenize(
    sources: list[str], tokenizer: Tokenizer, text_field: str = "text", cache_dir: str | Path = ".cache"
) -> tuple[TokenStream, int]:
    """All documents as one token stream, and their bytes of UTF-8 text: for evaluation, without a split."""
    units = prepare_units(resolve(sources, text_field, Path(cache_dir)), tokenizer, Path(cache_dir) / "units")
    rows = np.concatenate([unit.table for unit in units])
    return TokenStream(units, [True] * len(rows)), int(rows["bytes"].sum())


def split_units(units: list[Unit], split: Split, document_start: int | None) -> Corpus:
    """The text of complete units as one stream for training and one for validation."""
    rows, tokenizer = np.concatenate([unit.table for unit in units]), units[0].tokenizer
    kinds = split_documents(rows, split)
    kept, held_out = rows[kinds != DUPLICATE], rows[kinds == VALIDATION]
    size, validation_bytes = int(kept["bytes"].sum()), int(held_out["bytes"].sum())
    train = TokenStream(units, (kinds == TRAIN).tolist())
    if len(held_out) > 0:
        origin = f"{len(held_out):,} documents"
        validation = TokenStream(units, (kinds == VALIDATION).tolist())[:]
    else:
        origin = "the end of the text"
        fraction = min(split.fraction, MAX_VALIDATION / size)
        end = len(train) - max(2, round(fraction * len(train)))
        validation = train[end:]
        validation_bytes = len(tokenizer.decode(validation).encode("utf-8"))
        train.length = end
    text_hash = hashlib.blake2b(kept["hash"].tobytes(), digest_size=16).hexdigest()
    description = (
        f"{len(kept):,} documents ({len(rows) - len(kept):,} duplicates dropped), "
        f"{size / 1e6:.2f} MB, hash {text_hash[:12]}\n"
        f"  {len(train):,} tokens to train on, {(size - validation_bytes) / max(1, len(train)):.2f} bytes per token, "
        f"vocabulary {tokenizer.vocab_size:,}\n"
        f"  {len(validation):,} for validation ({origin}, {validation_bytes / 1e6:.2f} MB)"
    )
    return Corpus(description, text_hash, tokenizer, train, validation, validation_bytes, document_start)


def trained_tokenizer(files: list[TextFile], vocab_size: int, split: Split, cache_dir: Path) -> Tokenizer:
    """A tokenizer that is trained on a sample of the files, unless the cache has it, complete."""
    folder = cache_dir / "tokenizers" / digest(VERSION, vocab_size, split, sorted(TRAINER_OPTIONS.items()), files)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        with contextlib.suppress(UserError), reading(folder):
            found = load_tokenizer(folder / "tokenizer.json")  # the last file that is saved
            read_model(found.files["tokenizer.model"])  # it goes into every checkpoint
            return found
        print(f"training a tokenizer of {vocab_size:,} pieces (once) ...", file=sys.stderr, flush=True)
        made = train_tokenizer(sample_text(files, split), vocab_size, folder / "tokenizer.model")
        made.save(folder)
        return made


def sample_text(files: list[TextFile], split: Split) -> list[str]:
    """About `TOKENIZER_BYTES` of text from places all over the files, without documents that may be for validation."""
    texts, due = [], 0.0
    fraction = TOKENIZER_BYTES / max(1, sum(file.size for file in files))
    for file in files:
        due += fraction * file.size  # what the sample lacks up to here
        if due < SAMPLE_BYTES and fraction < 1:
            continue
        for document in read_documents(file):
            texts.append("".join(islice(document, 1 + 2 * MAX_VALIDATION // BLOCK)))
            due -= len(texts[-1])
            if due <= 0:
                break
    held_out = split.candidates(np.array([content_hash(text) for text in texts], np.uint64))
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
