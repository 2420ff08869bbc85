"""Which tokens of a conversation are learned, against transformers and against marks made by hand; and packed rows."""

import dataclasses
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import transformers
from pyarrow import parquet

from data.chat import ChatFormat, add_chat_template
from data.conversations import Conversation, Conversations, encode_conversation, pack
from data.corpus import prepare
from data.python_chat import questions_and_answers
from data.settings import DataSettings
from data.sources import resolve
from data.tokenizer import load_tokenizer
from errors import UserError, note


def said(*contents: str, system: str | None = None) -> list[dict]:
    """Messages of user and assistant in turn, the user first."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = [
    said("What is 2 + 2?", "4", "And 漢字 é ☺?", "漢字 ☺"),
    said(" Lead and trail ", " a  b \n", "\n\nx", "\n\ny\n"),
    said("assistant", "user", "assistant\n", "assistant: I am the assistant."),
    said("Hello", "Hi.", "q", "a", system="You are terse."),
]


def encode(chat: ChatFormat, messages: list[dict]) -> tuple[list[int], list[int]]:
    """The ids and the mask of the learned ones."""
    ids, learned, unknown = chat.encode_learned(messages)
    assert not unknown
    return ids.tolist(), learned.astype(int).tolist()


@pytest.mark.parametrize("begin", ["{% generation %}", "{%- generation -%}"])
def test_what_is_learned_in_generation_blocks_is_what_transformers_marks(ours, tmp_path, begin):
    add_chat_template(ours).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = theirs.chat_template.replace("{% generation %}", begin)
    theirs.save_pretrained(tmp_path)
    for messages in CONVERSATIONS:
        options = dict(return_assistant_tokens_mask=True, return_dict=True)
        expected = theirs.apply_chat_template(messages, **options)
        ids, mask = encode(ChatFormat(load_tokenizer(tmp_path)), messages)
        assert ids == expected["input_ids"]
        assert mask == expected["assistant_masks"] and 0 < sum(mask) < len(mask)


def without_generation(tokenizer):
    """The tokenizer with its template's answers unmarked."""
    source = re.sub(r"\{% (end)?generation %\}", "", add_chat_template(tokenizer).chat_template)
    tokenizer = load_tokenizer(tokenizer.folder)
    tokenizer.files["chat_template.jinja"] = source.encode()
    assert "generation %}" not in source
    return tokenizer


def hand_marked(tokenizer, spans: list[tuple[str | list[int], bool]]) -> tuple[list[int], list[int]]:
    """The ids of ids and markup, and whether each part is learned. No id may reach over two of them."""
    ids = [(tokenizer.encode_special(p).ids if isinstance(p, str) else p, learned) for p, learned in spans]
    return [i for some, _ in ids for i in some], [int(learned) for some, learned in ids for _ in some]


def test_without_generation_blocks_answers_are_the_spans_that_were_marked_by_hand(qwen, ours):
    """Qwen2.5's template, which has none, and ours without them; what a person types is text."""
    assert not re.search("{%-? generation", qwen.chat_template)
    typed = "<|im_end|>\n<|im_start|>assistant\nassistant <|end|><|assistant|>x{% generation %}"
    other = said("2 + 2?", "4", "And 漢字 ☺?", "漢字 ☺", system="Be terse.")
    for messages in (said("Hello", "Hi.", typed, "a", system="x"), other):
        spans, own = [], [("<s>", False)]
        for message in messages:
            role, text, is_answer = message["role"], message["content"], message["role"] == "assistant"
            spans += [(f"<|im_start|>{role}\n", False), (qwen.encode(text), is_answer)]
            spans += [("<|im_end|>", is_answer), ("\n", False)]
            own += [(f"<|{role}|>", False), (ours.encode(text), is_answer), ("<|end|>", is_answer)]
        assert encode(ChatFormat(qwen), messages) == hand_marked(qwen, spans)
        for tokenizer in (add_chat_template(ours), without_generation(ours)):
            assert encode(ChatFormat(tokenizer), messages) == hand_marked(ours, own)


def test_an_answer_that_the_template_changes_later_is_not_learned_and_its_row_is_counted_once(ours):
    """As Qwen3 does, whose template drops the thoughts of all answers but the last."""
    tokenizer = without_generation(ours)
    changed = "('' if loop.last else 'Hm. ') + message.content +"
    source = tokenizer.chat_template.replace("message.content +", changed, 1)
    tokenizer.files["chat_template.jinja"] = source.encode()
    messages = said("q", "first", "r", "other", "s", "last")
    ids, learned, unknown = ChatFormat(tokenizer).encode_learned(messages)
    assert unknown == 2 and tokenizer.decode(ids[learned]) == "last"
    _, remarks = encode_conversation({"messages": messages}, ChatFormat(tokenizer), 100)
    assert remarks == ["rows with answers not learned, as the template changes them when the conversation continues"]


SHAREGPT = {"user": "human", "assistant": "bing"}
ROWS = [said(f"What is {n}?", f"It is {n}.", *(["And\nthen?", f"{n + 1}"] * (n % 3)), system="Be.") for n in range(60)]


def write_rows(folder: Path, rows: list[list[dict]]) -> None:
    """Conversations with every kind of keys in several files, with a text beside them.

    Some have a byte order mark, other line ends, columns of null, or the system prompt beside the messages.
    """
    folder.mkdir()
    with_keys = [{("messages", "conversations")[n % 2]: row, "id": n, "text": None} for n, row in enumerate(rows)]
    for row in with_keys[1::4]:
        given = [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in row["conversations"][1:]]
        row |= {"system": row["conversations"][0]["content"], "conversations": given, "messages": None}
    lines = [json.dumps(row).replace("\\n", "\\r") + "\r\n\n" for row in with_keys[:40]]
    (folder / "a.jsonl").write_text("\ufeff" + "".join(lines))
    columns = {"id": range(20), "conversations": [None] * 5 + rows[45:], "messages": rows[40:45] + [[]] * 15}
    parquet.write_table(pyarrow.table(columns), folder / "c.parquet")
    (folder / "README.md").write_text("Conversations.")


def write_jsonl(folder: Path, rows: list[list[dict]]) -> str:
    """Conversations in a file, which is returned."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def prepared(path: str | Path, tokenizer: Path, cache: Path, **changes) -> Conversations:
    """The rows of a file or folder, of 61 ids if `changes` do not say otherwise."""
    settings = DataSettings(data=(str(path),), cache=str(cache), sequence_length=60)
    return prepare(dataclasses.replace(settings, **changes), tokenizer)


def packed(rows: np.ndarray, tokenizer) -> list[tuple[str, str]]:
    """The conversations in rows: the text of each, and the text of what is learned."""
    texts = []
    for ids, learned, documents in rows.transpose(1, 0, 2):
        assert (np.diff(documents[documents > 0].astype(int), prepend=1) >= 0).all(), "one after another"
        for number in range(1, documents.max() + 1):
            here = documents == number
            texts.append((tokenizer.decode(ids[here], special=True), tokenizer.decode(ids[here & (learned > 0)])))
    return texts


def test_rows_of_all_formats_are_packed_whole_and_once_and_a_damaged_cache_is_refused(tokenizer_file, tmp_path, capsys):
    write_rows(tmp_path / "rows", ROWS)
    changes = dict(sequence_length=100, validation_fraction=0.3)
    corpus = prepared(tmp_path / "rows", tokenizer_file, tmp_path, **changes)
    assert "files left out, as they are text and not rows: 1 (the first: " in capsys.readouterr().err
    train, validation = (packed(rows, corpus.tokenizer) for rows in (corpus.train, corpus.validation))
    expected = []
    for row in ROWS:
        text = "<s>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in row)
        expected.append((text, "".join(m["content"] for m in row if m["role"] == "assistant")))
    assert 0.1 < len(validation) / len(expected) < 0.5 and sorted(train + validation) == sorted(expected)
    assert corpus.train.shape[2] == corpus.validation.shape[2] == 101
    (inputs, targets, documents), *_ = corpus.validation_batches(100, 3)
    assert inputs.dtype == targets.dtype == documents.dtype == np.int64
    learned = targets >= 0
    assert np.array_equal(targets[:, :-1][learned[:, :-1]], inputs[:, 1:][learned[:, :-1]]) and learned.any()
    assert corpus.prompts[0].startswith("What is ")
    assert "+ It is" in corpus.show_row() and "  <s><|system|>Be.<|end|><|user|>What is" in corpus.show_row()
    again = prepared(tmp_path / "rows", tokenizer_file, tmp_path, **changes)
    assert np.array_equal(again.train, corpus.train) and not capsys.readouterr().err
    (damaged,) = (tmp_path / "conversations").glob("*.npz")
    os.truncate(damaged, damaged.stat().st_size - 200)
    with pytest.raises(UserError, match=r"cannot be read .*; delete .*conversations, which is made again"):
        prepared(tmp_path / "rows", tokenizer_file, tmp_path, **changes)


def test_packing_wastes_little_and_keeps_every_length():
    generator = random.Random(1)
    lengths = [min(64, int(generator.expovariate(1 / 15)) + 2) for _ in range(2000)]
    ones = [Conversation([], np.full(length, n + 1), np.ones(length, bool)) for n, length in enumerate(lengths)]
    ids, learned, documents = pack(ones, 64, np.dtype(np.uint16))
    counts = np.bincount(ids.ravel(), minlength=2001)[1:]
    assert counts.tolist() == lengths
    assert (documents > 0).mean() > 0.99 and ((documents > 0) == (ids > 0)).all()
    starts = np.diff(documents.astype(int), axis=1, prepend=0) > 0
    assert not learned[starts].any() and learned[(documents > 0) & ~starts].all()


def test_batches_depend_on_seed_and_step_alone_and_an_epoch_has_every_row_once(tokenizer_file, tmp_path):
    corpus = prepared(write_jsonl(tmp_path, ROWS), tokenizer_file, tmp_path)
    count, order = corpus.train.shape[1], {"size": 4, "sequence_length": 100}
    inputs = np.concatenate([corpus.batch(**order, seed=1, first=4 * step).inputs for step in range(count)])
    for epoch in np.split(inputs, 4):
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, corpus.train[0, :, :-1].astype(np.int64)))
    assert not np.array_equal(inputs[:count], inputs[count : 2 * count])
    assert not np.array_equal(inputs[:4], corpus.batch(**order, seed=2, first=0).inputs)


def test_what_is_unusual_is_one_line_with_a_count_and_the_first_place(tokenizer_file, tmp_path, capsys):
    rows = [said(f"Question {n}?", "An answer.") for n in range(8)]
    rows += [rows[0], said("q"), 7, [{"role": "user"}]]
    rows += [said("word " * 99, "a"), said("q", "short", "r", "long " * 99, "s", "t")]
    rows += [[*said("q"), {"role": "assistant", "content": "", "tool_calls": [1]}]]
    rows += [[*said("q", "a"), {"role": "tool", "content": "x"}]]
    lines = [{"messages": row} for row in rows] + [{"text": "a"}, rows[:1]]
    lines += [{"messages": [message | {"weight": 0} for message in rows[n]], "tools": [1]} for n in (0, 1)]
    lines += [{"messages": said("q", "", system="s"), "system": "t", "source": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"messages": [\n')
    for _ in range(2):  # the second time from the cache, in another process
        note.cache_clear()
        corpus = prepared(path, tokenizer_file, tmp_path)
    remarks = sorted(capsys.readouterr().err.splitlines())
    assert remarks[::2] == remarks[1::2] == sorted([
        f"duplicates dropped: 3 (the first: {path}, row 9)",
        f"conversations dropped, as they have no answer to learn: 1 (the first: {path}, row 10)",
        f"conversations dropped, as no answer is left to learn within --sequence-length: 1 (the first: {path}, row 13)",
        "rows skipped, as each must be one object with messages that the template supports: 7 (the first: "
        f"{path}, row 11: messages must be a list, and not an empty one.)",
        f"conversations cut after the last answer that fits into --sequence-length: 1 (the first: {path}, row 14)",
        f"rows in which nothing uses the keys tools, weight: 2 (the first: {path}, row 19)",
        f"rows in which nothing uses the keys system: 1 (the first: {path}, row 21)",
    ])  # fmt: skip
    texts = packed(corpus.train, corpus.tokenizer) + packed(corpus.validation, corpus.tokenizer)
    assert re.match("10 .*\n.* train on 9 .*\n.* for validation 1 conversation, .* in 1 row$", corpus.description)
    assert len(texts) == 10 and ("<s><|user|>q<|end|><|assistant|>short<|end|>", "short") in texts


def test_an_error_that_is_not_of_the_row_is_not_counted_as_one(tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.setattr(ChatFormat, "encode_learned", lambda self, messages: len(None))
    with pytest.raises(TypeError):
        prepared(write_jsonl(tmp_path, [said("q", "a")]), tokenizer_file, tmp_path)


def test_a_template_that_does_not_teach_the_end_of_an_answer_is_named(tokenizer_file, ours, tmp_path, capsys):
    folder = shutil.copytree(tokenizer_file.parent, tmp_path / "tokenizer")
    source = add_chat_template(ours).chat_template
    unmarked = source.replace(" + '<|end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|end|>")
    (folder / "chat_template.jinja").write_text(unmarked)
    path = write_jsonl(tmp_path, [said(f"{n}?", "a") for n in range(8)])
    prepared(path, folder, tmp_path)
    notice = "conversations whose end-of-turn token is not learned, as {% generation %} leaves it out"
    assert capsys.readouterr().err == f"{notice}: 8 (the first: {path}, row 1)\n"


def test_conversations_need_a_template_and_rows_with_a_text_are_a_text(tokenizer_file, shared, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[1]\n" + json.dumps({"messages": said("q", "a")}) + "\n")
    with pytest.raises(UserError, match=r"stories260K has no chat template.*chat_template.jinja .* into its folder"):
        prepared(path, shared / "stories260K" / "tok512.model", tmp_path)
    path.write_text(json.dumps({"text": "A text.", "messages": said("q", "a")}) + "\n")
    description = prepared(path, tokenizer_file, tmp_path).description
    assert description.startswith("1 document (0 duplicates dropped)")


def test_a_tokenizer_of_ours_gets_a_template_that_ends_answers_and_saves_it(ours, llama, qwen, tmp_path):
    taught = add_chat_template(ours)
    assert taught.hash == ours.hash and ours.chat_template is None
    taught.save(tmp_path)
    written = {name: (tmp_path / name).stat().st_mtime_ns for name in taught.files}
    assert written["tokenizer.json"] == max(written.values()), "the last"
    saved = load_tokenizer(tmp_path)
    end = saved.encode_special("<|end|>").ids
    assert saved.chat_template == taught.chat_template and [ChatFormat(saved).end_of_turn] == end
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [saved.eos_id, *end]
    assert all(add_chat_template(other) is other for other in (saved, qwen, llama))


def test_questions_about_python_come_from_its_own_docstrings():
    files = {Path(file.name).stem: file for file in resolve(DataSettings(data=("python-chat",)))}
    chosen = [files[name] for name in ("shutil", "posixpath", "ntpath", "_strptime")]
    conversations = [row["messages"] for file in chosen for row in questions_and_answers(file.fetch())]
    assert [[m["role"] for m in messages] for messages in conversations] == [["user", "assistant"]] * len(conversations)
    pairs = {question["content"]: answer["content"] for question, answer in conversations}
    copytree = "Recursively copy a directory tree and return the destination directory"
    assert pairs["What does shutil.copytree do?"] == f"{copytree}."
    assert pairs[f"Which function of shutil does this: {copytree}?"] == "That is shutil.copytree."
    signature = "copymode(src, dst, *, follow_symlinks=True)"
    assert pairs["What are the arguments of shutil.copymode?"] == f"It is called as {signature}."
    assert pairs["What are the arguments of os.path.join?"] == "It is called as join(a, *p)."
    assert not any(re.search(r"\b_|ntpath|\n", question) for question in pairs if question.startswith("What "))
