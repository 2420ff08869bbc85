"""What a run leaves behind, and what it says when it cannot go on."""

import dataclasses
import json
import math
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.batches import validation_windows
from data.tokenizer import load_tokenizer
from data.tokens import tokenize
from errors import UserError
from model.decoder import Decoder
from model.pretrained import load_pretrained
from training import commands, loop, machine, metrics, optimizer, plot
from training.estimate import activation_bytes, estimate
from training.evaluate import Evaluation, evaluate
from training.loop import train
from training.settings import config_path, load, parse

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run(flags, tmp_path):
    """A finished run."""
    train(parse([*flags, "--tensorboard"], "test").settings, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_leaves_settings_metrics_a_picture_and_two_checkpoints(run, settings):
    assert {path.name for path in run.iterdir() if not path.name.startswith("events.")} == {
        *("settings.toml", "metrics.jsonl", "loss.png", "last", "best")
    }
    assert any(path.name.startswith("events.") for path in run.iterdir())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = load(run / "settings.toml")
    assert dataclasses.replace(saved, run=settings.run) == settings
    assert metrics.read(run)[0]["text"].endswith(platform.python_version())
    lines = metrics.read(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in lines if "validation_loss" in line] == [10, 20, 30, 40]
    state = json.loads((run / "last" / "state.json").read_text())
    assert state["step"] == 40 and state["tokens"] == 40 * 8 * 32
    assert state["best_validation_loss"] == min(line.get("validation_loss", 9e9) for line in lines)
    assert all(state[f"{what}_hash"] for what in ("text", "tokenizer", "settings", "weights"))


def test_the_model_learns(run):
    lines = metrics.read(run)
    assert lines[1]["loss"] == pytest.approx(math.log(400), rel=0.02)  # a fresh model knows nothing
    last = next(line for line in reversed(lines) if "validation_loss" in line)
    assert last["validation_loss"] < 4.5
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(flags, tmp_path):
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        train(parse([*flags, "--steps", "6", "--seed", seed], "test").settings, tmp_path / name)
    a, b, c = (load_file(tmp_path / name / "last" / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if a[name].ndim == 2)


def test_micro_batches_change_nothing_but_rounding(flags, tmp_path):
    for name, size in (("whole", "8"), ("cut", "2")):
        train(parse([*flags, "--steps", "10", "--micro-batch-size", size], "test").settings, tmp_path / name)
    whole, cut = (
        [line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("whole", "cut")
    )
    # Adam divides by the gradient's size, so that the rounding of tiny gradients shows after some steps
    assert cut == pytest.approx(whole, rel=1e-4)


def test_activation_checkpointing_changes_no_bit(flags, tmp_path):
    for name in ("off", "on"):
        extra = ["--activation-checkpointing"] if name == "on" else []
        train(parse([*flags, "--steps", "6", *extra], "test").settings, tmp_path / name)
    off, on = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("off", "on"))
    assert all(torch.equal(off[name], on[name]) for name in off)


def test_norms_alone_learn_when_asked(flags, tmp_path):
    train(parse([*flags, "--steps", "3", "--train-only", "norms"], "test").settings, tmp_path / "norms")
    tensors = load_file(tmp_path / "norms" / "last" / "training_state.safetensors")
    moved = {name.split(".", 1)[1] for name in tensors if name.startswith("exp_avg.")}
    assert moved and all("norm" in name for name in moved)


def test_a_norm_can_be_swapped_on_the_way_in(flags, run, tmp_path, capsys):
    settings = parse([*flags, "--steps", "3", "--init-from", str(run), "--norm", "layer"], "test").settings
    train(settings, tmp_path / "swapped")
    out = capsys.readouterr().out
    assert "tensors kept from" in out and "5 new: " in out  # the biases of two norms in two layers and the last one
    lines = metrics.read(tmp_path / "swapped")
    assert lines[1]["loss"] < 5.0  # starts from what the other run learned, not from log(400) = 6.0


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(flags, tmp_path, monkeypatch):
    write = metrics.Metrics.write

    def poison(self, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 13:
            settings_of_step.append(step)

    settings_of_step = []
    monkeypatch.setattr(metrics.Metrics, "write", poison)
    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda *args: float("nan") if settings_of_step else rate(*args))
    with pytest.raises(UserError, match=r"step 15: the loss is nan and the largest gradient nan in .*learning-rate"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text())["step"] == 10
    weights = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_slow_machine_does_fewer_steps_and_says_so(flags, tmp_path, capsys):
    train(parse([*flags, "--steps", "100000", "--max-minutes", "1e-6"], "test").settings, tmp_path / "run")
    assert "doing 80 (--max-minutes None does them all)" in capsys.readouterr().out
    lines = [line for line in metrics.read(tmp_path / "run") if "loss" in line]
    assert len(lines) == 80
    assert lines[-1]["learning_rate"] == 0  # the schedule was shortened with the run


def test_float16_skips_steps_that_overflow_and_remembers_the_scale(flags, tmp_path, monkeypatch, capsys):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: scaler(*args, init_scale=2.0**30, **kwargs))
    train(parse([*flags, "--dtype", "float16", "--steps", "20"], "test").settings, tmp_path / "run")
    assert "float16 overflow, update skipped" in capsys.readouterr().out
    state = json.loads((tmp_path / "run" / "last" / "state.json").read_text())
    assert 1 < state["scaler"]["scale"] < 2.0**30
    assert any(line.get("gradient_norm") == "inf" for line in metrics.read(tmp_path / "run"))


def test_a_finished_run_is_never_overwritten(train_script, flags, run, tmp_path, monkeypatch):
    out = train_script(*flags, "--out", str(run), cwd=tmp_path)
    assert out.returncode == 2 and "never overwritten" in out.stderr and len(out.stderr.strip().splitlines()) == 1


def test_two_runs_that_start_at_once_get_folders_of_their_own(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claimed = {commands.claim_folder(settings, "tiny") for _ in range(3)}
    assert {path.name for path in claimed} == {"tiny-rms", "tiny-rms-2", "tiny-rms-3"}


def test_a_run_that_cannot_start_leaves_no_folder(train_script, flags, tmp_path):
    out = train_script(*flags, "--data", "nowhere.txt", cwd=tmp_path)
    assert out.returncode == 2 and "nowhere.txt" in out.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_an_evaluation_that_is_not_finite_saves_nothing(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(math.nan, 10, 10))
    with pytest.raises(UserError, match=r"step 10: the validation loss is nan; .*had not been saved yet"):
        train(parse(flags, "test").settings, tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()


def test_a_given_number_of_steps_is_done_however_long_it_takes(tmp_path):
    (tmp_path / "short.toml").write_text("[optimizer]\nmax_minutes = 1.0\n")
    config = ["--config", str(tmp_path / "short.toml")]
    assert parse(config, "test").settings.optimizer.max_minutes == 1.0
    assert parse([*config, "--steps", "9"], "test").settings.optimizer.max_minutes is None
    assert parse([*config, "--steps", "9", "--max-minutes", "2"], "test").settings.optimizer.max_minutes == 2.0


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_last_checkpoint_opens_in_transformers_with_equal_logits_and_ids(flags, tmp_path, norm):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    train(parse([*flags, "--norm", norm, "--steps", "12"], "test").settings, tmp_path / "run")
    last = tmp_path / "run" / "last"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    tokenizer, our_tokenizer = transformers.AutoTokenizer.from_pretrained(last), load_tokenizer(last)
    text = "the quick</s> brown fox,  7 wizards\n\tmix é potions 🦊"
    ids = tokenizer(text)["input_ids"]
    assert ids == [our_tokenizer.bos_id, *our_tokenizer.encode(text)]
    tokens = torch.tensor([ids])[:, :32]
    with torch.no_grad():
        ours, expected = load_pretrained(last)(tokens), theirs(tokens).logits
    assert (ours - expected).norm() / expected.norm() < 2e-6


def test_an_evaluation_is_the_mean_over_every_token_of_the_text(run, text_folder):
    tokenizer, model = load_tokenizer(run / "last"), load_pretrained(run / "last")
    text = (text_folder / "07.txt").read_text(encoding="utf-8")
    ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window = torch.tensor([ids[start : start + 33]])
            log_p = model(window[:, :-1]).double().log_softmax(-1)
            nats -= log_p.gather(2, window[:, 1:, None]).sum().item()
    tokens, text_bytes = tokenize([str(text_folder / "07.txt")], tokenizer)
    found = evaluate(model, validation_windows(tokens, 32, 4), text_bytes, torch.device("cpu"))
    assert found.tokens == len(ids) - 1 and found.text_bytes == len(text.encode())
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)


def test_a_picture_is_drawn_of_a_run_with_numbers_that_are_not_finite(run, tmp_path):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": "nan"}\n')
    plot.draw([run, run], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_the_peak_is_known_for_devices_in_the_table_alone(monkeypatch):
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40": None,
        "NVIDIA A10G": None,
        "NVIDIA H100 PCIe": 756e12,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert machine.peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert machine.peak_flops(torch.device("cuda"), torch.float32) is None
    assert machine.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_the_estimate_counts_what_the_forward_pass_keeps(settings):
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = Decoder(settings.model)
    tokens = torch.randint(0, 400, (8, 32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    kept = {
        address: size for address, size in kept.items() if address not in {p.data_ptr() for p in model.parameters()}
    }
    found = activation_bytes(settings.model, 8, 32, torch.float32, checkpointing=False)
    assert found == pytest.approx(sum(kept.values()), rel=0.02)
    deep = dataclasses.replace(settings.model, num_hidden_layers=8)
    whole, checkpointed = (activation_bytes(deep, 8, 32, torch.float32, checkpointing=on) for on in (False, True))
    assert checkpointed < 0.5 * whole  # the head, a layer, and the inputs of the others


def test_cosine_runs_too(flags, tmp_path):
    train(parse([*flags, "--schedule", "cosine", "--steps", "6"], "test").settings, tmp_path / "run")
    rates = [line["learning_rate"] for line in metrics.read(tmp_path / "run") if "loss" in line]
    assert rates[4] == pytest.approx(3e-3) and rates[5] == pytest.approx(0, abs=1e-12)


def test_embedding_and_head_can_learn_at_a_rate_of_their_own(settings):
    model = Decoder(dataclasses.replace(settings.model, tie_word_embeddings=False))
    groups = optimizer.build(
        model, dataclasses.replace(settings.optimizer, embedding_rate_factor=5.0), torch.device("cpu")
    ).param_groups
    by_factor = {group["rate_factor"]: group for group in groups if group["weight_decay"]}
    vocabulary = {id(model.embed_tokens.weight), id(model.lm_head.weight)}
    assert {id(parameter) for parameter in by_factor[5.0]["params"]} == vocabulary
    assert not vocabulary & {id(parameter) for parameter in by_factor[1.0]["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_the_script_ends_with_what_to_type_next_and_that_works(train_script, flags, tmp_path):
    out = train_script(*flags, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "runs" / "tiny-rms" / "best" / "config.json").exists()
    assert "bits per byte" in out.stdout and "xz -9e" in out.stdout
    assert "next: python generate.py runs/tiny-rms --prompt" in out.stdout
    again = train_script(*flags, "--steps", "2", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "runs" / "tiny-rms-2").exists()
    evaluated = train_script("--eval-only", "--init-from", "runs/tiny-rms", *flags[:4], cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "nats per token, perplexity" in evaluated.stdout


def test_a_dry_run_trains_nothing_and_prints_what_the_run_would_need(train_script, tmp_path):
    out = train_script("--config", "1b", "--dry-run", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "1,235,814,400 parameters" in out.stdout and "FLOPs" in out.stdout and "GB" in out.stdout
    assert not list(tmp_path.iterdir())


def test_compiling_without_a_compiler_is_said_in_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    train(parse([*flags, "--compile", "--steps", "2"], "test").settings, tmp_path / "run")
    assert "no C++ compiler found" in capsys.readouterr().out


def test_two_processes_train_the_run_of_one(flags, tmp_path):
    few = [*flags, "--steps", "10"]
    train(parse(few, "test").settings, tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "train.py"), *few, "--out", "two"]
    out = subprocess.run([*launch, *script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout.count("next: ") == 1  # only one of them speaks
    one, two = ([line["loss"] for line in metrics.read(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("config", ["tiny", "small", "124m", "1b"])
def test_the_header_of_a_config_states_the_memory_that_a_dry_run_estimates(config):
    header = re.search(r"# Memory: (\S+ [MG]B) on a CPU", config_path(config).read_text(encoding="utf-8"))[1]
    assert f"memory    {header}:" in estimate(parse(["--config", config], "test").settings)
