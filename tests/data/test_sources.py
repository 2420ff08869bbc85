"""Where text comes from: names, files, folders, patterns, formats, data sets of the Hub, and errors."""

import gzip
import io
import json
import random
import re
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.corpus import Corpus, prepare
from data.settings import DataSettings
from data.sources import FORMATS, HUB_TEXTS, resolve
from errors import UserError, printable
from tests.data.conftest import read


def error_message(source: str | Path) -> str:
    """What a user reads: one line that ends with a full stop."""
    with pytest.raises(UserError) as caught:
        read(source)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    return message


def write_jsonl(path: Path, rows: list[object]) -> None:
    content = ("\ufeff" + "".join(json.dumps(row) + "\r\n\r\n" for row in rows)).encode("utf-8")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_the_default_corpus_is_the_standard_library_and_its_prose_without_tests_and_tables(library_text):
    root = Path(sysconfig.get_path("stdlib"))
    names = {Path(file.name).relative_to(root).as_posix() for file in resolve(DataSettings())}
    folders = {folder for name in names for folder in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idlelib", "tkinter", "lib2to3", "distutils", "site-packages", "__pycache__"}
    assert {"argparse.py", "json/decoder.py", "encodings/utf_8.py", "encodings/idna.py"} <= names
    assert not names & {"encodings/cp037.py", "encodings/mac_arabic.py", "encodings/koi8_r.py"}
    assert any("The `with` statement" in text or 'The "with" statement' in text for text in library_text), "prose"
    assert 5e6 < sum(len(text) for text in library_text) < 20e6


def test_text_keeps_all_but_its_line_ends_and_a_byte_order_mark_and_a_row_is_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr("data.readers.BLOCK", 7)
    texts = ["a\ufeff\r\nb\tc\0d  \n\n  e▁😀\u2028\x85", " ", "Übermäßig 😀 größer\n" * 50 + "x" * 99]
    rows = [{"story": text, "n": 1} for text in (*texts, "")]
    for number, text in enumerate([*texts, ""]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode("utf-8-sig"))
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl.gz", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("*.txt", "a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read(tmp_path / name, field="story") == [text.replace("\r\n", "\n") for text in texts], name


def test_folders_and_patterns_are_sorted_and_take_only_text_and_links_to_folders_are_named(tmp_path, capsys):
    (tmp_path / "b" / ".git").mkdir(parents=True)
    for name in ("b/2.md", "b/1.TXT", "a[1].py", "b/.git/config.txt", ".hidden.txt", "b/picture.png"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert read(tmp_path) == ["a[1].py", "b/1.TXT", "b/2.md"]
    assert read(tmp_path / "**" / "*") == ["a[1].py", "b/1.TXT", "b/2.md"]
    assert read(tmp_path / "*") == ["a[1].py"]
    assert read(tmp_path / "b" / "*.md", tmp_path / "a[1].py") == ["b/2.md", "a[1].py"]
    (tmp_path / "b" / "linked").symlink_to(tmp_path.parent)
    (tmp_path / "b" / "empty.md").touch()
    assert read(tmp_path) == ["a[1].py", "b/1.TXT", "b/2.md"]
    notes = capsys.readouterr().err
    assert f"1 file without text (the first: {tmp_path}/b/empty.md)" in notes
    assert f"left out of {tmp_path}/*: 1 folder; " in notes and f"left out of {tmp_path}: 1 .png; " in notes
    assert f"skipped: {tmp_path}/b/linked is a link to a folder; name it in --data too" in notes.splitlines()


def test_files_of_a_folder_that_are_not_utf8_are_left_out_and_so_are_nulls(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.readers.BLOCK", 100)
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "utf16.txt").write_bytes("記事帳\r\n".encode("utf-16"))  # as Notepad may save it
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_bytes(b"ascii for many blocks\n" * 1000 + b"\xe9")
    write_jsonl(tmp_path / "d.jsonl", [{"text": None}, {"text": "d"}, {"text": None}])
    parquet.write_table(pyarrow.table({"text": ["e", None]}), tmp_path / "e.parquet")
    assert read(tmp_path) == ["a\0b", "d", "e", "記事帳\n"]
    notes = capsys.readouterr().err.replace(f"{tmp_path}/", "").splitlines()
    assert [note.partition(" cannot")[0] for note in notes] == ["skipped: a.txt", "skipped: c.txt"]
    assert "convert it to UTF-8, or leave it out" in error_message(tmp_path / "c.txt"), "named by itself"


def test_a_row_whose_text_is_missing_or_is_no_text_is_named_with_its_line(tmp_path):
    reasons = {
        '{"text": 5}': "'text' is int, not text",
        '{"text": []}': "'text' is list, not text",
        '{"body": "c", "n": 1}': "no field 'text' among body, n",
        r'{"text": "\ud800"}': "surrogates",
        '[{"text": "a"}]': "it is of type list, not an object",
        "{": "Expecting property name",
    }
    for line, reason in reasons.items():
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
        message = error_message(tmp_path / "a.jsonl")
        assert "a.jsonl, row 2 cannot be read" in message and reason in message and "--text-field" in message
    for row in ({"text": 5}, {"body": "c"}):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        assert "a.parquet, row 1 cannot be read" in error_message(tmp_path / "a.parquet")


def test_messages_are_text_where_the_field_is_called_so_and_a_name_that_is_not_utf8_is_shown(tmp_path, capsys):
    said = [{"role": "user", "content": "2 + 2?"}, {"from": "gpt", "value": "4\r\n"}]
    path = tmp_path / ("a\udcc4.jsonl" if sys.platform == "linux" else "a.jsonl")  # other systems have no such names
    write_jsonl(path, [{"messages": said}, {"messages": []}])
    assert read(path, field="messages") == ["2 + 2?\n4\n"]
    prepare(DataSettings(data=(str(tmp_path),), text_field="messages", cache=str(tmp_path / "cache")))
    assert "skipped: 1 row without text in " + printable(str(path)) in capsys.readouterr().err


def test_sources_that_hold_nothing_are_named(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"x")
    for source in (tmp_path / "*", tmp_path / "a.docx"):
        assert f"{source} names no file to read; the formats are {' '.join(FORMATS)} (" in error_message(source)


def test_a_name_wins_over_a_folder_and_a_path_is_the_folder(tmp_path, monkeypatch):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "own.txt").write_text("own", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(resolve(DataSettings())) > 100
    assert read("./python") == ["own"]


def publish(hub, dataset: str, revision: str, texts: dict[str, str]) -> list[str]:
    """Put a data set on the server, twenty documents a file; returns the paths of its files there."""
    files, generator = {}, random.Random(0)
    for name, text in texts.items():
        written, documents = io.BytesIO(), [f"{text} {n} {generator.randbytes(500).hex()}" for n in range(20)]
        parquet.write_table(pyarrow.table({"text": documents}), written)
        files[f"/datasets/{dataset}/resolve/{hub.commit}/{name}"] = written.getvalue()
    siblings = [{"rfilename": name, "size": 1000} for name in [*texts, "README.md"]]
    info = {"id": dataset, "sha": hub.commit, "siblings": siblings}
    hub.files |= files | {f"/api/datasets/{dataset}/revision/{revision}": json.dumps(info).encode()}
    return [*files]


@pytest.fixture
def prepared(tmp_path, tokenizer_file):
    return lambda name: prepare(DataSettings(data=(name,), cache=str(tmp_path / "cache")), tokenizer_file)


def text_of(corpus: Corpus) -> str:
    return corpus.tokenizer.decode(corpus.train[:])


@pytest.fixture
def numbers(hub) -> list[str]:
    """A data set of nine files in a folder, and one beside it."""
    texts = {f"part/{n}.parquet": f"file {n}" for n in range(9)}
    beside = {name: "other" for name in ("other.parquet", "part-2/0.parquet", "part.parquet")}
    return publish(hub, "owner/numbers", "main", texts | beside)


def test_a_data_set_is_read_in_order_and_downloaded_once(hub, numbers, prepared):
    corpus = prepared("hub:owner/numbers/part")
    read_files = list(dict.fromkeys(re.findall("file [0-9]|other", text_of(corpus))))
    assert read_files == [f"file {n}" for n in range(9)]
    assert {path for _, path in hub.asked if "/resolve/" in path} == set(numbers[:9])
    hub.asked.clear()
    again = prepared("hub:owner/numbers/part")
    assert again.text_hash == corpus.text_hash and not hub.asked


@pytest.mark.parametrize("name", HUB_TEXTS)
def test_a_known_text_is_its_files_of_a_data_set(tmp_path, hub, prepared, name):
    dataset, revision, begin = HUB_TEXTS[name]
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}{n}.parquet": f"{name} {n}" for n in range(2)})
    text = text_of(prepared(name))
    assert f"{name} 0 " in text and f"{name} 1 " in text
    assert list((tmp_path / "hub").glob("datasets--*")), "where every other program looks"


def test_the_list_of_a_data_set_is_kept_for_each_revision(hub, prepared):
    dataset, revision, begin = HUB_TEXTS["shakespeare"]
    publish(hub, dataset, "main", {"plain.parquet": "of main"})
    assert "of main" in text_of(prepared(f"hub:{dataset}"))
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}0.parquet": "of another"})
    assert "of another" in text_of(prepared("shakespeare"))


def test_what_cannot_be_downloaded_is_one_line(hub, numbers, prepared):
    reasons = {
        "owner/nothing": "^hub:owner/nothing cannot be downloaded .HTTP 404.; check the connection and the name",
        "owner/numbers/nowhere": "^hub:owner/numbers/nowhere names no file to read",
        "owner/numbers/part": "^part/0.parquet of hub:owner/numbers cannot be downloaded .HTTP 404",
    }
    for path in numbers:
        del hub.files[path]
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            prepared(f"hub:{name}")
    hub.stop()
    with pytest.raises(UserError, match=r"hub:owner/other cannot be downloaded \(ConnectError\); check the connection"):
        prepared("hub:owner/other")
