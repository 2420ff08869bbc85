"""A text as token streams, one for training and one for validation; and what `--data` names, a text or conversations.

CACHE/tokenizers/, units/ and conversations/   see the modules     CACHE/hub/   lists of files of the Hub
"""

import hashlib
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.batches import Batch, batch, validation_windows
from data.conversations import Conversations, find_conversations, prepare_conversations
from data.settings import DataSettings
from data.sources import TextFile, resolve
from data.split import DUPLICATE, MAX_VALIDATION, TRAIN, VALIDATION, split_documents
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from data.tokens import TokenStream, counted, prepare_units
from data.train_tokenizer import trained_tokenizer
from errors import UserError


@dataclass(frozen=True)
class Corpus:
    """A text that can be trained on. Its methods are those of `Conversations`, so that training need not ask."""

    description: str  # three lines to print
    text_hash: str  # hash of the documents, in order
    tokenizer: Tokenizer
    train: TokenStream
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    validation_bytes: int  # bytes of its text in UTF-8
    everything: TokenStream  # also duplicates
    everything_bytes: int
    has_long_tokens: bool  # whole phrases: in bits per byte, a model beats xz untrained
    prompts: list[str]  # for samples: the first words of up to three held-out documents
    document_start: int | None = None  # the id that begins a document, where attention keeps documents apart
    chat = None  # a text has no chat template

    def count_sequences(self, settings: DataSettings) -> int:
        """The sequences of an epoch; `UserError` if they are fewer than a batch."""
        size, length = settings.batch_size, settings.sequence_length
        if len(self.train) // length < size:
            raise UserError(
                f"the text has {len(self.train):,} tokens to train on, but one batch of {size} sequences of {length} "
                f"needs {size * length:,}; give more text, or a smaller --batch-size or --sequence-length."
            )
        return len(self.train) // length

    def batch(self, **order: int) -> Batch:
        return batch(self.train, document_start=self.document_start, **order)

    def validation_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return validation_windows(self.validation, sequence_length, batch_size, self.document_start)

    def all_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return validation_windows(self.everything, sequence_length, batch_size, self.document_start)

    def xz_bits_per_byte(self) -> float:
        """What `xz -9e` makes of the validation text, to compare the model with."""
        text = self.tokenizer.decode(self.validation).encode("utf-8")
        # 7e is 9e with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
        return 8 * len(lzma.compress(text, preset=7 | lzma.PRESET_EXTREME)) / max(1, len(text))


def prepare(
    settings: DataSettings, tokenizer: str | Path | None = None, vocab_size: int = 4096
) -> Corpus | Conversations:
    """What --data names, by the tokenizer in a file or folder or, if None, a new one of at most `vocab_size` pieces."""
    files = resolve(settings)
    loaded = tokenizer and load_tokenizer(tokenizer)
    chat_file = find_conversations(files)
    if chat_file is not None and loaded is None:
        fix = f"give a model to teach them with --init-from, or leave out {chat_file}"
        raise UserError(f"{', '.join(settings.data)} has conversations; {fix}.")
    loaded = loaded or trained_tokenizer(files, settings, vocab_size)
    check_vocabulary(loaded, vocab_size)
    if chat_file is None:
        return split_text(files, settings, loaded)
    return prepare_conversations(files, settings, loaded, vocab_size)


def first_words(text: str) -> str:
    """The first five words of a text, of the first line with a letter; at most 24 characters."""
    line = next((line for line in text.split("\n") if any(map(str.isalpha, line))), text)
    words = " ".join(line.split()[:5]).rstrip("\ufffd")
    return words if len(words) <= 24 else words[:24].rpartition(" ")[0] or words[:24]


def split_text(files: list[TextFile], settings: DataSettings, tokenizer: Tokenizer) -> Corpus:
    units = prepare_units(files, tokenizer, Path(settings.cache, "units"))
    table = np.concatenate([unit.table for unit in units])
    kinds = split_documents(table, settings)
    documents, held_out = table[kinds != DUPLICATE], table[kinds == VALIDATION]
    size, validation_bytes = int(documents["bytes"].sum()), int(held_out["bytes"].sum())
    train = TokenStream(units, (kinds == TRAIN).tolist())
    everything = TokenStream(units, [True] * len(kinds))  # also duplicates
    if len(held_out) > 0:
        origin = counted(len(held_out), "document")
        validation = TokenStream(units, (kinds == VALIDATION).tolist())[:]
    else:
        origin = "the end of the text"
        fraction = min(settings.validation_fraction, MAX_VALIDATION / size)
        end = len(train) - max(2, round(fraction * len(train)))
        validation = train[end:]
        validation_bytes = len(tokenizer.decode(validation).encode("utf-8"))
        train.length = end
    text_hash = hashlib.blake2b(documents["hash"].tobytes(), digest_size=16).hexdigest()
    description = (
        f"{counted(len(documents), 'document')} ({counted(len(table) - len(documents), 'duplicate')} dropped), "
        f"{size / 1e6:.2f} MB, hash {text_hash[:12]}\n"
        f"  {len(train):,} tokens to train on, {(size - validation_bytes) / max(1, len(train)):.2f} bytes per token, "
        f"vocabulary {tokenizer.vocab_size:,}\n"
        f"  {len(validation):,} for validation ({origin}, {validation_bytes / 1e6:.2f} MB)"
    )
    if size < 1.6 * (len(train) + len(validation)):
        description += (
            "\n  note: tokens are nearly single bytes; a tokenizer made of this text, with enough pieces, is better"
        )
    has_long_tokens = size > 10 * (len(train) + len(validation))
    if has_long_tokens:
        description += (
            "\n  note: tokens are whole phrases, as the text is small or repeats itself; give a smaller --vocab-size"
        )
    starts = np.flatnonzero(validation == tokenizer.document_start)[:3].tolist() or [0]
    return Corpus(
        description=description,
        text_hash=text_hash,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        validation_bytes=validation_bytes,
        everything=everything,
        everything_bytes=int(table["bytes"].sum()),
        has_long_tokens=has_long_tokens,
        prompts=[first_words(tokenizer.decode(validation[start : start + 64])) for start in starts],
        document_start=tokenizer.document_start if settings.document_mask else None,
    )
