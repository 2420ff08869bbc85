"""A conversation: what is computed in each turn, what is dropped when the context is full, and interrupted answers."""

from unittest.mock import DEFAULT, Mock

import pytest

from checkpoints.pretrained import load_pretrained
from data.tokenizer import load_tokenizer
from errors import UserError
from generation import cli, conversation, cpu_step
from generation.conversation import Conversation
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
        monkeypatch.setattr(conversation, "write", self.written.append)
        monkeypatch.setattr(conversation, "log", self.lines.append)
        context = self.decoder.config.max_position_embeddings
        self.conversation = Conversation(self.continue_prompts, self.format, self.settings, context)
        forward = Decoder.forward

        def record(decoder, tokens, *arguments, cache=None, **options):
            self.fed.append((cache.length, tokens[0].tolist()))
            return forward(decoder, tokens, *arguments, cache=cache, **options)

        monkeypatch.setattr(Decoder, "forward", record)

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
        ids = [token.id for token in self.continue_prompts([prompt], sample_numbers=sample_numbers)]
        self.calls.pop()
        return self.format.tokenizer.decode(ids) + "\n"


@pytest.fixture
def talk(chatml_model, monkeypatch):
    return Talk(chatml_model, monkeypatch)


def test_answers_are_those_of_a_fresh_cache_but_only_new_tokens_are_computed(talk):
    answers, before = [], 0
    for question in ("def add", "x + é ☺?", "def add", "def add"):
        talk.fed.clear()
        answers.append(talk.ask(question))
        [(cached, tokens)] = talk.fed  # new tokens go through the step for a CPU
        assert tokens == talk.calls[-1][0][cached:] and tokens and cached >= before  # the last prompt is computed once
        before = len(talk.calls[-1][0])
    assert answers == [talk.fresh_answer(turn) for turn in range(4)] and len(set(answers)) == 4
    assert [number for _, number in talk.calls] == [[0], [1], [2], [3]]
    assert [message["content"] + "\n" for message in talk.conversation.messages[1::2]] == answers
    assert talk.lines == ["the answer was cut after 12 tokens (--max-new-tokens)"] * 4


def test_no_more_turns_are_dropped_than_the_answer_needs_room(chatml_model, monkeypatch):
    talk, room, dropped = Talk(chatml_model, monkeypatch, max_new_tokens=40), 256 - 40, []
    for turn in range(7):
        before, logged = talk.conversation.messages, len(talk.lines)
        talk.ask(f"def add_{turn}(x, y): return x")
        turns = len(before) // 2
        count = turns + 1 - len(talk.conversation.messages) // 2
        messages = [*before, talk.conversation.messages[-2]]
        lengths = [len(talk.format.encode(messages[2 * n :])) for n in range(turns + 1)]
        assert len(talk.calls[-1][0]) == lengths[count] <= room and all(length > room for length in lengths[:count])
        said = [f"dropped the oldest {count} of {turns} turns: the context is 256 tokens"] if count else []
        assert [line for line in talk.lines[logged:] if "dropped" in line] == said
        dropped.append(count)
    assert sum(dropped) >= 3 and dropped[:2] == [0, 0]
    text = talk.format.tokenizer.decode(talk.calls[-1][0])
    assert SYSTEM in text and "add_6" in text and "add_5" in text and "add_0" not in text
    assert "".join(talk.written) == talk.fresh_answer()


@pytest.mark.parametrize("stage", ["prefill", "step", "write"])
def test_an_interrupted_answer_stays_with_the_text_that_it_has_and_its_cache_is_valid(talk, monkeypatch, stage):
    talk.ask("def add")
    places = {
        "prefill": (talk.decoder.layers[1], "forward", 0),
        "step": (cpu_step, "normalize", 5),  # called between the last layer and the head
        "write": (conversation, "write", 4),
    }
    owner, name, calls = places[stage]
    effects = [*[DEFAULT] * calls, KeyboardInterrupt, *[DEFAULT] * 9]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(wraps=getattr(owner, name), side_effect=effects))
        written = talk.ask("a longer question " * 2)
    if stage == "prefill":
        assert talk.lines[-1].strip().startswith("stopped before the answer began; your")
        assert not written and len(talk.conversation.messages) == 2
    else:
        partial = talk.conversation.messages[-1]["content"]
        assert talk.lines[-1] == "stopped" and partial.startswith(written.removesuffix("\n")) and written.endswith("\n")
        assert talk.fresh_answer().startswith(partial) and 1 < len(partial) < len(talk.fresh_answer()) - 1
    assert talk.ask("x") == talk.fresh_answer()
    if stage != "prefill":
        assert partial.strip() in talk.format.tokenizer.decode(talk.calls[-1][0])


def type_lines(monkeypatch, *lines: str | BaseException) -> None:
    """What `read_line` returns or raises, until the input ends."""
    monkeypatch.setattr(conversation, "read_line", Mock(side_effect=[*lines, EOFError]))


def test_messages_on_the_command_line_are_conversations_and_only_answers_are_printed(chat_model, output, monkeypatch):
    settings = {"chat": True, "max_new_tokens": 9}
    single = [output(chat_model, [prompt], **settings)[0] for prompt in ("def add", "x")]
    both, lines = output(chat_model, ["def add", "x"], batch_size=2, **settings)
    assert both == "\n".join(single) and not both.startswith("def add") and len(lines) == 1
    type_lines(monkeypatch, "def add", "/reset")
    typed, lines = output(chat_model, None, **settings)
    assert typed == single[0]
    assert lines[2:] == ["the answer was cut after 9 tokens (--max-new-tokens)", "a new conversation begins", ""]


def test_every_id_that_ends_a_turn_ends_an_answer(chatml_model, output, monkeypatch):
    tokenizer, record = load_tokenizer(chatml_model), Mock(side_effect=generate)
    markers = "<|endoftext|>", "<|im_end|>", "<|im_start|>"  # the last one begins another turn
    ids = {i for i, token in tokenizer.added_tokens.items() if token.content in markers}
    monkeypatch.setattr(cli, "generate", record)
    type_lines(monkeypatch, "x")
    for prompts in (["x"], None):
        output(chatml_model, prompts, chat=True, max_new_tokens=9)
    assert [call.kwargs["eos_ids"] for call in record.call_args_list] == [ids] * 4 and len(ids) == 3


def test_an_error_or_ctrl_c_neither_ends_nor_changes_the_conversation(talk, monkeypatch):
    talk.ask("def add")
    talk.lines.clear(), talk.written.clear()
    type_lines(
        monkeypatch, "", "  ", "0123456789" * 30, KeyboardInterrupt(), UserError("not UTF-8"), "/?", "/rest", "/quit"
    )
    talk.conversation.run()
    first, too_long, interrupted, not_utf8, again, unknown, _ = talk.lines
    assert unknown == "/rest is sent to the model; /help lists the commands"
    assert "/reset" in first and "/quit" in interrupted and again == first
    assert too_long.startswith("error: the prompt has") and not_utf8 == "error: not UTF-8"
    assert [message["content"] for message in talk.conversation.messages[::2]] == ["def add", "/rest"]
    assert "".join(talk.written) == talk.fresh_answer()
