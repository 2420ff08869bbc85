"""The first look at a corpus: which documents it holds, which are copies, and which are kept for validation.

Sixteen bytes a document are remembered (a hash of its text and its length), never text. The split depends on the text
alone, not on places or times of files: the documents with the smallest hashes are the validation set.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from data.corpus import TextFile, stream
from errors import UserError

TRAIN, VALIDATION, COPY = 0, 1, 2

# A fixed set of 4 MB is about a million tokens: its mean loss has a standard error below 0.002 nats even where tokens
# vary by 2 nats, and evaluating more would only take time away from training.
MOST_VALIDATION = 4_000_000  # bytes


@dataclass(frozen=True)
class Split:
    """Which side each document is on."""

    side: np.ndarray  # (documents,) uint8: TRAIN, VALIDATION or COPY (of an earlier document, dropped)
    cut: tuple[int, int, int] | None  # (document, bytes for training, bytes for validation): one that is divided
    text_hash: str  # of the kept documents, in order
    documents: int  # kept
    bytes: int  # of the kept documents


def scan(texts: Iterable[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """The hash (uint64) and the length in bytes (uint64) of each document of a stream of (text, first)."""
    hashes, lengths = array("Q"), array("Q")
    digest, length = hashlib.blake2b(digest_size=8), 0

    def close() -> None:
        hashes.append(int.from_bytes(digest.digest(), "little"))
        lengths.append(length)

    for text, first in texts:
        if first:
            if length:
                close()
            digest, length = hashlib.blake2b(digest_size=8), 0
        encoded = text.encode("utf-8")
        digest.update(encoded)
        length += len(encoded)
    if length:
        close()
    return np.frombuffer(hashes, np.uint64), np.frombuffer(lengths, np.uint64)


def split(hashes: np.ndarray, lengths: np.ndarray, validation_fraction: float) -> Split:
    """Drop copies, then give validation about `validation_fraction` of the bytes, at most about 4 MB.

    Documents go to validation in the order of their hashes until the goal is reached; one that would take it past
    twice the goal is passed over. Where every document is that large (a corpus of one file, say), the end of the
    longest becomes the validation set instead.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"the validation fraction is {validation_fraction}; it must lie between 0 and 1.")
    if not len(hashes):
        raise UserError("there is no text in the files that were named; give some that hold text.")
    kept = np.sort(np.unique(hashes, return_index=True)[1])  # of equal hashes, the first
    side = np.full(len(hashes), COPY, np.uint8)
    side[kept] = TRAIN
    total = int(lengths[kept].sum())
    goal = min(validation_fraction * total, MOST_VALIDATION)

    taken, cut = 0, None
    for document in kept[np.argsort(hashes[kept])]:
        length = int(lengths[document])
        if taken + length <= min(2 * goal, total - 1):  # total - 1: one document at least is for training
            side[document] = VALIDATION
            taken += length
        if taken >= goal:
            break
    if not taken:
        longest = int(kept[np.argmax(lengths[kept])])
        tail = max(1, round(goal))
        cut = (longest, int(lengths[longest]) - tail, tail)
    text_hash = hashlib.blake2b(hashes[kept].tobytes() + lengths[kept].tobytes(), digest_size=16).hexdigest()
    return Split(side, cut, text_hash, len(kept), total)


def by_side(files: Iterable[TextFile], split: Split) -> Iterator[tuple[str, bool, int]]:
    """Yield (text, first, side) for every document that is kept; side is TRAIN or VALIDATION."""
    document, position = -1, 0  # position: bytes of this document so far
    for text, first in stream(files):
        if first:
            document, position = document + 1, 0
        if document >= len(split.side):
            return  # the files have grown meanwhile; the caller sees that by their fingerprint
        side = int(split.side[document])
        if split.cut and document == split.cut[0]:
            encoded = text.encode("utf-8")
            yield from _divide(encoded, first, split.cut[1] - position, split.cut[2])
            position += len(encoded)
        elif side != COPY:
            yield text, first, side


def _divide(encoded: bytes, first: bool, cut: int, tail: int) -> Iterator[tuple[str, bool, int]]:
    """Divide a piece at the last line end before byte `cut`; without one near, between two characters."""
    if cut >= len(encoded):
        yield encoded.decode("utf-8"), first, TRAIN
        return
    if cut < 0:
        yield encoded.decode("utf-8"), False, VALIDATION
        return
    # No more than `tail` bytes back, so that the validation set at most doubles.
    at = encoded.rfind(b"\n", max(0, cut - tail), cut) + 1 or cut
    while at > 0 and encoded[at] & 0xC0 == 0x80:
        at -= 1
    if at:
        yield encoded[:at].decode("utf-8"), first, TRAIN
    yield encoded[at:].decode("utf-8"), True, VALIDATION
