import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError
from training.settings import CONFIGS, Actions, Settings, load_settings, parse, save_settings

ROOT = Path(__file__).parent.parent.parent


def settings_from(*flags: str) -> Settings:
    return parse(list(flags), "test").settings


def test_help_shows_what_people_use_and_help_all_every_flag_in_80_columns_without_importing_torch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code = "import sys, train\ntry: train.main()\nfinally: print('torch' in sys.modules)"
    shown = {}
    for flag in ("--help", "--help-all"):
        done = subprocess.run([sys.executable, "-c", code, flag], cwd=ROOT, capture_output=True, text=True)
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
    settings = settings_from("--config", str(tmp_path / "mine.toml"), "--steps", "6")
    assert settings.optimizer.steps == 6 and settings.optimizer.learning_rate == 0.5
    assert settings.optimizer.beta1 == Settings().optimizer.beta1


def test_an_explicit_sequence_length_overrides_the_first_length_of_the_file(tmp_path):
    (tmp_path / "growing.toml").write_text("[data]\nsequence_length = 256\nfirst_sequence_length = 64\n")
    config = ["--config", str(tmp_path / "growing.toml")]
    assert settings_from(*config).data.first_sequence_length == 64
    assert settings_from(*config, "--first-sequence-length", "None").data.first_sequence_length is None
    assert settings_from(*config, "--sequence-length", "100").data.first_sequence_length is None
    flags = ["--sequence-length", "100", "--first-sequence-length", "50"]
    assert settings_from(*config, *flags).data.first_sequence_length == 50


def test_the_learning_rate_has_a_short_name():
    assert settings_from("--lr", "0.5") == settings_from("--learning-rate", "0.5")


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_config_survives_saving_and_loading(config, tmp_path):
    settings = settings_from("--config", config)
    save_settings(settings, tmp_path / "settings.toml")
    assert load_settings(tmp_path / "settings.toml") == settings


def test_norm_bias_is_a_pair_of_flags_and_reads_back_as_it_was_saved(tmp_path):
    expected = {(): None, ("--norm-bias",): True, ("--no-norm-bias",): None, ("--norm", "layer", "--norm-bias"): None}
    for flags, value in (expected | {("--norm", "layer", "--no-norm-bias"): False}).items():
        settings = settings_from(*flags)
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
        ("steps = 1\n", "unknown key steps. Known: run, model, data"),
        ("[optimizer\n", "cannot be read"),
        ('[optimizer]\nsteps = "many"\n', "steps is 'many': Expected `int`, got `str`"),
        ("[optimizer]\nsteps = 0\n", "steps is 0: Expected `int` >= 1"),
        ("[optimizer]\nembedding_lr_multiplier = nan\n", "multiplier is nan: Expected `float` >= 0"),
        ("[model]\nmax_position_embeddings = 1\n", "max_position_embeddings is 1: Expected `int` >= 2"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, content, message):
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        settings_from("--config", str(tmp_path / "bad.toml"))
    assert "bad.toml" in str(error.value)
