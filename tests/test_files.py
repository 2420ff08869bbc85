"""Reading small files and JSON: what is refused, and that it is refused in one line."""

import errno
import json
import os
import sys
from dataclasses import dataclass

import pytest

from errors import UserError
from files import read_json, replace_text


@dataclass(frozen=True)
class Inner:
    name: str = "default"


@dataclass(frozen=True)
class Record:
    count: int
    share: float
    inner: Inner
    points: list[tuple[int, float]]

    @property
    def doubled(self) -> int:
        return 2 * self.count


RECORD = {"count": 3, "share": 1, "inner": {"name": "a"}, "points": [[1, 0.5]]}


def test_a_record_has_the_types_of_its_fields(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORD))
    record = read_json(tmp_path / "a.json", Record)
    assert record == Record(3, 1.0, Inner("a"), [(1, 0.5)]) and isinstance(record.share, float)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 3.5}, "Expected `int`"),
        ({"count": True}, "Expected `int`"),
        ({"count": None}, "Expected `int`"),
        ({"count": 2**70}, "Expected `int`"),
        ({"share": "1"}, "Expected `float`"),
        ({"inner": []}, "Expected `object`"),
        ({"inner": {"nam": "a"}}, "'nam' is not one of its keys"),
        ({"coun": 4}, "'coun' is not one of its keys"),
        ({"__class__": 1}, "'__class__' is not one of its keys"),
        ({"doubled": 1}, "'doubled' is not one of its keys"),
        ({"points": [[1]]}, "length 2"),
    ],
)
def test_a_record_with_other_types_or_other_keys_is_refused(tmp_path, changes, words):
    (tmp_path / "a.json").write_text(json.dumps(RECORD | changes))
    with pytest.raises(UserError, match=f"is not readable JSON .*{words}"):
        read_json(tmp_path / "a.json", Record)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": "\xff"}', "utf-8"),
        (b"[]", "Expected `object`, got `array`"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_clear_json_object_is_refused(tmp_path, content, words):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=f"is not readable JSON .*{words}"):
        read_json(tmp_path / "a.json")


def test_a_pair_of_surrogates_is_a_character_and_huge_integers_are_floats(tmp_path):
    (tmp_path / "a.json").write_text(f'{{"a": "\\ud83d\\ude00", "b": {10**30}, "c": {1 - 2**63}, "d": {"1" * 5000}}}')
    assert read_json(tmp_path / "a.json") == {"a": "\U0001f600", "b": 1e30, "c": 1 - 2**63, "d": float("inf")}


def test_what_other_programs_write_beside_json_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": Infinity}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": float("inf")}


def test_a_missing_file_is_an_empty_object_and_any_other_obstacle_is_an_error(tmp_path):
    assert read_json(tmp_path / "a.json") == {}
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is not a regular file"):
        read_json(tmp_path / "folder")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither pipes nor devices in folders")
def test_a_pipe_and_a_device_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read_json(tmp_path / name)


def test_a_file_that_cannot_be_replaced_keeps_its_text_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a"
    replace_text(path, "old")

    def disk_is_full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError) as error:
        replace_text(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
