"""What generate.py prints: texts in order, log lines, and errors before the weights are read."""

import io
import json
from pathlib import Path

import pytest
import torch

from checkpoints import weights
from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained, save_pretrained
from errors import UserError
from generation import session
from generation.settings import Sampling, Settings, recommended_sampling
from model.config import ModelConfig
from model.decoder import Decoder
from model.lora import add_lora

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, decoder, tokenizer):
    directory = tmp_path_factory.mktemp("run") / "best"
    save_pretrained(decoder, directory, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(directory)
    (directory / "state.json").write_text("{}")  # the last file of a save
    return directory


def output(checkpoint, prompts=("x",), **settings) -> tuple[str, list[str]]:
    """All text that `run` writes, and the lines it logs."""
    written, lines = [], []
    session.run(Settings(**settings), checkpoint, prompts, written.append, lines.append)
    return "".join(written), lines


def test_texts_are_printed_in_order_with_blank_lines_between_and_equal_each_text_alone(checkpoint):
    prompts = ("def add", "x", "def add_b(x, y):")
    alone = [output(checkpoint, [prompt], max_new_tokens=9)[0] for prompt in prompts]
    together, _ = output(checkpoint, prompts, max_new_tokens=9)
    assert together == "\n".join(alone)
    assert all(text.startswith(prompt) and text.endswith("\n") for text, prompt in zip(alone, prompts, strict=True))
    assert output(checkpoint, prompts, max_new_tokens=9, batch_size=2)[0] == together


def test_samples_of_a_prompt_differ_and_do_not_depend_on_other_prompts_or_samples(checkpoint):
    first, _ = output(checkpoint, max_new_tokens=9)
    both, _ = output(checkpoint, samples=2, max_new_tokens=9)
    others, _ = output(checkpoint, ["def", "x"], samples=2, max_new_tokens=9, batch_size=3)
    assert both.startswith(first + "\n") and both != first + "\n" + first
    assert others.startswith("def") and others.endswith("\n\n" + both)


def test_a_text_begins_with_its_prompt_also_where_that_ends_with_a_space(checkpoint):
    prompts = ["def add ", "x", " ", "def add_b(x,  "]
    alone = [output(checkpoint, [prompt], max_new_tokens=5, sampling=GREEDY)[0] for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(alone, prompts, strict=True))
    assert output(checkpoint, prompts, max_new_tokens=5, sampling=GREEDY)[0] == "\n".join(alone)


def test_a_text_is_printed_as_it_is_generated_and_ends_before_a_stop_string(checkpoint):
    writes = []
    session.run(Settings(max_new_tokens=20, sampling=GREEDY), checkpoint, ["def"], writes.append, lambda line: None)
    text = "".join(writes)
    assert sum(map(bool, writes)) > 10
    stop = text[12:15]
    assert output(checkpoint, ["def"], max_new_tokens=20, sampling=GREEDY, stop=(stop, "not there"))[0] == (
        text[: text.index(stop, 3)] + "\n"
    )


def test_a_start_opens_the_configuration_the_weights_and_the_tokenizer_once(checkpoint, monkeypatch):
    opened = []

    def record(module, name) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *a, **b: opened.append(Path(path).name) or real(path, *a, **b))

    record(io, "open")
    record(weights, "safe_open")
    output(find_checkpoint(checkpoint.parent), max_new_tokens=2)
    assert [opened.count(name) for name in ("config.json", "model.safetensors", "tokenizer.json")] == [1, 1, 1]


def test_errors_are_found_before_the_weights_are_read(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(session, "load_pretrained", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="context is 48 tokens"):
        output(checkpoint, ["☺" * 60])
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(UserError, match=r"there is no .*tokenizer"):
        output(tmp_path)


@pytest.mark.parametrize("place", ["load_pretrained", "generate"])
def test_out_of_memory_is_a_user_error_that_names_the_flag(checkpoint, monkeypatch, place):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(session, place, fail)
    with pytest.raises(UserError, match="smaller --batch-size"):
        output(checkpoint)


def test_matrices_are_quantized_for_int8_and_the_log_says_so(checkpoint):
    text, lines = output(checkpoint, max_new_tokens=5, device="cpu", dtype="int8")
    assert "in bfloat16 with int8 matrices, kernels: " in lines[0] and len(text) > 2
    loaded = session.load_decoder(session.open_checkpoint(checkpoint), Settings(device="cpu", dtype="int8"))
    assert all(layer.self_attn.qkv_proj.int8 is not None for layer in loaded.layers)


@pytest.mark.parametrize(("model", "settings"), [({}, {"batch_size": 17}), ({"norm": "dyt"}, {})], ids=str)
def test_int8_is_refused_before_the_weights_are_read_where_no_step_uses_it(
    monkeypatch, tmp_path, tokenizer, model, settings
):
    save_pretrained(Decoder(ModelConfig(**({"vocab_size": 320, "hidden_size": 32} | model))), tmp_path)
    tokenizer.save(tmp_path)
    monkeypatch.setattr(session, "load_pretrained", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="--dtype int8 needs a CPU, a --batch-size"):
        output(tmp_path, **({"device": "cpu", "dtype": "int8"} | settings))


def test_tokenizer_template_and_ends_are_those_of_the_adapter_alone_beside_its_model_and_merged(
    checkpoint, tokenizer, tmp_path
):
    decoder = load_pretrained(checkpoint)
    add_lora(decoder, {"r": 2, "lora_alpha": 4, "base_model_name_or_path": str(checkpoint)}, seed=1)
    bare, adapter, merged = (tmp_path / name for name in ("bare", "adapter", "merged"))
    for directory in (bare, adapter):
        save_pretrained(decoder, directory)
    tokenizer.for_conversations().save(adapter)
    fields = {"do_sample": True, "temperature": 0.3, "eos_token_id": [5, tokenizer.eos_id]}
    (adapter / "generation_config.json").write_text(json.dumps(fields))
    session.run(Settings(merge=merged, adapter=str(adapter)), checkpoint, [])
    for directory, option in ((adapter, None), (checkpoint, str(adapter)), (merged, None)):
        _, found, ends = session.open_directory(directory, option)
        assert found.chat_template is not None and ends == {5, tokenizer.eos_id}
        assert recommended_sampling(directory, option) == Sampling(temperature=0.3, top_k=50)
    _, found, ends = session.open_directory(checkpoint, str(bare))
    assert found.chat_template is None and ends == {tokenizer.eos_id}
