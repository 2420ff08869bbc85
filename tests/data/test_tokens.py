"""From text to token streams, and what the cache holds after kills, changes of the text and concurrent runs."""

import json
import lzma
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data import cache, chunks, corpus, packing, tokens
from data.tokens import TokenizedCorpus, prepare, tokenize
from errors import UserError

ROOT = Path(__file__).parents[2]


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> list[str]:
    """A folder of small documents of random words; a duplicate and lines of all lengths among them."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("etaoin shrdlué😀\n", k=generator.randint(1, 7))) for _ in range(400)]
    texts = [" ".join(generator.choices(words, k=generator.randint(5, 300))) for _ in range(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate([*texts, texts[3]]):
        (folder / f"{i:03}.txt").write_bytes(text.encode("utf-8"))
    return texts


def documents_of(stream: np.ndarray, tokenizer) -> list[str]:
    """Decode a token stream; its BOS and EOS must stand where they should."""
    ids = stream.tolist()
    if tokenizer.bos_id is None:
        assert ids[0] == ids[-1] == tokenizer.eos_id
        ids = ids[1:]
    found, one = [], []
    for i in ids:
        if i == tokenizer.eos_id:
            if tokenizer.bos_id is not None:
                assert one.pop(0) == tokenizer.bos_id
            found.append(tokenizer.decode(one))
            one = []
        else:
            one.append(i)
    assert not one, "the stream ends with EOS"
    return found


def assert_equal(one: TokenizedCorpus, other: TokenizedCorpus) -> None:
    assert np.array_equal(one.train, other.train) and np.array_equal(one.validation, other.validation)
    assert one.description == other.description and one.tokenizer.hash == other.tokenizer.hash


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(cache.TEMPORARY + "*"))


def test_the_streams_are_the_documents_between_bos_and_eos(tmp_path):
    texts = write_corpus(tmp_path / "text")
    corpus = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    train, validation = (documents_of(stream, corpus.tokenizer) for stream in (corpus.train, corpus.validation))
    assert [text for text in texts if text in set(train)] == train, "in order"
    assert sorted(train + validation) == sorted(texts)
    assert corpus.train.dtype == np.uint16 and not corpus.divided
    assert (corpus.documents, corpus.duplicates, corpus.validation_documents) == (60, 1, len(validation))
    assert corpus.bytes == sum(len(text.encode()) for text in texts)
    assert corpus.validation_bytes == sum(len(text.encode()) for text in validation)
    assert "60 documents (1 duplicates dropped)" in corpus.description
    assert "\n" not in corpus.description and corpus.text_hash[:12] in corpus.description


def test_a_tokenizer_without_bos_puts_one_eos_in_front(tmp_path, qwen_folder):
    texts = write_corpus(tmp_path / "text")
    corpus = prepare([str(tmp_path / "text")], tokenizer=str(qwen_folder), cache_dir=tmp_path / "cache")
    assert corpus.train.dtype == np.uint32, "151,665 ids"
    found = [text for stream in (corpus.train, corpus.validation) for text in documents_of(stream, corpus.tokenizer)]
    assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("name", ["ours", "llama", "qwen"])
def test_a_document_in_chunks_gets_the_ids_of_the_undivided_text(tmp_path, monkeypatch, request, name):
    tokenizer = request.getfixturevalue(name)
    lines = [line for line in Path(corpus.__file__).read_text(encoding="utf-8").split("\n") for _ in range(3)]
    random.Random(0).shuffle(lines)
    text = "\n".join(lines)
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    (tmp_path / "b.txt").write_bytes(b" short")
    monkeypatch.setattr(chunks, "CHUNK", 200)
    monkeypatch.setattr(packing, "ENCODE_CHARACTERS", 1000)
    stream, size = tokenize([str(tmp_path)], tokenizer)
    begin = [tokenizer.eos_id] if tokenizer.bos_id is None else [tokenizer.bos_id]
    between = [tokenizer.eos_id] + ([] if tokenizer.bos_id is None else [tokenizer.bos_id])
    expected = begin + tokenizer.encode(text) + between + tokenizer.encode(" short") + [tokenizer.eos_id]
    assert stream.tolist() == expected
    assert size == len(text.encode("utf-8")) + 6


def test_tokenize_keeps_duplicates_and_refuses_empty_text(tmp_path, ours):
    texts = write_corpus(tmp_path / "text")
    stream, size = tokenize([str(tmp_path / "text")], ours)
    assert documents_of(stream, ours) == [*texts, texts[3]]
    assert size == sum(len(text.encode()) for text in [*texts, texts[3]])
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="no text"):
        tokenize([str(tmp_path / "blank.jsonl")], ours)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_whose_text_is_null_are_skipped_and_counted_once(tmp_path, capsys, ours, name):
    texts = write_corpus(tmp_path / "text")
    rows, path = [None, *texts[:30], None, *texts[30:], None], tmp_path / name
    if name == "a.jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    else:
        parquet.write_table(pyarrow.table({"text": rows}), path)
    said = f"skipped 3 rows of {path} whose 'text' is null\n"
    corpus = prepare([str(path)], vocab_size=400, cache_dir=tmp_path / "cache")
    assert corpus.documents == len(texts) and capsys.readouterr().err.count(said) == 1
    assert documents_of(tokenize([str(path)], ours)[0], ours) == texts and capsys.readouterr().err == said


def test_a_text_that_vanishes_while_it_is_listed_is_named_and_not_the_cache(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")

    def vanish(files):
        (tmp_path / "text" / "007.txt").unlink()
        return files

    monkeypatch.setattr(tokens, "drop_non_utf8", vanish)
    with pytest.raises(UserError, match=r"007\.txt cannot be read \(No such file or directory\)"):
        prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("fails", ["opening", "writing"])
def test_a_temporary_file_that_cannot_be_created_or_written_gives_a_one_line_error(tmp_path, monkeypatch, ours, fails):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_corpus(tmp_path / "text")
    target = (tokens.tempfile, "TemporaryFile") if fails == "opening" else (packing.TokenWriter, "_write")
    monkeypatch.setattr(*target, full)
    with pytest.raises(UserError, match=r"temporary file \(No space left on device\); .*TMPDIR"):
        tokenize([str(tmp_path / "text")], ours)


def test_the_tokenizer_is_trained_on_training_documents_only(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "text")
    seen: list[str] = []
    train = tokens.train_tokenizer
    monkeypatch.setattr(tokens, "train_tokenizer", lambda documents, *rest: train(watched(documents), *rest))

    def watched(documents):
        for text in documents:
            seen.append(text)
            yield text

    corpus = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache", validation_fraction=0.3)
    assert set(seen) == set(documents_of(corpus.train, corpus.tokenizer))
    assert len(seen) < len(texts)


def test_the_tokenizer_of_a_large_text_is_trained_on_a_sample_from_all_of_it(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "text", documents=200)
    seen: list[str] = []
    monkeypatch.setattr(tokens, "TOKENIZER_BYTES", sum(len(text.encode()) for text in texts) // 5)
    train = tokens.train_tokenizer

    def watched(documents, *rest):
        seen.extend(documents)
        return train(seen, *rest)

    monkeypatch.setattr(tokens, "train_tokenizer", watched)
    prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    assert 25 < len(seen) < 50
    indices = [texts.index(text) for text in seen]
    assert min(indices) < 40 and max(indices) > 160


def test_a_second_run_reads_no_text(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    arguments = dict(vocab_size=400, cache_dir=tmp_path / "cache")
    first = prepare([str(tmp_path / "text")], **arguments)
    monkeypatch.setattr(corpus, "READERS", {})
    assert_equal(prepare([str(tmp_path / "text")], **arguments), first)


def test_other_text_another_vocabulary_and_another_fraction_are_prepared_anew(tmp_path):
    write_corpus(tmp_path / "text")
    path, arguments = [str(tmp_path / "text")], dict(vocab_size=400, cache_dir=tmp_path / "cache")
    first = prepare(path, **arguments)
    assert prepare(path, **arguments | {"vocab_size": 410}).tokenizer.vocab_size == 410
    assert len(prepare(path, **arguments, validation_fraction=0.3).validation) > 2 * len(first.validation)
    (tmp_path / "text" / "new.txt").write_text("something new", encoding="utf-8")
    assert prepare(path, **arguments).text_hash != first.text_hash
    (tmp_path / "text" / "new.txt").unlink()
    assert_equal(prepare(path, **arguments), first)


def test_the_same_text_in_another_folder_is_found_by_its_hash(tmp_path, monkeypatch):
    write_corpus(tmp_path / "one")
    write_corpus(tmp_path / "two")
    arguments = dict(vocab_size=400, cache_dir=tmp_path / "cache")
    first = prepare([str(tmp_path / "one")], **arguments)
    monkeypatch.setattr(tokens, "TokenWriter", None)  # nothing may be tokenized again
    monkeypatch.setattr(tokens, "train_tokenizer", None)
    assert_equal(prepare([str(tmp_path / "two")], **arguments), first)


@pytest.mark.parametrize("damage", ["shorter", "missing", "meta", "another key", "a key less", "text hash"])
def test_damaged_files_of_the_cache_are_made_anew(tmp_path, damage):
    write_corpus(tmp_path / "text")
    arguments = dict(vocab_size=400, cache_dir=tmp_path / "cache")
    first = prepare([str(tmp_path / "text")], **arguments)
    expected = first.train[:].copy()
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    meta_file = folder / "meta.json"
    meta = json.loads(meta_file.read_text())
    if damage == "shorter":
        (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])
    elif damage == "another key":
        meta_file.write_text(json.dumps(meta | {"unknown": 1}))
    elif damage == "a key less":
        meta_file.write_text(json.dumps({key: meta[key] for key in meta if key != "duplicates"}))
    elif damage == "text hash":
        (hash_file,) = (tmp_path / "cache" / "sources").iterdir()
        hash_file.write_text('{"text_hash": "of a text that was never prepared"}')
    else:
        (folder / ("validation.bin" if damage == "missing" else "meta.json")).unlink()
    assert np.array_equal(prepare([str(tmp_path / "text")], **arguments).train, expected)
    assert json.loads(meta_file.read_text()) == meta


def test_an_exception_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    arguments = dict(vocab_size=400, cache_dir=tmp_path / "cache")
    write, calls = packing.TokenWriter._write, iter(range(10**6))

    def failing(self, ids):
        if next(calls) == 30:
            raise OSError(28, "No space left on device")
        write(self, ids)

    monkeypatch.setattr(packing.TokenWriter, "_write", failing)
    with pytest.raises(UserError, match="No space left on device"):
        prepare([str(tmp_path / "text")], **arguments)
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    corpus = prepare([str(tmp_path / "text")], **arguments)
    assert len(documents_of(corpus.train, corpus.tokenizer)) > 30


def test_text_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    write_corpus(tmp_path / "text")
    write_streams = tokens._write_streams

    def changed_meanwhile(*arguments):
        write_streams(*arguments)
        (tmp_path / "text" / "000.txt").write_text("changed", encoding="utf-8")

    monkeypatch.setattr(tokens, "_write_streams", changed_meanwhile)
    with pytest.raises(UserError, match="changed while"):
        prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    assert not (tmp_path / "cache" / "sources").exists()


def test_a_folder_gets_its_name_when_its_files_are_on_disk(tmp_path, monkeypatch):
    events, rename = [], os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("renamed"), rename(*names)))
    with cache.atomic_folder(tmp_path / "folder") as new:
        (new / "file").write_text("text")
    *synced, last = events
    assert set(synced) >= {(tmp_path / "folder" / "file").stat().st_ino} and last == "renamed"


def test_what_a_killed_process_left_is_removed(tmp_path):
    write_corpus(tmp_path / "text")
    folder = tmp_path / "cache" / "tokens" / (cache.TEMPORARY + "killed")
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"half")
    prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def start(tmp_path: Path, cache_dir: str) -> subprocess.Popen:
    code = (
        "import sys; from data.tokens import prepare; print('ready', flush=True);"
        "prepare([sys.argv[1]], vocab_size=400, cache_dir=sys.argv[2]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text"), str(tmp_path / cache_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_killed_preparation_leaves_nothing_that_is_taken_for_complete(tmp_path):
    write_corpus(tmp_path / "text", documents=300)
    expected = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "untouched")
    completed = start(tmp_path, "other")
    completed.stdout.readline()
    began = time.perf_counter()
    assert completed.wait() == 0
    duration = time.perf_counter() - began
    for _ in range(4):
        process = start(tmp_path, "cache")
        process.stdout.readline()
        time.sleep(random.uniform(0, duration))
        process.kill()
        process.wait()
        for folder in (tmp_path / "cache" / "tokens").glob("[!.]*"):
            assert {path.name for path in folder.iterdir()} == {"train.bin", "validation.bin", "meta.json"}
    assert_equal(prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache"), expected)


def test_two_preparations_at_once_both_succeed(tmp_path):
    write_corpus(tmp_path / "text", documents=300)
    processes = [start(tmp_path, "cache") for _ in range(2)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert not leftovers(tmp_path / "cache")
    expected = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "alone")
    assert_equal(prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache"), expected)


def test_a_text_of_one_document_says_so_and_has_both_streams(tmp_path):
    (tmp_path / "one.txt").write_text("a line or two\n" * 500, encoding="utf-8", newline="")
    corpus = prepare([str(tmp_path / "one.txt")], vocab_size=286, cache_dir=tmp_path / "cache")
    assert corpus.divided and "end of the longest document" in corpus.description
    (head,), (tail,) = (documents_of(stream, corpus.tokenizer) for stream in (corpus.train, corpus.validation))
    assert head + tail == "a line or two\n" * 500 and head.endswith("\n")


def test_texts_too_small_give_a_one_line_error(tmp_path, tokenizer_file):
    (tmp_path / "one.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="too short to train"):
        prepare([str(tmp_path / "one.txt")], tokenizer=tokenizer_file, cache_dir=tmp_path / "cache")
    (tmp_path / "blank.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no text"):
        prepare([str(tmp_path / "blank.jsonl")], cache_dir=tmp_path / "cache")
    assert not leftovers(tmp_path / "cache")


def test_a_text_too_small_for_the_vocabulary_gets_a_smaller_one_and_a_line_says_so(tmp_path, capsys):
    text = "too little to learn four thousand pieces from\n" * 9
    (tmp_path / "two.txt").write_text(text, encoding="utf-8")
    corpus = prepare([str(tmp_path / "two.txt")], cache_dir=tmp_path / "cache")
    assert 259 < corpus.tokenizer.vocab_size < 400
    assert f"the tokenizer has {corpus.tokenizer.vocab_size} pieces instead" in capsys.readouterr().err
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(text)) == text
    assert_equal(prepare([str(tmp_path / "two.txt")], cache_dir=tmp_path / "cache"), corpus)
    assert "pieces instead" not in capsys.readouterr().err


def test_files_of_a_folder_that_are_not_utf8_are_left_out_and_named(tmp_path, capsys):
    write_corpus(tmp_path / "text")
    expected = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "clean")
    for number in range(7):
        (tmp_path / "text" / f"x{number}.txt").write_bytes(b"caf\xe9 " * 1000)
    with_others = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    error = capsys.readouterr().err
    assert error.count("x0.txt cannot be read") == 1 and error.count("cannot be read") == 5
    assert "skipped 7 of 68 files" in error
    assert_equal(with_others, expected)
    with pytest.raises(UserError, match=r"x0\.txt cannot be read .*byte 0xe9 in position 3"):  # named by itself
        prepare([str(tmp_path / "text" / "x0.txt")], vocab_size=400, cache_dir=tmp_path / "cache")
    with pytest.raises(UserError, match="no file is UTF-8 text"):
        prepare([str(tmp_path / "text" / "x*.txt")], vocab_size=400, cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    write_corpus(tmp_path / "text")
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(UserError, match="cache"):
        prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")


def test_u2581_is_counted(tmp_path):
    write_corpus(tmp_path / "text")
    (tmp_path / "text" / "underscores.txt").write_text("a▁b▁c", encoding="utf-8")
    corpus = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache")
    assert corpus.u2581_count == 2 and "2 characters U+2581" in corpus.description


def test_special_tokens_in_the_text_are_counted_and_named(tmp_path, qwen_folder, tokenizer_file):
    write_corpus(tmp_path / "text")
    prepared = dict(sources=[str(tmp_path / "text")], cache_dir=tmp_path / "cache")
    assert "special token" not in prepare(**prepared, tokenizer=qwen_folder).description
    (tmp_path / "text" / "chat.txt").write_text("<|im_start|>user\nHi <tool_call><|im_end|>\n<|im_start|>")
    for _ in range(2):  # the second time from the cache
        corpus = prepare(**prepared, tokenizer=qwen_folder)
        assert corpus.special_tokens == {"<|im_start|>": 2, "<|im_end|>": 1}
        assert "3 special tokens in the text (<|im_start|> <|im_end|>)" in corpus.description
    assert "special token" not in prepare(**prepared, tokenizer=tokenizer_file).description


def test_bits_per_byte_of_xz_are_those_of_the_program(tmp_path):
    write_corpus(tmp_path / "text", documents=300)
    corpus = prepare([str(tmp_path / "text")], vocab_size=400, cache_dir=tmp_path / "cache", validation_fraction=0.4)
    text = "".join(documents_of(corpus.validation, corpus.tokenizer)).encode("utf-8")
    expected = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    assert corpus.xz_bits_per_byte == pytest.approx(expected, rel=2e-3)


def test_the_package_imports_no_torch():
    code = "import sys, data.tokens, data.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
