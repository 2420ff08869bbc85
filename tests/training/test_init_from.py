"""Runs that start from the weights of a checkpoint: what they keep, and what they print."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.families import load_config
from generation.settings import SMALL_MODELS
from tests.training.runs import assert_equal_tensors, evaluations, open_session, resume, settings_of, train_run
from training.loop import save
from training.session import set_up
from training.settings import CONFIGS, load_settings


def test_the_given_weights_are_evaluated_before_the_first_step_and_stay_the_best_if_nothing_is_better(
    flags, finished_run, tmp_path
):
    start = [*flags, "--steps", "2", "--init-from", str(finished_run)]
    first, *_, last = evaluations(train_run(tmp_path / "worse", *start, "--learning-rate", "1"))
    given = [line["validation_loss"] for line in evaluations(finished_run)]
    assert first["step"] == 0 and first["validation_loss"] == min(given) < last["validation_loss"]
    assert_equal_tensors(*(folder / "best" / "model.safetensors" for folder in (finished_run, tmp_path / "worse")))


def test_init_from_without_a_config_uses_finetune(flags, finished_run, capsys):
    start = ["--init-from", str(finished_run), *flags[:4]]
    assert settings_of(*start).optimizer == load_settings(CONFIGS / "finetune.toml").optimizer
    assert settings_of(*start, "--config", "tiny").optimizer.optimizer == "muon"
    assert capsys.readouterr().err.startswith(f"the model is that of {finished_run / 'best'}; the [model] of")


def test_init_from_in_a_file_is_that_of_the_command_line(finished_run, tmp_path):
    (tmp_path / "mine.toml").write_text(f'[run]\ninit_from = "{finished_run}"\n')
    settings = settings_of("--config", str(tmp_path / "mine.toml"))
    assert settings.run.init_from == str(finished_run / "best")
    assert settings.model == load_config(finished_run / "best")


def test_a_previous_token_head_without_attention_bias_is_a_note(flags, tmp_path, capsys):
    set_up(settings_of(*flags, "--previous-token-head", "--no-attention-bias"), tmp_path, resume=False)
    assert "note: --previous-token-head does nothing without --attention-bias" in capsys.readouterr().out


@pytest.fixture(scope="module")
def layer_flags(flags, tmp_path_factory) -> list[str]:
    """The flags of runs that start from one with LayerNorm, whose biases and untied head have learned a little."""
    flags, folder = [*flags, "--no-tie-word-embeddings", "--learning-rate", "3e-2"], tmp_path_factory.mktemp("layer")
    return [*flags, "--init-from", str(train_run(folder / "run", *flags, "--steps", "8", "--norm", "layer"))]


def test_a_converted_norm_keeps_the_biases_of_the_run_unless_they_are_dropped(layer_flags):
    expected = {("rms",): True, ("rms", "--no-norm-bias"): None, ("layer",): None, ("l2",): True, ("none",): None}
    for (norm, *more), bias in expected.items():
        assert settings_of(*layer_flags, "--norm", norm, *more).model.norm_bias is bias, (norm, more)


@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "tokenizer.json"])
def test_a_run_keeps_the_generation_config_of_its_parent_and_writes_one_if_it_has_none(flags, run, tmp_path, tokenizer):
    path = run / "best" / "generation_config.json"
    sampling = {"do_sample": True} | vars(SMALL_MODELS)
    assert json.loads(path.read_text()) == {"bos_token_id": 1, "eos_token_id": 2} | sampling
    content = '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}'
    path.write_text(content)
    config = run / "best" / "config.json"  # numbers of other programs may have no point; settings.toml gives them one
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10000'))
    for name in {"tokenizer.model", "tokenizer.json"} - {tokenizer}:
        (run / "best" / name).unlink()
    child = train_run(tmp_path / "child", *flags, "--init-from", str(run), "--steps", "2")
    resume(child, "--steps", "3")
    assert {(child / save / path.name).read_text() for save in ("best", "last")} == {content}
    assert [line["step"] for line in evaluations(child)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("extra", "exact"), [([], True), (["--no-center-weights"], False), (["--no-norm-bias"], False)]
)
def test_a_layernorm_run_continues_as_rmsnorm_with_the_same_function_if_it_is_centered_and_keeps_its_biases(
    layer_flags, tmp_path, extra, exact
):
    norms = (["--norm", "layer"], ["--norm", "rms", *extra])
    layer, rms = (open_session(tmp_path, *layer_flags, *norm).model for norm in norms)
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        difference = (rms(tokens) - layer(tokens)).norm() / layer(tokens).norm()
    assert (difference < 1e-5) == exact


def test_a_run_continues_a_model_with_yarn_and_a_bias_of_o_proj_and_its_settings_keep_them(flags, tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    save(open_session(tmp_path, *flags, "--qk-norm", "--attention-bias"))
    path = tmp_path / "last" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": rope}))
    weights = load_file(path.with_name("model.safetensors"))
    weights["model.layers.0.self_attn.o_proj.bias"] += 0.1
    save_file(weights, path.with_name("model.safetensors"))
    run = train_run(tmp_path / "next", *flags, "--init-from", str(path.parent), "--norm", "layer", "--steps", "2")
    for model in (load_settings(run / "settings.toml").model, load_config(run / "last")):
        assert model.norm == "layer" and model.attention_output_bias
        assert model.rope_scaling["rope_type"] == "yarn" and model.rope_scaling["beta_fast"] == 32
    assert resume(run, "--steps", "3") == 0
