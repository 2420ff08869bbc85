"""The loop of a session in the terminal, and text that cannot change the terminal's state."""

import io
import sys

import pytest

from errors import UserError
from generation.terminal import HELP, printable, prompt_loop, read_line


def session(*events, respond=None) -> tuple[list[str], list[str]]:
    """Type lines, or raise exceptions, until the input ends; returns what was responded to and what was logged."""
    events, heard, lines = iter([*events, EOFError()]), [], []

    def read():
        event = next(events)
        if isinstance(event, BaseException):
            raise event
        return event

    prompt_loop(respond or heard.append, lambda: heard.append("RESET"), read, lines.append)
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

    assert session("a", "b", respond=interrupted)[1] == ["\nstopped", "\nstopped", ""]


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


def test_the_prompt_is_not_printed_to_redirected_output_nor_for_lines_of_a_pipe(monkeypatch, capsys):
    for is_terminal, prompt in ((True, "> "), (False, "")):
        stdin = io.StringIO("hi\n")
        stdin.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_line() == "hi"
        assert capsys.readouterr() == ("", prompt)
        with pytest.raises(EOFError):
            read_line()
        capsys.readouterr()
