"""What a RUN argument means (the Hub is a local server), and how weights are read: exactly and only if they fit."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints.find import find_checkpoint, find_files, newest_run
from checkpoints.pretrained import load_pretrained, open_checkpoint, save_pretrained, unpacked_tensors
from errors import UserError
from generation.load import find_eos_ids
from tests.conftest import edit_tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def checkpoint(directory, **config):
    """A directory with the files by which a complete checkpoint is recognized."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "state.json").write_text("{}")
    return directory


def test_a_run_folder_means_its_best_checkpoint(tmp_path):
    order = ["best", "best.new", "best.old", "last", "last.new", "last.old"]
    for name in order:
        checkpoint(tmp_path / "run" / name)
    for name in order:
        assert find_checkpoint(tmp_path / "run").name == name
        (tmp_path / "run" / name / "state.json").unlink()  # as in an interrupted save
    with pytest.raises(UserError, match=r"has no config\.json, best/ or last/"):
        find_checkpoint(tmp_path / "run")


def test_the_newest_run_is_the_one_that_saved_a_checkpoint_last(tmp_path):
    with pytest.raises(UserError, match=r"there is no run in .* `python train.py`"):
        newest_run(tmp_path)
    for age, (run, save) in enumerate([("c", "best"), ("a", "last.new"), ("b", "last.old"), ("a", "best")]):
        os.utime(checkpoint(tmp_path / run / save), (2_000_000_000 - age, 2_000_000_000 - age))
    (tmp_path / "a-file").write_text("x")
    assert newest_run(tmp_path) == tmp_path / "c"
    os.utime(tmp_path / "b" / "last.old", (2_100_000_000, 2_100_000_000))
    assert newest_run(tmp_path) == tmp_path / "b"
    newest = ", ".join(str(tmp_path / run) for run in "bca")
    with pytest.raises(UserError, match=f"does not exist; .* Newest runs: {newest}"):
        find_checkpoint(tmp_path / "d")
    with pytest.raises(UserError, match=rf"does not exist; .* Did you mean {tmp_path / 'a'}\?"):
        find_checkpoint(tmp_path / "aa")


def test_eos_ids_are_those_of_the_tokenizer_and_of_generation_config_or_else_of_config(tmp_path):
    directory = checkpoint(tmp_path / "model", eos_token_id=7)
    assert find_eos_ids(find_files(directory), 2) == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert find_eos_ids(find_files(directory), 5) == {5, 6}
    (directory / "generation_config.json").write_text("{}")
    assert find_eos_ids(find_files(directory), 7) == {7}


@pytest.fixture
def model(hub, stories260k_directory) -> dict[str, bytes]:
    """The files of `org/stories`, which the server has."""
    files = {path.name: path.read_bytes() for path in stories260k_directory.iterdir()}
    files |= {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": 2}'}
    unwanted = "pytorch_model.bin consolidated.safetensors original/params.json onnx/model.onnx README.md".split()
    published = files | dict.fromkeys(unwanted, b"not needed")
    siblings = [{"rfilename": file, "size": len(content)} for file, content in published.items()]
    tree = [{"type": "file", "path": file, "size": len(content), "oid": "0"} for file, content in published.items()]
    info = json.dumps({"id": "org/stories", "sha": hub.commit, "siblings": siblings}).encode()
    hub.files |= {f"/api/models/org/stories/revision/{revision}": info for revision in ("main", "v2", hub.commit)}
    hub.files |= {f"/api/models/org/stories/tree/{hub.commit}": json.dumps(tree).encode()}
    hub.files |= {f"/org/stories/resolve/{hub.commit}/{file}": content for file, content in published.items()}
    return files


def test_only_the_needed_files_of_a_model_are_downloaded_once_and_used_offline(tmp_path, hub, model):
    snapshot = tmp_path / "hub" / "models--org--stories" / "snapshots" / hub.commit
    assert find_checkpoint("org/stories") == find_checkpoint("org/stories@v2") == snapshot
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == model
    downloads = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert sorted(downloads) == sorted(f"/org/stories/resolve/{hub.commit}/{name}" for name in model)
    hub.stop()
    assert find_checkpoint("org/stories") == snapshot
    with pytest.raises(UserError, match=r"^org/other is no local path, and .* gives no model: .*connection"):
        find_checkpoint("org/other")


def test_what_the_hub_refuses_is_one_line_with_its_reason(hub, model):
    hub.errors = {
        "/api/models/org/none/revision/main": (404, "RepoNotFound"),
        "/api/models/org/closed/revision/main": (403, "GatedRepo"),
        "/api/models/org/stories/revision/v9": (404, "RevisionNotFound"),
    }
    names = {"org/none": "404", "org/closed": "403", "org/stories@v9": "404", "org/a--b": "Cannot have -- or .."}
    for name, reason in names.items():
        with pytest.raises(UserError, match=f"^{name.partition('@')[0]} is no local path.*{reason}"):
            find_checkpoint(name)
    assert {path for _, path in hub.asked if path.startswith("/api/models/")} == {*hub.errors}


def test_a_mistyped_path_is_no_request(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("runs/tiny-rms").mkdir(parents=True)
    for name in ("runs/stories", "other/stories", "./org/stories", "org/stories/best", "stories"):
        with pytest.raises(UserError, match="does not exist"):
            find_checkpoint(name)
    with pytest.raises(UserError, match=r"does not exist; did you mean runs/tiny-rms\?"):
        find_checkpoint("run/tiny-rms")
    assert not hub.asked


@pytest.mark.parametrize("dtype", DTYPES[1:3])
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_cast_while_they_are_read_are_those_that_are_cast_afterwards(make_decoder, tmp_path, stored, dtype):
    save_pretrained(make_decoder(attention_bias=True).to(stored), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype == stored
    read, expected = load_pretrained(checkpoint, compute_dtype=dtype, cast=True), load_pretrained(tmp_path)
    assert read.compute_dtype == dtype
    for name, tensor in expected.state_dict().items():
        ours, cast = read.state_dict()[name], tensor.to(dtype if tensor.ndim == 2 else torch.float32)
        assert ours.dtype == cast.dtype and torch.equal(ours, cast)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_o_proj_is_read_where_one_of_its_elements_is_neither_0_nor_minus_0(saved, dtype):
    directory, bias = saved(attention_bias=True), torch.full((48,), -0.0, dtype=dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for value in (-0.0, -smallest, 2.0):
        bias[-1] = value
        edit_tensors(directory, lambda t: t.update({"model.layers.1.self_attn.o_proj.bias": bias}))
        assert load_pretrained(directory).config.attention_output_bias == (value != 0)


def test_loaded_weights_do_not_change_with_their_file(make_decoder, saved):
    directory = saved()
    decoder = load_pretrained(directory)
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(10_000))
    for name, tensor in make_decoder().state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)


@torch.no_grad()
def test_a_base_model_without_a_head_is_read_when_the_embedding_is_the_head(tokens, tmp_path, relative):
    shape = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=64, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.save_pretrained(tmp_path)
    assert relative(load_pretrained(tmp_path)(tokens), model(tokens).logits) <= 1e-6
    model.save_pretrained(tmp_path)  # and the other way round, the head alone
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert relative(load_pretrained(tmp_path)(tokens), model(tokens).logits) <= 1e-6


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/outside.safetensors", "..\\x", "C:x", ".", "pipe"])
def test_an_index_may_only_name_files_beside_it(saved, tmp_path, name):
    directory = saved()
    (directory / "model.safetensors").rename(tmp_path / "outside.safetensors")
    os.mkfifo(directory / "pipe")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json cannot be read \(.* is not beside it\)"):
        load_pretrained(directory)


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named(saved):
    directory, names = saved(), ("model.layers.0.mlp.up_proj.weight", "model.extra", "model.norm.weight")
    edit_tensors(directory, lambda t: t.update({names[1]: t.pop(names[0]), names[2]: torch.zeros(7)}))
    with pytest.raises(UserError, match="{} is missing, {} is unexpected, {} has shape".format(*names)):
        load_pretrained(directory)


def test_what_cannot_be_read_is_one_line(saved):
    directory = saved()
    path = directory / "model.safetensors"
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UserError, match=r"cannot be read \(no 'I8'\); give the unquantized model"):
        load_pretrained(directory)
    path.unlink()
    # How torch.save began files before and since version 1.6: with its magic number, and as a ZIP file.
    old, new = b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"PK\3\4"
    reasons = {old: "pickled", new: "pickled", b"GGUF": "GGUF", b"\x80\2\0\0": "a.bin, whose"}  # the last: of llama2.c
    for start, reason in reasons.items():
        (directory / "a.bin").write_bytes(start)
        with pytest.raises(UserError, match=f"model has {reason}"):
            load_pretrained(directory)


def test_weights_of_different_dtypes_in_one_file_are_read_exactly(saved):
    directory = saved()
    halved = [f"model.layers.{i}.{name}_proj.weight" for i in range(3) for name in ("self_attn.q", "mlp.down")]
    edit_tensors(directory, lambda t: t.update({name: t[name].bfloat16() for name in halved}))
    tensors, decoder = load_file(directory / "model.safetensors"), load_pretrained(directory)
    for name, tensor in unpacked_tensors(decoder.state_dict(), decoder.config).items():
        assert torch.equal(tensor.float(), tensors[name].float())
    assert decoder.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert decoder.layers[0].self_attn.qkv_proj.weight.dtype == torch.float32


def test_copies_of_the_head_must_equal_the_tied_embedding_and_old_rotary_tables_are_ignored(saved):
    directory = saved()
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(directory, lambda t: t.update(more | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_pretrained(directory).lm_head is None
    edit_tensors(directory, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match="a head beside its tied embedding"):
        load_pretrained(directory)
