"""Checkpoint directories: what is written, and that it is read back exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.pretrained import load_pretrained, save_pretrained, unpacked_tensors
from errors import UserError
from model.config import NORMS, PLACEMENTS


def test_packed_matrices_are_unpacked_in_files_with_their_rows_in_order(make_decoder, saved):
    decoder = make_decoder(attention_bias=True)
    tensors = load_file(saved(attention_bias=True) / "model.safetensors")
    attention, mlp = decoder.layers[1].self_attn, decoder.layers[1].mlp
    q, k, v = attention.qkv_proj.weight.split((48, 16, 16))
    gate, up = mlp.gate_up_proj.weight.split(80)
    for name, tensor in {"q": q, "k": k, "v": v, "o": attention.o_proj.weight}.items():
        assert torch.equal(tensors[f"model.layers.1.self_attn.{name}_proj.weight"], tensor)
    for name, tensor in {"gate": gate, "up": up, "down": mlp.down_proj.weight}.items():
        assert torch.equal(tensors[f"model.layers.1.mlp.{name}_proj.weight"], tensor)
    assert torch.equal(tensors["model.layers.1.self_attn.v_proj.bias"], attention.qkv_proj.bias[64:])
    assert not tensors["model.layers.1.self_attn.o_proj.bias"].any()
    assert "lm_head.weight" not in tensors


FAMILY = {"rms": "llama", "layer": "stablelm"}
NORM_CHANGES = [
    *(({"norm": norm}, FAMILY.get(norm, "prenorm")) for norm in NORMS),
    ({"norm_bias": True}, "prenorm"),
    ({"norm": "layer", "norm_bias": False}, "stablelm"),
    ({"norm": "offset", "norm_bias": True}, "prenorm"),
    *(({"norm_placement": place}, "prenorm" if place != "pre" else "llama") for place in PLACEMENTS),
]


@pytest.mark.parametrize(("changes", "model_type"), NORM_CHANGES)
@torch.no_grad()
def test_a_model_with_any_norm_in_any_place_is_read_back_bit_equal(make_decoder, tokens, tmp_path, changes, model_type):
    decoder = make_decoder(**changes).eval()
    save_pretrained(decoder, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    again = load_pretrained(tmp_path).eval()
    assert again.config == decoder.config
    assert again.state_dict().keys() == decoder.state_dict().keys()
    assert all(torch.equal(tensor, decoder.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(again(tokens), decoder(tokens))


def test_weights_of_different_dtypes_in_one_file_are_read_exactly(saved, edit_weights):
    directory = saved()
    halved = [f"model.layers.{i}.{name}_proj.weight" for i in range(3) for name in ("self_attn.q", "mlp.down")]
    edit_weights(directory, lambda t: t.update({name: t[name].bfloat16() for name in halved}))
    tensors, decoder = load_file(directory / "model.safetensors"), load_pretrained(directory)
    for name, tensor in unpacked_tensors(decoder.state_dict(), decoder.config).items():
        assert torch.equal(tensor.float(), tensors[name].float())
    assert decoder.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert decoder.layers[0].self_attn.qkv_proj.weight.dtype == torch.float32


def test_copies_of_the_head_must_equal_the_tied_embedding_and_old_rotary_tables_are_ignored(saved, edit_weights):
    directory = saved()
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_weights(directory, lambda t: t.update(more | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_pretrained(directory).lm_head is None
    edit_weights(directory, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match="a head beside its tied embedding"):
        load_pretrained(directory)
