"""Text that cannot change the terminal's state, and where the prompt is printed."""

import io
import sys

import pytest

from generation.terminal import printable, read_line


def test_control_characters_become_visible_and_all_others_stay():
    harmless = "a\tb\né☺漢\U0001f99c\u00a0"
    assert printable(harmless) == harmless
    assert printable("\x1b[2J\x07\r\x7f\x9b31m\x00") == "␛[2J␇␍␡\ufffd31m␀"
    everything = printable("".join(map(chr, range(0x300))))
    assert not any(chr(code) in everything for code in (*range(9), *range(11, 32), *range(127, 160)))


def test_the_prompt_is_not_printed_to_redirected_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode() + b"\xe9\n"), "ascii"))
    assert [read_line(), read_line()] == ["é", "\ufffd"]  # what is typed may be anything
    assert capsys.readouterr() == ("", "> > ")
    with pytest.raises(EOFError):
        read_line()
