"""Streams against `decode` of all ids, for our tokenizers, LLaMA's and Qwen's; stop strings by definition."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generation.stream import Detokenizer, StopStrings, TextStream

KINDS = ["tokenizer", "stories_tokenizer", "qwen_tokenizer"]
EASY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=KINDS)
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """What a stream of these ids gives, an id at a time, with what it gives at the end."""
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push([token]) for token in ids] + [detokenizer.flush()]


@EASY
@given(data=st.data())
def test_a_stream_of_any_ids_joins_to_decode_of_all_ids(any_tokenizer, data):
    # Low ids are the bytes of all three tokenizers, where characters are split and most sequences are ill-formed.
    token = st.one_of(st.integers(0, 260), st.integers(0, any_tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=30))
    prompt = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(any_tokenizer)
    text = detokenizer.push(ids[:prompt]) + "".join([detokenizer.push([token]) for token in ids[prompt:]])
    assert text + detokenizer.flush() == any_tokenizer.decode(ids)


@EASY
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd\u2581") | st.sampled_from(" \n😀")))
def test_a_stream_of_a_text_never_shows_part_of_a_character(any_tokenizer, text):
    ids = any_tokenizer.encode(text)
    parts = pieces(any_tokenizer, ids)
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == any_tokenizer.decode(ids)


def byte_ids(tokenizer, text: str) -> list[int]:
    """The ids of single bytes that spell a text that the tokenizer has no token for."""
    ids = tokenizer.encode(text)
    assert len(ids) >= len(text.encode()), "the text is to be spelled in bytes"
    return ids[-len(text.encode()) :]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_emoji_in_byte_tokens_appears_whole_with_its_last_byte(kind, request):
    tokenizer = request.getfixturevalue(kind)
    assert pieces(tokenizer, byte_ids(tokenizer, "🦜")) == ["", "", "", "🦜", ""]


def test_an_emoji_of_byte_level_tokens_appears_whole_with_its_last_token(qwen_tokenizer):
    ids = qwen_tokenizer.encode("🫠")
    assert len(ids) > 1
    assert pieces(qwen_tokenizer, ids) == [""] * (len(ids) - 1) + ["🫠", ""]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_character_that_never_ends_is_shown_as_replacement_only_at_the_end(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("x") + byte_ids(tokenizer, "🦜")[:3]
    *parts, end = pieces(tokenizer, ids)
    assert "".join(parts) == "x" and set(end) == {"\ufffd"} and "".join([*parts, end]) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_do_not_hold_the_text_back(stories_tokenizer):
    never = byte_ids(stories_tokenizer, "ÿ")[-1]  # 0xBF, a continuation of nothing
    parts = pieces(stories_tokenizer, [never] * 10)
    assert parts[4] == "\ufffd" and "".join(parts) == "\ufffd" * 10


def test_leading_spaces_of_later_tokens_stay(stories_tokenizer):
    ids = stories_tokenizer.encode("Once upon a time")
    assert pieces(stories_tokenizer, ids)[0] != "" and "".join(pieces(stories_tokenizer, ids)) == "Once upon a time"


def plain_stop(text: str, stops: list[str]) -> str:
    """Read a character at a time and end before the first stop string that is complete, the longest if several are."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


@given(
    parts=st.lists(st.text("ab\n", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut_into_pieces(parts, stops):
    stream, shown = StopStrings(stops), ""
    expected = plain_stop("".join(parts), stops)
    for part in parts:
        shown += stream.push(part)
        assert expected.startswith(shown)  # what is out is never taken back
    assert shown + stream.flush() == expected
    assert stream.met == (expected != "".join(parts))


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else_is():
    stream = StopStrings(["\n\nclass", "END"])
    assert [stream.push(part) for part in ["a", "b\n", "\ncl", "ean", "E", "N", "T", "."]] == [
        *["a", "b", "", "\n\nclean", "", "", "ENT", "."]
    ]
    assert [stream.push("EN"), stream.flush(), stream.met] == ["", "EN", False]


def test_a_stop_string_split_over_tokens_ends_the_text_before_it(tokenizer):
    written = []
    stream = TextStream(tokenizer, tokenizer.encode("stop"), ["+ y ☺"], written.append)
    ids = tokenizer.encode(" return x + y ☺ é")
    wanted = [stream.push(token) for token in ids]
    stream.close()
    assert "".join(written) == "stop return x "
    assert wanted.index(True) == len(tokenizer.encode(" return x + y ☺")) - 1 and wanted.count(False) > 5


def test_the_prompt_is_not_searched_for_stop_strings_and_a_held_back_end_is_written(tokenizer):
    written = []
    stream = TextStream(tokenizer, tokenizer.encode("x + y"), ["+ y", " z"], written.append)
    assert not any([stream.push(token) for token in tokenizer.encode(" x ")])
    stream.close()
    assert "".join(written) == "x + y x "
