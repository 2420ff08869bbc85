"""Documents to one long row of ids on disk.

A token stream is every document between BOS and EOS, end to end: BOS a a a EOS BOS b b EOS. With a tokenizer that has
no BOS it is EOS a a a EOS b b EOS. Either way each token of each document, and its end, is predicted exactly once.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from data.tokenizer import Tokenizer

# Text encoded at once: enough to keep many cores busy, little enough that its ids as Python integers do not matter.
AT_ONCE = 4_000_000  # characters

Piece = tuple[str, bool, int]  # text, whether a document begins with it, which stream it goes to


class TokenStream:
    """An open file that documents are appended to as ids: uint16, or uint32 for a vocabulary over 65,536."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer):
        self.dtype = token_dtype(tokenizer)
        self.tokens = 0
        self._file = file
        self._eos = [tokenizer.eos_id]
        self._begin = self._eos if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._between = self._eos if tokenizer.bos_id is None else [tokenizer.eos_id, tokenizer.bos_id]

    def add(self, ids: Sequence[int], first: bool) -> None:
        """Append ids to the current document, or begin a new one with them."""
        if first:
            self._write(self._between if self.tokens else self._begin)
        self._write(ids)

    def end(self) -> None:
        """Close the last document."""
        if self.tokens:
            self._write(self._eos)
        self._file.flush()

    def _write(self, ids: Sequence[int]) -> None:
        self._file.write(np.asarray(ids, self.dtype).tobytes())
        self.tokens += len(ids)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id; little-endian on every machine, as the files are."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def pack(pieces: Iterable[Piece], streams: Sequence[TokenStream], tokenizer: Tokenizer) -> None:
    """Encode the pieces on all cores, a few MB at a time, append each to its stream, and end the streams."""
    for group in _groups(pieces):
        for (_, first, side), ids in zip(group, _encode(group, tokenizer), strict=True):
            streams[side].add(ids, first)
    for one in streams:
        one.end()


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[0])
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[Piece], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each piece as they are within its document.

    A piece in the middle of a document is encoded after a newline, whose ids are then cut off: otherwise a tokenizer
    that puts a space in front of every text (LLaMA's) would put one in the middle of the document.
    """
    newline = tokenizer.encode("\n")
    encoded = tokenizer.encode_batch([text if first else "\n" + text for text, first, _ in group])
    for i, (text, first, _) in enumerate(group):
        if not first:
            cuts_off = encoded[i][: len(newline)] == newline
            encoded[i] = encoded[i][len(newline) :] if cuts_off else tokenizer.encode(text)
    return encoded
