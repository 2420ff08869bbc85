"""Tensors and files that cannot be loaded: each is a one-line error."""

import json

import pytest
import torch

from checkpoints.pretrained import load_pretrained, load_weights
from errors import UserError


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named_up_to_a_limit(saved, edit_weights):
    directory = saved()

    def damage(tensors):
        for name in [name for name in tensors if "q_proj" in name or "gate_proj" in name or "layernorm" in name]:
            del tensors[name]
        tensors["model.extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(7)

    edit_weights(directory, damage)
    with pytest.raises(UserError) as refusal:
        load_pretrained(directory)
    message = str(refusal.value)
    assert "missing: model.layers.0.input_layernorm.weight, " in message
    assert "and 4 more; unexpected: model.extra; " in message
    assert "wrong shape: model.norm.weight is (7,) instead of (48,)." in message


@pytest.mark.parametrize("name", ["stray", "model.layers.0.mlp.norm.weight"])
def test_a_tensor_with_an_unknown_name_is_an_error_and_not_dropped_as_a_norm(make_decoder, saved, name, edit_weights):
    directory = saved()
    edit_weights(directory, lambda t: t.update({name: torch.zeros(2)}))
    for load in (load_pretrained, lambda directory: load_weights(make_decoder(norm="layer"), directory)):
        with pytest.raises(UserError, match=f"unexpected: {name}"):
            load(directory)


@pytest.mark.parametrize("kept", [0, 4, 200, 20_000, -1])
def test_truncated_weights_are_a_user_error(saved, kept):
    directory = saved()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        load_pretrained(directory)


def test_quantized_tensors_are_refused(saved, edit_weights):
    directory = saved()
    edit_weights(directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has type I8"):
        load_pretrained(directory)


def test_pickled_weights_are_refused(saved):
    directory = saved()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert them to safetensors"):
        load_pretrained(directory)


def test_a_missing_or_broken_file_is_a_user_error(saved, tmp_path):
    directory = saved()
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_pretrained(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks model-1\.safetensors, model-2\.safetensors"):
        load_pretrained(directory)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"index\.json is not readable JSON"):
        load_pretrained(directory)
    for content, words in {
        "{": "is not readable JSON",
        "[]": "Expected `object`, got `array`",
        "\udcff": "is not readable JSON",
    }.items():
        (directory / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=words):
            load_pretrained(directory)
    (directory / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_pretrained(directory)
    with pytest.raises(UserError, match="is not a directory"):
        load_pretrained(tmp_path / "nowhere")
