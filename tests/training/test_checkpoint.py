"""Saves that are interrupted anywhere, what readers then find, and how transformers opens a checkpoint."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained
from data.tokenizer import load_tokenizer
from errors import UserError
from training import checkpoint
from training.loop import train
from training.settings import parse

ROOT = Path(__file__).parent.parent.parent


def save(target: Path, content: str) -> None:
    def write(directory: Path) -> None:
        (directory / "weights").write_text(content)
        (directory / "state.json").write_text("{}")

    checkpoint.replace_directory(target, write)


def found(run: Path) -> str:
    return (checkpoint.find_last(run) / "weights").read_text()


class Killed(BaseException):
    """Leaves the files as the end of the process would."""


def killed_rmtree(path: Path, **_: object) -> None:
    if path.exists():
        raise Killed


def test_saving_leaves_one_complete_directory(tmp_path):
    for content in ("first", "second", "third"):
        save(tmp_path / "last", content)
        assert found(tmp_path) == content
        assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("renames_done", [0, 1, 2])
def test_a_save_killed_at_any_rename_leaves_a_complete_checkpoint_and_the_next_save_works(
    tmp_path, monkeypatch, renames_done
):
    save(tmp_path / "last", "before")
    rename, calls = Path.rename, []

    def killed_rename(path: Path, target: Path) -> Path:
        if len(calls) == renames_done:
            raise Killed
        calls.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed_rename)
    if renames_done == 2:  # both done: killed while the old directory is deleted
        monkeypatch.setattr(shutil, "rmtree", killed_rmtree)
    with pytest.raises(Killed):
        save(tmp_path / "last", "after")
    monkeypatch.undo()
    assert found(tmp_path) == ("before" if renames_done == 0 else "after")
    save(tmp_path / "last", "later")
    assert found(tmp_path) == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_save_killed_while_writing_keeps_the_previous_save(tmp_path):
    save(tmp_path / "last", "before")

    def write(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise Killed

    with pytest.raises(Killed):
        checkpoint.replace_directory(tmp_path / "last", write)
    assert found(tmp_path) == "before"


def test_the_old_directory_is_found_when_the_new_one_is_incomplete(tmp_path):
    save(tmp_path / "last", "before")
    (tmp_path / "last").rename(tmp_path / "last.old")
    (tmp_path / "last.new").mkdir()
    assert found(tmp_path) == "before"
    save(tmp_path / "last", "after")
    assert found(tmp_path) == "after"


@pytest.mark.skipif(os.name == "nt", reason="Windows makes links only for administrators and in developer mode")
@pytest.mark.parametrize("link", ["last", "last.old"])
def test_a_link_is_replaced_by_a_directory_and_what_it_points_to_is_kept(tmp_path, link):
    save(tmp_path / "last", "elsewhere")
    (tmp_path / "last").rename(tmp_path / "elsewhere")
    (tmp_path / link).symlink_to("elsewhere")
    for content in ("first", "second"):
        save(tmp_path / "last", content)
        assert found(tmp_path) == content and not (tmp_path / "last").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "last"]
    assert (tmp_path / "elsewhere" / "weights").read_text() == "elsewhere"
    (tmp_path / "best").symlink_to("nowhere")
    checkpoint.replace_directory(tmp_path / "best", lambda directory: (directory / "state.json").write_text("{}"))
    assert not (tmp_path / "best").is_symlink()


def test_a_folder_without_a_complete_checkpoint_is_a_one_line_error(tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(UserError, match="no complete last/ to resume from"):
        checkpoint.find_last(tmp_path)


FULL_DISK = """
import resource, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import torch
from safetensors.torch import save_file
from errors import exit_on_user_error
from training import checkpoint

def write(directory):
    save_file({{"weight": torch.randn(250_000)}}, directory / "model.safetensors")  # 1 MB
    (directory / "state.json").write_text("{{}}")

resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))  # the disk takes half of it
with exit_on_user_error():
    checkpoint.replace_directory(Path({target!r}), write)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file to simulate a full disk with")
def test_a_full_disk_is_a_one_line_error_and_the_last_complete_checkpoint_stays(tmp_path):
    save(tmp_path / "last", "before")
    code = FULL_DISK.format(root=str(ROOT), target=str(tmp_path / "last"))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert out.returncode == 2, out.stderr
    assert "could not be saved" in out.stderr and "the previous save is intact" in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
    assert found(tmp_path) == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_every_file_of_a_save_can_be_read_by_others(flags, tmp_path):
    before = os.umask(0o022)
    try:
        train(parse([*flags, "--steps", "1"], "test").settings, tmp_path / "run")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"training_state.safetensors", "model.safetensors"} <= {path.name for path in files}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o644"}


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_last_checkpoint_opens_in_transformers_with_equal_logits_and_ids(flags, tmp_path, norm):
    train(parse([*flags, "--norm", norm, "--steps", "12"], "test").settings, tmp_path / "run")
    last = tmp_path / "run" / "last"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    tokenizer, our_tokenizer = transformers.AutoTokenizer.from_pretrained(last), load_tokenizer(last)
    text = "the quick</s> brown fox,  7 wizards\n\tmix é potions 🦊"
    ids = tokenizer(text)["input_ids"]
    assert ids == [our_tokenizer.bos_id, *our_tokenizer.encode(text)]
    tokens = torch.tensor([ids])[:, :32]
    with torch.no_grad():
        ours, expected = load_pretrained(last)(tokens), theirs(tokens).logits
    assert (ours - expected).norm() / expected.norm() < 2e-6
