"""Where generate.py takes its prompts from, what it prints, and which errors it finds before the weights are read."""

import io
import json
import random
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoints import weights
from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained, save_pretrained
from data.chat import add_chat_template
from data.tokenizer import encode_prompt, tokens_after
from errors import UserError
from generation import cli, conversation, generate, load
from generation.settings import Sampling, Settings, read_prompts, recommended_sampling
from model.lora import add_lora

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, decoder, tokenizer):
    directory = tmp_path_factory.mktemp("run") / "best"
    save_pretrained(decoder, directory, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_id}))
    (directory / "state.json").write_text("{}")  # the last file of a save
    return directory


def set_stdin(monkeypatch, content: bytes, terminal: bool = False, encoding: str = "utf-8"):
    stream = io.TextIOWrapper(io.BytesIO(content), encoding)
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stream)


def test_standard_input_is_one_prompt_without_its_last_line_break(monkeypatch):
    for content, prompt in {"a\nb\n": "a\nb", "a\r\n": "a", "a\n\n": "a\n", " a ": " a ", "": "", "é☺": "é☺"}.items():
        set_stdin(monkeypatch, content.encode())
        assert read_prompts(Settings()) == [prompt]
    set_stdin(monkeypatch, b"\xef\xbb\xbfhello\n")  # with a byte order mark
    assert read_prompts(Settings(chat=True)) == ["hello"]


def test_a_terminal_is_not_read_and_gives_an_empty_prompt_with_a_hint_or_a_conversation(monkeypatch, capsys):
    set_stdin(monkeypatch, b"typed", terminal=True)
    assert read_prompts(Settings(chat=True)) is None and read_prompts(Settings()) == [""]
    hint = capsys.readouterr().err
    assert hint.startswith("no prompt: the model starts a text of its own;") and "--chat" in hint
    with pytest.raises(UserError, match="a conversation has one answer to each message; give --samples with"):
        read_prompts(Settings(chat=True, samples=2))
    set_stdin(monkeypatch, b"")
    assert read_prompts(Settings(chat=True, jsonl=True)) == []  # no conversation


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (b"\xff\xfe", {}, "standard input cannot be read"),
        (b'"a"\n5\n', {"jsonl": True}, r"line 2 of standard input .*\(Expected `str \| object`, got `int`\); give a"),
        (b'{"text": "x"}', {"jsonl": True}, r"line 1 of standard input cannot be read \(no 'prompt'\)"),
        (b'"\\ud800"', {"jsonl": True}, "line 1 of standard input cannot be read"),
    ],
)
def test_input_that_is_no_prompt_is_a_user_error(monkeypatch, content, settings, words):
    set_stdin(monkeypatch, content)
    with pytest.raises(UserError, match=words):
        read_prompts(Settings(**settings))


def test_keys_beside_a_prompt_are_said_to_do_nothing(monkeypatch, capsys):
    set_stdin(monkeypatch, b'\xef\xbb\xbf{"prompt": "a", "temperature": 0}\n"b"\n')
    assert read_prompts(Settings(jsonl=True)) == ["a", "b"]
    assert 'only "prompt" is read of prompt, temperature; sampling is set by flags' in capsys.readouterr().err


def test_what_is_typed_may_be_anything_and_its_prompt_is_not_printed_to_redirected_output(monkeypatch, capsys):
    set_stdin(monkeypatch, "é\n".encode() + b"\xe9\n", encoding="ascii")
    assert [conversation.read_line(), conversation.read_line()] == ["é", "\ufffd"]
    assert capsys.readouterr() == ("", "> > ")
    with pytest.raises(EOFError):
        conversation.read_line()


def test_prompts_start_with_bos_and_an_empty_prompt_is_bos_or_else_eos():
    def tokenizer(bos, eos):
        return SimpleNamespace(bos_id=bos, eos_id=eos, encode=lambda text: [ord(c) for c in text])

    assert encode_prompt(tokenizer(1, 2), "AB") == [1, 65, 66] and encode_prompt(tokenizer(1, 2), "") == [1]
    assert encode_prompt(tokenizer(None, 2), "AB") == [65, 66] and encode_prompt(tokenizer(None, 2), "") == [2]
    assert encode_prompt(tokenizer(0, 2), "A") == [0, 65]  # a BOS id of 0 counts too


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_space_at_the_end_of_a_prompt_is_left_to_the_first_token(kind, request):
    tokenizer = request.getfixturevalue(kind)
    assert encode_prompt(tokenizer, "def  ") == encode_prompt(tokenizer, "def ") + tokenizer.encode("a ")[1:]
    assert tokens_after(tokenizer, "def") is None
    ids = set(tokens_after(tokenizer, "def "))
    for i in random.Random(0).sample(range(3, tokenizer.vocab_size), 290):  # without <unk>, which has spaces
        if tokenizer.decode([i]).strip():  # not the byte of a space
            assert (i in ids) == tokenizer.decode([*tokenizer.encode("a"), i]).startswith("a "), i


def test_texts_are_printed_in_order_and_do_not_depend_on_other_prompts_or_samples(checkpoint, output):
    prompts = ("def add ", "x", "def add_b(x, y):", " ", "def add_b(x,  ")
    alone = [output(checkpoint, [prompt], max_new_tokens=9)[0] for prompt in prompts]
    assert all(text.startswith(prompt) and text.endswith("\n") for text, prompt in zip(alone, prompts, strict=True))
    for batch_size in (2, 16):
        assert output(checkpoint, prompts, max_new_tokens=9, batch_size=batch_size)[0] == "\n".join(alone)
    both, _ = output(checkpoint, ["x"], samples=2, max_new_tokens=9)
    assert both.startswith(alone[1] + "\n") and both != alone[1] + "\n" + alone[1]
    others, _ = output(checkpoint, ["def", "x"], samples=2, max_new_tokens=9, batch_size=3)
    assert others.startswith("def") and others.endswith("\n\n" + both)


def test_a_text_is_printed_while_it_is_generated_and_ends_before_a_stop_string(checkpoint, output, monkeypatch):
    writes, write = [], cli.write
    monkeypatch.setattr(cli, "write", lambda part: writes.append(part) or write(part))
    text, _ = output(checkpoint, ["def"], max_new_tokens=20, sampling=GREEDY)
    assert "".join(writes) == text and sum(map(bool, writes)) > 10
    stop = text[12:15]
    options = dict(max_new_tokens=20, sampling=GREEDY, stop=(stop, "not there"))
    before = text[: text.index(stop, 3)]
    assert output(checkpoint, ["def"], **options)[0] == before + "\n"
    lines = output(checkpoint, ["def", "x"], samples=2, batch_size=3, jsonl=True, **options)[0].splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0] == {"row": 0, "prompt": "def", "sample": 0, "text": before, "end": "stop"}
    assert [(one["prompt"], one["sample"]) for one in rows] == [("def", 0), ("def", 1), ("x", 0), ("x", 1)]


def test_what_the_decoding_step_says_comes_before_the_first_character(checkpoint, output, monkeypatch):
    events, decode_step = [], generate.decode_step
    monkeypatch.setattr(generate, "decode_step", lambda *a, **b: events.append("step") or decode_step(*a, **b))
    monkeypatch.setattr(cli, "write", events.append)
    output(checkpoint, ["def"], max_new_tokens=2)
    assert events[:2] == ["step", "step"] and "".join(events[2:]).startswith("def")


def test_a_start_opens_the_configuration_the_weights_and_the_tokenizer_once(checkpoint, monkeypatch, output):
    opened = []

    def record(module, name) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *a, **b: opened.append(Path(path).name) or real(path, *a, **b))

    record(io, "open")
    record(weights, "safe_open")
    output(find_checkpoint(checkpoint.parent), max_new_tokens=2)
    assert [opened.count(name) for name in ("config.json", "model.safetensors", "tokenizer.json")] == [1, 1, 1]


def test_errors_are_found_before_the_weights_are_read(checkpoint, monkeypatch, output):
    monkeypatch.setattr(load, "load_pretrained", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="context is 48 tokens"):
        output(checkpoint, ["☺" * 60])
    with pytest.raises(UserError, match="--dtype int8 needs a CPU, Numba, at most 16 sequences"):
        output(checkpoint, dtype="int8", batch_size=17)
    with pytest.raises(UserError, match="--system is for conversations"):
        output(checkpoint, system="x")


def test_out_of_memory_is_a_user_error_that_names_the_flag(checkpoint, monkeypatch, output):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(cli, "generate", unittest.mock.Mock(side_effect=error))
    with pytest.raises(UserError, match="smaller --batch-size"):
        output(checkpoint)


def test_matrices_are_quantized_for_int8_and_the_log_says_so(checkpoint, output):
    text, lines = output(checkpoint, max_new_tokens=5, dtype="int8")
    assert "in bfloat16 with int8 matrices, kernels: " in lines[0] and len(text) > 2
    loaded = load.load_decoder(load.open_model(checkpoint)[0], "cpu", "int8")
    assert all(layer.self_attn.qkv_proj.int8 is not None for layer in loaded.layers)


def test_tokenizer_template_and_ends_are_those_of_the_adapter_also_merged(checkpoint, tokenizer, tmp_path, output):
    decoder = load_pretrained(checkpoint)
    add_lora(decoder, {"r": 2, "lora_alpha": 4, "base_model_name_or_path": str(checkpoint)}, seed=1)
    bare, adapter, merged = (tmp_path / name for name in ("bare", "adapter", "merged"))
    for directory in (bare, adapter):
        save_pretrained(decoder, directory)
    add_chat_template(tokenizer).save(adapter)
    fields = {"do_sample": True, "temperature": 0.3, "eos_token_id": [5, tokenizer.eos_id]}
    (adapter / "generation_config.json").write_text(json.dumps(fields))
    merged.with_name("merged.new").mkdir()  # somebody's own
    load.merge(checkpoint, str(adapter), merged)
    assert merged.with_name("merged.new").is_dir()
    for directory, option in ((adapter, None), (checkpoint, str(adapter)), (merged, None)):
        _, opened, ends = load.open_model(directory, option)
        assert opened.chat_template is not None and ends == {5, tokenizer.eos_id}
        assert recommended_sampling(directory, option) == Sampling(temperature=0.3, top_k=50)
    _, opened, ends = load.open_model(checkpoint, str(bare))
    assert opened.chat_template is None and ends == {tokenizer.eos_id}
