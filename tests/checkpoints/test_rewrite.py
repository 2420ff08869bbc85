"""`python -m checkpoints.rewrite IN OUT --dtype`: what the copy has, and that no half-written one is ever left."""

import json
import runpy
import sys

import pytest
import torch
import transformers

from checkpoints import rewrite
from checkpoints.pretrained import load_pretrained
from errors import UserError


@torch.no_grad()
def test_the_copy_has_other_weights_and_everything_else_as_it_was(tmp_path, tokens, monkeypatch):
    torch.manual_seed(4)
    shape = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
    config = transformers.LlamaConfig(**shape, attention_bias=True, max_position_embeddings=64)
    source, out = tmp_path / "llama", tmp_path / "new" / "half"
    transformers.LlamaForCausalLM(config).save_pretrained(source, max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    side_files = {"tokenizer.model": b"pieces", "tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
    for name, content in (side_files | {"state.json": b"{}", "pytorch_model.bin": b"no"}).items():
        (source / name).write_bytes(content)
    monkeypatch.delitem(sys.modules, "checkpoints.rewrite")  # runpy warns of an imported module
    monkeypatch.setattr(sys, "argv", ["rewrite", str(source), str(out), "--dtype", "bfloat16"])
    runpy.run_module("checkpoints.rewrite", run_name="__main__", alter_sys=False)
    expected = {*side_files, "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == expected and list(out.parent.iterdir()) == [out]
    assert all((out / name).read_bytes() == content for name, content in side_files.items())
    before, after = (json.loads((directory / "config.json").read_text()) for directory in (source, out))
    assert after == before | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    model = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    copy = transformers.LlamaForCausalLM.from_pretrained(out, dtype="auto")
    assert copy.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor) and tensor.dtype == torch.bfloat16
    assert torch.equal(load_pretrained(out)(tokens), load_pretrained(source).to(torch.bfloat16)(tokens))


def test_nothing_that_exists_is_overwritten(saved, tmp_path):
    directory = saved()
    (tmp_path / "left.new").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for out in (directory, directory / "config.json", tmp_path / "left"):
        with pytest.raises(UserError, match="nothing is overwritten"):
            rewrite.rewrite(str(directory), out, "bfloat16")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_copy_that_is_not_complete_leaves_nothing(saved, tmp_path, monkeypatch, failure):
    directory = saved()

    def fail(*_, **__):
        assert (tmp_path / "out.new").is_dir() and not (tmp_path / "out").exists()
        raise failure

    monkeypatch.setattr(rewrite, "save_tensors", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        rewrite.rewrite(str(directory), tmp_path / "out", "bfloat16")
    assert list(tmp_path.iterdir()) == [directory]


def test_what_float16_cannot_represent_is_refused(saved, edit_weights, tmp_path):
    directory = saved()
    edit_weights(directory, lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 4].fill_(1e6))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has inf or NaN in float16"):
        rewrite.rewrite(str(directory), tmp_path / "out", "float16")
    rewrite.rewrite(str(directory), tmp_path / "out", "bfloat16")
