"""A text as token streams, one for training and one for validation; and what `--data` names, a text or conversations.

CACHE/tokenizers/, units/ and conversations/   see the modules     CACHE/hub/   lists of files of the Hub
"""

import hashlib
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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

    chat: ClassVar[None] = None  # a text has no chat template
    tokenizer: Tokenizer
    documents: np.ndarray  # rows of `tokens.DOCUMENT`, without duplicates
    duplicates: int
    train: TokenStream
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    validation_bytes: int  # bytes of its text in UTF-8
    validation_source: str  # what it consists of
    everything: TokenStream  # also duplicates
    everything_bytes: int
    document_start: int | None = None  # the id that begins a document, where attention keeps documents apart

    @property
    def text_hash(self) -> str:
        """Hash of the documents, in order."""
        return hashlib.blake2b(self.documents["hash"].tobytes(), digest_size=16).hexdigest()

    @property
    def bytes_per_token(self) -> float:
        return int(self.documents["bytes"].sum()) / (len(self.train) + len(self.validation))

    @property
    def has_long_tokens(self) -> bool:
        """Whether tokens are whole phrases: in bits per byte, a model beats xz untrained."""
        return self.bytes_per_token > 10

    @property
    def prompts(self) -> list[str]:
        """For samples: the first words of up to three held-out documents."""
        starts = np.flatnonzero(self.validation == self.tokenizer.document_start)[:3].tolist() or [0]
        return [first_words(self.tokenizer.decode(self.validation[start : start + 64])) for start in starts]

    @property
    def description(self) -> str:
        """Three lines to print, and a note on tokens that are too short or too long."""
        size = int(self.documents["bytes"].sum())
        train_bytes_per_token = (size - self.validation_bytes) / max(1, len(self.train))
        lines = [
            f"{counted(len(self.documents), 'document')} ({counted(self.duplicates, 'duplicate')} dropped), "
            f"{size / 1e6:.2f} MB, hash {self.text_hash[:12]}",
            f"{len(self.train):,} tokens to train on, {train_bytes_per_token:.2f} bytes per token, "
            f"vocabulary {self.tokenizer.vocab_size:,}",
            f"{len(self.validation):,} for validation ({self.validation_source}, {self.validation_bytes / 1e6:.2f} MB)",
        ]
        if self.bytes_per_token < 1.6:
            lines.append(
                "note: tokens are nearly single bytes; a tokenizer made of this text, with enough pieces, is better"
            )
        if self.has_long_tokens:
            lines.append(
                "note: tokens are whole phrases, as the text is small or repeats itself; give a smaller --vocab-size, "
                f"such as {max(300, self.tokenizer.vocab_size // 4)}"
            )
        return "\n  ".join(lines)

    def count_sequences(self, settings: DataSettings) -> int:
        """The sequences of an epoch; `UserError` if they are fewer than a batch."""
        length = settings.sequence_length
        count = len(self.train) // length
        if count < settings.batch_size:
            raise UserError(
                f"the text has {len(self.train):,} tokens to train on, but one batch of {settings.batch_size} "
                f"sequences of {length} needs {settings.batch_size * length:,}; give more text, or a smaller "
                "--batch-size or --sequence-length."
            )
        return count

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
    """The documents of all files for training and for validation or, where none is held out, the end of the text."""
    units = prepare_units(files, tokenizer, Path(settings.cache, "units"))
    table = np.concatenate([unit.table for unit in units])
    kinds = split_documents(table, settings)
    documents = table[kinds != DUPLICATE]
    held_out = table[kinds == VALIDATION]
    train = TokenStream(units, (kinds == TRAIN).tolist())
    validation = TokenStream(units, (kinds == VALIDATION).tolist())[:]
    validation_bytes = int(held_out["bytes"].sum())
    if len(held_out) == 0:
        fraction = min(settings.validation_fraction, MAX_VALIDATION / int(documents["bytes"].sum()))
        end = len(train) - max(2, round(fraction * len(train)))
        validation = train[end:]
        validation_bytes = len(tokenizer.decode(validation).encode("utf-8"))
        train.length = end
    return Corpus(
        tokenizer=tokenizer,
        documents=documents,
        duplicates=len(table) - len(documents),
        train=train,
        validation=validation,
        validation_bytes=validation_bytes,
        validation_source=counted(len(held_out), "document") if len(held_out) > 0 else "the end of the text",
        everything=TokenStream(units, [True] * len(table)),
        everything_bytes=int(table["bytes"].sum()),
        document_start=tokenizer.document_start if settings.document_mask else None,
    )
