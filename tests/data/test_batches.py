"""The order in which batches take a token stream, and the windows of an evaluation."""

import numpy as np
import pytest

from data.batches import batch, number_documents, permute, validation_windows

STREAM = np.arange(1003, dtype=np.uint16)  # each token is its own position, so a window shows where it was taken
T, B = 10, 7


def rows(step: int, **changes) -> tuple[np.ndarray, np.ndarray]:
    arguments = dict(seed=5, first=step * B, size=B, sequence_length=T) | changes
    return batch(STREAM, **arguments)


def test_an_epoch_takes_every_window_once_in_another_order_each_time():
    windows = len(STREAM) // T
    inputs, targets = map(np.concatenate, zip(*map(rows, range(-(-3 * windows // B))), strict=True))
    assert inputs.dtype == targets.dtype == np.int64 and np.array_equal(targets, (inputs + 1) % len(STREAM))
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    epochs = inputs[: 3 * windows, 0].reshape(3, windows)
    for epoch in epochs:
        assert len({int(start) % T for start in epoch if start >= T}) <= 2, "one grid, but for the window that wraps"
        gaps = np.diff(np.sort(epoch))
        assert (gaps[1:-1] == T).all(), "no window twice and none left out"
    first_of_next_seed = np.concatenate([rows(step, seed=6)[0][:, 0] for step in range(-(-windows // B))])[:windows]
    assert len({tuple(epoch - epoch.min()) for epoch in (*epochs, first_of_next_seed)}) == 4
    assert len({int(np.sort(epoch)[1] % T) for epoch in epochs}) > 1, "the offset changes with the epoch"


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_order_does_not_depend_on_how_it_is_divided_into_batches_and_shares(size):
    for first in (0, 90, 96, 102, 1200):  # 96 and 102 lie across the end of an epoch
        whole = rows(0, first=first, size=6)
        parts = [rows(0, first=first + start, size=size) for start in range(0, 6, size)]
        for i in (0, 1):  # inputs, targets
            assert np.array_equal(np.concatenate([part[i] for part in parts]), whole[i])
    assert not np.array_equal(rows(124)[0], rows(123)[0]) and not np.array_equal(rows(123, seed=6)[0], rows(123)[0])


def test_the_order_of_windows_is_a_bijection_for_any_count():
    keys = np.random.SeedSequence(5).generate_state(4, np.uint64)
    for count in [*range(1, 300), 4095, 4096, 4097, 100_003]:
        found = permute(np.arange(count), count, keys).astype(np.int64)
        assert len(found) == count and (np.bincount(found, minlength=count) == 1).all(), count


def test_neighbours_do_not_stay_neighbours_and_keys_give_other_orders():
    first, second = (
        permute(np.arange(10**6), 10**6, np.random.SeedSequence(n).generate_state(4, np.uint64)) for n in (1, 2)
    )
    for order in (first, second):
        steps = np.diff(order.astype(np.int64))
        assert (np.abs(steps) < 1000).mean() == pytest.approx(0.002, rel=0.1), "as often as by chance"
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert (first == second).sum() < 20


@pytest.mark.parametrize("length", [2, 10, 11, 70, 71, 72, 500, 1003])
def test_evaluation_predicts_every_token_but_the_first_once(length):
    stream, expected = STREAM[:length], 1
    for inputs, targets in validation_windows(stream, T, B):
        assert inputs.shape == targets.shape == (B, T)
        assert inputs.dtype == targets.dtype == np.int64
        kept = targets != -100
        assert np.array_equal(targets[kept], np.arange(expected, expected + kept.sum()))
        assert np.array_equal(inputs[kept] + 1, targets[kept]) and not inputs[~kept].any() and kept.any()
        expected += int(kept.sum())
    assert expected == length


def test_documents_are_numbered_from_the_ids_that_begin_them():
    stream = np.array([1, 5, 6, 2, 1, 7, 2, 1, 8, 9, 2], np.uint16)
    (whole,) = validation_windows(stream, 10, 1)
    assert number_documents(whole, None) is whole
    assert number_documents(whole, 1)[2].tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    for step in range(4):
        plain = batch(stream, seed=1, first=2 * step, size=2, sequence_length=4)
        inputs, targets, documents = number_documents(plain, 1)
        assert inputs is plain[0] and targets is plain[1]
        assert np.array_equal(np.diff(documents, axis=1), inputs[:, 1:] == 1)
