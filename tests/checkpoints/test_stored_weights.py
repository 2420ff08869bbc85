"""How weights are read: exactly, without a second copy in memory, and only after their headers fit config.json."""

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import stored_weights
from checkpoints.pretrained import load_pretrained, load_weights, save_pretrained
from checkpoints.stored_weights import stored_dtype
from errors import UserError
from generation.weights import cast_weights
from model.config import ModelConfig
from model.decoder import Decoder


@pytest.mark.parametrize("chunk", [7, 1000])
def test_weights_read_in_chunks_of_any_size_are_bit_equal(make_decoder, tmp_path, monkeypatch, chunk):
    decoder = make_decoder(norm="derf", attention_bias=True, qk_norm=True, tie_word_embeddings=False)
    save_pretrained(decoder, tmp_path)
    monkeypatch.setattr(stored_weights, "CHUNK", chunk)
    trained = make_decoder(seed=6, norm="derf", attention_bias=True, qk_norm=True, tie_word_embeddings=False)
    load_weights(trained, tmp_path)
    for other in (load_pretrained(tmp_path), trained):
        assert other.state_dict().keys() == decoder.state_dict().keys()
        assert all(torch.equal(tensor, decoder.state_dict()[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_cast_while_they_are_read_are_those_that_are_cast_afterwards(make_decoder, tmp_path, stored, dtype):
    save_pretrained(make_decoder(attention_bias=True).to(stored), tmp_path)
    assert stored_dtype(tmp_path) == stored
    read, expected = load_pretrained(tmp_path, compute_dtype=dtype, cast=True), load_pretrained(tmp_path)
    cast_weights(expected, dtype)
    assert read.compute_dtype == dtype
    for name, tensor in expected.state_dict().items():
        found = read.state_dict()[name]
        assert found.dtype == tensor.dtype == (dtype if tensor.ndim == 2 else torch.float32)
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_of_o_proj_is_read_where_one_of_its_elements_is_neither_0_nor_minus_0(saved, edit_weights, dtype):
    directory, bias = saved(attention_bias=True), torch.full((48,), -0.0, dtype=dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for value in (-0.0, -smallest, 2.0):
        bias[-1] = value
        edit_weights(directory, lambda t: t.update({"model.layers.1.self_attn.o_proj.bias": bias}))
        assert load_pretrained(directory).config.attention_output_bias == (value != 0)


MEASURE = """
import ctypes, sys, torch
from checkpoints.pretrained import load_pretrained

def memory(field):  # VmRSS is the memory now, VmHWM its maximum
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

small, large = sys.argv[1:]
for dtype in (torch.float32, torch.bfloat16):
    load_pretrained(small, compute_dtype=dtype, cast=True)  # brings torch's code into memory
    ctypes.CDLL(None).malloc_trim(0)  # gives back what was freed, which could hide a copy
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the maximum starts again from the memory now
    before = memory("VmRSS")
    decoder = load_pretrained(large, compute_dtype=dtype, cast=True)
    print((memory("VmHWM") - before) / sum(parameter.nbytes for parameter in decoder.parameters()))
    del decoder
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc and frees memory as glibc does")
def test_loading_needs_no_memory_for_a_second_copy_of_the_weights(saved, tmp_path):
    config = ModelConfig(vocab_size=60_000, hidden_size=512, intermediate_size=4096, num_hidden_layers=2)  # 180 MB
    decoder = Decoder(config, seed=None)
    for parameter in decoder.parameters():
        parameter.data.fill_(0.5)
    save_pretrained(decoder, tmp_path)
    command = [sys.executable, "-c", MEASURE, saved(), tmp_path]  # a new process: nothing is freed that could be reused
    out = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    shares = list(map(float, out.split()))
    assert len(shares) == 2 and all(0.95 < share < 1.1 for share in shares), shares


def test_a_copy_of_a_tied_head_is_compared_in_chunks_with_the_embedding(saved, edit_weights, monkeypatch):
    monkeypatch.setattr(stored_weights, "CHUNK", 1000)
    directory = saved()
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].bfloat16().float()}))
    with pytest.raises(UserError, match="an lm_head that differs"):
        load_pretrained(directory)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_pretrained(directory)
    edit_weights(directory, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    with pytest.raises(UserError, match="an lm_head that differs"):
        load_pretrained(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**5},
        {"hidden_size": 48 * 10**5, "head_dim": 8},
        {"intermediate_size": 10**7},
        {"vocab_size": 10**7},
        {"head_dim": 10**6},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_size_that_no_tensor_has_is_refused_before_a_model_is_built(
    make_decoder, saved, edit_config, monkeypatch, changes
):
    directory, decoder = saved(attention_bias=True), make_decoder()
    edit_config(directory, **changes)
    monkeypatch.setattr("checkpoints.pretrained.Decoder", lambda *_, **__: pytest.fail("a model was built"))
    name, size = next(iter(changes.items()))
    size = size * 6 if name == "head_dim" else size
    before = time.process_time()
    with pytest.raises(UserError, match=rf"config\.json of .* says .*{name} {size}\b.* at most 97 rows or columns"):
        load_pretrained(directory)
    with pytest.raises(UserError, match=rf"{name.removeprefix('resolved_')}"):
        load_weights(decoder, directory)
    assert time.process_time() - before < 1


def small_llama(tied: bool) -> transformers.LlamaForCausalLM:
    torch.manual_seed(3)
    shape = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
    shape |= dict(max_position_embeddings=64, attention_bias=True, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model.model.layers[1].self_attn.o_proj.bias.data.fill_(0.1)
    return model


@torch.no_grad()
def test_a_base_model_without_a_head_is_read_when_the_embedding_is_the_head(tokens, tmp_path, relative):
    model = small_llama(tied=True)
    model.model.save_pretrained(tmp_path / "base")
    assert relative(load_pretrained(tmp_path / "base")(tokens), model(tokens).logits) <= 1e-6


def test_a_base_model_that_lacks_its_head_is_refused(tmp_path):
    small_llama(tied=False).model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no head \(lm_head\.weight\), and its config\.json has tie_word_emb"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/outside.safetensors", "..\\x", "C:x", "a/b", "."])
def test_an_index_may_only_name_files_beside_it(saved, tmp_path, name):
    directory = saved()
    (directory / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json names .*but shards must lie beside it"):
        load_pretrained(directory)


@pytest.mark.skipif(os.name == "nt", reason="Windows allows links to administrators only")
def test_files_may_be_links_as_in_the_cache_of_the_hub(make_decoder, saved, tmp_path, tokens):
    directory = saved()
    for name in ("model.safetensors", "config.json"):
        (directory / name).rename(tmp_path / f"blob-{name}")
        (directory / name).symlink_to(f"../blob-{name}")
    assert torch.equal(load_pretrained(directory)(tokens), make_decoder()(tokens))


def test_a_tensor_in_two_shards_is_refused(saved):
    directory = saved()
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    shutil.copy(directory / "model-1.safetensors", directory / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match=r"has .* in two of its files"):
        load_pretrained(directory)


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [48], "data_offsets": [0, 192]} | changes


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(shape=[48.0])}, "Expected `int`, got `float` - at .*shape"),
        ({"a": entry(shape=[-48])}, "a size or an offset is below 0"),
        ({"a": entry(shape=[0, 2**70], data_offsets=[0, 0])}, "Expected `int`, got `float` - at .*shape"),
        ({"a": entry(shape=[47])}, "a has other bytes than its shape says"),
        ({"a": entry(shape=[2**40])}, "a has other bytes than its shape says"),
        ({"a": entry(), "b": entry(data_offsets=[96, 288])}, "b has other bytes than its shape says"),
        ({"a": entry(), "b": entry(data_offsets=[192, 384])}, "it is truncated"),
        ({"a": entry(shape=[40], data_offsets=[0, 160])}, "it has more bytes than its tensors"),
        ({"a": {"dtype": "F32"}}, "missing required field"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(saved, header, words):
    directory, text = saved(), json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(192))
    with pytest.raises(UserError, match=rf"is not a complete safetensors file \(.*{words}"):
        load_pretrained(directory)


def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(saved):
    directory = saved()
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match=r"is a pointer of Git LFS.*`git lfs pull`"):
        load_pretrained(directory)


def test_a_file_that_becomes_shorter_while_it_is_read_is_a_user_error(saved, monkeypatch):
    directory = saved()
    path = directory / "model.safetensors"
    entries = stored_weights.read_entries(directory)
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(stored_weights, "read_entries", lambda _: entries)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read \(it has become shorter\)"):
        load_pretrained(directory)
