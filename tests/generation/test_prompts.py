"""Where prompts are read from, and how they are encoded."""

import io
import random
import sys
from types import SimpleNamespace

import pytest
import tyro

from errors import UserError
from generation.prompts import encode_prompt, first_tokens, read_prompts
from generation.settings import Settings


def set_stdin(monkeypatch, content: bytes, terminal: bool = False):
    stream = io.TextIOWrapper(io.BytesIO(content))
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.parametrize(
    ("content", "prompt"),
    [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a ", " a "), (b"", ""), ("é☺".encode(), "é☺")],
)
def test_standard_input_is_one_prompt_without_its_last_line_break(monkeypatch, content, prompt):
    set_stdin(monkeypatch, content)
    assert read_prompts(Settings()) == [prompt]


def test_a_terminal_is_not_read_and_gives_an_empty_prompt_with_a_hint(monkeypatch, capsys):
    set_stdin(monkeypatch, b"typed", terminal=True)
    assert read_prompts(Settings()) == [""]
    hint = capsys.readouterr().err
    assert hint.startswith("no prompt: the model starts a text of its own;") and "--chat" in hint


def test_input_that_is_not_utf8_is_a_user_error(monkeypatch):
    set_stdin(monkeypatch, b"\xff\xfe")
    with pytest.raises(UserError, match="standard input cannot be read"):
        read_prompts(Settings())


def test_prompts_start_with_bos_and_an_empty_prompt_is_bos_or_else_eos():
    def tokenizer(bos, eos):
        return SimpleNamespace(bos_id=bos, eos_id=eos, encode=lambda text: [ord(c) for c in text])

    assert encode_prompt(tokenizer(1, 2), "AB") == [1, 65, 66]
    assert encode_prompt(tokenizer(1, 2), "") == [1]
    assert encode_prompt(tokenizer(None, 2), "AB") == [65, 66]
    assert encode_prompt(tokenizer(None, 2), "") == [2]
    assert encode_prompt(tokenizer(0, 2), "A") == [0, 65]  # a BOS id of 0 counts too


@pytest.mark.parametrize("kind", ["tokenizer", "stories_tokenizer", "qwen_tokenizer"])
def test_a_space_at_the_end_of_a_prompt_is_left_to_the_first_token(kind, request):
    tokenizer = request.getfixturevalue(kind)
    assert encode_prompt(tokenizer, "def  ") == encode_prompt(tokenizer, "def ") + tokenizer.encode("a ")[1:]
    assert first_tokens(tokenizer, "def") is None
    ids = set(first_tokens(tokenizer, "def "))
    for i in random.Random(0).sample(range(3, tokenizer.vocab_size), 290):  # without <unk>, which has spaces
        if tokenizer.decode([i]).strip():  # not the byte of a space
            assert (i in ids) == tokenizer.decode([*tokenizer.encode("a"), i]).startswith("a "), i


def test_a_text_after_the_run_is_the_first_prompt():
    settings = tyro.cli(Settings, args=["runs/a", "hello", "--prompt", "x", "--prompt", "y"])
    assert settings.run == "runs/a" and read_prompts(settings) == ["hello", "x", "y"]
