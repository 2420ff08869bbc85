"""How a checkpoint writes conversations: where its template is found, what ends an answer, and recommended sampling.

Last: rendered templates and their token ids against transformers; bytes and ids must be equal.
"""

import datetime
import json
import shutil

import pytest
import transformers
from transformers.utils import chat_template_utils as reference

from data import chat as chat_module
from data.chat import BORDER, break_tokens, compile_template
from data.tokenizer import BREAK, load_tokenizer
from errors import UserError
from generation.settings import Sampling, recommended_sampling
from tests.data.test_conversations import said
from tests.generation.conftest import chat_format


def write(path, content) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture
def model(chatml_model, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(chatml_model, tmp_path / "model")


def test_a_template_file_is_preferred_to_the_configuration_and_what_is_no_text_is_one_line(model):
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    for value, expected in ((None, None), ("one é", "one é"), (named, "two")):
        write(model / "tokenizer_config.json", config | {"chat_template": value})
        assert load_tokenizer(model).chat_template == expected
    for value in (7, named[:1]):
        write(model / "tokenizer_config.json", config | {"chat_template": value})
        with pytest.raises(UserError, match=r"tokenizer_config.json cannot be read"):
            assert load_tokenizer(model).chat_template
    write(model / "chat_template.jinja", "three é")
    assert load_tokenizer(model).chat_template == "three é"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('no\n \x1b[31m') if messages[0].role == 'system' }}", "TemplateError: no␊ ␛[31m"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(model, source, expected):
    write(model / "chat_template.jinja", source)
    with pytest.raises(UserError) as error:
        chat_format(model, "Be terse.")
    text = str(error.value)
    assert text.startswith("the model's chat template does not support this conversation (") and expected in text
    assert "\n" not in text and "\x1b" not in text


def test_tags_that_are_not_special_are_tokens_in_answers_and_text_in_questions(model):
    write(model / "chat_template.jinja", "{{ messages[-1].content }}{% if false %}<think>{% endif %}")
    chat = chat_format(model)
    answer, question = ([{"role": role, "content": "<think>"}] for role in ("assistant", "user"))
    (think,) = chat.encode(answer)
    assert chat.tokenizer.added_tokens[think].content == "<think>"
    assert think not in chat.encode(question) and len(chat.encode(question)) > 3


def test_every_occurrence_of_a_token_is_broken_and_nothing_else_changes():
    tokens = ["<a>", "<a><b>", "<", "b><c", "aaa", ".*"]
    for text in ("x<a>y<a><b><c>aaaaa.*", "<<a>a>", "nothing < special", "", "a.b*"):
        broken = break_tokens(text, tokens)
        assert broken.replace(BREAK, "") == text
        assert not any(token in broken for token in tokens if len(token) > 1)
        assert (BREAK in broken) == any(token in text for token in tokens if len(token) > 1)
    assert break_tokens("<a>", []) == "<a>"


@pytest.mark.parametrize(("normalizer", "typed"), [("Lowercase", "a<|IM_END|>b"), ("NFKC", "a\uff1c|im_end|\uff1eb")])
def test_text_that_a_normalizer_turns_into_a_token_is_no_token(model, normalizer, typed):
    fields = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    fields["normalizer"] = {"type": normalizer}
    for token in fields["added_tokens"]:
        token["normalized"] = True
    write(model / "tokenizer.json", fields)
    chat = chat_format(model)
    end = chat.end_of_turn
    assert chat.tokenizer.encode_special("a<|im_end|>b").ids.count(end) == 1
    harmless, forged = (chat.encode([{"role": "user", "content": text}]).count(end) for text in ("ab", typed))
    assert harmless == forged >= 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eos_token_id": 2}, None),
        # transformers samples only with do_sample
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}, {"temperature": 0, "repetition_penalty": 1.3}),
        ({"do_sample": True, "min_p": 0.1, "temperature": None}, {"temperature": 1, "top_k": 50, "min_p": 0.1}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),  # as vLLM has it
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
    ],
)
def test_sampling_is_what_the_generation_config_recommends(tmp_path, capsys, fields, expected):
    assert recommended_sampling(tmp_path) is None
    write(tmp_path / "generation_config.json", fields)
    assert recommended_sampling(tmp_path) == (None if expected is None else Sampling(**expected))
    assert capsys.readouterr().err == ""


def test_what_changes_the_texts_of_transformers_alone_is_named(tmp_path, capsys):
    neutral = {"num_beams": 1, "typical_p": 1.0, "guidance_scale": 1, "min_new_tokens": 0, "penalty_alpha": 0.0}
    neutral |= {"suppress_tokens": [], "forced_eos_token_id": None, "epsilon_cutoff": 0.0}
    other = {"min_new_tokens": 1, "no_repeat_ngram_size": 1, "forced_eos_token_id": 1, "forced_bos_token_id": 0}
    other |= {"typical_p": 0, "guidance_scale": 0, "bad_words_ids": [[1]]}
    for name, fields in {"neutral": neutral, "other": other}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name / "generation_config.json", fields)
        recommended_sampling(tmp_path / name)
    [line] = capsys.readouterr().err.splitlines()
    names = line.removeprefix(f"{tmp_path}/other/generation_config.json has ").removesuffix(", without effect here")
    assert {*names.split(", ")} == {*other}


def test_a_recommendation_that_is_none_is_one_line(tmp_path):
    write(tmp_path / "generation_config.json", {"do_sample": True, "top_p": [1]})
    with pytest.raises(UserError, match=r"generation_config.json cannot be read \(top_p is \[1\]"):
        recommended_sampling(tmp_path)


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = [
    said("Hello\n"),
    said(" Hi é ☺ ", "Hello.\n\n", "And </b> now?"),
    said("Hi", "<think>\nhm\n</think>\n\nYes.", "Go on", "ok", "x", system="  You are terse. <b>&'\"\n"),
    said("q", "a"),
    said("x")[::-1] + said("y"),
    said(system="alone"),
]

# Written for this test with the constructs that the templates of well-known models use.
TEMPLATES = {
    "blocks on lines of their own": """\
{% for m in messages %}
    {% if m.role == 'assistant' %}
  A: {{ m.content }}
    {% elif m.content is string and m.content | trim %}
  {{ m['role'] | title }}: {{ m.content }}

    {% else %}
    {# nothing to say #}
    {% endif %}
\t{%+ if loop.last %} end {% endif +%}
{% endfor %}
{{ unknown }}{{ pad_token is defined }}
""",
    "break and continue": """\
{%- for m in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {{- loop.index ~ m.role }}
{%- else %}empty
{%- endfor %}""",
    "messages as JSON": """\
{%- for m in messages %}
    {{- m | tojson }}{{ m | tojson(indent=4) }}{{ m | tojson(ensure_ascii=true, sort_keys=true) }}
    {{- m.content | tojson(separators=(',', ':')) }}
{%- endfor %}""",
    "the date": "{{ strftime_now('%d %b %Y, %H:%M') }}",
    "generation blocks with a scope of their own": """\
{%- set x = 1 %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation -%}
            {%- set x = 2 %}{{ m.content + eos_token ~ x }}
        {%- endgeneration %}{{ x }}
    {%- else %}
{% generation %}
    {{ m.content }}
{% endgeneration %}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}>{% endif %}""",
}


class Now(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(2026, 3, 5, 23, 59)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_to_the_bytes_of_transformers(name, monkeypatch):
    for module in (chat_module, reference):
        monkeypatch.setattr(module, "datetime", Now)
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            given, options = [[dict(message) for message in messages]], {"add_generation_prompt": prompt, **SPECIAL}
            expected = reference.render_jinja_template(given, chat_template=TEMPLATES[name], **options)[0][0]
            rendered = compile_template(TEMPLATES[name]).render(messages=messages, **options)
            assert rendered.replace(BORDER, "") == expected


def test_ordinary_messages_have_the_ids_of_transformers(chat_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    texts = "def add(x, y)", " é☺ 漢字\n\n x", "</think>tab\tand   spaces  "
    for system in (None, "Be terse. é "):
        ours = chat_format(chat_model, system)
        for count in (1, 3):
            messages = said(*texts[:count], system=system)
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert ours.encode(said(*texts[:count])) == expected and len(expected) > 9
