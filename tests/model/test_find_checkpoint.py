"""What a RUN means: a checkpoint, a run folder with saves whole and cut, the newest run, or nothing, in a sentence."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from errors import UserError
from model.find_checkpoint import eos_ids, find_checkpoint, newest_run


def checkpoint(directory, **config):
    """A directory with what a whole checkpoint has, as far as finding it goes."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.model").write_bytes(b"a tokenizer")
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 5)}, directory / "model.safetensors")
    return directory


def test_a_directory_with_config_json_is_a_checkpoint_itself(tmp_path):
    directory = checkpoint(tmp_path / "downloaded")
    assert find_checkpoint(directory) == directory == find_checkpoint(str(directory))


def test_a_run_folder_gives_its_saves_best_first(tmp_path):
    order = ["best", "best.new", "best.old", "last", "last.new", "last.old"]
    for name in order:
        checkpoint(tmp_path / "run" / name)
    for name in order:
        assert find_checkpoint(tmp_path / "run").name == name
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(UserError, match=r"neither a checkpoint .* nor a run folder"):
        find_checkpoint(tmp_path / "run")


def cut_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def cut_header(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def shard_missing(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def bad_header(directory):
    (directory / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{" * 40)


DAMAGES = {
    "no config.json": lambda directory: (directory / "config.json").unlink(),
    "no model.safetensors": lambda directory: (directory / "model.safetensors").unlink(),
    "no tokenizer": lambda directory: (directory / "tokenizer.model").unlink(),
    "model.safetensors is cut short": cut_weights,
    "model.safetensors is cut short ": cut_header,
    "unreadable weights": bad_header,
    "unreadable weights ": shard_missing,
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_save_is_passed_over_and_named_when_nothing_else_is_left(tmp_path, fault):
    DAMAGES[fault](checkpoint(tmp_path / "best"))
    with pytest.raises(UserError, match=rf"no checkpoint in .* is whole \(best: {fault.strip()}"):
        find_checkpoint(tmp_path)
    whole = checkpoint(tmp_path / "last.old")
    assert find_checkpoint(tmp_path) == whole


def test_a_whole_sharded_checkpoint_is_whole(tmp_path):
    directory = checkpoint(tmp_path / "best")
    shard_missing(directory)
    save_file({"b": torch.zeros(1)}, directory / "model-00002-of-00002.safetensors")
    assert find_checkpoint(tmp_path) == directory


@pytest.mark.parametrize("name", ["tokenizer.json", "sentencepiece.model"])
def test_a_save_with_a_tokenizer_of_another_kind_is_whole(tmp_path, name):
    directory = checkpoint(tmp_path / "best")
    (directory / "tokenizer.model").rename(directory / name)
    assert find_checkpoint(tmp_path) == directory


def test_the_newest_run_is_the_one_that_saved_last_not_the_one_touched_last(tmp_path):
    for age, (run, save) in enumerate([("c", "best"), ("a", "last.new"), ("b", "last.old"), ("a", "best")]):
        directory = checkpoint(tmp_path / run / save)
        os.utime(directory, (2_000_000_000 - age, 2_000_000_000 - age))
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "a-file").write_text("x")
    assert newest_run(tmp_path) == tmp_path / "c"
    os.utime(tmp_path / "b" / "last.old", (2_100_000_000, 2_100_000_000))
    assert newest_run(tmp_path) == tmp_path / "b"


def test_no_run_at_all_is_a_sentence_that_says_how_to_make_one(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"there is no run in .* `python train.py`"):
            newest_run(folder)


def test_a_mistyped_run_names_those_that_exist(tmp_path):
    checkpoint(tmp_path / "tiny-rms" / "best")
    (tmp_path / "folder").mkdir()
    for name, fault in (("tiny-rsm", "does not exist"), ("folder", "is neither")):
        with pytest.raises(UserError, match=rf"{name} {fault}.* There are: .*tiny-rms"):
            find_checkpoint(tmp_path / name)


def test_eos_ids_are_the_tokenizers_and_those_of_the_generation_config_or_else_of_the_config(tmp_path):
    directory = checkpoint(tmp_path / "model", eos_token_id=7)
    assert eos_ids(directory, 2) == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_ids(directory, 5) == {5, 6}
    (directory / "generation_config.json").write_text("{}")
    assert eos_ids(directory, 7) == {7}
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json is not a readable JSON"):
        eos_ids(directory, 2)
