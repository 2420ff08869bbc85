"""Templates in a process of their own: the same text, in limited time and memory, and one line for each failure."""

import io
import sys
import time

import pytest

from errors import UserError
from generation import template
from generation.template import join_up_to, render, render_unlimited

HI = [{"role": "user", "content": "é ☺ \ud83d</b>\x00"}]  # a lone surrogate too
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


def message(source: str) -> str:
    with pytest.raises(UserError) as error:
        render(source, HI, {})
    text = str(error.value)
    assert "\n" not in text and "\x1b" not in text and len(text) < 450
    return text


def test_another_process_renders_the_same_text():
    source = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ add_generation_prompt }}{{ tools }}"
    for flag in (True, False):
        arguments = source, HI, {"bos_token": "<s>é"}, flag
        assert render(*arguments) == render_unlimited(*arguments) != ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ raise_exception('no\n \x1b[31mrole' ~ 'x' * 999) }}",
            "does not support this conversation: no ␛[31mrolexx",
        ),
        ("\n{% for %}", "the chat template is not valid at its line 2: "),
        ("{{ messages.a.b }}", "the chat template failed (UndefinedError: "),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{{ range(10**9) }}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10**15 }}", "was stopped because it needed too much memory"),
    ],
)
def test_a_template_that_fails_is_one_line(source, expected, monkeypatch, capsysbinary):
    # What the other process does, in this one, without the limits: a process for each would take a while.
    monkeypatch.setattr(template, "limit_resources", lambda: None)
    monkeypatch.setattr(template.subprocess, "run", run_here(monkeypatch, capsysbinary))
    assert expected in message(source)


def run_here(monkeypatch, capsysbinary):
    def run(command, input, **options):
        assert options["timeout"] == 4 * template.SECONDS and command[1:] == ["-m", "generation.template"]
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": io.BytesIO(input)}))
        template.main()
        return template.subprocess.CompletedProcess(command, 0, capsysbinary.readouterr().out)

    return run


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1)
    start = time.monotonic()
    assert message(LOOP).startswith("the chat template was stopped because it took longer than 1 seconds;")
    assert time.monotonic() - start < 8


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process exactly")
def test_a_template_that_needs_too_much_memory_is_stopped():
    assert render("{{ ('a' * 10**8) | length }}", HI, {}) == "100000000"
    assert "was stopped because it needed too much memory" in message("{{ ('a' * 1200000000) | length }}")


def test_a_process_that_dies_is_one_line(monkeypatch):
    dead = template.subprocess.CompletedProcess([], -9, b"")
    monkeypatch.setattr(template.subprocess, "run", lambda *_, **__: dead)
    assert "was stopped because it ended its process with status -9" in message("x")


def test_a_text_longer_than_the_limit_is_not_collected():
    assert join_up_to(5, ["ab", "", "cde"]) == "abcde"
    parts = iter(["abc", "def", "never read"])
    with pytest.raises(MemoryError):
        join_up_to(5, parts)
    assert next(parts) == "never read"
    with pytest.raises(MemoryError):
        render_unlimited("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", HI, {})
