"""The loop of a session in the terminal, and text that cannot change the terminal's state."""

import io
import sys

import pytest

from errors import UserError
from generation import terminal
from generation.terminal import HELP, hold_session, printable, read_line


def session(*events, respond=None) -> tuple[list[str], list[str]]:
    """Type lines, or raise exceptions, until the input ends; returns what was responded to and what was logged."""
    events, heard, lines = iter([*events, EOFError()]), [], []

    def read():
        event = next(events)
        if isinstance(event, BaseException):
            raise event
        return event

    hold_session(respond or heard.append, lambda: heard.append("RESET"), read, lines.append)
    return heard, lines


def test_lines_go_to_the_model_and_blank_lines_and_commands_do_not():
    heard, lines = session("hi", "", "  ", " /reset ", "/help", "/no_think why?", "/rest", " x ")
    assert heard == ["hi", "RESET", "/no_think why?", "/rest", " x "]
    assert lines == [HELP, ""]
    assert all(name in HELP for name in ("/reset", "Ctrl-C", "Ctrl-D"))


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_in_a_response_ends_only_that():
    heard, lines = session(KeyboardInterrupt(), "hi")
    assert heard == ["hi"] and "Ctrl-D leaves" in lines[0]

    def interrupted(text):
        raise KeyboardInterrupt

    assert session("a", "b", respond=interrupted)[1] == ["stopped", "stopped", ""]


def test_an_error_that_the_user_can_fix_is_printed_and_the_session_continues():
    def fail(text):
        raise UserError(f"{text} is too long.")

    assert session("a", UserError("not UTF-8"), "b", respond=fail)[1] == [
        "error: a is too long.",
        "error: not UTF-8",
        "error: b is too long.",
        "",
    ]


def test_control_characters_become_visible_and_all_others_stay():
    harmless = "a\tb\né☺漢\U0001f99c\u00a0"
    assert printable(harmless) == harmless
    assert printable("\x1b[2J\x07\r\x7f\x9b31m\x00") == "␛[2J␇␍␡\ufffd31m␀"
    everything = printable("".join(map(chr, range(0x300))))
    assert not any(chr(code) in everything for code in (*range(9), *range(11, 32), *range(127, 160)))


def test_the_prompt_is_not_printed_to_redirected_output_and_a_line_must_be_utf8(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("hi\n\udcff\n"))
    assert read_line() == "hi"
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "> ")
    with pytest.raises(UserError, match=r"the line .* is not UTF-8"):
        read_line()
    with pytest.raises(EOFError):
        read_line()


def test_lines_of_a_pipe_are_read_without_a_prompt_and_one_that_cannot_be_read_costs_no_other(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "MAX_FILE", 50)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped\r\na\xffb\nok\n" + b"x" * 60 + b"\nlast")))
    assert read_line() == "piped" and capsys.readouterr() == ("", "")
    with pytest.raises(UserError, match="this line is not UTF-8"):
        read_line()
    assert read_line() == "ok"
    with pytest.raises(EOFError):  # perhaps of a device that never ends
        read_line()
    assert "error: a line is longer than" in capsys.readouterr().err
