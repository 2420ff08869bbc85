"""Saves that are interrupted anywhere, and what readers then find."""

import shutil
from pathlib import Path

import pytest

from training import checkpoint


def write(target: Path, content: str) -> None:
    checkpoint.recover_interrupted_save(target)
    (new := target.with_name("last.new")).mkdir()
    (new / "weights").write_text(content)
    checkpoint.finish_save(target, checkpoint.State(0, 0, 0.0, None, ""))


def found(run: Path) -> str:
    return (checkpoint.find_last(run) / "weights").read_text()


class Killed(BaseException):
    """Leaves the files as the end of the process would."""


def killed_rmtree(path: Path, **_: object) -> None:
    if path.exists():
        raise Killed


@pytest.mark.parametrize("renames_done", [0, 1, 2])
def test_a_save_killed_at_any_rename_leaves_a_complete_checkpoint_and_the_next_save_works(
    tmp_path, monkeypatch, renames_done
):
    write(tmp_path / "last", "before")
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
        write(tmp_path / "last", "after")
    monkeypatch.undo()
    for _ in range(2):
        assert found(tmp_path) == ("before" if renames_done == 0 else "after")
        checkpoint.recover_interrupted_save(tmp_path / "last")
    write(tmp_path / "last", "later")
    assert found(tmp_path) == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
