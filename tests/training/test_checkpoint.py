"""Saves that are interrupted anywhere, and what readers then find."""

import shutil
from pathlib import Path

import pytest

from training import checkpoint


def write(target: Path, content: str) -> None:
    checkpoint.recover_interrupted_save(target)
    (new := target.with_name("last.new")).mkdir()
    (new / "weights").write_text(content)
    checkpoint.publish(target, checkpoint.State(0, 0, 0.0, None, "", {}))


@pytest.mark.parametrize("renames_done", [0, 1, 2])
def test_a_save_killed_at_any_rename_leaves_a_complete_checkpoint_and_the_next_save_works(
    tmp_path, monkeypatch, renames_done
):
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
        found = (checkpoint.find_last(tmp_path) / "weights").read_text()
        assert found == ("before" if renames_done == 0 else "after")
        checkpoint.recover_interrupted_save(tmp_path / "last")
    write(tmp_path / "last", "later")
    assert (checkpoint.find_last(tmp_path) / "weights").read_text() == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
