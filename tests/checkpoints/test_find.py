"""What a RUN argument means: a checkpoint, a run folder with complete and damaged ones, the newest run, or an error."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from checkpoints.find import eos_ids, find_checkpoint, newest_run
from errors import UserError


def checkpoint(directory, **config):
    """A directory with the files by which a complete checkpoint is recognized."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.model").write_bytes(b"a tokenizer")
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 5)}, directory / "model.safetensors")
    return directory


def test_a_directory_with_config_json_is_a_checkpoint_itself(tmp_path):
    directory = checkpoint(tmp_path / "downloaded")
    assert find_checkpoint(directory) == directory == find_checkpoint(str(directory))


def test_a_run_folder_means_its_best_checkpoint(tmp_path):
    order = ["best", "best.new", "best.old", "last", "last.new", "last.old"]
    for name in order:
        checkpoint(tmp_path / "run" / name)
    for name in order:
        assert find_checkpoint(tmp_path / "run").name == name
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(UserError, match=r"neither a checkpoint .* nor a run folder"):
        find_checkpoint(tmp_path / "run")


def truncate_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def truncate_header(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def lose_a_shard(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def break_header(directory):
    (directory / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{" * 40)


DAMAGE = {
    "no config.json": lambda directory: (directory / "config.json").unlink(),
    "has no model.safetensors": lambda directory: (directory / "model.safetensors").unlink(),
    "no tokenizer": lambda directory: (directory / "tokenizer.model").unlink(),
    "model.safetensors is not a complete safetensors file (it is truncated)": truncate_weights,
    "model.safetensors is not a complete safetensors file (it is truncated) ": truncate_header,
    "model.safetensors is not a complete safetensors file (Expecting property": break_header,
    "lacks model-00002-of-00002.safetensors": lose_a_shard,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_note_and_an_error_when_no_other_is_left(tmp_path, capsys, damage):
    DAMAGE[damage](checkpoint(tmp_path / "best"))
    with pytest.raises(UserError, match=rf"no checkpoint in .* is complete \(best: {re.escape(damage.strip())}"):
        find_checkpoint(tmp_path)
    complete = checkpoint(tmp_path / "last.old")
    assert find_checkpoint(tmp_path) == complete
    note = f"note: using {complete}, because preferred checkpoints are damaged (best: {damage.strip()}"
    assert capsys.readouterr().err.startswith(note)


def test_a_checkpoint_with_all_its_shards_is_complete(tmp_path):
    directory = checkpoint(tmp_path / "best")
    lose_a_shard(directory)
    save_file({"c": torch.zeros(1)}, directory / "model-00002-of-00002.safetensors")
    assert find_checkpoint(tmp_path) == directory


def test_a_checkpoint_may_have_a_tokenizer_json_alone(tmp_path):
    directory = checkpoint(tmp_path / "best")
    (directory / "tokenizer.model").rename(directory / "tokenizer.json")
    assert find_checkpoint(tmp_path) == directory


def test_the_newest_run_is_the_one_that_saved_a_checkpoint_last(tmp_path):
    for age, (run, save) in enumerate([("c", "best"), ("a", "last.new"), ("b", "last.old"), ("a", "best")]):
        directory = checkpoint(tmp_path / run / save)
        os.utime(directory, (2_000_000_000 - age, 2_000_000_000 - age))
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "a-file").write_text("x")
    assert newest_run(tmp_path) == tmp_path / "c"
    os.utime(tmp_path / "b" / "last.old", (2_100_000_000, 2_100_000_000))
    assert newest_run(tmp_path) == tmp_path / "b"


def test_an_error_for_no_run_says_how_to_train_one(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"there is no run in .* `python train.py`"):
            newest_run(folder)


def test_an_error_for_a_mistyped_run_names_existing_runs(tmp_path):
    checkpoint(tmp_path / "tiny-rms" / "best")
    (tmp_path / "folder").mkdir()
    for name, damage in (("tiny-rsm", "does not exist"), ("folder", "is neither")):
        with pytest.raises(UserError, match=rf"{name} {damage}.* Existing runs: .*tiny-rms"):
            find_checkpoint(tmp_path / name)


def test_eos_ids_are_those_of_the_tokenizer_and_of_generation_config_or_else_of_config(tmp_path):
    directory = checkpoint(tmp_path / "model", eos_token_id=7)
    assert eos_ids(directory, 2) == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_ids(directory, 5) == {5, 6}
    (directory / "generation_config.json").write_text("{}")
    assert eos_ids(directory, 7) == {7}
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json is not readable JSON"):
        eos_ids(directory, 2)
    for wrong in ("[[1]]", "{}", '"</s>"', "true", "2.5"):
        (directory / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(UserError, match=r"generation_config.json has eos_token_id .*, which must be a token id"):
            eos_ids(directory, 2)


FOREIGN = {
    "stories.Q4_K_M.gguf": r"has GGUF weights, .*give the directory or the Hub id of the model that they were made",
    "pytorch_model.bin": r"has pickled weights, .*convert them to safetensors first, .*save_pretrained\(OUT\)",
    "model.pt": r"has pickled weights",
    "weights.pth": r"has pickled weights",
    "consolidated.00.pth": r"has weights in their publisher's own format",
    "consolidated.safetensors": r"has weights in their publisher's own format",
    "adapter_config.json": r"has a PEFT adapter without its base model; .*merge_and_unload\(\)",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("with_config", [True, False])
def test_a_directory_with_weights_in_another_format_is_refused_with_advice(tmp_path, name, with_config):
    directory = checkpoint(tmp_path / "model")
    (directory / name).write_bytes(b"content")
    if not with_config:
        (directory / "config.json").unlink()
    else:
        assert find_checkpoint(directory) == directory  # it has model.safetensors too
    (directory / "model.safetensors").unlink()
    (directory / "adapter_model.safetensors").write_bytes(b"content")
    with pytest.raises(UserError, match=rf"model {FOREIGN[name]}"):
        find_checkpoint(directory)


def test_a_file_is_refused_with_what_to_give_instead(tmp_path):
    directory = checkpoint(tmp_path / "model")
    for name in ("a.gguf", "a.bin", "a.txt"):
        (directory / name).write_bytes(b"content")
    for name, words in {
        "model.safetensors": rf"is one file of a checkpoint; give its directory, {re.escape(str(directory))}\.",
        "a.gguf": "has GGUF weights",
        "a.bin": "has pickled weights",
        "a.txt": "is a file; give the directory of a checkpoint or a run",
    }.items():
        with pytest.raises(UserError, match=rf"{re.escape(name)} {words}"):
            find_checkpoint(directory / name)
