"""Where prompts come from, and the ids that they begin with."""

import io
import sys
from types import SimpleNamespace

import pytest

from errors import UserError
from generation.prompts import lines_of, prompt_ids, read_prompts


def type_in(monkeypatch, content: bytes, terminal: bool = False):
    stream = io.TextIOWrapper(io.BytesIO(content))
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)


def test_flags_come_first_then_the_lines_of_the_file_and_standard_input_stays_unread(monkeypatch, tmp_path):
    type_in(monkeypatch, b"never read")
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff  two \r\n\n   \nthree\u2028\x0cstill three".encode())
    assert read_prompts(["one", ""], path) == ["one", "", "  two ", "three\u2028\x0cstill three"]
    assert sys.stdin.buffer.read() == b"never read"


@pytest.mark.parametrize(
    ("content", "prompt"),
    [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a ", " a "), (b"", ""), ("é☺".encode(), "é☺")],
)
def test_standard_input_is_one_prompt_less_one_line_break(monkeypatch, content, prompt):
    type_in(monkeypatch, content)
    assert read_prompts([], None) == [prompt]


def test_a_terminal_is_not_read(monkeypatch):
    type_in(monkeypatch, b"typed", terminal=True)
    assert read_prompts([], None) == [""]
    monkeypatch.setattr(sys, "stdin", None)  # a program without a console
    assert read_prompts([], None) == [""]


def test_input_that_is_not_utf8_or_empty_or_missing_is_a_sentence(monkeypatch, tmp_path):
    type_in(monkeypatch, b"\xff\xfe")
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        read_prompts([], None)
    for content, fault in ((b"\xff", "not UTF-8"), (b" \n\n", "holds no prompt"), (b"", "holds no prompt")):
        (tmp_path / "prompts").write_bytes(content)
        with pytest.raises(UserError, match=fault):
            lines_of(tmp_path / "prompts")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            lines_of(path)


def test_a_prompt_begins_with_bos_and_an_empty_one_is_what_a_document_begins_with():
    def tokenizer(bos, eos):
        return SimpleNamespace(bos_id=bos, eos_id=eos, encode=lambda text: [ord(c) for c in text])

    assert prompt_ids(tokenizer(1, 2), "AB") == [1, 65, 66]
    assert prompt_ids(tokenizer(1, 2), "") == [1]
    assert prompt_ids(tokenizer(None, 2), "AB") == [65, 66]
    assert prompt_ids(tokenizer(None, 2), "") == [2]
    assert prompt_ids(tokenizer(0, 2), "A") == [0, 65]  # id 0 is a BOS like any other
