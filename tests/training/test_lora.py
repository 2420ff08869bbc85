"""Runs with --lora: what is saved, what stays as it was, that they resume exactly, and what generates with them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import generate
from checkpoints.pretrained import load_pretrained, open_checkpoint
from errors import UserError
from tests.training.runs import assert_parts_equal_a_run, evaluations, open_session, resume, train_run
from training.loop import train_steps


@pytest.fixture(scope="module")
def start(flags, finished_run) -> list[str]:
    return [*flags, "--init-from", str(finished_run), "--lora", "4", "--steps", "12"]


@pytest.fixture(scope="module")
def folder(start, tmp_path_factory) -> Path:
    return train_run(tmp_path_factory.mktemp("lora") / "run", *start)


def test_the_base_stays_bit_equal_and_the_optimizer_has_state_for_a_and_b_alone(start, finished_run, tmp_path):
    before = load_pretrained(finished_run / "best").state_dict()
    session = open_session(tmp_path, *start)
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
    before, *_, after = evaluations(folder)
    assert after["validation_loss"] < before["validation_loss"]
    fields = json.loads((folder / "best" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["base_model_name_or_path"]) == (4, 8, str(finished_run / "best"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(start, tmp_path, dtype):
    start = [*start, "--lora-alpha", "6", "--dtype", dtype]
    assert_parts_equal_a_run(tmp_path, (1, 7, 12), *start)
    with pytest.raises(UserError, match="cannot be resumed: lora: 4 -> 2"):
        resume(tmp_path / "run", "--steps", "20", "--lora", "2")


@pytest.fixture
def generated(monkeypatch, capsys):
    """What generate.py prints for some arguments."""

    def run(*arguments) -> str:
        greedy = ("--max-new-tokens", "9", "--temperature", "0", "--dtype", "float32")
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments), *greedy])
        capsys.readouterr()
        generate.main()
        return capsys.readouterr().out

    return run


@torch.no_grad()
def test_a_run_its_adapter_on_the_base_and_the_two_merged_generate_the_same_text(
    folder, finished_run, generated, tmp_path
):
    merged = tmp_path / "merged"
    text = generated(folder, "the ")
    assert text.startswith("the ") and generated(finished_run, "the ", "--adapter", folder) == text
    (bare := tmp_path / "bare").mkdir()  # as PEFT saves it, without a tokenizer
    for path in (folder / "best").glob("adapter_*"):
        shutil.copy(path, bare)
    assert generated(bare, "the ") == text
    assert generated(folder, "--merge", merged) == "" and {*tmp_path.iterdir()} == {bare, merged}
    assert generated(merged, "the ") == text
    adapted = load_pretrained(open_checkpoint(finished_run / "best", folder / "best"))
    models = [adapted, *(load_pretrained(directory) for directory in (merged, finished_run / "best"))]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["layers.0.mlp.down_proj.weight"], states[2]["layers.0.mlp.down_proj.weight"])
    with pytest.raises(UserError, match="merged exists; give a new directory"):
        generated(folder, "--merge", merged)
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(40).view(2, 20)
    logits = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (models[0](tokens) - logits).norm() <= 2e-6 * logits.norm()


def test_a_changed_model_is_refused(start, tmp_path):
    with pytest.raises(UserError, match="--lora leaves the model as it is; leave out --norm and other flags"):
        open_session(tmp_path, *start, "--norm", "layer")


def test_a_run_whose_base_is_gone_says_so(start, run, tmp_path):
    folder = train_run(tmp_path / "lora", *start, "--init-from", str(run), "--steps", "1")
    shutil.rmtree(run)
    with pytest.raises(UserError, match=r"cannot be read \(No such .*\); the adapter needs the model that its run"):
        resume(folder, "--steps", "20")
