import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError
from training.settings import CONFIGS, DataSettings, RunSettings, Settings, load_settings, parse, save_settings

ROOT = Path(__file__).parent.parent.parent


def settings_from(*flags: str) -> Settings:
    return parse(list(flags), "test").settings


def test_help_answers_without_importing_torch():
    code = (
        "import sys; sys.argv[1:] = ['--help']\ntry: import train; train.main()\nfinally: print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert out.stdout.rstrip().endswith("False") and "--learning-rate" in out.stdout


def test_the_flags_have_the_names_of_the_fields_without_their_table():
    settings = settings_from(
        *"--config small --norm layer --steps 7 --seed 3 --out here --data a.txt b.txt --device cpu".split(),
        *"--dtype float32 --batch-size 4 --sequence-length 64 --learning-rate 1e-4 --compile".split(),
    )
    assert settings.model.norm == "layer" and settings.model.hidden_size == 512
    assert settings.optimizer.steps == 7 and settings.optimizer.learning_rate == 1e-4
    assert settings.run.seed == 3 and settings.run.out == "here"
    assert settings.data.data == ("a.txt", "b.txt") and settings.data.batch_size == 4
    assert settings.machine.device == "cpu" and settings.machine.dtype == "float32" and settings.machine.compile


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


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_config_survives_saving_and_loading(config, tmp_path):
    settings = settings_from("--config", config)
    save_settings(settings, tmp_path / "settings.toml")
    assert load_settings(tmp_path / "settings.toml") == settings


def test_twenty_thousand_paths_survive_saving_and_loading(tmp_path):
    paths = [f"a folder with a rather long name/and part {number:06}.jsonl" for number in range(20_000)]
    settings = settings_from("--data", *paths)
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


def test_every_field_has_a_docstring_for_its_help():
    for table in dataclasses.fields(Settings):
        if table.name == "model":
            continue  # the model's own tests check ModelConfig
        body = inspect.getsource(table.type)
        for field in dataclasses.fields(table.type):
            after = body.split(f"\n    {field.name}: ")[1].split("\n", 1)[1].lstrip()
            assert after.startswith('"""'), f"{table.name}.{field.name} has no docstring"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[optimizer]\nlearning_rat = 1\n", "Did you mean learning_rate?"),
        ("[optimiser]\nsteps = 1\n", "Did you mean optimizer?"),
        ("steps = 1\n", "is not one of the tables"),
        ("[optimizer\n", "not a readable TOML file"),
        ('[data]\ndata = ["--steps", "3"]\n', "begins with a dash; write ./--steps for a file"),
    ],
)
def test_an_unknown_name_in_a_file_is_refused_with_the_nearest_known_one(tmp_path, content, message):
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(UserError, match=message):
        settings_from("--config", str(tmp_path / "bad.toml"))


def test_a_value_that_looks_like_a_flag_survives_saving(tmp_path):
    settings = settings_from("--sample-prompt=--help")
    save_settings(settings, tmp_path / "settings.toml")
    assert load_settings(tmp_path / "settings.toml").run.sample_prompt == "--help"


@pytest.mark.parametrize("field", ["data", "text_field", "tokenizer", "cache", "out", "init_from", "sample_prompt"])
def test_a_value_that_settings_toml_cannot_save_is_refused_before_anything_is_prepared(field):
    name, table = ("data", DataSettings) if hasattr(DataSettings(), field) else ("run", RunSettings)
    value = ("a", "t\udcff") if field == "data" else "t\udcff"
    flag = "--" + field.replace("_", "-")
    with pytest.raises(UserError, match=f"{flag} 't.udcff' is not UTF-8 text at character 1"):
        Settings(**{name: table(**{field: value})})


def test_a_file_name_with_nul_is_refused(tmp_path):
    for table, key in (("data", "cache"), ("data", "tokenizer"), ("run", "out"), ("run", "init_from")):
        (tmp_path / "nul.toml").write_text(f'[{table}]\n{key} = "c\\u0000x"\n')
        with pytest.raises(UserError, match=f"--{key.replace('_', '-')} .* contains a NUL character"):
            settings_from("--config", str(tmp_path / "nul.toml"))


def test_the_names_that_other_programs_use_for_our_flags_work():
    settings = settings_from("--lr", "1e-4", "--bs=4", "--wd", "0", "--max-iters", "9")
    assert (settings.optimizer.learning_rate, settings.data.batch_size, settings.optimizer.steps) == (1e-4, 4, 9)


def test_an_unknown_flag_exits_with_status_2_and_the_nearest_known_one(capsys):
    with pytest.raises(SystemExit) as ended:
        settings_from("--learning-rat", "1")
    assert ended.value.code == 2 and "--learning-rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--config", "tinny"), "Did you mean tiny?"),
        (("--resume", "nowhere"), "does not exist"),
        (("--sequence-length", "100000"), "longer than the model's context"),
        (("--num-attention-heads", "3"), "divisible|divide|multiple"),
        (("--steps", "0"), "must be between 1 and 1,000,000,000"),
        (("--steps", str(10**400)), "between 1 and 1,000,000,000"),
        (("--batch-size", str(2**62)), "between 1 and 1,000,000,000"),
        (("--hidden-size", str(2**53)), "hidden_size is 9007199254740992 and must be at most 16,777,216"),
        (
            ("--num-attention-heads", str(2**62), "--num-key-value-heads", "3"),
            "num_attention_heads is .* at most 65,536",
        ),
        (("--head-dim", str(2**24)), "heads times head_dim is 67108864 and must be at most"),
        (("--validation-fraction", "1.5"), "between 0 and 1"),
        (("--learning-rate", "-1"), "greater than 0"),
        (("--seed", "-1"), "must not be negative"),
        (("--seed", str(2**63)), "does not fit into 64 bits"),
        (("--norm", "batch", "--activation-checkpointing"), "statistics twice a step; leave out --act"),
        (("--epochs", "3"), "training is measured in --steps"),
        (("--beta2", "1.0"), "between 0 and 1"),
        (("--final-learning-rate", "nan"), "between 0 and 1"),
        (("--resume", "runs/x", "--config", "small"), "leave out --config"),
        (("--sample-prompt", "ab\udcff"), r"--sample-prompt 'ab\\udcff' is not UTF-8 text at character 2"),
    ],
)
def test_a_value_that_cannot_work_is_a_one_line_error(flags, message):
    with pytest.raises(UserError, match=message) as error:
        settings_from(*flags)
    assert "\n" not in str(error.value)
