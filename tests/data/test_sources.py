"""Where text comes from: names, files, folders, patterns, formats, and what a user reads when something is wrong."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.readers import read_documents
from data.sources import resolve
from errors import UserError
from tests.data.conftest import read


def documents(*sources: str | Path, field: str = "text") -> list[str]:
    return read(list(sources), field)


def error_message(*sources: str | Path, field: str = "text") -> str:
    """What a user reads: one line that ends with a full stop."""
    with pytest.raises(UserError) as caught:
        documents(*sources, field=field)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    return message


def write_jsonl(path: Path, rows: list[object]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_the_default_corpus_is_the_standard_library_and_its_prose_without_tests_and_tables(library_text):
    names = [Path(file.name) for file in resolve(["python"], "text", Path())]
    root = Path(sysconfig.get_path("stdlib"))
    inside = {part for path in names for part in path.relative_to(root).parts[:-1]}
    assert not inside & {"test", "tests", "idlelib", "tkinter", "lib2to3", "distutils", "site-packages", "__pycache__"}
    kept = {path.relative_to(root).as_posix() for path in names}
    assert {"argparse.py", "json/decoder.py", "encodings/utf_8.py", "encodings/idna.py"} <= kept
    assert not kept & {"encodings/cp037.py", "encodings/mac_arabic.py", "encodings/koi8_r.py"}
    assert any("The `with` statement" in text or 'The "with" statement' in text for text in library_text), "prose"
    assert 5e6 < sum(len(text) for text in library_text) < 20e6


def test_an_interpreter_without_sources_asks_for_data(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    assert "--data" in error_message("python")


def test_sources_that_another_encoding_declares_are_left_out_of_the_default_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "old.py").write_bytes("# coding: latin-1\n# é".encode("latin-1"))
    (tmp_path / "new.py").write_text("print('é')", encoding="utf-8")
    assert documents("python") == ["print('é')"]


def test_text_is_never_changed(tmp_path):
    text = "\ufeffa\r\nb\tc\0d  \n\n  e▁😀\u2028\x85"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    assert documents(tmp_path / "a.txt") == [text]


def test_a_row_is_a_document_in_jsonl_gzip_and_parquet(tmp_path):
    texts = ["one\ntwo", "", "drei ä", " "]
    rows = [{"text": text, "n": 1} for text in texts]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl.gz", rows)
    parquet.write_table(pyarrow.table({"text": texts, "n": [1, 2, 3, 4]}), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert documents(tmp_path / name) == ["one\ntwo", "drei ä", " "], name


def test_a_row_can_be_as_long_as_a_library(tmp_path):
    text = "a" * 20_000_000
    write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / "b.parquet")
    assert documents(tmp_path / "a.jsonl", tmp_path / "b.parquet") == [text, text]


def test_the_text_field_can_have_another_name(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"story": "x"}])
    parquet.write_table(pyarrow.table({"story": ["y"]}), tmp_path / "b.parquet")
    assert documents(tmp_path / "a.jsonl", tmp_path / "b.parquet", field="story") == ["x", "y"]


def test_folders_and_patterns_are_sorted_and_take_only_text(tmp_path):
    (tmp_path / "b" / ".git").mkdir(parents=True)
    for name in ("b/2.md", "b/1.TXT", "a.py", "b/.git/config.txt", ".hidden.txt", "b/picture.png"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert documents(tmp_path) == ["a.py", "b/1.TXT", "b/2.md"]
    assert documents(tmp_path / "**" / "*") == ["a.py", "b/1.TXT", "b/2.md"]
    assert documents(tmp_path / "b" / "*.md", tmp_path / "a.py") == ["b/2.md", "a.py"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    scandir = os.scandir

    def scandir_of_a_user(path):  # root, as whom tests may run, can read every folder
        if os.fspath(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_of_a_user)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for source in (tmp_path, "python"):
        with pytest.raises(PermissionError, match="secret"):
            documents(source)


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("bracket", encoding="utf-8")
    assert documents(tmp_path / "a[1].txt") == ["bracket"]


def test_empty_files_in_a_folder_are_no_documents(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("x", encoding="utf-8")
    assert documents(tmp_path) == ["x"]


def test_a_file_of_many_blocks_is_one_document_with_characters_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("data.readers.BLOCK", 7)
    text = "Übermäßig 😀 größer\n" * 50 + "x" * 99
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    assert documents(tmp_path / "a.txt") == [text]


def test_files_of_a_folder_that_are_not_utf8_and_rows_without_text_are_left_out_with_the_reason(tmp_path):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    write_jsonl(tmp_path / "c.jsonl", [{"text": None}, {"text": "c"}, {"text": None}])
    parquet.write_table(pyarrow.table({"text": ["d", None]}), tmp_path / "d.parquet")
    skipped = []
    files = resolve([str(tmp_path)], "text", tmp_path)
    assert ["".join(document) for file in files for document in read_documents(file, skipped)] == ["a\0b", "c", "d"]
    assert [reason.replace(f"{tmp_path}/", "").partition(";")[0] for reason in skipped] == [
        "a.txt cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        "2 rows of c.jsonl whose 'text' is null",
        "1 rows of d.parquet whose 'text' is null",
    ]
    assert "convert it to UTF-8, or leave it out" in error_message(tmp_path / "a.txt"), "named by itself"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_pipes_in_a_folder_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    for source in (tmp_path, tmp_path / "*"):
        assert [Path(file.name).name for file in resolve([str(source)], "text", tmp_path)] == ["a.txt"]


def test_sources_that_are_not_there_or_hold_nothing_are_named(tmp_path):
    assert "or one of python, shakespeare" in error_message("shakespear")
    assert "no file" in error_message(tmp_path / "missing.txt")
    assert "no file" in error_message("~nobody-of-this-name/x")
    assert "matches no file" in error_message(tmp_path / "*.txt")
    assert "holds no file" in error_message(tmp_path)
    (tmp_path / "a.docx").write_bytes(b"x")
    assert ".parquet" in error_message(tmp_path / "a.docx")


def test_a_name_wins_over_a_folder_and_a_path_is_the_folder(tmp_path, monkeypatch):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "own.txt").write_text("own", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(resolve(["python"], "text", tmp_path)) > 100
    assert documents("./python") == ["own"]
