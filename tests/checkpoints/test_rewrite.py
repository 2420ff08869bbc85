"""`python -m checkpoints.rewrite IN OUT --dtype`: what the copy has, and that no half-written one is ever left."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import rewrite
from checkpoints.pretrained import load_pretrained
from checkpoints.rewrite import rewrite as rewrite_checkpoint
from errors import UserError

SIDE_FILES = {
    "tokenizer.model": b"pieces",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"add_bos_token": false}',
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
}


@pytest.fixture
def qwen(tmp_path) -> Path:
    """A sharded Qwen2 checkpoint that transformers wrote, with tokenizer files and a training state beside it."""
    torch.manual_seed(4)
    shape = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
    config = transformers.Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=64)
    model = transformers.Qwen2ForCausalLM(config)
    model.generation_config.max_length = 77
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1 + 0.05)
    directory = tmp_path / "qwen"
    model.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    for name, content in (SIDE_FILES | {"state.json": b"{}", "pytorch_model.bin": b"no"}).items():
        (directory / name).write_bytes(content)
    return directory


def command(monkeypatch, *arguments: object) -> None:
    """Run the module as a program, in this process."""
    monkeypatch.delitem(sys.modules, "checkpoints.rewrite", raising=False)  # runpy warns of an imported module
    monkeypatch.setattr(sys, "argv", ["rewrite", *map(str, arguments)])
    runpy.run_module("checkpoints.rewrite", run_name="__main__", alter_sys=False)


@torch.no_grad()
def test_the_copy_has_other_weights_and_everything_else_as_it_was(qwen, tmp_path, tokens, monkeypatch, capsys):
    out = tmp_path / "new" / "half"
    command(monkeypatch, qwen, out, "--dtype", "bfloat16")
    expected = {*SIDE_FILES, "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == expected and list(out.parent.iterdir()) == [out]
    for name in (*SIDE_FILES, "generation_config.json"):
        assert (out / name).read_bytes() == (qwen / name).read_bytes()
    before, after = (json.loads((directory / "config.json").read_text()) for directory in (qwen, out))
    assert after == before | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    model = transformers.Qwen2ForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    copy = transformers.Qwen2ForCausalLM.from_pretrained(out, dtype="auto")
    assert copy.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor) and tensor.dtype == torch.bfloat16
    assert torch.equal(load_pretrained(out)(tokens), load_pretrained(qwen).to(torch.bfloat16)(tokens))
    megabytes = (out / "model.safetensors").stat().st_size / 1e6
    assert capsys.readouterr().out == f"{out}: {megabytes:,.1f} MB of bfloat16 weights\n"


def test_bfloat16_written_as_float32_is_exact(saved, tmp_path):
    directory = saved()
    rewrite_checkpoint(str(directory), tmp_path / "half", torch.bfloat16)
    rewrite_checkpoint(str(tmp_path / "half"), tmp_path / "full", torch.float32)
    half, full = (load_pretrained(tmp_path / name).state_dict() for name in ("half", "full"))
    assert all(torch.equal(full[name], tensor.float()) for name, tensor in half.items())
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_that_exists_is_overwritten(saved, tmp_path, monkeypatch, capsys):
    directory = saved()
    (tmp_path / "empty").mkdir()
    (tmp_path / "left.new").mkdir()
    before = contents(tmp_path)
    for out in (directory, tmp_path / "empty", directory / "config.json", tmp_path / "left"):
        with pytest.raises(SystemExit) as end:
            command(monkeypatch, directory, out, "--dtype", "bfloat16")
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ") and "nothing is overwritten" in line
    assert contents(tmp_path) == before
    assert (tmp_path / "empty").is_dir() and (tmp_path / "left.new").is_dir() and not (tmp_path / "left").exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["copy_side_files", "save_tensors", "fsync_directory"])
def test_a_copy_that_is_not_complete_leaves_nothing(saved, tmp_path, monkeypatch, failure, step):
    directory = saved()
    before, called = contents(tmp_path), []

    def fail(*_, **__):
        assert (tmp_path / "out.new").is_dir() and not (tmp_path / "out").exists()
        called.append(step)
        raise failure

    monkeypatch.setattr(rewrite, step, fail)
    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else UserError) as error:
        rewrite_checkpoint(str(directory), tmp_path / "out", torch.bfloat16)
    assert called and contents(tmp_path) == before and not (tmp_path / "out.new").exists()
    assert failure is KeyboardInterrupt or "out could not be written ([Errno 28]" in str(error.value)


def test_what_float16_cannot_represent_is_refused(saved, edit_weights, tmp_path):
    directory = saved()
    edit_weights(directory, lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 4].fill_(1e6))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has values that torch\.float16 cannot"):
        rewrite_checkpoint(str(directory), tmp_path / "out", torch.float16)
    rewrite_checkpoint(str(directory), tmp_path / "out", torch.bfloat16)


def test_a_checkpoint_that_does_not_match_its_configuration_is_refused(saved, edit_weights, tmp_path):
    directory = saved()
    edit_weights(directory, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        rewrite_checkpoint(str(directory), tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_weights_can_be_read_by_others(saved, tmp_path):
    before = os.umask(0o022)
    try:
        directory = saved()
        rewrite_checkpoint(str(directory), tmp_path / "out", torch.bfloat16)
        for folder in (directory, tmp_path / "out"):
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
        os.umask(0o077)
        rewrite_checkpoint(str(directory), tmp_path / "private", torch.bfloat16)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "private").iterdir()} == {0o600}
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no devices in folders")
def test_a_device_beside_the_weights_is_not_copied(saved, tmp_path):
    directory = saved()
    (directory / "null.json").symlink_to("/dev/null")
    rewrite_checkpoint(str(directory), tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out" / "null.json").exists()
