"""Which documents of prepared units are for training and which for validation.

The split depends on the text alone. It looks at 24 bytes for each document.
"""

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
    """TRAIN, VALIDATION or DUPLICATE for each row of `units.DOCUMENT`.

    Of equal documents the first is kept. For validation are, in order, those below a threshold of their hash, until
    they have 4 MB. One that would take them past twice their share of the bytes is left out, and if no other document
    remained, none is for validation.
    """
    hashes, kinds = table["hash"], np.full(len(table), DUPLICATE, np.uint8)
    kinds[np.unique(hashes, return_index=True)[1]] = TRAIN
    kept, taken = kinds == TRAIN, 0
    most = 2 * min(split.fraction * float(table["bytes"][kept].sum()), MAX_VALIDATION)
    for row in np.flatnonzero(kept & split.candidates(hashes)).tolist():
        size = int(table["bytes"][row])
        if taken < MAX_VALIDATION and taken + size <= most:
            kinds[row] = VALIDATION
            taken += size
    if TRAIN not in kinds:
        kinds[kept] = TRAIN
    return kinds


def find_pieces(table: np.ndarray, unit: np.ndarray, wanted: np.ndarray, lead: int) -> np.ndarray:
    """The pieces of a `units.TokenStream` that are the `wanted` rows, behind the `lead` ids that begin a unit."""
    tokens = table["tokens"].astype(np.int64)
    ends = np.cumsum(tokens)
    first_of_unit = np.searchsorted(unit, unit)  # the row
    ends += lead - (ends - tokens)[first_of_unit]
    label = np.where(wanted, unit, -1)
    edges = np.flatnonzero(np.diff(label, prepend=-2, append=-2))
    first, last = edges[:-1], edges[1:] - 1
    pieces = np.column_stack([label[first], (ends - tokens)[first], ends[last]])
    return np.concatenate([[[0, 0, lead]], pieces[pieces[:, 0] >= 0]])
