"""Runs that start from the weights of a checkpoint: what they keep, and what they print."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.families import load_config
from generation.settings import SMALL_MODELS
from training import metrics
from training.loop import train
from training.session import no_log, set_up
from training.settings import CONFIGS, load_settings, parse


def test_a_run_can_start_from_the_weights_of_a_model_with_another_norm(flags, run, tmp_path, capsys):
    settings = parse([*flags, "--steps", "3", "--init-from", str(run), "--norm", "layer"], "test").settings
    train(settings, tmp_path / "swapped")
    out = capsys.readouterr().out
    assert "weights: those of" in out and "5 new: " in out  # the biases of two norms in two layers and the last one


def test_the_given_weights_are_evaluated_before_the_first_step_and_stay_the_best_if_nothing_is_better(
    flags, run, tmp_path
):
    start = [*flags, "--steps", "2", "--init-from", str(run)]
    train(parse([*start, "--learning-rate", "1"], "test").settings, tmp_path / "worse")
    first, *_, last = [line for line in metrics.read(tmp_path / "worse") if "validation_loss" in line]
    given = [line["validation_loss"] for line in metrics.read(run) if "validation_loss" in line]
    assert first["step"] == 0 and first["validation_loss"] == min(given) < last["validation_loss"]
    given, best = (load_file(folder / "best" / "model.safetensors") for folder in (run, tmp_path / "worse"))
    assert all(torch.equal(given[name], best[name]) for name in given)


def test_init_from_without_a_config_uses_finetune(flags, run):
    start = ["--init-from", str(run), *flags[:4]]
    assert parse(start, "test").settings.optimizer == load_settings(CONFIGS / "finetune.toml").optimizer
    assert parse([*start, "--config", "tiny"], "test").settings.optimizer.optimizer == "muon"


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A LayerNorm run, and the flags of the runs that start from it."""

    folder: Path
    flags: list[str]


@pytest.fixture
def layer_run(flags, tmp_path) -> LayerRun:
    """A run with an untied head whose biases and weights have learned a little."""
    flags = [*flags, "--no-tie-word-embeddings", "--learning-rate", "3e-2"]
    train(parse([*flags, "--steps", "8", "--norm", "layer"], "test").settings, tmp_path / "layer")
    return LayerRun(tmp_path / "layer", flags)


def test_a_converted_norm_keeps_the_biases_of_the_run_unless_they_are_dropped(layer_run):
    start = [*layer_run.flags, "--init-from", str(layer_run.folder)]
    expected = {("rms",): True, ("rms", "--no-norm-bias"): None, ("layer",): None, ("l2",): True, ("none",): None}
    for (norm, *more), bias in expected.items():
        assert parse([*start, "--norm", norm, *more], "test").settings.model.norm_bias is bias, (norm, more)


@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "tokenizer.json"])
def test_a_run_keeps_the_generation_config_of_its_parent_and_writes_one_if_it_has_none(flags, run, tmp_path, tokenizer):
    path = run / "best" / "generation_config.json"
    sampling = {"do_sample": True} | vars(SMALL_MODELS)
    assert json.loads(path.read_text()) == {"bos_token_id": 1, "eos_token_id": 2} | sampling
    content = '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}'
    path.write_text(content)
    config = run / "best" / "config.json"  # numbers of other programs may have no point; settings.toml gives them one
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10000'))
    assert '"rope_theta": 10000,' in config.read_text() or '"rope_theta": 10000\n' in config.read_text()
    for name in {"tokenizer.model", "tokenizer.json"} - {tokenizer}:
        (run / "best" / name).unlink()
    child = tmp_path / "child"
    train(parse([*flags, "--init-from", str(run), "--steps", "2"], "test").settings, child)
    train(parse(["--resume", str(child), "--steps", "3"], "test").settings, child, resume=True)
    assert {(child / save / path.name).read_text() for save in ("best", "last")} == {content}
    assert [line["step"] for line in metrics.read(child) if "validation_loss" in line] == [0, 2, 3]


@pytest.mark.parametrize(
    ("extra", "exact"), [([], True), (["--no-center-weights"], False), (["--no-norm-bias"], False)]
)
def test_a_layernorm_run_continues_as_rmsnorm_with_the_same_function_if_it_is_centered_and_keeps_its_biases(
    layer_run, extra, exact
):
    start = [*layer_run.flags, "--init-from", str(layer_run.folder)]
    settings = [parse([*start, *more], "test").settings for more in (["--norm", "layer"], ["--norm", "rms", *extra])]
    layer, rms = (set_up(s, layer_run.folder / "next", resume=False, log=no_log).model for s in settings)
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        difference = (rms(tokens) - layer(tokens)).norm() / layer(tokens).norm()
    assert (difference < 1e-5) == exact


def test_a_run_continues_a_model_with_yarn_and_a_bias_of_o_proj_and_its_settings_keep_them(flags, tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    train(parse([*flags, "--qk-norm", "--attention-bias", "--steps", "2"], "test").settings, tmp_path / "qwen3")
    path = tmp_path / "qwen3" / "last" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": rope}))
    weights = load_file(path.with_name("model.safetensors"))
    weights["model.layers.0.self_attn.o_proj.bias"] += 0.1
    save_file(weights, path.with_name("model.safetensors"))
    start = ["--init-from", str(path.parent), "--norm", "layer", "--steps", "2"]
    train(parse([*flags, *start], "test").settings, tmp_path / "next")
    for model in (
        load_settings(tmp_path / "next" / "settings.toml").model,
        load_config(tmp_path / "next" / "last"),
    ):
        assert model.norm == "layer" and model.attention_output_bias
        assert model.rope_scaling["rope_type"] == "yarn" and model.rope_scaling["beta_fast"] == 32
