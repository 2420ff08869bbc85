"""Documents for training and validation, streams of units, the order of batches, and the windows of an evaluation."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import split as split_module
from data.batches import Batch, batch, permute, validation_windows
from data.settings import DataSettings
from data.split import DOCUMENT, DUPLICATE, TRAIN, VALIDATION, split_documents
from data.tokens import TokenStream

STREAM = np.arange(1003, dtype=np.uint16)  # each token is its own position, so a window shows where it was taken
T, B = 10, 7


def rows(step: int, **changes) -> Batch:
    arguments = dict(seed=5, first=step * B, size=B, sequence_length=T) | changes
    return batch(STREAM, **arguments)


def test_an_epoch_takes_every_window_once_in_another_order_each_time():
    windows = len(STREAM) // T
    batches = [rows(step) for step in range(-(-3 * windows // B))]
    inputs, targets = (np.concatenate([batch[i] for batch in batches]) for i in (0, 1))
    assert inputs.dtype == targets.dtype == np.int64 and np.array_equal(targets, (inputs + 1) % len(STREAM))
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    epochs = inputs[: 3 * windows, 0].reshape(3, windows)
    for epoch in epochs:
        assert len({int(start) % T for start in epoch if start >= T}) <= 2, "one grid, but for the window that wraps"
        gaps = np.diff(np.sort(epoch))
        assert (gaps[1:-1] == T).all(), "no window twice and none left out"
    first_of_next_seed = np.concatenate([rows(step, seed=6).inputs[:, 0] for step in range(-(-windows // B))])[:windows]
    assert len({tuple(epoch - epoch.min()) for epoch in (*epochs, first_of_next_seed)}) == 4
    assert len({int(np.sort(epoch)[1] % T) for epoch in epochs}) > 1, "the offset changes with the epoch"


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_order_does_not_depend_on_how_it_is_divided_into_batches_and_shares(size):
    for first in (0, 90, 96, 102, 1200):  # 96 and 102 lie across the end of an epoch
        whole = rows(0, first=first, size=6)
        batches = [rows(0, first=first + start, size=size) for start in range(0, 6, size)]
        assert np.array_equal(np.concatenate([batch.inputs for batch in batches]), whole.inputs)
        assert np.array_equal(np.concatenate([batch.targets for batch in batches]), whole.targets)
    inputs = [rows(step, seed=seed).inputs.tolist() for step, seed in ((123, 5), (124, 5), (123, 6))]
    assert inputs[0] not in inputs[1:]


def test_the_order_of_windows_is_a_bijection_for_any_count():
    keys = np.random.SeedSequence(5).generate_state(4, np.uint64)
    for count in [*range(1, 300), 4095, 4096, 4097, 100_003]:
        order = permute(np.arange(count), count, keys).astype(np.int64)
        assert len(order) == count and (np.bincount(order, minlength=count) == 1).all(), count


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
    for inputs, targets, _ in validation_windows(stream, T, B):
        assert inputs.shape == targets.shape == (B, T)
        assert inputs.dtype == targets.dtype == np.int64
        predicted = targets != -100
        assert np.array_equal(targets[predicted], np.arange(expected, expected + predicted.sum()))
        assert np.array_equal(inputs[predicted] + 1, targets[predicted])
        assert predicted.any() and not inputs[~predicted].any()
        expected += int(predicted.sum())
    assert expected == length


def test_documents_are_numbered_from_the_ids_that_begin_them():
    stream = np.array([1, 5, 6, 2, 1, 7, 2, 1, 8, 9, 2], np.uint16)
    (whole,) = validation_windows(stream, 10, 1)
    assert whole.with_documents(None) is whole
    assert whole.with_documents(1).documents.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    for step in range(4):
        plain = batch(stream, seed=1, first=2 * step, size=2, sequence_length=4)
        inputs, targets, documents = plain.with_documents(1)
        assert inputs is plain.inputs and targets is plain.targets
        assert np.array_equal(np.diff(documents, axis=1), inputs[:, 1:] == 1)


def table_of(hashes, sizes=100, tokens=3) -> np.ndarray:
    table = np.ones(len(hashes), DOCUMENT)
    table["hash"], table["bytes"], table["tokens"] = hashes, sizes, tokens
    return table


def random_table(count: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return table_of(generator.integers(0, 2**63, count), generator.integers(1, 200, count))


def kinds_of(table: np.ndarray, fraction: float = 0.05, salt: int = 0) -> np.ndarray:
    settings = DataSettings(validation_fraction=fraction, validation_salt=salt)
    return split_documents(table["hash"], table["bytes"], settings)


def test_of_equal_documents_the_first_is_kept():
    kinds = kinds_of(table_of([5, 6, 5, 7, 6, 5]), fraction=0)
    assert kinds.tolist() == [TRAIN, TRAIN, DUPLICATE, TRAIN, DUPLICATE, DUPLICATE]


def test_validation_gets_about_its_fraction_of_the_bytes_up_to_its_limit_in_the_order_of_files(monkeypatch):
    table = random_table(20_000)
    for fraction in (0.01, 0.05, 0.3):
        taken = table["bytes"][kinds_of(table, fraction) == VALIDATION].sum() / table["bytes"].sum()
        assert taken == pytest.approx(fraction, rel=0.15)
    monkeypatch.setattr(split_module, "MAX_VALIDATION", 10_000)
    kinds = kinds_of(table, 0.3)
    assert 10_000 <= table["bytes"][kinds == VALIDATION].sum() <= 10_200
    assert np.flatnonzero(kinds == VALIDATION)[-1] < 1000


def test_a_document_is_chosen_by_its_text_alone_and_another_salt_chooses_others():
    def chosen(table: np.ndarray, salt: int = 0) -> set[int]:
        return set(table["hash"][kinds_of(table, salt=salt) == VALIDATION].tolist())

    table = random_table(2000)
    mixed = np.random.default_rng(1).permutation(table)[:1900]
    assert chosen(mixed) == chosen(table) & set(mixed["hash"].tolist())
    assert len(chosen(table) & chosen(table, salt=1)) < 0.2 * len(chosen(table))


def test_one_huge_document_is_not_for_validation():
    table = table_of([*range(1, 301), *[2] * 3000], [2000] + [50] * 3299)  # copies do not raise its share
    assert all(kinds_of(table, 0.05, salt)[0] == TRAIN for salt in range(100))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), fraction=st.floats(0, 1))
def test_something_remains_to_train_on(sizes, fraction):
    hashes = np.random.default_rng(sum(sizes)).integers(0, 2**63, len(sizes))
    assert TRAIN in kinds_of(table_of(hashes, sizes), fraction)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_chosen_documents_end_to_end(tmp_path_factory, data):
    """Against plain lists, for any documents in any units, any choice of them and any slice."""
    folder, units, starts, stops, expected = tmp_path_factory.mktemp("stream"), [], [], [], []
    draw_unit = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), max_size=4)
    for number, unit in enumerate(data.draw(st.lists(draw_unit, min_size=1, max_size=4))):
        ids, path = np.arange(sum(tokens for tokens, *_ in unit), dtype="<u2") + 1000 * number, folder / f"{number}.bin"
        ids.tofile(path)
        table = table_of([0] * len(unit), tokens=[tokens for tokens, *_ in unit])
        units.append(SimpleNamespace(path=path, table=table, tokenizer=SimpleNamespace(dtype=ids.dtype)))
        for tokens, start, stop in unit:
            starts.append(start)
            stops.append(min(tokens, stop))
            expected += ids[start : stops[-1]].tolist()
            ids = ids[tokens:]
    stream = TokenStream(units, (np.array(starts), np.array(stops)))
    assert len(stream) == len(expected) and stream[:].tolist() == expected
    start, stop = data.draw(st.integers(0, len(expected) + 1)), data.draw(st.integers(0, len(expected) + 3))
    assert stream[start:stop].tolist() == expected[start:stop]
