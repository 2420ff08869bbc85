"""Streams against `decode` of all ids, for three kinds of tokenizers; stop strings against a reference."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generation.stream import TextStream

# BPE of ours; SentencePiece, which adds and drops spaces; byte-level BPE: a token may have parts of two characters.
KINDS = ["tokenizer", "llama", "qwen"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_a_stream_joined_equal_decode_of_all_ids(kind, request, data):
    any_tokenizer = request.getfixturevalue(kind)
    # Low ids are bytes in all three tokenizers: they split characters, and most sequences of them are not UTF-8.
    token = st.one_of(st.integers(0, 260), st.integers(0, any_tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=30))
    prompt = data.draw(st.integers(0, len(ids)))
    stream = TextStream(any_tokenizer, prompt=ids[:prompt])
    text = stream.text + "".join([stream.push(token) for token in ids[prompt:]])
    assert text + stream.finish() == any_tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_emoji_of_byte_tokens_is_returned_with_its_last_byte_and_bytes_of_none_after_three(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("🦜")[-4:]  # the bytes
    for pushed, expected in ((ids, ["", "", "", "🦜", ""]), (ids[:1] * 6, ["", "", "", *"\ufffd" * 3, "\ufffd" * 3])):
        stream = TextStream(tokenizer)
        assert [*map(stream.push, pushed), stream.finish()] == expected


def reference_stop(text: str, stops: list[str]) -> str:
    """Read one character at a time and end before the first complete stop string, the longest if there are several."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


def stop_stream(parts: list[str], stops: list[str]) -> TextStream:
    """A stream whose token i is the text parts[i]."""
    decode = lambda ids: "".join(parts[i] for i in ids)  # noqa: E731
    return TextStream(SimpleNamespace(encode=lambda text: [], decode=decode), stops)


@given(
    parts=st.lists(st.text("ab\n", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string_however_it_is_split(parts, stops):
    stream, returned = stop_stream(parts, stops), ""
    expected = reference_stop("".join(parts), stops)
    for i in range(len(parts)):
        returned += stream.push(i)
        assert expected.startswith(returned)  # what was returned is final
    assert returned + stream.finish() == expected
    assert (stream.end == "stop") == (expected != "".join(parts))


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    stream = stop_stream(["a", "b\n", "\n", "clean", "E", "N", "T", ".", "EN"], ["\n\nclass", "END"])
    assert [stream.push(i) for i in range(9)] == ["a", "b", "", "\n\nclean", "", "", "ENT", ".", ""]
    assert (stream.finish(), stream.end) == ("EN", None)


def test_a_stop_string_split_over_tokens_ends_the_text_before_it_but_not_the_prompt(tokenizer):
    stream, stopped = TextStream(tokenizer, ["+ y ☺", " z"], tokenizer.encode("a + y ☺")), []
    text = stream.text
    for token in tokenizer.encode(" return x + y ☺ é"):
        text += stream.push(token)
        stopped.append(stream.end == "stop")
    assert text + stream.finish() == "a + y ☺ return x "
    assert stopped.index(True) == len(tokenizer.encode(" return x + y ☺")) - 1 and stopped.count(False) > 5
