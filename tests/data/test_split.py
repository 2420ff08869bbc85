"""Which documents are for training, which for validation, and which are duplicates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import read_documents, resolve
from data.split import DUPLICATE, TRAIN, VALIDATION, CorpusSplit, hash_documents, kept_documents, split_corpus
from errors import UserError


def random_documents(count: int, size: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list("abcdeé \n"), generator.integers(3, 2 * size))) for _ in range(count)]


def split_texts(documents: list[str], fraction: float) -> CorpusSplit:
    return split_corpus(*hash_documents([text] for text in documents), fraction)


def train_and_validation(documents: list[str], tmp_path, fraction: float) -> tuple[list[str], list[str]]:
    for i, text in enumerate(documents):
        (tmp_path / f"{i:06}.txt").write_bytes(text.encode("utf-8"))
    files = resolve([str(tmp_path)])
    corpus_split = split_corpus(*hash_documents(read_documents(files)), fraction)
    found: tuple[list[str], list[str]] = [], []
    for split, document in kept_documents(read_documents(files), corpus_split):
        found[split].append("".join(document))
    return found


def test_lengths_are_bytes_and_blocks_do_not_change_the_hash():
    documents = random_documents(20, 50)
    blocks = [
        [text[: len(text) // 3], text[len(text) // 3 : len(text) // 2], text[len(text) // 2 :]] for text in documents
    ]
    hashes, lengths = hash_documents(blocks)
    assert lengths.tolist() == [len(text.encode("utf-8")) for text in documents]
    assert np.array_equal(hashes, hash_documents([text] for text in documents)[0])
    assert len(set(hashes.tolist())) == 20


def test_every_byte_that_is_read_is_reported():
    reported = []
    hash_documents([["ab", "é"], ["c"]], reported.append)
    assert reported == [2, 2, 1]


def test_duplicates_are_dropped_and_the_first_is_kept():
    corpus_split = split_texts(["a", "b", "a", "c", "b", "a"], 0.3)
    assert (corpus_split.splits == DUPLICATE).tolist() == [False, False, True, False, True, True]
    assert corpus_split.documents == 3 and corpus_split.bytes == 3


def test_duplicates_of_many_blocks_do_not_shift_the_documents_after_them(tmp_path, monkeypatch):
    monkeypatch.setattr("data.readers.BLOCK", 7)
    documents = random_documents(30, 100)
    train, validation = train_and_validation(documents + documents[:9] + ["", "the last one"], tmp_path, 0.2)
    assert sorted(train + validation) == sorted([*documents, "the last one"]) and len(validation) > 1


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_validation_gets_its_fraction_of_the_bytes_in_undivided_documents(tmp_path, fraction):
    documents = random_documents(400, 200)
    train, validation = train_and_validation(documents, tmp_path, fraction)
    assert sorted(train + validation) == sorted(documents)
    share = sum(len(text.encode()) for text in validation) / sum(len(text.encode()) for text in documents)
    assert fraction <= share <= fraction + 2 * 200 * 1.2 / sum(map(len, documents)), "past the goal by one document"


def test_the_split_depends_on_the_text_and_not_on_names_or_order(tmp_path):
    documents = random_documents(60, 100)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    first = train_and_validation(documents, tmp_path / "one", 0.1)
    second = train_and_validation(documents[::-1], tmp_path / "two", 0.1)
    assert set(first[1]) == set(second[1]) and len(first[1]) > 1


def test_validation_is_capped(tmp_path, monkeypatch):
    monkeypatch.setattr("data.split.MAX_VALIDATION", 1000)
    _, validation = train_and_validation(random_documents(500, 50), tmp_path, 0.5)
    assert 1000 <= sum(len(text.encode()) for text in validation) <= 1000 + 150


def test_one_huge_document_never_becomes_the_validation_set(tmp_path):
    documents = ["x" * 100_000, *random_documents(300, 50)]
    train, validation = train_and_validation(documents, tmp_path, 0.05)
    assert documents[0] in train and len(validation) > 10


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 1000), min_size=2, max_size=30), fraction=st.floats(0.01, 0.99))
def test_training_and_validation_both_get_text_whatever_the_lengths(lengths, fraction):
    hashes = np.random.default_rng(sum(lengths)).integers(0, 2**63, len(lengths)).astype(np.uint64)
    corpus_split = split_corpus(hashes, np.array(lengths, np.uint64), fraction)
    assert (corpus_split.splits == TRAIN).any()
    assert (corpus_split.splits == VALIDATION).any() != (corpus_split.divided is not None)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
@pytest.mark.parametrize("line", ["a line of the text é\n", "no end of line ", "é"])
def test_a_single_document_gives_its_end_cut_at_a_line_end(tmp_path, fraction, line):
    text = line * 7001  # more than one chunk where there are lines
    train, validation = train_and_validation([text], tmp_path, fraction)
    assert [len(train), len(validation)] == [1, 1]
    assert train[0] + validation[0] == text
    tail = len(validation[0].encode()) / len(text.encode())
    assert tail == pytest.approx(fraction, abs=60 / len(text)), "to a line or a character"
    if "\n" in line:
        assert train[0].endswith("\n")


def test_of_few_large_documents_the_longest_gives_its_end(tmp_path):
    documents = ["b\n" * 5000, "a line\n" * 2000, "c" * 9000]
    train, validation = train_and_validation(documents, tmp_path, 0.05)
    assert len(validation) == 1 and documents[1].endswith(validation[0])
    assert sorted(train) == sorted([documents[0], documents[1][: -len(validation[0])], documents[2]])


def test_a_document_without_a_line_end_near_the_cut_is_cut_there(tmp_path):
    text = "short\n" + "x" * 10_000
    train, validation = train_and_validation([text], tmp_path, 0.05)
    assert len(validation[0]) == pytest.approx(0.05 * len(text), abs=1)
    assert train[0] + validation[0] == text


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_that_leaves_nothing_to_train_or_validate_on_is_refused(fraction):
    with pytest.raises(UserError, match="between 0 and 1"):
        split_texts(["text", "more"], fraction)


def test_no_text_at_all_is_refused():
    with pytest.raises(UserError, match="no text"):
        split_texts([], 0.05)
