"""Documents to one long row of ids on disk.

A token stream is every document between BOS and EOS, end to end: BOS a a a EOS BOS b b EOS. With a tokenizer that has
no BOS it is EOS a a a EOS b b EOS. Either way each token of each document, and its end, is predicted exactly once.
"""

from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from data.tokenizer import Tokenizer

# Text encoded at once: enough to keep many cores busy, little enough that its ids as Python integers do not matter.
ENCODE_CHARACTERS = 4_000_000


class TokenWriter:
    """Encodes documents, a few MB of chunks at a time on all cores, and appends their ids to an open file."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer):
        self.dtype = token_dtype(tokenizer)
        self.tokens = self.documents = 0  # written so far
        self._file = file
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n")
        self._eos = [tokenizer.eos_id]
        self._begin = self._eos if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._between = self._eos if tokenizer.bos_id is None else [tokenizer.eos_id, tokenizer.bos_id]
        self._pending: list[tuple[str, bool]] = []  # chunks not yet encoded, each with its starts_document
        self._pending_characters = 0

    def add(self, chunk: str, *, starts_document: bool) -> None:
        """Append a chunk to the current document, or begin a new document with it."""
        self._pending.append((chunk, starts_document))
        self._pending_characters += len(chunk)
        if self._pending_characters >= ENCODE_CHARACTERS:
            self._write_pending()

    def finish(self) -> None:
        """Write what is pending and end the last document."""
        self._write_pending()
        if self.tokens:
            self._write(self._eos)
        self._file.flush()

    def _write_pending(self) -> None:
        """A chunk in the middle of a document is encoded after a newline, whose ids are then cut off.

        Otherwise a tokenizer that puts a space in front of every text (LLaMA's) would put one inside the document.
        """
        texts = [chunk if starts_document else "\n" + chunk for chunk, starts_document in self._pending]
        encoded = self._tokenizer.encode_batch(texts)
        for (chunk, starts_document), ids in zip(self._pending, encoded, strict=True):
            if starts_document:
                self._write(self._between if self.tokens else self._begin)
                self.documents += 1
            elif ids[: len(self._newline)] == self._newline:
                ids = ids[len(self._newline) :]
            else:
                ids = self._tokenizer.encode(chunk)
            self._write(ids)
        self._pending, self._pending_characters = [], 0

    def _write(self, ids: Sequence[int]) -> None:
        self._file.write(np.asarray(ids, self.dtype).tobytes())
        self.tokens += len(ids)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id; little-endian on every machine, as the files are."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
