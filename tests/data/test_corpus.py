"""From text to token streams, and what the cache holds after kills, changes of the text and other processes."""

import io
import json
import lzma
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import readers, tokens, train_tokenizer
from data.corpus import Corpus, prepare
from data.settings import DataSettings
from data.split import content_hash
from data.tokens import TokenStream
from errors import UserError, note
from tests.conftest import ROOT, run_python
from tests.data.conftest import write_corpus


def documents_of(stream: TokenStream | np.ndarray, tokenizer) -> list[str]:
    """Decode a token stream; its BOS and EOS must stand where they should."""
    ids, begin = stream[:], 0 if tokenizer.bos_id is None else 1
    ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
    assert ends[-1] == len(ids), "the stream ends with EOS"
    documents = [ids[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]
    assert begin == 0 or all(document[0] == tokenizer.bos_id for document in documents)
    return [tokenizer.decode(document[begin:-1]) for document in documents]


def prepared(tmp_path: Path, tokenizer: Path | None = None, vocab_size: int = 400, **changes) -> Corpus:
    """The corpus of the folder `text`, with a small vocabulary."""
    values = dict(data=(str(tmp_path / "text"),), cache=str(tmp_path / "cache"), validation_fraction=0.2) | changes
    return prepare(DataSettings(**values), tokenizer, vocab_size)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the cache; the hash of a tokenizer is in the names of units."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_units(monkeypatch):
    """Several units for the texts of these tests."""
    monkeypatch.setattr(tokens, "UNIT_BYTES", 20_000)


def test_the_streams_are_the_documents_between_bos_and_eos(tmp_path, small_units, qwen_folder):
    texts = write_corpus(tmp_path / "text")
    corpus = prepared(tmp_path)
    train, validation = (documents_of(stream, corpus.tokenizer) for stream in (corpus.train, corpus.validation))
    assert [text for text in texts if text in set(train)] == train, "in order"
    assert sorted(train + validation) == sorted(texts) and len(validation) > 3
    other = prepared(tmp_path, qwen_folder, 151_665)  # without BOS
    streams = other.train, other.validation
    assert sorted(text for stream in streams for text in documents_of(stream, other.tokenizer)) == sorted(texts)
    assert (corpus.validation.dtype, other.validation.dtype) == (np.uint16, np.uint32), "151,665 ids"
    size, description = sum(len(text.encode()) for text in texts), corpus.description
    assert f"60 documents (1 duplicate dropped), {size / 1e6:.2f} MB, hash {corpus.text_hash[:12]}\n" in description
    assert f" for validation ({len(validation)} documents, " in description and description.count("\n") == 2
    assert corpus.validation_bytes == sum(len(text.encode()) for text in validation)
    expected = 8 * len(lzma.compress("".join(validation).encode(), preset=9 | lzma.PRESET_EXTREME))
    assert corpus.xz_bits_per_byte() == pytest.approx(expected / corpus.validation_bytes, rel=2e-3)


@pytest.mark.parametrize("name", ["ours", "qwen"])
def test_all_batches_keep_duplicates_and_blocks_get_the_ids_of_the_undivided_text(tmp_path, monkeypatch, request, name):
    tokenizer = request.getfixturevalue(name)
    lines = [line for line in Path(readers.__file__).read_text(encoding="utf-8").split("\n") if line[:1].strip()]
    text = "\n".join(lines * 3)
    for file, content in {"a.txt": text, "b.txt": " short", "c.txt": " short", "blank.jsonl": "\n\n"}.items():
        (tmp_path / file).write_bytes(content.encode("utf-8"))
    monkeypatch.setattr(readers, "BLOCK", 200)
    monkeypatch.setattr(tokens, "GROUP", 1000)
    arguments = dict(tokenizer=tokenizer.folder, vocab_size=tokenizer.vocab_size, cache=str(tmp_path))
    corpus = prepared(tmp_path, data=(str(tmp_path / "*.txt"),), **arguments)
    begin, end = [] if tokenizer.bos_id is None else [tokenizer.bos_id], [tokenizer.eos_id]
    short = begin + tokenizer.encode(" short") + end
    batches = [*corpus.all_batches(10, 3)]
    first = batches[0].inputs
    ids = first[0, :1].tolist() + np.concatenate([targets[targets >= 0] for _, targets, _ in batches]).tolist()
    assert ids == begin + tokenizer.encode(text) + end + 2 * short and first.shape == (3, 10)
    assert corpus.everything_bytes == len(text.encode("utf-8")) + 2 * 6
    with pytest.raises(UserError, match="no text"):
        prepared(tmp_path, data=(str(tmp_path / "blank.jsonl"),), **arguments)


def test_what_a_process_raises_is_what_the_user_reads(tmp_path, small_units, tokenizer_file):
    write_corpus(tmp_path / "text", documents=200)
    (tmp_path / "text" / "150.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(UserError, match=r"150.jsonl, row 1 .*'text' is int, not text"):
        prepared(tmp_path, tokenizer_file, 2000)


def test_the_tokenizer_is_trained_on_a_sample_from_all_of_the_text_without_validation_documents(tmp_path, monkeypatch):
    texts, seen, train = write_corpus(tmp_path / "text", documents=400), [], train_tokenizer.train_tokenizer
    spy = lambda sample, *arguments: seen.append(sample) or train(sample, *arguments)  # noqa: E731
    monkeypatch.setattr(train_tokenizer, "train_tokenizer", spy)
    corpus = prepared(tmp_path)
    assert set(seen[0]) == set(documents_of(corpus.train, corpus.tokenizer))
    monkeypatch.setattr(train_tokenizer, "SAMPLE_SIZE", sum(map(len, texts)) // 5)
    prepared(tmp_path, vocab_size=410)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared(tmp_path, vocab_size=410, data=(str(rows),))
    for sample in seen[1:]:  # of many files and of one
        assert 40 < len(sample) < 100 and not set(sample) - set(seen[0])
        places = [texts.index(text) for text in sample]
        assert min(places) < 40 and max(places) > 360


def test_only_other_text_another_vocabulary_or_another_split_are_prepared_anew(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path / "text")
    (tmp_path / "text" / "gbk.txt").write_bytes("中文".encode("gbk"))
    (tmp_path / "text" / "rows.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": null}')
    first = prepared(tmp_path)
    note.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "read_documents", None)
        patch.setattr(tokens, "why_left_out", None)
        again = prepared(tmp_path)
    notes = capsys.readouterr().err
    assert notes.count(f"skipped: {tmp_path}/text/gbk.txt cannot be read") == 2  # said each time
    assert notes.count("skipped: 2 rows without text in ") == 2
    assert np.array_equal(again.train[:], first.train[:]) and np.array_equal(again.validation, first.validation)
    assert again.description == first.description and again.tokenizer.hash == first.tokenizer.hash
    assert prepared(tmp_path, vocab_size=410).tokenizer.vocab_size == 410
    for change in (dict(validation_fraction=0.5), dict(validation_salt=1)):
        assert not np.array_equal(prepared(tmp_path, **change).validation, first.validation)
    (tmp_path / "text" / "new.txt").write_text("something new", encoding="utf-8")
    assert prepared(tmp_path).text_hash != first.text_hash


@pytest.mark.parametrize("size_left", [None, 0.9])
@pytest.mark.parametrize("name", ["docs", "tokenizer.json", "tokenizer.model"])
def test_what_is_missing_in_the_cache_and_a_damaged_tokenizer_are_made_anew(tmp_path, name, size_left):
    write_corpus(tmp_path / "text")
    prepared(tmp_path)
    before = contents(tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob(f"*/**/*{name}")
    if size_left is None or name == "docs":
        path.unlink()
    else:
        os.truncate(path, int(size_left * path.stat().st_size))
    prepared(tmp_path)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize(("pattern", "change"), [("bin", -2), ("bin", 2), ("docs", -24), ("docs", -7)])
def test_a_file_of_the_cache_with_another_size_is_refused(tmp_path, pattern, change):
    write_corpus(tmp_path / "text")
    prepared(tmp_path)
    (damaged,) = (tmp_path / "cache" / "units").glob(f"*.{pattern}")
    os.truncate(damaged, damaged.stat().st_size + change)
    with pytest.raises(UserError, match=r"is damaged: .*; delete .*units; it is made again"):
        prepared(tmp_path)


def start(tmp_path: Path, cache: str) -> subprocess.Popen:
    code = (
        "import sys; from data import tokens; tokens.UNIT_BYTES = 20_000\n"
        "from data.corpus import prepare; from data.settings import DataSettings; print('ready', flush=True)\n"
        "prepare(DataSettings(data=(sys.argv[1],), cache=sys.argv[2], validation_fraction=0.2), vocab_size=400)\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text"), str(tmp_path / cache)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_killed_preparations_and_two_at_once_give_what_an_undisturbed_one_gives(tmp_path, small_units):
    write_corpus(tmp_path / "text", documents=300)
    began = time.perf_counter()
    prepared(tmp_path, cache=str(tmp_path / "untouched"))
    duration = time.perf_counter() - began
    for _ in range(2):
        process = start(tmp_path, "cache")
        process.stdout.readline()
        time.sleep(random.uniform(0, duration))
        process.kill()
        process.wait()
    processes = [start(tmp_path, "cache") for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert contents(tmp_path / "cache") == contents(tmp_path / "untouched")


MEASURED = """
import sys
from data import corpus, tokens
from data.settings import DataSettings
tokens.GROUP = 200_000
settings = DataSettings(data=(sys.argv[1],), cache=sys.argv[2], validation_fraction=float(sys.argv[4]))
corpus.prepare(settings, sys.argv[3])
print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])
"""


# Not resource.getrusage: its peak counts the memory of the process that started this one, too.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_more_text_takes_no_more_memory(tmp_path, tokenizer_file):
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(3000)]
    text = "".join(word + " " for word in generator.choices(words, k=300_000))

    def peak(copies: int, cache: str) -> float:
        """MB to prepare copies of 2 MB as one document, with the same bytes for validation each time."""
        path = tmp_path / f"{copies}.txt"
        path.write_text(text * copies, newline="")
        arguments = [path, tmp_path / cache, tokenizer_file, 200_000 / (copies * len(text))]
        one_pool = os.environ | {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}  # not one for each busy thread
        return int(run_python("-c", MEASURED, *arguments, env=one_pool).stdout) / 1000

    little, much = peak(1, "cache"), []
    while len(much) < 3 and not any(one < little + 9 for one in much):  # an allocator may take more at times
        much.append(peak(8, f"cache {len(much)}"))
    assert min(much) < little + 9, f"{little}, {much} MB: 14 MB more text, held anywhere, would always be 14 MB or more"


def test_a_text_of_one_document_is_validated_on_its_end_whatever_the_tokenizer(tmp_path, qwen_folder, shared):
    text = "".join(f"line {n} of {n * n}\n" for n in range(2000))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text(text, encoding="utf-8", newline="")
    corpus = prepared(tmp_path, validation_fraction=0.05)
    assert "the ends of 1 document," in corpus.description
    train, validation = corpus.train[:].tolist(), corpus.validation.tolist()
    assert train[:-1] + validation == [corpus.tokenizer.bos_id, *corpus.tokenizer.encode(text), corpus.tokenizer.eos_id]
    assert corpus.validation_bytes == len(corpus.tokenizer.decode(validation).encode())
    sizes = [corpus.validation_bytes]
    for tokenizer, vocab_size in ((None, 300), (qwen_folder, 151_665), (shared / "stories260K" / "tok512.model", 512)):
        sizes.append(prepared(tmp_path, tokenizer, vocab_size, validation_fraction=0.05).validation_bytes)
    assert len({*sizes}) > 1 and 0.05 * len(text) - 20 < min(sizes) < max(sizes) <= 0.05 * len(text)


def test_the_ends_of_a_few_long_documents_are_held_out_also_beside_short_ones(tmp_path):
    (tmp_path / "text").mkdir()
    for name, lines in (("a", 2000), ("c", 3000), ("d", 20)):
        text = "".join(f"{name} line {n} of {n * n}\n" for n in range(lines))
        (tmp_path / "text" / f"{name}.txt").write_text(text, encoding="utf-8", newline="")
    corpus = prepared(tmp_path, validation_fraction=0.05)
    held_out = corpus.tokenizer.decode(corpus.validation)
    assert "the ends of 2 documents" in corpus.description and "c line 2999 of" in held_out and "d " not in held_out
    assert 90 <= held_out.count("a line") <= 100 and 135 <= held_out.count("c line") <= 150
    rows = "".join(f'{{"text": "row {n}"}}\n' for n in range(300))
    (tmp_path / "text" / "rows.jsonl").write_text(rows, encoding="utf-8")
    corpus = prepared(tmp_path, validation_fraction=0.05)
    assert " documents and the ends of 2 documents, " in corpus.description
    assert documents_of(corpus.train, corpus.tokenizer)[1].startswith("c line 0 of")  # each ends with EOS
    assert 0.04 * corpus.everything_bytes < corpus.validation_bytes < 0.06 * corpus.everything_bytes


def test_a_text_too_small_for_the_vocabulary_gets_a_smaller_one_and_one_without_text_is_refused(tmp_path):
    (tmp_path / "two.txt").write_text("too little to learn four thousand pieces from\n" * 9, encoding="utf-8")
    corpus = prepare(DataSettings(data=(str(tmp_path / "two.txt"),), cache=str(tmp_path)))
    assert 263 < corpus.tokenizer.vocab_size < 400 and corpus.advice == []
    corpus.tokenizer.save(tmp_path)
    (tmp_path / "new.txt").write_text("too little to learn four thousand pieces from 文\n" * 99, encoding="utf-8")
    new = prepare(DataSettings(data=(str(tmp_path / "new.txt"),), cache=str(tmp_path)), tmp_path)
    assert "% of the tokens are first bytes of characters that the tokenizer lacks" in new.advice[0]
    phrases = random.Random(1).choices(["在城南的竹林深处听雨", "念一封没有寄出的信", "把旧书店的灯点亮"], k=2000)
    (tmp_path / "phrases.txt").write_text("".join(phrases) + "把灯，" * 99, encoding="utf-8")
    corpus = prepare(DataSettings(data=(str(tmp_path / "phrases.txt"),), cache=str(tmp_path)), vocab_size=1000)
    assert corpus.advice[0].startswith("note: tokens are whole phrases")
    assert [piece for piece in corpus.tokenizer.vocabulary if "，" in piece] == ["，"]
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="there is no text in the files"):
        prepare(DataSettings(data=(str(tmp_path / "empty.txt"),), cache=str(tmp_path)))


def test_the_hash_of_a_document_is_that_of_its_complete_text_also_of_several_blocks(ours):
    rows, empty = tokens.write_ids(io.BytesIO(), [["one ", "end"], [], ["two ", "end"]], ours)
    assert empty == 1
    assert rows["hash"].tolist() == [content_hash(text) for text in ("one end", "two end")]
