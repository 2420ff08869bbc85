"""Runs that start from the weights of a checkpoint: what they keep and print; and with --lora, what is learned."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import generate
from checkpoints.families import load_config
from checkpoints.pretrained import load_pretrained, open_checkpoint
from errors import UserError
from generation.settings import small_model_sampling
from tests.conftest import edit_json, edit_tensors
from tests.training import runs
from training.loop import save, train_steps
from training.session import set_up
from training.settings import CONFIGS, load_settings


def test_the_given_weights_are_evaluated_first_and_stay_the_best_if_nothing_is_better(flags, finished_run, tmp_path):
    start = [*flags, "--steps", "2", "--init-from", str(finished_run)]
    first, *_, last = runs.evaluations(runs.train_run(tmp_path / "worse", *start, "--learning-rate", "1"))
    given = [line["validation_loss"] for line in runs.evaluations(finished_run)]
    assert first["step"] == 0 and first["validation_loss"] == min(given) < last["validation_loss"]
    runs.assert_equal_tensors(*(folder / "best" / "model.safetensors" for folder in (finished_run, tmp_path / "worse")))


def test_init_from_without_a_config_uses_finetune(flags, finished_run, capsys):
    start = ["--init-from", str(finished_run), *flags[:4]]
    assert runs.settings_of(*start).optimizer == load_settings(CONFIGS / "finetune.toml").optimizer
    assert runs.settings_of(*start, "--config", "tiny").optimizer.optimizer == "muon"
    assert capsys.readouterr().err.startswith(f"the model is that of {finished_run / 'best'}; the [model] of")


def test_init_from_in_a_file_is_that_of_the_command_line(finished_run, tmp_path):
    (tmp_path / "mine.toml").write_text(f'[run]\ninit_from = "{finished_run}"\n')
    settings = runs.settings_of("--config", str(tmp_path / "mine.toml"))
    assert settings.run.init_from == str(finished_run / "best")
    assert settings.model == load_config(finished_run / "best")


def test_a_previous_token_head_without_attention_bias_is_a_note(flags, tmp_path, capsys):
    set_up(runs.settings_of(*flags, "--previous-token-head", "--no-attention-bias"), tmp_path, resume=False)
    assert "note: --previous-token-head does nothing without --attention-bias" in capsys.readouterr().out


@pytest.fixture(scope="module")
def layer_flags(flags, tmp_path_factory) -> list[str]:
    """The flags of runs that start from one with LayerNorm, whose biases and untied head have learned a little."""
    flags, folder = [*flags, "--no-tie-word-embeddings", "--learning-rate", "3e-2"], tmp_path_factory.mktemp("layer")
    return [*flags, "--init-from", str(runs.train_run(folder / "run", *flags, "--steps", "8", "--norm", "layer"))]


def test_a_converted_norm_keeps_the_biases_of_the_run_unless_they_are_dropped(layer_flags):
    expected = {("rms",): True, ("rms", "--no-norm-bias"): None, ("layer",): None, ("l2",): True, ("none",): None}
    for (norm, *more), bias in expected.items():
        assert runs.settings_of(*layer_flags, "--norm", norm, *more).model.norm_bias is bias, (norm, more)


@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "tokenizer.json"])
def test_a_run_keeps_the_generation_config_of_its_parent_and_writes_one_if_it_has_none(flags, run, tmp_path, tokenizer):
    path = run / "best" / "generation_config.json"
    sampling = {"do_sample": True} | vars(small_model_sampling(chat=False))
    assert json.loads(path.read_text()) == {"bos_token_id": 1, "eos_token_id": 2} | sampling
    content = '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}'
    path.write_text(content)
    config = run / "best" / "config.json"  # numbers of other programs may have no point; settings.toml gives them one
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10000'))
    for name in {"tokenizer.model", "tokenizer.json"} - {tokenizer}:
        (run / "best" / name).unlink()
    child = runs.train_run(tmp_path / "child", *flags, "--init-from", str(run), "--steps", "2")
    runs.resume(child, "--steps", "3")
    assert {(child / save / path.name).read_text() for save in ("best", "last")} == {content}
    assert [line["step"] for line in runs.evaluations(child)] == [0, 2, 3]
    of_run = load_settings(run / "settings.toml")
    text, prompts = of_run.data.data, of_run.run.sample_prompts
    again = runs.settings_of("--init-from", str(run))  # on the text of the run
    assert (again.data.data, again.run.sample_prompts) == (text, prompts) and text != ("python",)
    assert runs.settings_of("--init-from", str(run), "--data", "python").data.data == ("python",)


@pytest.mark.parametrize("extra, exact", [([], True), (["--no-center-weights"], False), (["--no-norm-bias"], False)])
def test_a_layernorm_run_is_the_same_function_as_rmsnorm_if_centered_with_biases(layer_flags, tmp_path, extra, exact):
    norms = (["--norm", "layer"], ["--norm", "rms", *extra])
    layer, rms = (runs.open_session(tmp_path, *layer_flags, *norm).model for norm in norms)
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        difference = (rms(tokens) - layer(tokens)).norm() / layer(tokens).norm()
    assert (difference < 1e-5) == exact


def test_a_run_continues_a_model_with_yarn_and_a_bias_of_o_proj_and_its_settings_keep_them(flags, tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    save(runs.open_session(tmp_path, *flags, "--qk-norm", "--attention-bias"))
    path = tmp_path / "last" / "config.json"
    edit_json(path, rope_scaling=rope)
    edit_tensors(path.with_name("model.safetensors"), lambda t: t["model.layers.0.self_attn.o_proj.bias"].add_(0.1))
    run = runs.train_run(tmp_path / "next", *flags, "--init-from", str(path.parent), "--norm", "layer", "--steps", "2")
    for model in (load_settings(run / "settings.toml").model, load_config(run / "last")):
        assert model.norm == "layer" and model.attention_output_bias
        assert model.rope_scaling["rope_type"] == "yarn" and model.rope_scaling["beta_fast"] == 32
    assert runs.resume(run, "--steps", "3") == 0


@pytest.fixture(scope="module")
def start(flags, finished_run) -> list[str]:
    return [*flags, "--init-from", str(finished_run), "--lora", "4", "--steps", "12"]


@pytest.fixture(scope="module")
def folder(start, tmp_path_factory) -> Path:
    return runs.train_run(tmp_path_factory.mktemp("lora") / "run", *start)


def test_the_base_stays_bit_equal_and_the_optimizer_has_state_for_a_and_b_alone(start, finished_run, tmp_path):
    before = load_pretrained(finished_run / "best").state_dict()
    session = runs.open_session(tmp_path, *start)
    assert next(train_steps(session)).step == 1
    after = session.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(".lora_" in name for name in after.keys() - before.keys())
    learned = {parameter for name, parameter in session.model.named_parameters() if ".lora_" in name}
    assert session.optimizer.state.keys() == learned and len(learned) == 2 * 4 * 2  # matrices of a layer, packed


def test_a_run_saves_its_adapter_without_the_model_and_learns(folder, finished_run):
    for name in ("best", "last"):
        files = {path.name for path in (folder / name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "state.json"} <= files
        assert not {"config.json", "model.safetensors"} & files
        assert ("training_state.safetensors" in files) == (name == "last")
    before, *_, after = runs.evaluations(folder)
    assert after["validation_loss"] < before["validation_loss"]
    fields = json.loads((folder / "best" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["base_model_name_or_path"]) == (4, 8, str(finished_run / "best"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(start, tmp_path, dtype):
    start = [*start, "--lora-alpha", "6", "--dtype", dtype]
    runs.assert_parts_equal_a_run(tmp_path, (1, 7, 12), *start)
    with pytest.raises(UserError, match="cannot be resumed: lora: 4 -> 2"):
        runs.resume(tmp_path / "run", "--steps", "20", "--lora", "2")
    base = shutil.copytree(Path(load_settings(tmp_path / "run" / "settings.toml").run.init_from), tmp_path / "base")
    settings = tmp_path / "run" / "settings.toml"
    settings.write_text(re.sub("init_from = .*", f'init_from = "{base}"', settings.read_text()))
    edit_tensors(base / "model.safetensors", lambda tensors: tensors["model.layers.0.self_attn.q_proj.weight"].zero_())
    with pytest.raises(UserError, match=r"cannot be resumed: base_weights: .* -> "):
        runs.resume(tmp_path / "run", "--steps", "20")


@pytest.fixture
def generated(monkeypatch, capsys):
    """What generate.py prints for some arguments, in its log too with `log`."""

    def run(*arguments, log: bool = False) -> str:
        greedy = ("--max-new-tokens", "9", "--temperature", "0", "--dtype", "float32")
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments), *greedy])
        capsys.readouterr()
        generate.main()
        printed = capsys.readouterr()
        return printed.out + printed.err if log else printed.out

    return run


@torch.no_grad()
def test_a_run_its_adapter_on_the_base_and_both_merged_generate_equal_texts(folder, finished_run, generated, tmp_path):
    merged = tmp_path / "the merged"
    text = generated(folder, "the ")
    assert text.startswith("the ") and generated(finished_run, "the ", "--adapter", folder) == text
    (bare := tmp_path / "bare").mkdir()  # as PEFT saves it, without a tokenizer
    for path in (folder / "best").glob("adapter_*"):
        shutil.copy(path, bare)
    assert generated(bare, "the ") == text
    said = generated(folder, "--merge", merged, log=True)
    assert said == f"written: {merged}; try it: python generate.py '{merged}'\n"
    assert {*tmp_path.iterdir()} == {bare, merged}
    assert generated(merged, "the ") == text
    adapted = load_pretrained(open_checkpoint(finished_run / "best", folder / "best"))
    models = [adapted, *(load_pretrained(directory) for directory in (merged, finished_run / "best"))]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["layers.0.mlp.down_proj.weight"], states[2]["layers.0.mlp.down_proj.weight"])
    with pytest.raises(UserError, match="merged exists; give a new directory"):
        generated(folder, "--merge", merged)
    generated(finished_run, "--adapter", folder, "--merge", tmp_path / "again")
    runs.assert_equal_tensors(tmp_path / "again" / "model.safetensors", merged / "model.safetensors")
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(40).view(2, 20)
    logits = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (models[0](tokens) - logits).norm() <= 2e-6 * logits.norm()


def test_a_run_whose_base_is_gone_says_so(start, run, tmp_path):
    folder = runs.train_run(tmp_path / "lora", *start, "--init-from", str(run), "--steps", "1")
    shutil.rmtree(run)
    with pytest.raises(UserError, match=r"cannot be read \(No such .*\); the adapter needs the model that its run"):
        runs.resume(folder, "--steps", "20")
