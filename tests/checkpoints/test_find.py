"""What a RUN argument means: a checkpoint, a run folder with complete ones and others, a model of the Hub, an error.

The Hub is a local server that answers like it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.find import eos_ids, find_checkpoint, newest_run
from errors import UserError

ROOT = Path(__file__).parents[2]


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
        directory = checkpoint(tmp_path / run / save)
        os.utime(directory, (2_000_000_000 - age, 2_000_000_000 - age))
    (tmp_path / "a-file").write_text("x")
    assert newest_run(tmp_path) == tmp_path / "c"
    os.utime(tmp_path / "b" / "last.old", (2_100_000_000, 2_100_000_000))
    assert newest_run(tmp_path) == tmp_path / "b"


def test_eos_ids_are_those_of_the_tokenizer_and_of_generation_config_or_else_of_config(tmp_path):
    directory = checkpoint(tmp_path / "model", eos_token_id=7)
    assert eos_ids(directory, 2) == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_ids(directory, 5) == {5, 6}
    (directory / "generation_config.json").write_text("{}")
    assert eos_ids(directory, 7) == {7}


FIND = """
import sys, time
time.sleep = lambda seconds: None  # before another try
from errors import UserError
from checkpoints.find import find_checkpoint
for name in sys.argv[1:]:
    try:
        print(find_checkpoint(name))
    except UserError as error:
        print("error:", error)
assert "torch" not in sys.modules
"""
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


def find(tmp_path: Path, port: int, *names: str, **more: str) -> list[str]:
    """The lines that a new process prints, which finds checkpoints (the library reads its environment once)."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGINGFACE"))}
    endpoint = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    env = kept | endpoint | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, "-c", FIND, *names]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_only_the_needed_files_of_a_model_are_downloaded_once_and_used_without_a_network(tmp_path, hub, model):
    snapshot = tmp_path / "hub" / "models--org--stories" / "snapshots" / hub.commit
    assert find(tmp_path, hub.server_port, "org/stories", "org/stories@v2") == [str(snapshot)] * 2
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == model
    downloads = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert sorted(downloads) == sorted(f"/org/stories/resolve/{hub.commit}/{name}" for name in model)
    hub.asked.clear()
    assert find(tmp_path, hub.server_port, "org/stories", HF_HUB_OFFLINE="1") == [str(snapshot)] and not hub.asked
    unreachable, error = find(tmp_path, 9, "org/stories", "org/other")  # nobody listens on port 9
    assert unreachable == str(snapshot) and error.startswith("error: org/other is no local path, and the Hugging Face")


def test_what_the_hub_refuses_is_one_line_with_its_reason_and_a_mistyped_path_is_no_request(tmp_path, hub, model):
    hub.errors = {
        "/api/models/org/none/revision/main": (404, "RepoNotFound"),
        "/api/models/org/closed/revision/main": (403, "GatedRepo"),
        "/api/models/org/stories/revision/v9": (404, "RevisionNotFound"),
    }
    names = {"org/none": "404", "org/closed": "403", "org/stories@v9": "404", "org/a--b": "Cannot have -- or .."}
    (tmp_path / "other").mkdir()
    (tmp_path / "runs" / "tiny-rms").mkdir(parents=True)
    paths = ["runs/stories", "other/stories", "./org/stories", "org/stories/best", "stories", "run/tiny-rms"]
    lines = find(tmp_path, hub.server_port, *names, *paths)
    for line, (name, reason) in zip(lines, names.items(), strict=False):
        assert line.startswith(f"error: {name.partition('@')[0]} is no local path") and reason in line
    assert ["does not exist" in line for line in lines] == [False] * len(names) + [True] * len(paths)
    assert lines[-1].endswith("did you mean runs/tiny-rms?")
    assert {path for _, path in hub.asked if path.startswith("/api/models/")} == {*hub.errors}
