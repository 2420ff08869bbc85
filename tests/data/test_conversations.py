"""Which tokens of a conversation are learned, against transformers and against marks made by hand; and packed rows."""

import importlib.util
import re
from pathlib import Path

import pytest

from data.chat import ChatFormat
from data.tokenizer import load_tokenizer
from errors import UserError

TRL = importlib.util.find_spec("trl")
TEMPLATES = sorted((Path(TRL.origin).parent / "chat_templates").glob("*_training.jinja")) if TRL else []


def said(*contents: str, system: str | None = None) -> list[dict]:
    """Messages of user and assistant in turn, the user first."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = [
    said("Hello", "Hi."),
    said("What is 2 + 2?", "4", "And 漢字 é ☺?", "漢字 ☺"),
    said(" Lead and trail ", " a  b \n", "\n\nx", "\n\ny\n"),
    said("assistant", "user", "assistant\n", "assistant: I am the assistant."),
    said("Be brief?", "Yes.\n\n```py\nx = 1\n```", "q", "a", "q", "a"),
    said("Hello", "Hi.", "q", "a", system="You are terse."),
]


def encode(chat: ChatFormat, messages: list[dict]) -> tuple[list[int], list[int]]:
    """The ids and the mask of the learned ones."""
    ids, learned, unknown = chat.encode_learned(messages)
    assert not unknown
    return ids.tolist(), learned.astype(int).tolist()


@pytest.fixture(scope="module")
def with_markers(qwen_folder, tmp_path_factory):
    """Qwen2.5's tokenizer with the special tokens of all templates, as transformers has it and as we do."""
    transformers = pytest.importorskip("transformers")
    source = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES)
    markers = sorted(set(re.findall(r"<[|\w\uff5c\u2581]+>|</?s>|\[/?\w+\]", source)))
    theirs = transformers.AutoTokenizer.from_pretrained(qwen_folder)
    theirs.add_special_tokens({"additional_special_tokens": markers, "bos_token": "<s>"})
    theirs.save_pretrained(folder := tmp_path_factory.mktemp("markers"))
    return theirs, load_tokenizer(folder)


@pytest.mark.skipif(not TEMPLATES, reason="TRL is not installed")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_is_learned_is_what_transformers_marks_in_the_training_templates_of_trl(with_markers, path):
    """What a template refuses there, such as a system prompt, it refuses here."""
    theirs, tokenizer = with_markers
    source = path.read_text(encoding="utf-8")
    tokenizer.files["chat_template.jinja"] = source.encode()
    options = dict(chat_template=source, return_assistant_tokens_mask=True, return_dict=True)
    compared = 0
    for messages in CONVERSATIONS:
        try:
            expected = theirs.apply_chat_template(messages, **options)
        except Exception:
            with pytest.raises(UserError):
                ChatFormat(Path(), tokenizer).encode_learned(messages)
            continue
        ids, mask = encode(ChatFormat(Path(), tokenizer), messages)
        assert ids == expected["input_ids"]
        assert mask == expected["assistant_masks"] and 0 < sum(mask) < len(mask)
        compared += 1
    assert compared >= 5 or path.stem == "llava_next_training", "which is for images"
