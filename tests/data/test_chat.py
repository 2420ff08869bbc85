"""Messages of all kinds in a chat template: what is rendered, learned, named as left out, or refused."""

import pytest

from data.chat import ChatFormat, add_chat_template, plain_messages
from data.tokenizer import load_tokenizer
from errors import UserError

THINKS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}
        {{- '<think>\\n' + (message.reasoning_content or message.content.partition('</think>')[0][7:]) | trim }}
        {{- '\\n</think>\\n\\n' + message.content.split('</think>')[-1] | trim + '<|end|>' }}
    {%- else %}{{ message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n\\n</think>\\n\\n' }}{% endif %}"""


def chat_with(tokenizer, template: str) -> ChatFormat:
    tokenizer = load_tokenizer(tokenizer.folder)
    tokenizer.files["chat_template.jinja"] = template.encode()
    return ChatFormat(tokenizer)


def message(role: str, content: object, **others: object) -> dict:
    return {"role": role, "content": content, **others}


def test_a_thought_is_learned_where_the_generation_prompt_has_an_empty_one(ours):
    chat = chat_with(ours, THINKS)
    for content, others in (("<think>hm</think>Yes.", {}), ("Yes.", {"reasoning_content": "hm"})):
        thought = message("assistant", content, **others)
        messages = [message("user", "</think> q"), thought, message("user", "r"), message("assistant", "No.")]
        ids, learned, unknown = chat.encode_learned(messages)
        assert chat.tokenizer.decode(ids[learned], special=True) == "hm\n</think>\n\nYes.<|end|>No.<|end|>"
        assert not unknown and not chat.hidden_keys(messages)
        forgets = chat_with(ours, "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
        assert forgets.hidden_keys(messages) == ({"reasoning_content"} & thought.keys() or {"<think>"})


def test_a_template_may_change_a_content_but_not_leave_it_out(ours):
    for change in ("| upper", "| trim", "| tojson", "| e", ".split('</think>')[-1]"):
        chat = chat_with(ours, "{% for m in messages %}{{ m.role + m.content " + change + " }}{% endfor %}")
        for text in ("a", "", " \n", "<|end|>", "<think>", "<think>x", "<think>x</think>", '"é<b>"', "7" * 30):
            assert chat.encode([message("system", text), message("user", "q"), message("assistant", text)])
    chat = chat_with(ours, "{% for m in messages %}{{ m.content if m.role != 'tool' and loop.index < 3 }}{% endfor %}")
    for messages in ([message("tool", "x")], [message("user", "x")] * 3):
        with pytest.raises(UserError, match=rf"leaves out message {len(messages)} .{messages[0]['role']}"):
            chat.encode(messages)
    with pytest.raises(UserError, match="writes nothing"):
        chat.encode([message("user", "")])


def test_roles_that_mean_the_same_and_parts_of_text_are_one(ours):
    chat = ChatFormat(add_chat_template(ours))
    expected = chat.encode([message("system", "Be terse."), message("user", "q"), message("assistant", "a")])
    parts = [{"type": "text", "text": text} for text in ("Be ", "terse.")]
    for role in ("gpt", "chatgpt", "bing", "bard"):
        given = [message("developer", parts), {"from": "human", "value": "q"}, message(role, "a", weight=0, name=None)]
        assert chat.encode(given) == expected
    with pytest.raises(UserError, match=r"does not support this conversation \(TemplateError: no role tool"):
        chat.encode([message("tool", "x")])


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        ("messages must be a list", [None, [], "hi", {"role": "user"}]),
        ("1 .*image_url is not supported", [[message("user", [{"type": "image_url"}])]]),
        ("1 .*tool_calls is not supported", [[message("assistant", None, tool_calls=[1])]]),
        ("1 .*its role or its content is not text", [[message("user", None)], [message(["user"], "a")]]),
        ("surrogates not allowed", [[message("user", "\ud800")], [message("user\udfff", "a")]]),
    ],
)
def test_messages_that_are_not_text_are_refused_by_name(reason, refused):
    for messages in refused:
        with pytest.raises(UserError, match=reason):
            plain_messages(messages)
