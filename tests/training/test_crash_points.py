"""A run that is killed before any single operation on its files, with and without a power failure, is never lost.

One run is copied before every operation that changes its folder. A copy is what a kill at that instant leaves. A second
copy, in which every file that no fsync has reached is empty, is what a power failure may leave. From each the run
resumes and ends bit for bit like the run that was never stopped, or says that nothing was saved yet.
"""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from errors import UserError
from tests.training.runs import assert_equal_tensors, resume, train_run
from training import checkpoint

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


class Recorder:
    """Copies a folder before every operation that changes it, while `folder` is set."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.copies: list[Path] = []
        self.synced: dict[int, tuple[int, int]] = {}  # inode -> size and time of its last change, when it was synced
        sys.addaudithook(self.see)  # cannot be removed again: it does nothing without a folder

    def see(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if self.folder is not None and (writes or event in CHANGES) and str(arguments[0]).startswith(str(self.folder)):
            self.copy()

    def copy(self) -> None:
        folder, self.folder = self.folder, None  # copying must not record itself
        number = len(self.copies)
        kill, failure = (folder.with_name(f"{number:04}-{name}") for name in ("kill", "power-failure"))
        for target in (kill, failure):
            shutil.copytree(folder, target)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            status = path.stat()
            if self.synced.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                (failure / path.relative_to(folder)).write_bytes(b"")
        self.copies += [kill, failure]
        self.folder = folder

    def fsync(self, descriptor: int) -> None:
        if self.folder is not None:
            self.copy()
            status = os.fstat(descriptor)
            self.synced[status.st_ino] = (status.st_size, status.st_mtime_ns)


RECORDER = Recorder()


@pytest.fixture
def crashed(flags, tmp_path, monkeypatch) -> tuple[Path, list[Path]]:
    """A run of eight steps and two saves, and its copies from before every change."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "fsync", RECORDER.fsync)
    monkeypatch.setattr(RECORDER, "copies", [])
    RECORDER.folder = tmp_path / "run"
    try:
        train_run(tmp_path / "run", *flags, "--steps", "8", "--evaluate-every", "4")
    finally:
        RECORDER.folder = None
    return tmp_path / "run", RECORDER.copies


def resumes_like(run: Path, straight: Path) -> bool:
    """Resume a copy and compare its end; False where it says that nothing was saved yet."""
    try:
        resume(run)
    except UserError as error:
        if any(text in str(error) for text in ("nothing was saved yet", "only best/ was saved", "settings.toml")):
            assert checkpoint.find_complete(run / "last") is None, error
            return False
        assert "has already done" in str(error), error
    for name in ("model.safetensors", "training_state.safetensors"):
        assert_equal_tensors(*(checkpoint.find_last(path) / name for path in (run, straight)))
    for target in ("last", "best"):
        actual, expected = (checkpoint.find_complete(path / target) for path in (run, straight))
        files = [{path.name for path in folder.iterdir()} for folder in (actual, expected)]
        assert files[0] == files[1], (run.name, target)
        for path in expected.glob("*token*"):
            assert (actual / path.name).read_bytes() == path.read_bytes(), (run.name, path)
    return True


@pytest.mark.skipif(os.name == "nt", reason="the copies are told apart by inode")
@pytest.mark.parametrize("number", [2, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_resumes_from_the_crash_points_after_its_first_save(crashed, number):
    """All take three minutes: python -m pytest -m slow tests/training/test_crash_points.py"""
    straight, copies = crashed
    assert len(copies) > 100
    if number:
        copies = [copies[i] for i in [*sorted(random.Random(1).sample(range(len(copies)), number)), -1]]
    resumed = [resumes_like(copy, straight) for copy in copies]
    assert all(resumed[resumed.index(True) :]), "a later kill loses what an earlier one kept"


def write(target: Path, content: str) -> None:
    checkpoint.recover_interrupted_save(target)
    (new := target.with_name("last.new")).mkdir()
    (new / "weights").write_text(content)
    checkpoint.publish(target, checkpoint.State(0, 0, 0.0, None, "", {}))


@pytest.mark.parametrize("renames_done", [0, 1, 2])
def test_a_save_killed_at_any_rename_leaves_a_complete_checkpoint(tmp_path, monkeypatch, renames_done):
    write(tmp_path / "last", "before")
    rename, done = Path.rename, []

    def killed(path: Path, target: Path | None = None, **_: object) -> None:
        if len(done) == renames_done and path.exists():
            raise KeyboardInterrupt
        if target is not None:
            done.append(rename(path, target))

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(shutil, "rmtree", killed)  # after both renames: of the old directory
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "last", "after")
    monkeypatch.undo()
    for _ in range(2):
        content = (checkpoint.find_last(tmp_path) / "weights").read_text()
        assert content == ("before" if renames_done == 0 else "after")
        checkpoint.recover_interrupted_save(tmp_path / "last")
    write(tmp_path / "last", "later")
    assert (checkpoint.find_last(tmp_path) / "weights").read_text() == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
