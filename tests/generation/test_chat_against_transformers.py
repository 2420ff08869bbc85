"""Rendered chat templates and their token ids against transformers: bytes and ids must be equal."""

import datetime

import pytest

from data import chat
from data.chat import BORDER, compile_template
from tests.data.test_conversations import said
from tests.generation.conftest import chat_format

transformers = pytest.importorskip("transformers")
reference = pytest.importorskip("transformers.utils.chat_template_utils")

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


def reference_render(source, messages, add_generation_prompt):
    options = dict(chat_template=source, add_generation_prompt=add_generation_prompt, **SPECIAL)
    return reference.render_jinja_template([[dict(message) for message in messages]], **options)[0][0]


def own_render(source, messages, add_generation_prompt):
    options = dict(messages=messages, add_generation_prompt=add_generation_prompt, **SPECIAL)
    return compile_template(source).render(options).replace(BORDER, "")


class Now(datetime.datetime):
    @classmethod
    def now(cls):
        return cls(2026, 3, 5, 23, 59)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_to_the_bytes_of_transformers(name, monkeypatch):
    for module in (chat, reference):
        monkeypatch.setattr(module, "datetime", Now)
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            arguments = TEMPLATES[name], messages, prompt
            assert own_render(*arguments) == reference_render(*arguments)


TEXTS = ["def add(x, y)", " é☺ 漢字\n\n x", "</think>tab\tand   spaces  ", "1"]


def test_ordinary_messages_have_the_ids_of_transformers(chat_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    for system in (None, "Be terse. é "):
        ours = chat_format(chat_model, system)
        for count in (1, 3):
            messages = said(*TEXTS[:count], system=system)
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert ours.encode(said(*TEXTS[:count])) == expected and len(expected) > 9
