"""The order in which batches take a token stream: a function of the step, not a state.

    stream    t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...                 T = 3, offset of this epoch = 1
    windows      [t1 t2 t3]t4                                   window k: inputs from offset + k T,
                          [t4 t5 t6]t7                          targets one further; the last window
                                   [t7 t8 t9]t10                runs over the end into the start

An epoch takes every window once, in a random order given by (seed, epoch); its offset in [0, T) is random too, so each
epoch divides documents into windows differently. Any step of any process can be computed at once, so a resumed run
continues exactly, with any number of processes that divides the batch.
"""

import functools
from collections.abc import Iterator

import numpy as np

from errors import UserError

IGNORE = -100  # the target that no loss counts


def check_one_batch(tokens: np.ndarray, batch_size: int, sequence_length: int) -> None:
    """Raise `UserError` when the stream is shorter than one batch."""
    if len(tokens) // sequence_length < batch_size:
        raise UserError(
            f"the text has {len(tokens):,} tokens to train on, but one batch of {batch_size} sequences of "
            f"{sequence_length} needs {batch_size * sequence_length:,}; give more text, or make the batch or the "
            f"sequences smaller."
        )


def batch(
    tokens: np.ndarray,
    *,
    seed: int,
    step: int,
    batch_size: int,
    sequence_length: int,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one step, each int64 (batch_size / world_size, sequence_length).

    batch_size counts the sequences of all processes; process `rank` gets its share, and the shares in the order of
    ranks are the sequences that a single process would get. A pure function of its arguments.
    Raises `UserError` when the stream is shorter than one batch or the processes do not divide the batch.
    """
    if batch_size % world_size:
        raise UserError(f"a batch of {batch_size} cannot be shared by {world_size} processes; make it a multiple.")
    check_one_batch(tokens, batch_size, sequence_length)
    windows = len(tokens) // sequence_length
    share = batch_size // world_size
    index = step * batch_size + rank * share + np.arange(share)  # of windows since the run began
    starts = np.empty(share, np.int64)
    for epoch in np.unique(index // windows):
        in_epoch = index // windows == epoch
        offset, order = _epoch(seed, int(epoch), windows, sequence_length)
        starts[in_epoch] = offset + order[index[in_epoch] % windows] * sequence_length
    positions = starts[:, None] + np.arange(sequence_length + 1)  # (B, T + 1)
    ids = np.asarray(tokens[positions % len(tokens)], np.int64)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


@functools.lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def _epoch(seed: int, epoch: int, windows: int, sequence_length: int) -> tuple[int, np.ndarray]:
    """The offset and the order of windows of an epoch: 8 bytes per window, 32 MB for 10^9 tokens at T = 256."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return int(generator.integers(sequence_length)), generator.permutation(windows)


def validation_windows(
    tokens: np.ndarray, sequence_length: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets, int64 (batch_size, sequence_length), that predict every token but the first once.

    Windows follow each other without gap or overlap. All batches have one shape, so the last is padded with inputs 0
    and targets -100, which no loss counts.
    """
    size = batch_size * sequence_length
    for start in range(0, len(tokens) - 1, size):
        ids = np.asarray(tokens[start : start + size + 1], np.int64)
        inputs, targets = np.zeros(size, np.int64), np.full(size, IGNORE, np.int64)
        inputs[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
        yield inputs.reshape(batch_size, sequence_length), targets.reshape(batch_size, sequence_length)
