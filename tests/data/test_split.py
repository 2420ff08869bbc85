"""Which documents are for training and which for validation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import split as splitting
from data.corpus import resolve
from data.split import COPY, TRAIN, VALIDATION, by_side, scan, split
from errors import UserError


def pieces_of(documents: list[str]) -> list[tuple[str, bool]]:
    """Each document as up to three pieces."""
    cuts = [(text, [0, len(text) // 3, len(text) // 2, len(text)]) for text in documents]
    return [(text[a:b], a == 0) for text, ends in cuts for a, b in itertools.pairwise(ends) if a < b]


def random_documents(count: int, size: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list("abcdeé \n"), generator.integers(3, 2 * size))) for _ in range(count)]


def sides(documents: list[str], tmp_path, fraction: float) -> tuple[list[str], list[str]]:
    for i, text in enumerate(documents):
        (tmp_path / f"{i:06}.txt").write_bytes(text.encode("utf-8"))
    files = resolve([str(tmp_path)])
    division = split(*scan(splitting.stream(files)), fraction)
    found: tuple[list[str], list[str]] = [], []
    for text, first, side in by_side(files, division):
        if first:
            found[side].append(text)
        else:
            found[side][-1] += text
    return found


def test_lengths_are_bytes_and_pieces_do_not_change_the_hash():
    documents = random_documents(20, 50)
    hashes, lengths = scan(pieces_of(documents))
    assert lengths.tolist() == [len(text.encode("utf-8")) for text in documents]
    assert np.array_equal(hashes, scan((text, True) for text in documents)[0])
    assert len(set(hashes.tolist())) == 20


def test_copies_are_dropped_and_the_first_is_kept():
    division = split(*scan((text, True) for text in ["a", "b", "a", "c", "b", "a"]), 0.3)
    assert (division.side == COPY).tolist() == [False, False, True, False, True, True]
    assert division.documents == 3 and division.bytes == 3


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_validation_gets_its_fraction_of_the_bytes_by_whole_documents(tmp_path, fraction):
    documents = random_documents(400, 200)
    train, validation = sides(documents, tmp_path, fraction)
    assert sorted(train + validation) == sorted(documents)
    share = sum(len(text.encode()) for text in validation) / sum(len(text.encode()) for text in documents)
    assert fraction <= share <= fraction + 2 * 200 * 1.2 / sum(map(len, documents)), "past the goal by one document"


def test_the_split_depends_on_the_text_and_not_on_names_or_order(tmp_path):
    documents = random_documents(60, 100)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    first = sides(documents, tmp_path / "one", 0.1)
    second = sides(documents[::-1], tmp_path / "two", 0.1)
    assert set(first[1]) == set(second[1]) and len(first[1]) > 1


def test_validation_is_capped(tmp_path, monkeypatch):
    monkeypatch.setattr(splitting, "MOST_VALIDATION", 1000)
    _, validation = sides(random_documents(500, 50), tmp_path, 0.5)
    assert 1000 <= sum(len(text.encode()) for text in validation) <= 1000 + 150


def test_one_huge_document_never_becomes_the_validation_set(tmp_path):
    documents = ["x" * 100_000, *random_documents(300, 50)]
    train, validation = sides(documents, tmp_path, 0.05)
    assert documents[0] in train and len(validation) > 10


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 1000), min_size=2, max_size=30), fraction=st.floats(0.01, 0.99))
def test_both_sides_get_text_whatever_the_lengths(lengths, fraction):
    hashes = np.random.default_rng(sum(lengths)).integers(0, 2**63, len(lengths)).astype(np.uint64)
    division = split(hashes, np.array(lengths, np.uint64), fraction)
    assert (division.side == TRAIN).any()
    assert (division.side == VALIDATION).any() != (division.cut is not None)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
@pytest.mark.parametrize("line", ["a line of the text é\n", "no end of line ", "é"])
def test_a_single_document_gives_its_end_cut_at_a_line_end(tmp_path, fraction, line):
    text = line * 7001  # more than one piece where there are lines
    train, validation = sides([text], tmp_path, fraction)
    assert [len(train), len(validation)] == [1, 1]
    assert train[0] + validation[0] == text
    tail = len(validation[0].encode()) / len(text.encode())
    assert tail == pytest.approx(fraction, abs=60 / len(text)), "to a line or a character"
    if "\n" in line:
        assert train[0].endswith("\n")


def test_of_few_large_documents_the_longest_gives_its_end(tmp_path):
    documents = ["b\n" * 5000, "a line\n" * 2000, "c" * 9000]
    train, validation = sides(documents, tmp_path, 0.05)
    assert len(validation) == 1 and documents[1].endswith(validation[0])
    assert sorted(train) == sorted([documents[0], documents[1][: -len(validation[0])], documents[2]])


def test_a_document_without_a_line_end_near_the_cut_is_cut_there(tmp_path):
    text = "short\n" + "x" * 10_000
    train, validation = sides([text], tmp_path, 0.05)
    assert len(validation[0]) == pytest.approx(0.05 * len(text), abs=1)
    assert train[0] + validation[0] == text


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_that_leaves_a_side_empty_is_refused(fraction):
    with pytest.raises(UserError, match="between 0 and 1"):
        split(*scan([("text", True), ("more", True)]), fraction)


def test_no_text_at_all_is_refused():
    with pytest.raises(UserError, match="no text"):
        split(*scan([]), 0.05)
