"""A text as token streams, one for training and one for validation; and what `--data` names, a text or conversations.

CACHE/tokenizers/, tokens/ and conversations/   see the modules     CACHE/hub/   lists of files of the Hub
"""

import hashlib
import lzma
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.batches import Batch, batch, validation_windows
from data.conversations import Conversations, find_conversations, prepare_conversations, row_batches
from data.settings import DataSettings
from data.sources import TextFile, resolve
from data.split import DUPLICATE, MAX_VALIDATION, TRAIN, VALIDATION, Split, split_documents
from data.tokenizer import Tokenizer, check_vocabulary, encode_prompt, load_tokenizer, tokens_after
from data.tokenizer_training import trained_tokenizer
from data.tokens import TokenStream, counted, prepare_tokens
from errors import UserError, printable


@dataclass(frozen=True)
class Corpus:
    """A text that can be trained on. Its methods are those of `Conversations`, so that training need not ask."""

    description: str  # three lines to print
    text_hash: str  # hash of the documents, in order
    tokenizer: Tokenizer
    train: TokenStream
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    validation_bytes: int  # bytes of its text in UTF-8
    document_start: int | None = None  # the id that begins a document, where attention keeps documents apart

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
        """The sequences of one step, see `batches.batch`."""
        return batch(self.train, document_start=self.document_start, **order)

    def validation_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return validation_windows(self.validation, sequence_length, batch_size, self.document_start)

    def sample_prompts(self) -> list[str]:
        """The first words of up to three held-out documents."""
        starts = np.flatnonzero(self.validation == self.tokenizer.document_start)[:3].tolist() or [0]
        return [self.tokenizer.decode(self.validation[start : start + 8]).rstrip("\ufffd ") for start in starts]

    def encode_prompt(self, prompt: str) -> tuple[list[int], list[int] | None, set[int]]:
        """The ids of a prompt, those that may follow it (None: all), and those that end its continuation."""
        return encode_prompt(self.tokenizer, prompt), tokens_after(self.tokenizer, prompt), {self.tokenizer.eos_id}

    def show_sample(self, _: str, ids: list[int], tokens: list[int]) -> str:
        """The text of a prompt's ids and the tokens that continue it."""
        return self.tokenizer.decode(ids + tokens)

    def baseline(self) -> str:
        """A line for the end of a run: what `xz -9e` makes of the validation text, to compare the model with."""
        return f"xz -9e on the same text: {self.xz_bits_per_byte():.4f} bits per byte; text hash {self.text_hash}"

    def xz_bits_per_byte(self) -> float:
        text = self.tokenizer.decode(self.validation).encode("utf-8")
        # 7e is 9e with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
        return 8 * len(lzma.compress(text, preset=7 | lzma.PRESET_EXTREME)) / max(1, len(text))

    def generate_arguments(self, prompt: str) -> str:
        """What to give generate.py to try the model: the first words of a prompt."""
        return shlex.quote(printable(" ".join(prompt.split()[:5])))


def prepare(
    settings: DataSettings, tokenizer: str | Path | None = None, vocab_size: int = 4096
) -> Corpus | Conversations:
    """What --data names, as token streams or as rows of conversations; what the cache has is not made again.

    tokenizer: the file or folder to load, or None to train one; vocab_size: pieces of that, embeddings of the model.
    """
    split = Split(settings.validation_fraction, settings.validation_salt)
    files = resolve(settings)
    loaded, chat_file = tokenizer and load_tokenizer(tokenizer), find_conversations(files)
    if chat_file is not None and loaded is None:
        fix = f"give a model to teach them with --init-from, or leave out {chat_file}"
        raise UserError(f"{', '.join(settings.data)} has conversations; {fix}.")
    loaded = loaded or trained_tokenizer(files, vocab_size, split, Path(settings.cache))
    check_vocabulary(loaded, vocab_size)
    if chat_file is not None:
        return prepare_conversations(files, settings, split, loaded, vocab_size)
    return split_text(files, settings, split, loaded)


def all_batches(
    settings: DataSettings, tokenizer: Tokenizer, vocab_size: int, batch_size: int
) -> tuple[Iterator[Batch], int | None]:
    """Batches of all of --data, in order, without a split; and its bytes of text, None for conversations."""
    files = resolve(settings)
    check_vocabulary(tokenizer, vocab_size)
    if find_conversations(files) is not None:
        split = Split(settings.validation_fraction, settings.validation_salt)
        rows = prepare_conversations(files, settings, split, tokenizer, vocab_size)
        return row_batches(np.concatenate([rows.train, rows.validation], 1), batch_size), None
    path, documents = prepare_tokens(files, tokenizer, Path(settings.cache, "tokens"))
    stream = TokenStream(path, tokenizer.dtype, documents["tokens"], np.ones(len(documents), bool))
    document_start = tokenizer.document_start if settings.document_mask else None
    windows = validation_windows(stream, settings.sequence_length, batch_size, document_start)
    return windows, int(documents["bytes"].sum())


def split_text(files: list[TextFile], settings: DataSettings, split: Split, tokenizer: Tokenizer) -> Corpus:
    """The documents of files as one stream for training and one for validation."""
    path, table = prepare_tokens(files, tokenizer, Path(settings.cache, "tokens"))
    kinds = split_documents(table, split)
    documents, held_out = table[kinds != DUPLICATE], table[kinds == VALIDATION]
    size, validation_bytes = int(documents["bytes"].sum()), int(held_out["bytes"].sum())
    train = TokenStream(path, tokenizer.dtype, table["tokens"], kinds == TRAIN)
    if len(held_out) > 0:
        origin = counted(len(held_out), "document")
        validation = TokenStream(path, tokenizer.dtype, table["tokens"], kinds == VALIDATION)[:]
    else:
        origin = "the end of the text"
        fraction = min(split.fraction, MAX_VALIDATION / size)
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
    document_start = tokenizer.document_start if settings.document_mask else None
    return Corpus(description, text_hash, tokenizer, train, validation, validation_bytes, document_start)
