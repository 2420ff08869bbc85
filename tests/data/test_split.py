"""Which documents are for training, which for validation, and which are duplicates; and streams of pieces."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import split as split_module
from data.settings import DataSettings
from data.split import DUPLICATE, TRAIN, VALIDATION, split_documents
from data.tokens import DOCUMENT, TokenStream


def table_of(hashes, sizes=100, tokens=3) -> np.ndarray:
    table = np.ones(len(hashes), DOCUMENT)
    table["hash"], table["bytes"], table["tokens"] = hashes, sizes, tokens
    return table


def random_table(count: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return table_of(generator.integers(0, 2**63, count), generator.integers(1, 200, count))


def kinds_of(table: np.ndarray, fraction: float = 0.05, salt: int = 0) -> np.ndarray:
    return split_documents(table, DataSettings(validation_fraction=fraction, validation_salt=salt))


def test_of_equal_documents_the_first_is_kept():
    kinds = kinds_of(table_of([5, 6, 5, 7, 6, 5]), fraction=0)
    assert kinds.tolist() == [TRAIN, TRAIN, DUPLICATE, TRAIN, DUPLICATE, DUPLICATE]


def test_validation_gets_about_its_fraction_of_the_bytes():
    table = random_table(20_000)
    for fraction in (0.01, 0.05, 0.3):
        taken = table["bytes"][kinds_of(table, fraction) == VALIDATION].sum() / table["bytes"].sum()
        assert taken == pytest.approx(fraction, rel=0.15)


def test_a_document_is_chosen_by_its_text_alone_and_another_salt_chooses_others():
    def chosen(table: np.ndarray, salt: int = 0) -> set[int]:
        return set(table["hash"][kinds_of(table, salt=salt) == VALIDATION].tolist())

    table = random_table(2000)
    mixed = np.random.default_rng(1).permutation(table)[:1900]
    assert chosen(mixed) == chosen(table) & set(mixed["hash"].tolist())
    assert len(chosen(table) & chosen(table, salt=1)) < 0.2 * len(chosen(table))


def test_validation_ends_at_its_limit_in_the_order_of_files(monkeypatch):
    monkeypatch.setattr(split_module, "MAX_VALIDATION", 1000)
    table = random_table(2000)
    kinds = kinds_of(table, 0.3)
    assert 1000 <= table["bytes"][kinds == VALIDATION].sum() <= 1200
    assert np.flatnonzero(kinds == VALIDATION)[-1] < 100


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
    folder, units, chosen, expected = tmp_path_factory.mktemp("stream"), [], [], []
    draw_unit = st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=4)
    for number, unit in enumerate(data.draw(st.lists(draw_unit, min_size=1, max_size=4))):
        ids, path = np.arange(sum(tokens for tokens, _ in unit), dtype="<u2") + 1000 * number, folder / f"{number}.bin"
        ids.tofile(path)
        table = table_of([0] * len(unit), tokens=[tokens for tokens, _ in unit])
        units.append(SimpleNamespace(path=path, table=table, tokenizer=SimpleNamespace(dtype=ids.dtype)))
        for tokens, is_chosen in unit:
            chosen.append(is_chosen)
            expected += ids[:tokens].tolist() * is_chosen
            ids = ids[tokens:]
    stream = TokenStream(units, chosen)
    assert len(stream) == len(expected) and stream[:].tolist() == expected
    start, stop = data.draw(st.integers(0, len(expected) + 1)), data.draw(st.integers(0, len(expected) + 3))
    assert stream[start:stop].tolist() == expected[start:stop]
    stream.length = min(stop, len(expected))
    assert stream[:].tolist() == expected[:stop]
