"""A conversation: what is computed in each turn, what is dropped when the context is full, and interrupted answers."""

import itertools

import pytest

from checkpoints.pretrained import load_pretrained
from data.tokenizer import load_tokenizer
from errors import UserError
from generation import cpu_step, session
from generation.conversation import Conversation
from generation.cpu_step import CpuDecodeStep
from generation.generate import generate
from generation.settings import Sampling, Settings
from model.decoder import Decoder
from tests.generation.conftest import chat_format

SAMPLED = Sampling(temperature=1.2, repetition_penalty=1.1)
SYSTEM = "You are terse."


class Talk:
    """A conversation, with everything that goes in and out of it."""

    def __init__(self, directory, monkeypatch, **settings):
        self.settings = Settings(chat=True, **{"max_new_tokens": 12, "sampling": SAMPLED, **settings})
        self.decoder, self.format = load_pretrained(directory).eval(), chat_format(directory, SYSTEM)
        self.written, self.lines, self.calls, self.fed = [], [], [], []
        context = self.decoder.config.max_position_embeddings
        self.conversation = Conversation(
            self.continue_prompts, self.format, self.settings, context, self.write, self.lines.append
        )
        forward, step = Decoder.forward, CpuDecodeStep.__call__

        def record(decoder, tokens, *arguments, cache=None, **options):
            self.fed.append((cache.length, tokens[0].tolist()))
            return forward(decoder, tokens, *arguments, cache=cache, **options)

        def record_step(decode_step, tokens, padding):
            self.fed.append((decode_step.cache.length, tokens[0].tolist()))
            return step(decode_step, tokens, padding)

        monkeypatch.setattr(Decoder, "forward", record)
        monkeypatch.setattr(CpuDecodeStep, "__call__", record_step)

    def write(self, text: str) -> None:
        self.written.append(text)

    def ask(self, text: str) -> str:
        """The text that is written in this turn."""
        self.written.clear()
        self.conversation.answer(text)
        return "".join(self.written)

    def continue_prompts(self, prompts, **options):
        settings, vocab_size = self.settings, self.format.tokenizer.vocab_size
        self.calls.append((prompts[0], options["sample_numbers"]))
        settings = dict(max_new_tokens=settings.token_limit, sampling=settings.sampling, seed=settings.seed)
        return generate(self.decoder, prompts, **settings, vocab_size=vocab_size, **options)

    def fresh_answer(self, number: int = -1) -> str:
        """What the prompt of a turn gives without a kept cache."""
        prompt, sample_numbers = self.calls[number]
        result = self.continue_prompts([prompt], sample_numbers=sample_numbers)
        self.calls.pop()
        return self.format.tokenizer.decode(result.tokens[0]) + "\n"


@pytest.fixture
def talk(chatml_model, monkeypatch):
    return Talk(chatml_model, monkeypatch)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_only_tokens_that_are_not_in_the_cache_go_through_the_decoder(talk):
    cached = []
    for turn, question in enumerate(("def add", "x + y", "and é ☺?")):
        talk.fed.clear()
        talk.ask(question)
        prompt = talk.calls[turn][0]
        known = min(common_prefix(prompt, cached), len(prompt) - 1)
        assert talk.fed[0] == (known, prompt[known:])
        assert [len(tokens) for _, tokens in talk.fed[1:]] == [1] * 11
        if turn:
            assert known >= len(talk.calls[turn - 1][0])  # the last prompt is computed once
        cached = prompt + [tokens[0] for _, tokens in talk.fed[1:]]


def test_answers_are_those_of_a_fresh_cache_and_the_turns_hold_what_was_written(talk):
    answers = [talk.ask(question) for question in ("def add", "x + y", "def add", "def add")]
    assert answers == [talk.fresh_answer(turn) for turn in range(4)]
    assert len(set(answers)) == 4 and [number for _, number in talk.calls] == [[0], [1], [2], [3]]
    assert [answer["content"] + "\n" for _, answer in talk.conversation.turns] == answers
    assert talk.lines == ["the answer was cut after 12 tokens (--max-new-tokens)"] * 4


def test_no_more_turns_are_dropped_than_the_answer_needs_room(chatml_model, monkeypatch):
    talk, room, dropped = Talk(chatml_model, monkeypatch, max_new_tokens=40), 256 - 40, []
    for turn in range(7):
        before, logged = talk.conversation.turns, len(talk.lines)
        talk.ask(f"def add_{turn}(x, y): return x")
        count = len(before) + 1 - len(talk.conversation.turns)
        messages = [*itertools.chain(*before), talk.conversation.turns[-1][0]]
        lengths = [len(talk.format.encode(messages[2 * n :])) for n in range(len(before) + 1)]
        assert len(talk.calls[-1][0]) == lengths[count] <= room and all(length > room for length in lengths[:count])
        said = [f"dropped the oldest {count} of {len(before)} turns: the context is 256 tokens"] if count else []
        assert [line for line in talk.lines[logged:] if "dropped" in line] == said
        dropped.append(count)
    assert sum(dropped) >= 3 and dropped[:2] == [0, 0]
    text = talk.format.tokenizer.decode(talk.calls[-1][0])
    assert SYSTEM in text and "add_6" in text and "add_5" in text and "add_0" not in text
    assert "".join(talk.written) == talk.fresh_answer()


def test_a_message_that_does_not_fit_changes_nothing(talk):
    talk.ask("def add")
    before = list(talk.conversation.turns)
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens, but the model's context is 256"):
        talk.ask("0123456789" * 30)
    assert talk.conversation.turns == before and not talk.written
    assert talk.ask("x") == talk.fresh_answer()


def test_an_interrupted_answer_stays_with_the_text_that_it_has(talk, monkeypatch):
    talk.ask("def add")

    def interrupt(text):
        talk.written.append(text)
        if len([part for part in talk.written if part]) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(talk.conversation, "_write", interrupt)
    partial = talk.ask("x + y")
    monkeypatch.setattr(talk.conversation, "_write", talk.write)
    assert talk.lines[-1] == "stopped" and partial.endswith("\n")
    assert talk.conversation.turns[-1][1]["content"] == partial[:-1] != talk.fresh_answer()[:-1]
    assert talk.fresh_answer().startswith(partial[:-1])
    assert talk.ask("and?") == talk.fresh_answer()
    assert partial[:-1].strip() in talk.format.tokenizer.decode(talk.calls[-1][0])


@pytest.mark.parametrize("stage", ["prefill", "step"])
def test_an_answer_interrupted_inside_the_decoder_leaves_a_valid_cache(talk, monkeypatch, stage):
    talk.ask("def add")
    calls = []

    def interrupt(*_):
        calls.append(1)
        if stage == "prefill" or len(calls) > 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if stage == "prefill":
            patch.setattr(talk.decoder.layers[1], "forward", interrupt)
        else:
            normalize = cpu_step.normalize_rows  # called between the last layer and the head
            patch.setattr(cpu_step, "normalize_rows", lambda *arguments: interrupt() or normalize(*arguments))
        talk.ask("a longer question " * 2)
    assert len(talk.conversation.turns) == 1 + (stage == "step")
    assert talk.lines[-1].strip() == "stopped" + (
        "" if stage == "step" else " before the answer began; your message is forgotten"
    )
    assert talk.ask("x") == talk.fresh_answer()


# What generate.py prints in a chat.


def run(directory, prompts, *lines: str, **settings) -> tuple[str, list[str]]:
    """All text that `session.run` writes, and the lines that it logs, while `lines` are typed."""
    typed, written, logged = iter(lines), [], []

    def read() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    options = {"max_new_tokens": 9, "device": "cpu", **settings}
    session.run(Settings(**options), directory, prompts, written.append, logged.append, read)
    return "".join(written), logged


def test_messages_on_the_command_line_are_conversations_of_their_own_and_only_answers_are_printed(chat_model):
    single = [run(chat_model, [prompt], chat=True)[0] for prompt in ("def add", "x")]
    both, lines = run(chat_model, ["def add", "x"], chat=True, batch_size=2)
    assert both == "\n".join(single) and not both.startswith("def add") and len(lines) == 1
    typed, lines = run(chat_model, [], "def add", "/reset", chat=True)
    assert typed == single[0] and lines[2:] == [
        "the answer was cut after 9 tokens (--max-new-tokens)",
        "a new conversation begins",
        "",
    ]


def test_every_id_that_ends_a_turn_ends_an_answer(chatml_model, monkeypatch):
    tokenizer, seen = load_tokenizer(chatml_model), []
    markers = "<|endoftext|>", "<|im_end|>", "<|im_start|>"  # the last one begins another turn
    ids = {i for i, token in tokenizer.added_tokens.items() if token.content in markers}

    def record(*arguments, eos_ids, **options):
        seen.append(eos_ids)
        return generate(*arguments, eos_ids=eos_ids, **options)

    monkeypatch.setattr(session, "generate", record)
    run(chatml_model, ["x"], chat=True)
    run(chatml_model, [], "x", chat=True)
    assert seen == [ids, ids] and len(ids) == 3


def test_an_error_or_ctrl_c_does_not_end_the_conversation(talk):
    typed = iter(["", "  ", "0123456789" * 30, KeyboardInterrupt(), UserError("not UTF-8"), "/rest", EOFError()])

    def read() -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    talk.conversation.run(read)
    first, too_long, interrupted, not_utf8, _, last = talk.lines
    assert "/quit" in first and "/quit" in interrupted and last == ""
    assert too_long.startswith("error: the prompt has") and not_utf8 == "error: not UTF-8"
    assert [question["content"] for question, _ in talk.conversation.turns] == ["/rest"]


def test_what_makes_no_sense_is_a_user_error(chatml_model, tmp_path):
    with pytest.raises(UserError, match="--system is for conversations"):
        Settings(system="x")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((chatml_model / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(UserError, match="has no chat template, so it only continues text; teach it to talk: python"):
        run(tmp_path, ["x"], chat=True)
