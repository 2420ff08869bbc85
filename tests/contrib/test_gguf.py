"""GGUF files: what they hold computes the same function by llama.cpp's conventions, and errors leave nothing behind.

`llama_cpp_logits` follows llama.cpp's source (src/models/llama.cpp, qwen3.cpp, stablelm.cpp) in float64. llama.cpp
itself is asked in test_llama_cpp.py and test_same.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.pretrained import load_pretrained, save_pretrained
from data.tokenizer import load_tokenizer
from errors import UserError
from model.lora import add_lora
from tests.checkpoints.test_transformers import LLAMA3
from tests.conftest import randomize_trained, run_python

gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install gguf")
from contrib.gguf_file import DTYPES, write_gguf  # noqa: E402 - it imports gguf
from tests.contrib.test_llama_cpp import Vocabulary  # noqa: E402


def read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Metadata, and tensors in float64."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def llama_cpp_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) of a GGUF file by llama.cpp's conventions: metadata with its defaults, pairs of the rotation."""
    fields, arrays = read(path)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    arch = fields["general.architecture"]
    get = lambda key: fields[f"{arch}.{key}"]  # noqa: E731
    heads, kv_heads, width = get("attention.head_count"), get("attention.head_count_kv"), get("attention.key_length")
    rms = arch != "stablelm"
    eps = get("attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon")

    def norm(x, name):
        centered = x if rms else x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"]
        return y if rms else y + tensors[f"{name}.bias"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    positions = torch.arange(len(ids), dtype=torch.float64)
    frequency = get("rope.freq_base") ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(positions, frequency / tensors.get("rope_freqs.weight", 1))[:, None]  # (T, 1, d/2)
    assert get("rope.dimension_count") == width

    def rotate(x):  # (T, H, d)
        a, b = (x[..., 0::2], x[..., 1::2]) if arch == "llama" else x.chunk(2, -1)
        a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.stack([a, b], -1).flatten(-2) if arch == "llama" else torch.cat([a, b], -1)

    x = tensors["token_embd.weight"][ids]
    mask = torch.ones(len(ids), len(ids)).tril().log().double()
    for i in range(get("block_count")):
        block = f"blk.{i}."
        h = norm(x, block + "attn_norm")
        q, k, v = (
            linear(h, f"{block}attn_{n}").unflatten(-1, (count, width))
            for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if arch == "qwen3":
            q, k = norm(q, block + "attn_q_norm"), norm(k, block + "attn_k_norm")
        q, k = rotate(q), rotate(k).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / width**0.5 + mask
        values = v.repeat_interleave(heads // kv_heads, 1)
        x = x + linear(torch.einsum("hts,shd->thd", scores.softmax(-1), values).flatten(1), block + "attn_output")
        h = norm(x, block + "ffn_norm")
        gate = linear(h, block + "ffn_gate")
        x = x + linear(gate * gate.sigmoid() * linear(h, block + "ffn_up"), block + "ffn_down")
    if arch == "stablelm":
        assert "output.weight" in tensors  # that architecture has no tied head
    return norm(x, "output_norm") @ tensors.get("output.weight", tensors["token_embd.weight"]).T


CASES = {
    "llama, all biases, tied": {"attention_bias": True, "attention_output_bias": True, "tie_word_embeddings": True},
    "llama, wide heads, scaled rope": {"head_dim": 20, "rope_scaling": LLAMA3},
    "qwen3, qkv biases": {"qk_norm": True, "attention_bias": True, "rope_theta": 500.0},
    "stablelm, tied, qkv biases": {"norm": "layer", "attention_bias": True, "tie_word_embeddings": True},
    "stablelm, no norm bias": {"norm": "layer", "norm_bias": False, "norm_eps": 1e-3},
}


@torch.no_grad()
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_file_computes_the_same_logits_by_the_conventions_of_llama_cpp(chat_model, relative, tmp_path, changes):
    decoder, directory = chat_model(**{"tie_word_embeddings": False} | changes)
    write_gguf(directory, tmp_path / "model.gguf")
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2))
    assert relative(decoder(ids[None])[0], llama_cpp_logits(tmp_path / "model.gguf", ids.tolist())) <= 2e-6


@pytest.mark.parametrize("stored, dtype", [("float32", "float16"), ("bfloat16", "float32"), ("bfloat16", "auto")])
def test_matrices_have_the_dtype_asked_for_or_stored_and_the_rest_is_float32(chat_model, tmp_path, dtype, stored):
    decoder, directory = chat_model(dtype=getattr(torch, stored), attention_bias=True)
    write_gguf(directory, tmp_path / "model.gguf", dtype)
    dtype = stored if dtype == "auto" else dtype
    fields, tensors = read(tmp_path / "model.gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert {types[name] for name, tensor in tensors.items() if tensor.ndim == 2} == {DTYPES[dtype]}
    assert {types[name] for name, tensor in tensors.items() if tensor.ndim == 1} == {"F32"}
    assert gguf.LlamaFileType(fields["general.file_type"]).name.endswith(DTYPES[dtype])
    expected = decoder.embed_tokens.weight.to(getattr(torch, dtype)).double()
    assert torch.equal(torch.from_numpy(tensors["token_embd.weight"]), expected)


def test_matrices_in_8_bits_are_within_half_a_step_of_their_block_and_other_rows_are_refused(chat_model, tmp_path):
    decoder, directory = chat_model(hidden_size=96, intermediate_size=96)
    write_gguf(directory, tmp_path / "model.gguf", "q8_0")
    fields, tensors = read(tmp_path / "model.gguf")
    assert gguf.LlamaFileType(fields["general.file_type"]).name == "MOSTLY_Q8_0"
    blocks = decoder.layers[0].mlp.down_proj.weight.double().unflatten(1, (-1, 32))
    quantized = torch.from_numpy(tensors["blk.0.ffn_down.weight"]).view_as(blocks)
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    assert (quantized - blocks).abs().max() > 0 and ((quantized - blocks).abs() <= 0.6 * steps).all()
    _, directory = chat_model(hidden_size=96, intermediate_size=100)
    with pytest.raises(UserError, match=r"ffn_down.* rows that --dtype q8_0 cannot divide by 32"):
        write_gguf(directory, tmp_path / "other.gguf", "q8_0")


def test_metadata_describe_the_tokenizer(chat_model, tmp_path):
    _, directory = chat_model()
    (directory / "generation_config.json").write_text('{"eos_token_id": [-5, 2, 7, 9, 4294967296]}')
    (directory / "chat_template.jinja").write_text("{{ messages }} ü", encoding="utf-8")
    write_gguf(directory, tmp_path / "model.gguf", name="mine")
    fields, _ = read(tmp_path / "model.gguf")
    words = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if "tokenizer.ggml" in key}
    tokens, scores, types = (words.pop(key) for key in ("tokens", "scores", "token_type"))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 7}
    added = {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": False}
    assert words == {"model": "llama", "pre": "default"} | added | ids
    assert (fields["general.name"], fields["tokenizer.chat_template"]) == ("mine", "{{ messages }} ü")
    vocabulary = Vocabulary(load_tokenizer(directory), 300)
    expected = [vocabulary[name] for name in ("token_list", "token_scores", "token_types")]
    assert [tokens, scores, types] == [expected[0], pytest.approx(expected[1]), expected[2]]


REFUSED = {
    "placement": ({"norm": "layer", "norm_placement": "post"}, "norm = layer, .*norm_placement = post; it"),
    "own norm": ({"norm": "dyt", "qk_norm": True}, "norm = dyt, .*qk_norm = True; it has llama, qwen3, stablelm"),
    "several": ({"norm": "dyt", "mlp": "relu"}, "norm = dyt, .*mlp = relu; it has llama"),
    "bias": ({"norm": "rms", "norm_bias": True}, "norm = rms, norm_bias = True; it has llama"),
    "output bias": ({"qk_norm": True, "attention_bias": True, "attention_output_bias": True}, "qwen3 has no bias"),
    "scaled rope": ({"norm": "layer", "rope_scaling": LLAMA3}, r"scaled \(stablelm, llama3\)"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_llama_cpp_cannot_compute_is_refused(chat_model, tmp_path, changes, words):
    _, directory = chat_model(**changes)
    with pytest.raises(UserError, match=words):
        write_gguf(directory, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_that_float16_cannot_hold_are_refused_and_nothing_incomplete_is_left(chat_model, tmp_path):
    decoder, directory = chat_model()
    decoder.layers[1].mlp.down_proj.weight.data[3, 4] = 1e5
    save_pretrained(decoder, directory)
    with pytest.raises(UserError, match=r"blk.1.ffn_down.weight .* float16 .*1e\+05.*--dtype bfloat16"):
        write_gguf(directory, tmp_path / "model.gguf", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    write_gguf(directory, tmp_path / "model.gguf", "bfloat16")
    with pytest.raises(UserError, match="is not overwritten"):
        write_gguf(directory, tmp_path / "model.gguf")


def test_an_adapter_is_written_as_the_model_with_it_merged(chat_model, relative, tmp_path):
    decoder, directory = chat_model()
    fields = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": str(directory)}
    adapted = randomize_trained(add_lora(load_pretrained(directory), fields, 1))
    save_pretrained(adapted, tmp_path / "adapter")
    write_gguf(tmp_path / "adapter", tmp_path / "model.gguf")
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2))
    logits = llama_cpp_logits(tmp_path / "model.gguf", ids.tolist())
    with torch.no_grad():
        assert relative(adapted(ids[None])[0], logits) <= 2e-6 < relative(decoder(ids[None])[0], logits)


def test_the_command_takes_a_run_folder(chat_model, tmp_path):
    _, directory = chat_model()
    directory.rename(tmp_path / "best")
    (tmp_path / "best" / "state.json").write_text("{}")  # the last file of a save
    done = run_python("-m", "contrib.gguf", tmp_path, tmp_path / "out.gguf", "--dtype", "float16")
    assert done.returncode == 0 and done.stdout == f"written: {tmp_path / 'out.gguf'}\n"
    fields = read(tmp_path / "out.gguf")[0]
    assert fields["general.name"] == tmp_path.name and fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
