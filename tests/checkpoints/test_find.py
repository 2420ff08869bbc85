"""What a RUN argument means: a checkpoint, a run folder with complete ones and others, a model of the Hub, an error.

The Hub is a local server that answers like it.
"""

import json
import os
from pathlib import Path

import pytest

from checkpoints.find import eos_ids, find_checkpoint, newest_run
from errors import UserError


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


def test_eos_ids_are_those_of_the_tokenizer_and_of_generation_config_or_else_of_config(tmp_path):
    directory = checkpoint(tmp_path / "model", eos_token_id=7)
    assert eos_ids(directory, 2) == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_ids(directory, 5) == {5, 6}
    (directory / "generation_config.json").write_text("{}")
    assert eos_ids(directory, 7) == {7}


UNWANTED = ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "README.md")


@pytest.fixture
def model(hub, stories260k_directory) -> dict[str, bytes]:
    """The files of `org/stories`, which the server has."""
    files = {path.name: path.read_bytes() for path in stories260k_directory.iterdir()}
    files |= {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": 2}'}
    published = files | dict.fromkeys(UNWANTED, b"not needed")
    siblings = [{"rfilename": file, "size": len(content)} for file, content in published.items()]
    tree = [{"type": "file", "path": file, "size": len(content), "oid": "0"} for file, content in published.items()]
    info = json.dumps({"id": "org/stories", "sha": hub.commit, "siblings": siblings}).encode()
    hub.files |= {f"/api/models/org/stories/revision/{revision}": info for revision in ("main", "v2", hub.commit)}
    hub.files |= {f"/api/models/org/stories/tree/{hub.commit}": json.dumps(tree).encode()}
    hub.files |= {f"/org/stories/resolve/{hub.commit}/{file}": content for file, content in published.items()}
    return files


def test_only_the_needed_files_of_a_model_are_downloaded_once_and_used_offline(tmp_path, hub, model, no_network):
    snapshot = tmp_path / "hub" / "models--org--stories" / "snapshots" / hub.commit
    assert find_checkpoint("org/stories") == find_checkpoint("org/stories@v2") == snapshot
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == model
    downloads = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert sorted(downloads) == sorted(f"/org/stories/resolve/{hub.commit}/{name}" for name in model)
    no_network()
    assert find_checkpoint("org/stories") == snapshot
    with pytest.raises(UserError, match=r"^org/other is no local path, and the Hugging Face Hub cannot be reached;"):
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
