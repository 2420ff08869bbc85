"""The order in which batches take token streams: a function of how many sequences came before, not a state.

    stream    t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...                 T = 3, offset of this epoch = 1
    windows      [t1 t2 t3]t4                                   window k: inputs from offset + k T,
                          [t4 t5 t6]t7                          targets one further; the last window
                                   [t7 t8 t9]t10                runs over the end into the start

An epoch takes every window once, in a random order given by (seed, epoch). The offset in [0, T) is random too, so each
epoch divides documents into windows differently. Any sequence of a run can be computed at once, so a resumed run
continues exactly, with any number of processes that divides the batch; with another batch size it repeats nothing.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

IGNORED = -100  # the target that no loss counts, as `kernels.reference` has it
ROUNDS = 4  # of `permute`


class Batch(NamedTuple):
    """Sequences to predict, int64 (sequences, tokens) each."""

    inputs: np.ndarray
    targets: np.ndarray  # the id after each input, or `IGNORED`
    documents: np.ndarray | None = None  # the number of each input's document, where attention keeps documents apart

    def with_documents(self, document_start: int | None) -> "Batch":
        """The same with documents, which begin with the id `document_start`, unless that is None."""
        return self if document_start is None else self._replace(documents=np.cumsum(self.inputs == document_start, 1))


def batch(stream: Sequence, *, seed: int, first: int, size: int, sequence_length: int) -> Batch:
    """The `size` sequences from `first` on, counted over the run."""
    rows = []
    for windows, offset in windows_by_epoch(len(stream) // sequence_length, seed, first, size):
        for window in windows:
            start = offset % sequence_length + int(window) * sequence_length
            row = stream[start : start + sequence_length + 1]
            rows.append(np.concatenate([row, stream[: sequence_length + 1 - len(row)]]))
    ids = np.stack(rows).astype(np.int64)
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy())


def windows_by_epoch(count: int, seed: int, first: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """For each epoch that the sequences first .. first + size touch: the indices of its windows, and its offset."""
    for epoch, sequences in itertools.groupby(range(first, first + size), lambda sequence: sequence // count):
        *keys, offset = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS + 1, np.uint64)
        yield permute(np.array([*sequences]) % count, count, keys), int(offset)


def permute(index: np.ndarray, count: int, keys: Sequence[int]) -> np.ndarray:
    """Where each index below `count` is in the random order that the keys choose, without a table.
    A Feistel network with a round per key permutes the numbers of 2 b bits; what it takes to `count` or more goes
    through it again ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002)."""
    bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    positions = np.array(index, np.uint64)
    outside = np.ones(len(positions), bool)
    while outside.any():
        left, right = positions[outside] >> bits, positions[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ np.uint64(key)) & mask)
        positions[outside] = left << bits | right
        outside = positions >= count
    return positions


def mix(values: np.ndarray) -> np.ndarray:
    """A hash of each uint64: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def validation_windows(
    tokens: Sequence, sequence_length: int, batch_size: int, document_start: int | None = None
) -> Iterator[Batch]:
    """Batches that predict every token but the first once; the last one is padded."""
    size = batch_size * sequence_length
    for start in range(0, len(tokens) - 1, size):
        ids = tokens[start : start + size + 1].astype(np.int64)
        padding = (0, size + 1 - len(ids))
        inputs = np.pad(ids[:-1], padding).reshape(batch_size, sequence_length)
        targets = np.pad(ids[1:], padding, constant_values=IGNORED).reshape(batch_size, sequence_length)
        yield Batch(inputs, targets).with_documents(document_start)
