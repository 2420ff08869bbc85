"""Models named by an id of the Hugging Face Hub: downloaded from a local server that answers like it, or cached."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.find import find_checkpoint
from checkpoints.hub import HubModel, parse_id
from errors import UserError

ROOT = Path(__file__).parents[2]
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


def publish(hub, name: str, files: dict[str, bytes]) -> None:
    """Let the server have a model with these files, as its revisions `main` and `v2`."""
    siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
    tree = [{"type": "file", "path": file, "size": len(content), "oid": "0"} for file, content in files.items()]
    info = json.dumps({"id": name, "sha": hub.commit, "siblings": siblings}).encode()
    api = f"/api/models/{name}"
    hub.files |= {f"{api}/revision/{revision}": info for revision in ("main", "v2", hub.commit)}
    hub.files |= {f"{api}/tree/{hub.commit}": json.dumps(tree).encode()}
    hub.files |= {f"/{name}/resolve/{hub.commit}/{file}": content for file, content in files.items()}


@pytest.fixture
def model(hub, stories260k_directory) -> dict[str, bytes]:
    """The files of `org/stories`, which the server has."""
    files = {path.name: path.read_bytes() for path in stories260k_directory.iterdir()}
    files |= {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": 2}'}
    publish(hub, "org/stories", files | dict.fromkeys(UNWANTED, b"not needed"))
    return files


def environment(tmp_path: Path, port: int, **more: str) -> dict[str, str]:
    """The environment of a process whose hub is the local server, and whose cache is `tmp_path/hub`."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGINGFACE"))}
    endpoint = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    return kept | endpoint | {"PYTHONPATH": str(ROOT)} | more


def find(tmp_path: Path, port: int, *names: str, code: str = FIND, **more: str) -> tuple[list[str], list[str]]:
    """The lines that a new process prints, which finds checkpoints (the library reads its environment once)."""
    command = [sys.executable, "-c", code, *names]
    env = environment(tmp_path, port, **more)
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr.splitlines()


def test_only_the_needed_files_of_a_model_are_downloaded_and_only_once(tmp_path, hub, model):
    (directory, again), log = find(tmp_path, hub.server_port, "org/stories", "org/stories@v2")
    snapshot = tmp_path / "hub" / "models--org--stories" / "snapshots" / hub.commit
    assert Path(directory) == Path(again) == snapshot
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == model
    downloads = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert sorted(downloads) == sorted(f"/org/stories/resolve/{hub.commit}/{name}" for name in model)
    megabytes = sum(map(len, model.values())) / 1e6
    assert log == [f"downloading org/stories: {len(model)} files, {megabytes:.1f} MB"]

    for folder in (snapshot.parent.parent, snapshot):  # as paths
        assert find_checkpoint(folder) == snapshot
    hub.asked.clear()
    (offline,), log = find(tmp_path, hub.server_port, "org/stories", HF_HUB_OFFLINE="1")
    assert Path(offline) == snapshot and not hub.asked
    assert log == [f"note: HF_HUB_OFFLINE is set; using the cached files of org/stories, {snapshot}"]
    (unreachable, error), (note,) = find(tmp_path, 9, "org/stories", "org/other")  # nobody listens on port 9
    assert Path(unreachable) == snapshot and "gave no answer (ConnectError" in note and str(snapshot) in note
    assert error.startswith("error: org/other is no local path and could not be downloaded: http://127.0.0.1:9 gave")
    assert "check the connection" in error
    hub.errors["/api/models/org/stories/revision/main"] = (503, "Unavailable")
    (busy,), (note,) = find(tmp_path, hub.server_port, "org/stories")
    assert Path(busy) == snapshot and "503" in note
    hub.errors["/api/models/org/stories/revision/main"] = (403, "GatedRepo")  # an answer: the cache must not hide it
    (closed,), log = find(tmp_path, hub.server_port, "org/stories")
    assert closed.startswith("error: access to org/stories is restricted") and not log


def test_what_the_hub_refuses_is_a_one_line_error_that_says_what_to_do(tmp_path, hub, model):
    publish(hub, "org/gated", model)
    hub.errors = {
        "/api/models/org/none/revision/main": (404, "RepoNotFound"),
        "/api/models/org/private/revision/main": (401, "RepoNotFound"),
        "/api/models/org/closed/revision/main": (403, "GatedRepo"),
        "/api/models/org/stories/revision/v9": (404, "RevisionNotFound"),
        f"/org/gated/resolve/{hub.commit}/model.safetensors": (403, "GatedRepo"),
    }
    names = ("org/none", "org/private", "org/closed", "org/gated", "org/stories@v9")
    lines, _ = find(tmp_path, hub.server_port, *names)
    spelling = "check the spelling, or log in with `hf auth login` or set HF_TOKEN"
    assert "shows no model of this name (HTTP 404)" in lines[0] and spelling in lines[0]
    assert "shows no model of this name (HTTP 401)" in lines[1] and spelling in lines[1]
    for name, line in zip(names[2:4], lines[2:4], strict=True):
        assert line.startswith(f"error: access to {name} is restricted (HTTP 403); accept its terms at http://127")
        assert line.endswith("log in with `hf auth login` or set HF_TOKEN.")
    assert lines[4] == "error: org/stories has no revision 'v9' (HTTP 404); give another after the @."
    assert len(lines) == 5
    lines, _ = find(tmp_path, hub.server_port, "org/none", HF_HUB_OFFLINE="1")
    assert lines == ["error: org/none is not in the cache, and HF_HUB_OFFLINE forbids downloading it; unset it."]


def test_an_id_that_the_hub_cannot_have_is_not_taken_for_a_missing_connection(tmp_path, hub):
    lines, _ = find(tmp_path, hub.server_port, "org/a--b", "org/a..b", f"org/{'x' * 100}")
    assert len(lines) == 3 and all("neither a local path nor a valid model id of the Hub" in line for line in lines)
    assert not hub.asked


def test_an_answer_that_describes_no_model_is_a_one_line_error(tmp_path, hub, model):
    publish(hub, "org/odd", model)
    siblings = [{"rfilename": name, "size": "1"} for name in model] + [{"rfilename": "..\\\\x.json"}]
    for answer in ({}, {"siblings": [{}]}, {"siblings": [{"rfilename": 5}]}, {"siblings": siblings, "sha": hub.commit}):
        hub.files["/api/models/org/odd/revision/main"] = json.dumps({"id": "org/odd", **answer}).encode()
        (line,), _ = find(tmp_path, hub.server_port, "org/odd")
        if "sha" not in answer:
            assert line.startswith("error: org/odd is no local path and could not be downloaded: http://127.0.0.1:")
    assert Path(line).name == hub.commit


def test_a_model_in_another_format_is_refused_before_it_is_downloaded(tmp_path, hub):
    for name, files in {
        "gguf": ["config.json", "stories.Q4.gguf"],
        "pickled": ["config.json", "pytorch_model.bin", "tf/model.safetensors"],
        "adapter": ["adapter_config.json", "adapter_model.safetensors"],
        "data": ["config.json"],
    }.items():
        publish(hub, f"org/{name}", dict.fromkeys(files, b"content"))
    lines, _ = find(tmp_path, hub.server_port, "org/gguf", "org/pickled", "org/adapter", "org/data")
    words = ("GGUF", "convert them to safetensors", "merge_and_unload()", "has no config.json and model.safetensors")
    for line, word in zip(lines, words, strict=True):
        assert line.startswith("error: org/") and word in line
    assert not [path for _, path in hub.asked if "/resolve/" in path]


def test_a_mistyped_path_is_an_error_without_a_request(tmp_path, hub, model):
    (tmp_path / "org").mkdir()
    names = ["runs/stories", "org/stories", "./other/stories", "other/stories/best", "stories", "other/stories/"]
    lines, log = find(tmp_path, hub.server_port, *names)
    assert all("does not exist; give a checkpoint" in line for line in lines) and len(lines) == len(names)
    assert hub.asked == log == []


def test_an_id_is_an_organization_a_name_and_a_revision():
    assert parse_id("HuggingFaceTB/SmolLM2-135M") == HubModel("HuggingFaceTB/SmolLM2-135M", "main")
    assert parse_id("Qwen/Qwen2.5-0.5B@refs/pr/3") == HubModel("Qwen/Qwen2.5-0.5B", "refs/pr/3")
    for path in ("a/b/c", "/a/b", "../a", "a/..", "~/a", "a b/c", "a/b@", "é/a", "a\\b", "tests/b"):
        assert parse_id(path) is None, path


def test_the_folder_of_a_cached_model_means_its_main_or_else_its_newest_snapshot(tmp_path, saved):
    folder = tmp_path / "models--org--name"
    for age, commit in enumerate(("ccc", "aaa", "bbb")):
        shutil.copytree(saved(), folder / "snapshots" / commit)
        os.utime(folder / "snapshots" / commit, (2_000_000_000 - age, 2_000_000_000 - age))
    assert find_checkpoint(folder).name == "ccc"
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb")
    assert find_checkpoint(folder).name == "bbb"
    (folder / "refs" / "main").write_bytes(b"\xff")  # damaged
    assert find_checkpoint(folder).name == "ccc"
    (folder / "refs" / "main").write_text("ddd")  # not downloaded
    assert find_checkpoint(folder).name == "ccc"
    shutil.rmtree(folder / "snapshots")
    with pytest.raises(UserError, match="is neither a checkpoint"):
        find_checkpoint(folder)


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to another process")
def test_an_interrupted_download_stops_at_once_and_is_resumed(tmp_path, hub, model):
    hub.resume.clear()
    command = [sys.executable, "-c", FIND, "org/stories"]
    env = environment(tmp_path, hub.server_port)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    weights = ("GET", f"/org/stories/resolve/{hub.commit}/model.safetensors")
    while weights not in hub.asked:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 130
    assert log.splitlines()[-1] == "stopped; the same command resumes the download." and "Traceback" not in log
    hub.resume.set()
    (directory,), _ = find(tmp_path, hub.server_port, "org/stories")
    assert (Path(directory) / "model.safetensors").read_bytes() == model["model.safetensors"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file to simulate a full disk with")
def test_a_full_disk_is_a_one_line_error(tmp_path, hub, model):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + FIND
    (line,), _ = find(tmp_path, hub.server_port, "org/stories", code=limited)
    assert line.startswith("error: the disk is full (") and "HF_HOME" in line


def test_training_starts_from_a_model_of_the_hub(tmp_path, hub, model):
    code = "import sys; from training.settings import parse; settings = parse(sys.argv[1:], '').settings\n"
    code += "print(settings.run.init_from, settings.model.hidden_size)"
    (line,), _ = find(tmp_path, hub.server_port, "--init-from", "org/stories", code=code)
    assert line == f"{tmp_path / 'hub' / 'models--org--stories' / 'snapshots' / hub.commit} 64"


def test_generate_continues_a_text_with_a_model_of_the_hub(tmp_path, hub, model, shared):
    command = [
        sys.executable,
        ROOT / "generate.py",
        "org/stories",
        "--temperature=0",
        "--device=cpu",
        "--max-new-tokens=9",
    ]
    env = environment(tmp_path, hub.server_port)
    result = subprocess.run(command, cwd=tmp_path, env=env, input=b"", capture_output=True, timeout=120)
    expected = (shared / "stories260K" / "greedy_200_steps.txt").read_bytes()
    assert result.stdout.strip() and expected.startswith(result.stdout.rstrip()), result.stderr.decode()
    assert b"downloading org/stories" in result.stderr
