"""Which documents are for training and which for validation: it depends on the text alone."""

from dataclasses import dataclass

import numpy as np

from data.batches import mix

# A fixed set of 4 MB is about a million tokens: its mean loss has a standard error below 0.002 nats even where tokens
# vary by 2 nats, and evaluating more would only take time away from training.
MAX_VALIDATION = 4_000_000  # bytes
TRAIN, VALIDATION, DUPLICATE = 0, 1, 2


@dataclass(frozen=True)
class Split:
    """How documents are chosen for validation: `salt` chooses others, about `fraction` of the bytes, at most 4 MB."""

    fraction: float
    salt: int

    def candidates(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each document, given by its hash, may be for validation."""
        limit = np.uint64(min(self.fraction * 2**64, 2**64 - 2048))
        return mix(hashes ^ mix(np.array([self.salt], np.uint64))) < limit


def split_documents(table: np.ndarray, split: Split) -> np.ndarray:
    """TRAIN, VALIDATION or DUPLICATE for each row of `tokens.DOCUMENT`.

    Of equal documents the first is kept. For validation are, in order, candidates until they have 4 MB, but none that
    would take them past twice their share of the bytes; and none at all if nothing else remained.
    """
    _, first = np.unique(table["hash"], return_index=True)
    kinds = np.full(len(table), DUPLICATE, np.uint8)
    kinds[first] = TRAIN
    most = 2 * min(split.fraction * float(table["bytes"][first].sum()), MAX_VALIDATION)
    taken = 0
    for row in np.flatnonzero(split.candidates(table["hash"])):
        size = int(table["bytes"][row])
        if kinds[row] == TRAIN and taken < MAX_VALIDATION and taken + size <= most:
            kinds[row] = VALIDATION
            taken += size
    if TRAIN not in kinds:
        kinds[kinds == VALIDATION] = TRAIN
    return kinds
