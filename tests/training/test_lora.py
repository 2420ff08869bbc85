"""Runs with --lora: what is saved, what stays as it was, that they resume exactly, and what generates with them."""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generate
from checkpoints.pretrained import load_pretrained, open_checkpoint
from errors import UserError
from training import checkpoint, metrics
from training.loop import save, train, train_steps
from training.session import no_log, set_up
from training.settings import parse, save_settings


@pytest.fixture(scope="module")
def base(flags, tmp_path_factory) -> Path:
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(parse([*flags, "--steps", "6"], "test").settings, folder)
    return folder


@pytest.fixture(scope="module")
def start(flags, base) -> list[str]:
    """The flags of a run of 12 steps with LoRA from that run."""
    return [*flags, "--init-from", str(base), "--lora", "4", "--steps", "12"]


@pytest.fixture(scope="module")
def folder(start, tmp_path_factory) -> Path:
    """Such a run."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(parse(start, "test").settings, folder)
    return folder


def test_the_base_stays_bit_equal_and_the_optimizer_has_state_for_a_and_b_alone(start, base, tmp_path):
    before = load_pretrained(base / "best").state_dict()
    session = set_up(parse(start, "test").settings, tmp_path / "lora", resume=False, log=no_log)
    for _ in train_steps(session):
        pass
    after = session.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(".lora_" in name for name in after.keys() - before.keys())
    learned = {parameter for name, parameter in session.model.named_parameters() if ".lora_" in name}
    assert session.optimizer.state.keys() == learned and len(learned) == 2 * 4 * 2  # matrices of a layer, packed


def test_a_run_saves_its_adapter_without_the_model_and_learns(folder, base):
    for name in ("best", "last"):
        files = {path.name for path in (folder / name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "state.json"} <= files
        assert not {"config.json", "model.safetensors"} & files
        assert ("training_state.safetensors" in files) == (name == "last")
    losses = [line["validation_loss"] for line in metrics.read(folder) if "validation_loss" in line]
    assert losses[-1] < losses[0]
    fields = json.loads((folder / "best" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["base_model_name_or_path"]) == (4, 8, str(base / "best"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(start, tmp_path, dtype):
    settings = parse([*start, "--lora-alpha", "6", "--dtype", dtype], "test").settings
    train(settings, tmp_path / "straight")
    for stop in (1, 7, 12):
        session = set_up(settings, tmp_path / "resumed", resume=stop > 1, log=no_log)
        for result in train_steps(session):
            if result.step == stop:
                break
        save(session)
        assert session.saver.finish()
        save_settings(settings, tmp_path / "resumed" / "settings.toml")
    for file in ("adapter_model.safetensors", "training_state.safetensors"):
        found, straight = (load_file(tmp_path / name / "last" / file) for name in ("resumed", "straight"))
        assert found.keys() == straight.keys() and all(torch.equal(found[name], straight[name]) for name in straight)
    assert checkpoint.read_state(tmp_path / "resumed" / "last").step == 12
    changed = parse(["--resume", str(tmp_path / "resumed"), "--steps", "20", "--lora", "2"], "test").settings
    with pytest.raises(UserError, match="cannot be resumed: lora: 4 -> 2"):
        set_up(changed, tmp_path / "resumed", resume=True, log=no_log)


@pytest.fixture
def generated(monkeypatch, capsys):
    """What generate.py prints for some arguments."""

    def run(*arguments) -> str:
        greedy = ("--max-new-tokens", "9", "--temperature", "0", "--dtype", "float32")
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments), *greedy])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(generate, "exit_on_user_error", contextlib.nullcontext)
            generate.main()
        return capsys.readouterr().out

    return run


@torch.no_grad()
def test_a_run_its_adapter_on_the_base_and_the_two_merged_generate_the_same_text(folder, base, generated, tmp_path):
    merged = tmp_path / "merged"
    text = generated(folder, "the ")
    assert text.startswith("the ") and generated(base, "the ", "--adapter", folder) == text
    (bare := tmp_path / "bare").mkdir()  # as PEFT saves it, without a tokenizer
    for path in (folder / "best").glob("adapter_*"):
        shutil.copy(path, bare)
    assert generated(bare, "the ") == text
    assert generated(folder, "--merge", merged) == "" and {*tmp_path.iterdir()} == {bare, merged}
    assert generated(merged, "the ") == text
    adapted = load_pretrained(open_checkpoint(base / "best", folder / "best"))
    models = [adapted, *(load_pretrained(directory) for directory in (merged, base / "best"))]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["layers.0.mlp.down_proj.weight"], states[2]["layers.0.mlp.down_proj.weight"])
    with pytest.raises(UserError, match=r"--merge .*merged exists; give a new directory"):
        generated(folder, "--merge", merged)
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(40).view(2, 20)
    logits = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (models[0](tokens) - logits).norm() <= 2e-6 * logits.norm()


@pytest.mark.parametrize("extra", [["--norm", "layer"], ["--rope-theta", "500"]])
def test_a_changed_model_is_refused(start, tmp_path, extra):
    settings = parse([*start, *extra], "test").settings
    with pytest.raises(UserError, match="--lora leaves the model as it is; leave out --norm and other flags"):
        set_up(settings, tmp_path / "lora", resume=False, log=no_log)


def test_a_run_whose_base_is_gone_says_so(folder, base, tmp_path):
    settings = parse(["--resume", str(folder), "--steps", "20"], "test").settings
    base.rename(tmp_path / "moved")
    try:
        with pytest.raises(
            UserError, match=r"best cannot be read \(No such .*\); the adapter needs the model that its run"
        ):
            set_up(settings, folder, resume=True, log=no_log)
    finally:
        (tmp_path / "moved").rename(base)
