"""A text as token streams, for training and for validation; and what `--data` names, a text or conversations."""

import hashlib
import lzma
import re
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
from data.tokens import TokenStream, prepare_units
from data.train_tokenizer import trained_tokenizer
from errors import UserError, counted

LONG_TOKENS = 10  # bytes of a token, on average
SHORTEST_END = 500  # bytes: a shorter end of a document is not held out


class TooLittleText(UserError):
    """Fewer tokens than a batch."""


@dataclass(frozen=True)
class Corpus:
    """A text that can be trained on, with the methods of `Conversations`."""

    tokenizer: Tokenizer
    description: str  # three lines to print, the first of the whole text
    advice: list[str]  # a line to print, or none
    text_hash: str  # hash of the documents, in order
    prompts: list[str]  # for samples: the first words of up to three held-out documents
    has_long_tokens: bool  # whether tokens are whole phrases: in bits per byte, a model beats xz untrained
    train: TokenStream
    validation: np.ndarray  # (tokens,) uint16, or uint32 for a vocabulary over 65,536
    validation_bytes: int  # bytes of its text in UTF-8
    everything: TokenStream  # also duplicates
    everything_bytes: int
    document_start: int | None  # the id that begins a document, where attention keeps documents apart
    chat: None = None  # a text has no chat template

    def count_sequences(self, settings: DataSettings) -> int:
        """The sequences of an epoch; `TooLittleText` if they are fewer than a batch."""
        length, size = settings.sequence_length, settings.batch_size
        if len(self.train) // length < size:
            needed = f"one batch of {size} sequences of {length} needs {size * length:,}"
            fix = "give more text, or a smaller --batch-size, --sequence-length or --vocab-size"
            raise TooLittleText(f"the text has {len(self.train):,} tokens to train on, but {needed}; {fix}.")
        return len(self.train) // length

    def batch(self, *, seed: int, first: int, size: int, sequence_length: int) -> Batch:
        windows = batch(self.train, seed=seed, first=first, size=size, sequence_length=sequence_length)
        return windows.with_documents(self.document_start)

    def validation_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return validation_windows(self.validation, sequence_length, batch_size, self.document_start)

    def all_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return validation_windows(self.everything, sequence_length, batch_size, self.document_start)

    def xz_bits_per_byte(self) -> float:
        """What `xz -9e` makes of the validation text, to compare the model with."""
        text = self.tokenizer.decode(self.validation).encode("utf-8")
        # 7e is 9e with a dictionary of 16 MB, not 64: the text is shorter, and 64 would take 700 MB of memory.
        return 8 * len(lzma.compress(text, preset=7 | lzma.PRESET_EXTREME)) / max(1, len(text))


Text = Corpus | Conversations


def check_conversations(chat_file: str | None, tokenizer: str | Path | None) -> None:
    """`UserError` for conversations, if they are some, without a tokenizer: a new one is made of text."""
    if chat_file is not None and not tokenizer:
        learn = "--init-from MODEL, or --tokenizer FILE for a new model"
        read = "--text-field with the name of their field (messages or conversations)"
        raise UserError(f"{chat_file} has conversations; to learn them give {learn}; to read them as text give {read}.")


def prepare(settings: DataSettings, tokenizer: str | Path | None = None, vocab_size: int | None = 4096) -> Text:
    """What --data names, by the tokenizer in a file or folder or, if None, a new one of at most `vocab_size` pieces.
    That is of a model, which must have all ids of the tokenizer; None: a model will be made for it."""
    files = resolve(settings)
    chat_file = find_conversations(files)
    check_conversations(chat_file, tokenizer)
    loaded = load_tokenizer(tokenizer) if tokenizer else trained_tokenizer(files, settings, vocab_size)
    vocab_size = vocab_size or loaded.vocab_size
    check_vocabulary(loaded, vocab_size)
    if chat_file is None:
        return split_text(files, settings, loaded, is_new=not tokenizer)
    return prepare_conversations(files, settings, loaded, vocab_size)


def first_words(text: str) -> str:
    """The first five words of a text, of the first line with a letter; at most 24 characters, up to a word's end."""
    line = next((line for line in text.split("\n") if any(map(str.isalpha, line))), text)
    words = " ".join(line.split()[:5]).strip("\ufffd ")
    whole = re.match(r".{1,24}(?=[\s，。；：、！？]|$)", words, re.DOTALL)  # Chinese has punctuation and no spaces
    return whole[0] if whole else words[:24]


def count_last_tokens(ids: np.ndarray, size: int, tokenizer: Tokenizer) -> int:
    """How many of the last tokens fit into `size` bytes: up to a token the same text with any tokenizer."""
    ids, positions = np.unique(ids, return_inverse=True)
    special = (tokenizer.bos_id, tokenizer.eos_id)
    sizes = np.array([0 if i in special else len(tokenizer.token_bytes(i)) for i in ids.tolist()])[positions]
    return int(np.searchsorted(sizes[::-1].cumsum(), size, "right"))


def hold_out_ends(cuts: np.ndarray, table: np.ndarray, share: float, text: TokenStream, tokenizer: Tokenizer) -> None:
    """Hold out the ends of long documents, `share` bytes in all: lower `cuts`, the ids of each for training."""
    [rows] = np.nonzero(cuts)
    rows = rows[np.argsort(table["bytes"][rows], kind="stable")]  # short ones leave theirs to longer ones
    share_of_bytes = share / table["bytes"][rows].sum()
    owed = 0.0
    for row, end in zip(rows.tolist(), table["tokens"].cumsum()[rows].tolist(), strict=True):
        owed += share_of_bytes * table["bytes"][row]
        if SHORTEST_END <= owed <= table["bytes"][row] / 2 or row == rows[-1]:
            start = end - min(round(owed), cuts[row])
            cuts[row] -= min(cuts[row], max(2, count_last_tokens(text[start:end], round(owed), tokenizer)))
            owed = 0.0


def split_text(files: list[TextFile], settings: DataSettings, tokenizer: Tokenizer, is_new: bool) -> Corpus:
    """Documents for training and for validation, where few are held out with the ends of the others."""
    units = prepare_units(files, tokenizer, Path(settings.cache, "units"))
    table = np.concatenate([unit.table for unit in units])
    kinds = split_documents(table["hash"], table["bytes"], settings)
    documents = table[kinds != DUPLICATE]
    size = int(documents["bytes"].sum())
    share = min(settings.validation_fraction * size, MAX_VALIDATION)
    tokens = table["tokens"].astype(np.int64)
    nothing = np.zeros_like(tokens)
    everything = TokenStream(units, (nothing, tokens))
    stops = np.where(kinds == DUPLICATE, nothing, tokens)
    cuts = np.where(kinds == TRAIN, tokens, nothing)  # up to here a document is for training, and then for validation
    held_out = table["bytes"][kinds == VALIDATION]
    validation_bytes = int(held_out.sum())
    sources = [counted(len(held_out), "document")] if len(held_out) else []
    if validation_bytes <= share / 2:
        hold_out_ends(cuts, table, share - validation_bytes, everything, tokenizer)
        is_cut = (kinds == TRAIN) & (cuts < tokens)
        ends = TokenStream(units, (cuts, np.where(is_cut, tokens, cuts)))
        validation_bytes += len(tokenizer.decode(ends[:]).encode("utf-8"))
        sources.append(f"the ends of {counted(int(is_cut.sum()), 'document')}")
    eos = np.where((cuts > 0) & (cuts < tokens), tokens - 1, tokens)  # of a document that is cut, also for training
    train = TokenStream(units, (nothing, cuts), (eos, tokens))
    validation = TokenStream(units, (cuts, stops))[:]
    text_hash = hashlib.blake2b(documents["hash"].tobytes(), digest_size=16).hexdigest()
    dropped = counted(len(table) - len(documents), "duplicate")
    of_train = f"{(size - validation_bytes) / max(1, len(train)):.2f} bytes per token"
    lines = [
        f"{counted(len(documents), 'document')} ({dropped} dropped), {size / 1e6:.2f} MB, hash {text_hash[:12]}",
        f"{len(train):,} tokens to train on, {of_train}, vocabulary {tokenizer.vocab_size:,}",
        f"{len(validation):,} for validation ({' and '.join(sources)}, {validation_bytes / 1e6:.2g} MB)",
    ]
    bytes_per_token = size / (len(train) + len(validation))
    starts = np.flatnonzero(validation == tokenizer.document_start)[:3].tolist() or [0]
    return Corpus(
        tokenizer=tokenizer,
        description="\n  ".join(lines),
        advice=advice(tokenizer, bytes_per_token, validation, is_new),
        text_hash=text_hash,
        prompts=[first_words(tokenizer.decode(validation[start : start + 64])) for start in starts],
        has_long_tokens=bytes_per_token > LONG_TOKENS,
        train=train,
        validation=validation,
        validation_bytes=validation_bytes,
        everything=everything,
        everything_bytes=int(table["bytes"].sum()),
        document_start=tokenizer.document_start if settings.document_mask else None,
    )


def advice(tokenizer: Tokenizer, bytes_per_token: float, ids: np.ndarray, is_new: bool) -> list[str]:
    """A note to print where tokens are too short, do not know the characters or, if new, are too long; ids: some of the
    text."""
    fix = "a model whose tokenizer is made of this text, with enough pieces, is better"
    if bytes_per_token < 1.6:
        return [f"note: tokens are nearly single bytes; {fix}"]
    spelled = np.isin(ids, tokenizer.lead_bytes).mean()
    if spelled > 0.01:
        return [f"note: {spelled:.0%} of the tokens are first bytes of characters that the tokenizer lacks; {fix}"]
    smaller = max(300, 100 + sum(len(piece) == 1 or piece.startswith("<0x") for piece in tokenizer.vocabulary))
    if is_new and bytes_per_token > LONG_TOKENS and smaller < tokenizer.vocab_size:
        fix = f"give a smaller --vocab-size, such as {smaller}"
        return [f"note: tokens are whole phrases, as the text is small or repeats itself; {fix}"]
    return []
