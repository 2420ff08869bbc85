"""Which documents of prepared units are for training and which for validation, and both as streams of ids.

The split depends on the text alone. It looks at 24 bytes for each document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.batches import mix

# A fixed set of 4 MB is about a million tokens: its mean loss has a standard error below 0.002 nats even where tokens
# vary by 2 nats, and evaluating more would only take time away from training.
MAX_VALIDATION = 4_000_000  # bytes
MAX_COMPARED = 10_000_000  # documents; where there are more, each is compared with those of its own unit only
TRAIN, VALIDATION, DUPLICATE = 0, 1, 2


class TokenStream:
    """Pieces of files of ids, end to end, read when they are asked for."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype, pieces: np.ndarray):
        """pieces: int64 (n, 3), each the number of a path, and in that file the first id and the one after the last."""
        self._paths, self._dtype, self._pieces = paths, dtype, pieces
        self._ends = np.cumsum(pieces[:, 2] - pieces[:, 1])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: slice) -> np.ndarray:
        """The ids of a slice with step 1.

        They are read, not memory-mapped: pages that stay mapped would count as memory of the process.
        """
        start, stop, _ = places.indices(len(self))
        found, number = [np.empty(0, self._dtype)], int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            path, _, last = self._pieces[number].tolist()
            left = int(self._ends[number]) - start  # of this piece
            count = min(stop - start, left)
            offset = (last - left) * self._dtype.itemsize
            found.append(np.fromfile(self._paths[path], self._dtype, count, offset=offset))
            start, number = start + count, number + 1
        return np.concatenate(found)


@dataclass(frozen=True)
class Split:
    """How documents are chosen for validation: `salt` chooses others, about `fraction` of the bytes, at most 4 MB."""

    fraction: float
    salt: int

    def candidates(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each document, given by its hash, may be for validation."""
        limit = np.uint64(min(self.fraction * 2**64, 2**64 - 2048))
        return mix(hashes ^ mix(np.array([self.salt], np.uint64))) < limit


def split_documents(table: np.ndarray, unit: np.ndarray, split: Split, held_out: np.ndarray | None) -> np.ndarray:
    """TRAIN, VALIDATION or DUPLICATE for each row of `units.DOCUMENT`; `unit`: the number of its unit.

    Of equal documents the first is kept. For validation are, in order, those below a threshold of their hash, until
    they have 4 MB. One that would take them past twice their share of the bytes is left out, and if no other document
    remained, none is for validation. held_out: the hashes of the documents for validation, if they are known.
    """
    hashes, kinds = table["hash"], np.full(len(table), DUPLICATE, np.uint8)
    key = hashes if len(table) <= MAX_COMPARED else mix(hashes + unit.astype(np.uint64))
    kinds[np.unique(key, return_index=True)[1]] = TRAIN
    if held_out is None:
        kept, taken = kinds == TRAIN, 0
        most = 2 * min(split.fraction * float(table["bytes"][kept].sum()), MAX_VALIDATION)
        candidates = np.flatnonzero(kept & split.candidates(hashes))
        for row in candidates[np.sort(np.unique(hashes[candidates], return_index=True)[1])].tolist():
            size = int(table["bytes"][row])
            if taken < MAX_VALIDATION and taken + size <= most:
                kinds[row] = VALIDATION
                taken += size
        if TRAIN not in kinds:
            kinds[kept] = TRAIN
        held_out = hashes[kinds == VALIDATION]
    kinds[(kinds == TRAIN) & np.isin(hashes, held_out)] = DUPLICATE
    return kinds


def find_pieces(table: np.ndarray, unit: np.ndarray, wanted: np.ndarray, lead: int) -> np.ndarray:
    """The pieces, int64 (n, 3), that are the `wanted` rows; `lead`: ids before the first document of a unit."""
    tokens = table["tokens"].astype(np.int64)
    ends = np.cumsum(tokens)
    first_of_unit = np.searchsorted(unit, unit)  # the row
    ends += lead - (ends - tokens)[first_of_unit]
    label = np.where(wanted, unit, -1)
    edges = np.flatnonzero(np.diff(label, prepend=-2, append=-2))
    first, last = edges[:-1], edges[1:] - 1
    pieces = np.column_stack([label[first], (ends - tokens)[first], ends[last]])
    opening = np.array([[0, 0, lead]])  # EOS, where the tokenizer has no BOS
    return np.concatenate([opening, pieces[pieces[:, 0] >= 0]])


def cut_pieces(pieces: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `tokens` ids of the pieces, and the others."""
    ends = np.cumsum(pieces[:, 2] - pieces[:, 1])
    place = int(np.searchsorted(ends, tokens))
    before, after = pieces[: place + 1].copy(), pieces[place:].copy()
    before[-1, 2] = after[0, 1] = pieces[place, 2] - (ends[place] - tokens)
    return before, after
