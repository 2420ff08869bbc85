"""Which documents are for training and which for validation: it depends on the text alone."""

import hashlib

import numpy as np

from data.batches import mix
from data.settings import DataSettings

# A fixed set of 4 MB is about a million tokens: its mean loss has a standard error below 0.002 nats even where tokens
# vary by 2 nats, and evaluating more would only take time away from training.
MAX_VALIDATION = 4_000_000  # bytes
TRAIN, VALIDATION, DUPLICATE = 0, 1, 2
DOCUMENT = np.dtype([("hash", "<u8"), ("bytes", "<u8"), ("tokens", "<u8")])  # a row of a table of documents


def content_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def may_be_held_out(hashes: np.ndarray, settings: DataSettings) -> np.ndarray:
    """Whether each document, given by its hash, may be for validation: a fraction of them, others with another salt."""
    limit = np.uint64(min(settings.validation_fraction * 2**64, 2**64 - 2048))
    return mix(hashes ^ mix(np.array([settings.validation_salt], np.uint64))) < limit


def split_documents(hashes: np.ndarray, sizes: np.ndarray, settings: DataSettings) -> np.ndarray:
    """TRAIN, VALIDATION or DUPLICATE for each document, given by its hash and its bytes (tokens, of a conversation).
    Of equal documents the first is kept. Candidates become validation documents in order, until they hold 4 MB; one
    that would bring them above twice their share is skipped. With no training document left, there are none."""
    _, first = np.unique(hashes, return_index=True)
    kinds = np.full(len(hashes), DUPLICATE, np.uint8)
    kinds[first] = TRAIN
    most = 2 * min(settings.validation_fraction * float(sizes[first].sum()), MAX_VALIDATION)
    taken = 0
    for row in np.flatnonzero(may_be_held_out(hashes, settings)):
        size = int(sizes[row])
        if kinds[row] == TRAIN and taken < MAX_VALIDATION and taken + size <= most:
            kinds[row] = VALIDATION
            taken += size
    if TRAIN not in kinds:
        kinds[kinds == VALIDATION] = TRAIN
    return kinds
