"""Which documents are for training, which for validation, and which are duplicates.

Sixteen bytes a document are remembered (a hash of its text and its length), never text. The split depends on the text
alone, not on paths or times of files: the documents with the smallest hashes are the validation set.
"""

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from data.chunks import chunks
from data.readers import Document
from errors import UserError

TRAIN, VALIDATION, DUPLICATE = 0, 1, 2

# A fixed set of 4 MB is about a million tokens: its mean loss has a standard error below 0.002 nats even where tokens
# vary by 2 nats, and evaluating more would only take time away from training.
MAX_VALIDATION = 4_000_000  # bytes


@dataclass(frozen=True)
class DividedDocument:
    """The one document whose start is for training and whose end for validation, where no other can be."""

    index: int
    train_bytes: int  # the end of a line a little before is taken, if there is one
    validation_bytes: int


@dataclass(frozen=True)
class CorpusSplit:
    """The split of every document."""

    splits: np.ndarray  # (documents,) uint8: TRAIN, VALIDATION or DUPLICATE (of an earlier document, dropped)
    divided: DividedDocument | None
    text_hash: str  # of the kept documents, in order
    documents: int  # kept
    bytes: int  # of the kept documents


def hash_documents(
    documents: Iterable[Document], on_read: Callable[[int], object] = lambda size: None
) -> tuple[np.ndarray, np.ndarray]:
    """The hash (uint64) and the length in bytes (uint64) of each document; `on_read` gets the size of each block."""
    hashes, lengths = array("Q"), array("Q")
    for document in documents:
        digest, length = hashlib.blake2b(digest_size=8), 0
        for block in document:
            encoded = block.encode("utf-8")
            digest.update(encoded)
            length += len(encoded)
            on_read(len(encoded))
        hashes.append(int.from_bytes(digest.digest(), "little"))
        lengths.append(length)
    return np.frombuffer(hashes, np.uint64), np.frombuffer(lengths, np.uint64)


def split_corpus(hashes: np.ndarray, lengths: np.ndarray, validation_fraction: float) -> CorpusSplit:
    """Drop duplicates, then give validation about `validation_fraction` of the bytes, at most about 4 MB.

    Documents go to validation in the order of their hashes until the goal is reached; one that would take it past
    twice the goal is left out. Where every document is that large (a corpus of one file, say), the end of the
    longest becomes the validation set instead.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"the validation fraction is {validation_fraction}; it must lie between 0 and 1.")
    if not len(hashes):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    kept = np.sort(np.unique(hashes, return_index=True)[1])  # of equal hashes, the first
    splits = np.full(len(hashes), DUPLICATE, np.uint8)
    splits[kept] = TRAIN
    total = int(lengths[kept].sum())
    goal = min(validation_fraction * total, MAX_VALIDATION)

    validation_bytes, divided = 0, None
    for document in kept[np.argsort(hashes[kept])]:
        length = int(lengths[document])
        if validation_bytes + length <= min(2 * goal, total - 1):  # total - 1: one document at least is for training
            splits[document] = VALIDATION
            validation_bytes += length
        if validation_bytes >= goal:
            break
    if not validation_bytes:
        longest = int(kept[np.argmax(lengths[kept])])
        tail = max(1, round(goal))
        divided = DividedDocument(longest, int(lengths[longest]) - tail, tail)
    text_hash = hashlib.blake2b(hashes[kept].tobytes() + lengths[kept].tobytes(), digest_size=16).hexdigest()
    return CorpusSplit(splits, divided, text_hash, len(kept), total)


def kept_documents(documents: Iterable[Document], corpus_split: CorpusSplit) -> Iterator[tuple[int, Iterator[str]]]:
    """Yield (TRAIN or VALIDATION, chunks) for each document that is kept; the divided document comes as two.

    Chunks are read as they are iterated: those of one document must be used before the next document is asked for.
    """
    divided = corpus_split.divided
    # Files that have grown since give more documents than were split; the caller notices by their fingerprint.
    for index, (split, document) in enumerate(zip(corpus_split.splits, documents, strict=False)):
        if divided and index == divided.index:
            for part, labelled in itertools.groupby(_divide(chunks(document), divided), key=itemgetter(0)):
                yield part, (chunk for _, chunk in labelled)
        elif split != DUPLICATE:
            yield int(split), chunks(document)


def _divide(document: Iterable[str], divided: DividedDocument) -> Iterator[tuple[int, str]]:
    """Label each chunk TRAIN or VALIDATION; the chunk in which training ends becomes two.

    It is divided at its last line end before byte `train_bytes`; without one near, between two characters.
    """
    position = 0  # bytes before this chunk
    for chunk in document:
        encoded = chunk.encode("utf-8")
        end = divided.train_bytes - position
        position += len(encoded)
        if end >= len(encoded):
            yield TRAIN, chunk
        elif end < 0:
            yield VALIDATION, chunk
        else:
            # No more than `validation_bytes` back, so that the validation set at most doubles.
            end = encoded.rfind(b"\n", max(0, end - divided.validation_bytes), end) + 1 or end
            while end > 0 and encoded[end] & 0xC0 == 0x80:
                end -= 1
            if end:
                yield TRAIN, encoded[:end].decode("utf-8")
            yield VALIDATION, encoded[end:].decode("utf-8")
