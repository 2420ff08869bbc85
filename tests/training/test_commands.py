"""The actions of train.py: where a run is written, what it prints at its end, and what is never overwritten."""

import dataclasses
import json

import pytest

from data.tokenizer import load_tokenizer
from errors import UserError
from files import locked
from training import commands
from training.settings import parse


def test_two_runs_that_start_at_the_same_time_get_different_folders(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {commands.make_run_dir(settings, "tiny") for _ in range(3)}
    assert {path.name for path in folders} == {"text0-rms", "text0-rms-2", "text0-rms-3"}
    python = dataclasses.replace(settings, data=dataclasses.replace(settings.data, data=("python",)))
    assert commands.make_run_dir(python, "tiny").name == "tiny-rms"


def test_two_processes_never_share_a_run_folder(flags, run, tmp_path):
    new = tmp_path / "new"
    for folder, arguments in ((new, [*flags, "--out", str(new), "--steps", "2"]), (run, ["--resume", str(run)])):
        with locked(folder), pytest.raises(UserError, match="in use by another process"):
            commands.run(parse(arguments, "test"))
    assert commands.run(parse([*flags, "--out", str(new), "--steps", "2"], "test")) == 0


def test_a_run_that_cannot_start_leaves_no_folder(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        commands.run(parse([*flags, "--data", "nowhere.txt"], "test"))
    assert not list((tmp_path / "runs").iterdir())


def test_a_finished_run_prints_a_text_the_next_command_and_its_checkpoint_can_be_evaluated(
    flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert commands.run(parse([*flags, "--steps", "6", "--sample-prompts", "the quick"], "test")) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "text0-rms" / "best" / "config.json").exists()
    assert "bits per byte" in out and "xz -9e" in out
    assert "\n  | the quick" in out and out.endswith("next: python generate.py runs/text0-rms 'the quick'\n")
    assert commands.run(parse(["--eval-only", "--init-from", "runs/text0-rms", *flags[:4]], "test")) == 0
    assert "nats per token, perplexity" in capsys.readouterr().out
    said = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "quick brown fox"}]
    rows = [json.dumps({"messages": [{**said[0], "content": f"the {n}"}, said[1]]}) + "\n" for n in range(30)]
    (tmp_path / "chat.jsonl").write_text("".join(rows))
    evaluate = ["--eval-only", "--init-from", "runs/text0-rms", "--data", "chat.jsonl"]
    assert commands.run(parse(evaluate, "test")) == 0
    tokens = 30 * (len(load_tokenizer("runs/text0-rms/best").encode("quick brown fox")) + 1)  # and <end>
    assert f"({tokens} tokens)" in capsys.readouterr().out


def test_a_dry_run_trains_nothing_and_prints_what_the_run_would_need(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.run(parse(["--config", "1b", "--dry-run"], "test")) == 0
    out = capsys.readouterr().out
    assert "1,235,814,400 parameters" in out and "not measured" in out
    assert not list(tmp_path.iterdir())
