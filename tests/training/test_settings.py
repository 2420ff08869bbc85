"""The settings of train.py, and its actions: where a run is written, what it prints, what is never overwritten."""

import dataclasses
import json
import re

import pytest

from data.tokenizer import load_tokenizer
from errors import UserError
from files import locked
from tests.conftest import run_python
from tests.training.runs import settings_of
from training import commands
from training.settings import CONFIGS, Actions, Settings, load_settings, parse, save_settings


def test_help_shows_what_people_use_and_help_all_every_flag_in_80_columns_without_importing_torch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code = "import sys, train\ntry: train.main()\nfinally: print('torch' in sys.modules)"
    shown = {}
    for flag in ("--help", "--help-all"):
        done = run_python("-c", code, flag)
        *lines, imported = done.stdout.splitlines()
        assert (imported, done.returncode) == ("False", 0) and max(map(len, lines)) <= 80
        shown[flag] = {*re.findall(r"^(?:│ |  )(?:--lr \w+, )?(--[\w-]+)", done.stdout, re.MULTILINE)}
    tables = [Actions, *(f.type for f in dataclasses.fields(Settings))]
    names = {f.name for table in tables for f in dataclasses.fields(table)}
    without_flag = {"rope_scaling", "layer_types", "attention_output_bias"}
    assert shown["--help-all"] == {"--" + name.replace("_", "-") for name in names - without_flag}
    assert {"--norm", "--data", "--dry-run"} < shown["--help"] <= shown["--help-all"] | {"--help-all"}


def test_a_flag_overrides_the_file_and_the_file_the_default(tmp_path):
    (tmp_path / "mine.toml").write_text("[optimizer]\nsteps = 5\nlearning_rate = 0.5\n")
    settings = settings_of("--config", str(tmp_path / "mine.toml"), "--steps", "6")
    assert settings.optimizer.steps == 6 and settings.optimizer.learning_rate == 0.5
    assert settings.optimizer.beta1 == Settings().optimizer.beta1
    assert settings_of("--lr", "0.5") == settings_of("--learning-rate", "0.5")


def test_an_explicit_sequence_length_overrides_the_first_length_of_the_file(tmp_path):
    (tmp_path / "growing.toml").write_text("[data]\nsequence_length = 256\nfirst_sequence_length = 64\n")
    config = ["--config", str(tmp_path / "growing.toml")]
    assert settings_of(*config).data.first_sequence_length == 64
    assert settings_of(*config, "--first-sequence-length", "None").data.first_sequence_length is None
    assert settings_of(*config, "--sequence-length", "100").data.first_sequence_length is None
    flags = ["--sequence-length", "100", "--first-sequence-length", "50"]
    assert settings_of(*config, *flags).data.first_sequence_length == 50


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_config_survives_saving_and_loading(config, tmp_path):
    settings = settings_of("--config", config)
    save_settings(settings, tmp_path / "settings.toml")
    assert load_settings(tmp_path / "settings.toml") == settings


def test_norm_bias_is_a_pair_of_flags_and_reads_back_as_it_was_saved(tmp_path):
    expected = {(): None, ("--norm-bias",): True, ("--no-norm-bias",): None, ("--norm", "layer", "--norm-bias"): None}
    for flags, value in (expected | {("--norm", "layer", "--no-norm-bias"): False}).items():
        settings = settings_of(*flags)
        assert settings.model.norm_bias is value, flags
        save_settings(settings, tmp_path / "settings.toml")
        assert load_settings(tmp_path / "settings.toml") == settings
    (tmp_path / "mine.toml").write_text("[model]\nnorm_bias = true\n")
    assert load_settings(tmp_path / "mine.toml").model.norm_bias is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[optimizer]\nlearning_rat = 1\n", "Did you mean learning_rate?"),
        ("[optimiser]\nsteps = 1\n", "Did you mean optimizer?"),
        ("steps = 1\n", "unknown key steps. It belongs in .optimizer."),
        ('data = ["x"]\n', "data is a table; write .data. on a line above"),
        ("[optimizer\n", "cannot be read"),
        ('[optimizer]\nsteps = "many"\n', "steps is 'many': Expected `int`, got `str`"),
        ("[optimizer]\nsteps = 0\n", "steps is 0: it must be at least 1"),
        ("[run]\ntrain_only = 'all'\n", r"unknown key train_only\. If another version of this code wrote it, remove"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, content, message):
    (tmp_path / "settings.toml").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        settings_of("--config", str(tmp_path / "settings.toml"))
    assert "settings.toml" in str(error.value)


def test_two_runs_that_start_at_the_same_time_get_different_folders(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {commands.make_run_dir(settings, "tiny") for _ in range(3)}
    assert {path.name for path in folders} == {"text0-rms", "text0-rms-2", "text0-rms-3"}
    for text, name in (("python", "tiny-rms"), ("my 文本/*.txt", "my-文本-rms"), ("*.txt", "tiny-rms-2")):
        other = dataclasses.replace(settings, data=dataclasses.replace(settings.data, data=(text,)))
        assert commands.make_run_dir(other, "tiny").name == name


def test_two_processes_never_share_a_run_folder(flags, run, tmp_path):
    new = tmp_path / "new"
    for folder, arguments in ((new, [*flags, "--out", str(new), "--steps", "2"]), (run, ["--resume", str(run)])):
        with locked(folder), pytest.raises(UserError, match="in use by another process"):
            commands.run(parse(arguments, "test"))
    assert commands.run(parse([*flags, "--out", str(new), "--steps", "2"], "test")) == 0


def test_a_run_that_cannot_start_leaves_no_folder(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        commands.run(parse(["--data", "nowhere.txt"], "test"))
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_prints_a_text_and_the_next_command_and_can_be_evaluated(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.progress.FEW_BYTES", 0)
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
    (tmp_path / "short.txt").write_text("a few words\n" * 50)
    with pytest.raises(UserError, match="give more text"):  # said last
        commands.run(parse(["--data", "short.txt", "--dry-run"], "test"))
    assert "memory " in capsys.readouterr().out


def test_another_text_drops_the_prompts_of_the_default_one_and_no_others(tmp_path):
    (tmp_path / "own.toml").write_text('[run]\nsample_prompts = ["Once"]')
    assert settings_of("--config", str(tmp_path / "own.toml"), "--data", "x").run.sample_prompts == ("Once",)
    assert settings_of("--data", "x").run.sample_prompts == ()
    assert settings_of("--cache", "data").run.sample_prompts == settings_of("--cache", "x").run.sample_prompts != ()
