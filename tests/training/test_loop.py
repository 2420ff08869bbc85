"""The files that a run leaves, the steps it takes, what it prints, errors that end it, and the estimate before it."""

import dataclasses
import json
import math
import random
import re
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kernels
from data.tokenizer import Tokenizer
from errors import UserError
from model.decoder import Decoder
from model.lora import add_lora
from tests.training import runs
from tests.training.runs import after_step, evaluations, losses, open_session, train_run
from training import commands, estimate, loop, metrics, plot
from training.evaluate import Evaluation
from training.loop import train_steps
from training.settings import CONFIGS, OptimizerSettings, load_settings, parse


def test_a_run_learns_and_leaves_settings_metrics_a_plot_and_two_checkpoints(run, settings, tmp_path, monkeypatch):
    assert {path.name for path in run.iterdir()} == {"settings.toml", "metrics.jsonl", "loss.png", "last", "best"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    used = load_settings(run / "settings.toml")
    assert dataclasses.replace(used, run=settings.run) == settings
    assert used.run.out is None and all(used.run.sample_prompts)  # another run may begin with these settings
    assert [line["step"] for line in metrics.read(run) if "loss" in line] == list(range(1, 41))
    assert losses(run)[0] == pytest.approx(math.log(400), rel=0.02)  # an untrained model predicts every token alike
    evaluated = evaluations(run)
    assert [line["step"] for line in evaluated] == [10, 20, 30, 40] and evaluated[-1]["validation_loss"] < 4.5
    assert evaluated[-1]["perplexity"] == pytest.approx(math.exp(evaluated[-1]["validation_loss"]))
    state = json.loads((run / "last" / "state.json").read_text())
    assert state["step"] == 40 and state["tokens"] == 40 * 8 * 32 and state["text_hash"]
    assert state["best_validation_loss"] == min(line["validation_loss"] for line in evaluated)
    (run / "loss.png").unlink()
    plot.main((run,))
    assert (run / "loss.png").is_file()
    metrics.write(run, 41, loss=math.nan)  # can still be drawn
    plot.draw([run, run], tmp_path / "two.svg")
    assert b"<svg" in (tmp_path / "two.svg").read_bytes()


def test_the_same_seed_gives_the_same_run_and_another_seed_another_without_global_random_numbers(flags, tmp_path):
    flags = [*flags, "--steps", "6", "--seed", "7"]
    settings, a = parse(flags, "test").settings, tmp_path / "a" / "last" / "model.safetensors"
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    loop.train(settings, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.array_equal(np.random.get_state()[1], before[2])
    runs.assert_equal_tensors(train_run(tmp_path / "b", *flags, "--activation-checkpointing") / "last" / a.name, a)
    a, other = load_file(a), load_file(train_run(tmp_path / "c", *flags, "--seed", "8") / "last" / a.name)
    assert not any(torch.equal(a[name], other[name]) for name in a if a[name].ndim == 2)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(flags, tmp_path, monkeypatch):
    after_step(monkeypatch, 13, lambda: monkeypatch.setattr(loop, "learning_rate", lambda *_: math.nan))
    with pytest.raises(UserError, match=r"step 15: the loss is nan .*; the last save is kept: .*learning-rate"):
        train_run(tmp_path / "run", *flags)
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text())["step"] == 10
    weights = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    monkeypatch.undo()
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(math.nan, 10, 10))
    with pytest.raises(UserError, match=r"step 10: the validation loss is nan; nothing was saved yet"):
        train_run(tmp_path / "other", *flags)
    assert not (tmp_path / "other" / "last").exists()


def test_float16_skips_updates_that_overflow_and_saves_the_loss_scale(flags, tmp_path, monkeypatch, capsys):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: scaler(*args, init_scale=2.0**30, **kwargs))
    run = train_run(tmp_path / "run", *flags, "--dtype", "float16", "--steps", "20")
    assert "float16 overflow, update skipped" in capsys.readouterr().out
    state = json.loads((run / "last" / "state.json").read_text())
    assert 1 < state["scaler"]["scale"] < 2.0**30
    assert any(line.get("gradient_norm") == "inf" for line in metrics.read(run))


def test_the_steps_report_what_the_run_logs_and_neither_print_nor_write(flags, tmp_path, capfd):
    extended = [*flags, "--steps", "6", *"--embedding-lr-multiplier 5 --norm-lr-multiplier 3".split()]
    logged = metrics.read(train_run(tmp_path / "run", *extended))
    out, err = capfd.readouterr()
    steps = [line.split(":")[0] for line in out.splitlines() if "tok/s" in line]
    assert steps == [f"step {step} of 6" for step in range(1, 7)] and "\r" not in out + err
    session = open_session(tmp_path / "steps", *extended)
    for result, line in zip(train_steps(session), logged[:6], strict=True):
        assert result.step == session.state.step == line["step"]
        assert session.state.tokens == line["tokens"]
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert getattr(result, name) == line[name]
        rates = {group["lr"] for group in session.optimizer.param_groups}
        assert rates == {multiplier * result.learning_rate for multiplier in (1, 3, 5)}
    seconds = np.cumsum([line["step_seconds"] for line in logged[:6]])
    assert [line["seconds"] for line in logged[:6]] == seconds.tolist() and (np.diff(seconds) > 0).all()
    assert session.state.step == 6
    assert capfd.readouterr() == ("", "") and not (tmp_path / "steps").exists()


def test_a_loss_that_rises_twice_is_a_note_also_where_the_run_was_resumed(flags, tmp_path, monkeypatch, capsys):
    nats = iter([20.0, 15.0, 15.01, 15.02, 18.0, 1.0, 2.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(nats), 10, 10))
    after_step(monkeypatch, 7, lambda: signal.raise_signal(signal.SIGTERM))
    run = train_run(tmp_path / "run", *flags, "--steps", "10", "--evaluate-every", "2")
    assert runs.resume(run) == 0
    out = capsys.readouterr().out
    assert out.count("note: the validation loss has risen twice") == 1
    assert "best/ has the weights with the lowest validation loss, 1.5000 nats per token (step 4)\n" in out
    states = [json.loads((run / name / "state.json").read_text()) for name in ("best", "last")]
    assert [(state["step"], state["best_validation_loss"]) for state in states] == [(4, 1.5), (10, 1.5)]
    assert "the learning rate rises until" not in out
    short = ["--batch-size", "64", "--steps", "24", "--warmup-steps", "24", "--evaluate-every", "24"]
    train_run(tmp_path / "short", *flags, *short)
    out = capsys.readouterr().out
    assert "note: the learning rate rises until step 24; better is --warmup-steps 2" in out
    assert "note: give --evaluate-every 4, and best/ keeps the best weights of the way" in out
    train_run(tmp_path / "tuned", *flags[2:], "--init-from", str(run), "--steps", "2")
    assert " (step 0)\nnote: training has made the model no better" in capsys.readouterr().out


def test_a_sample_is_cut_to_the_context_and_cannot_send_commands_to_the_terminal(flags, tmp_path, monkeypatch, capsys):
    long = " ".join(map(str, range(200)))
    train_run(tmp_path / "run", *flags, "--steps", "2", "--sample-prompts", long, "one")
    out = capsys.readouterr().out
    assert "198 199" in out and " 150 " not in out and "\n  | one" in out and "next: " in out
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "\x1b]0;title\x07\nnext")
    train_run(tmp_path / "other", *flags, "--steps", "2")
    out = capsys.readouterr().out
    assert "  | \u241b]0;title\u2407\n  | next" in out and "\x1b" not in out


def test_too_little_memory_is_one_line(flags, tmp_path, monkeypatch):
    errors = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ]
    monkeypatch.setattr(loop, "train_step", Mock(side_effect=[*errors]))
    for number in range(len(errors)):
        with pytest.raises(UserError, match="too little memory; use a smaller --micro-batch-size"):
            commands.run(parse([*flags, "--out", str(tmp_path / str(number))], "test"))


CPU = torch.device("cpu")
MODELS = sorted(path for path in CONFIGS.glob("*.toml") if "[model]" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("rank", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (4, torch.float32)])
@pytest.mark.parametrize(("name", "head_dim"), [("cpu", 16), ("cpu", 64), ("gpu", 16)])
def test_the_formula_counts_what_the_forward_pass_keeps(settings, name, head_dim, rank, dtype, monkeypatch):
    chosen, saved = pytest.importorskip(f"kernels.{name}"), {}
    monkeypatch.setattr(kernels, "implementation", lambda device: chosen)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, head_dim=head_dim))
    model, tokens = Decoder(settings.model, compute_dtype=dtype), torch.randint(0, 400, (8, 32))
    if rank is not None:
        run = dataclasses.replace(settings.run, lora=rank, init_from="x")
        settings = dataclasses.replace(settings, run=run, optimizer=OptimizerSettings())
        add_lora(model, {"r": rank, "lora_alpha": 8, "base_model_name_or_path": "x"}, seed=1)
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert estimate.memory(settings, torch.float32, chosen)["gradients"] == 4 * learned
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens, token_weight=torch.rand(()))
    weights = {p.data_ptr() for p in model.parameters()}
    size = sum(storage.nbytes() for address, storage in saved.items() if address not in weights)
    size += tokens.numel() * 400 * dtype.itemsize if name == "gpu" else 0  # logits, which it does not keep
    sizes = estimate.memory(settings, dtype, chosen)
    assert sizes["activations"] + sizes["copies of them"] == pytest.approx(size, rel=0.05)
    deep = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_hidden_layers=8))
    less = dataclasses.replace(deep, machine=dataclasses.replace(deep.machine, activation_checkpointing=True))
    assert estimate.kept_elements(less, dtype, chosen) < 0.5 * estimate.kept_elements(deep, dtype, chosen)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_header_of_a_config_states_the_memory_of_the_formula(path):
    sizes = estimate.memory(load_settings(path), torch.bfloat16, kernels.implementation(CPU))
    stated = re.search(r"# Memory: (\S+ [MG]B), by the formula", path.read_text(encoding="utf-8"))[1]
    assert stated == estimate.format_bytes(sum(sizes.values()))


def test_a_step_of_several_micro_batches_has_one_update_of_the_weights(flags, monkeypatch, capsys):
    now = [0.0]

    def train_step(model, micro_batches, *_):
        now[0] += 2.0 + len(micro_batches)  # seconds of an update, and of each pass

    monkeypatch.setattr(estimate, "train_step", train_step)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])
    settings = runs.settings_of(*flags, "--micro-batch-size", "2", "--steps", "10")  # of 8 sequences
    for limit, measured in ((20, 3), (5, 1)):
        monkeypatch.setattr(estimate, "MAX_SECONDS", limit)
        assert estimate.measure_time(settings, CPU, torch.float32, has_documents=False) == 10 * (2 + 4)
        assert f"the fastest of {measured} at" in capsys.readouterr().out


@pytest.mark.parametrize("mask", ["--document-mask", "--no-document-mask"])
def test_the_timed_steps_have_documents_where_those_of_training_have(flags, tmp_path, monkeypatch, mask):
    members = set()
    monkeypatch.setattr(estimate, "train_step", lambda _, micro_batches, *__: members.add(len(micro_batches[0])))
    estimate.estimate(runs.settings_of(*flags, mask))
    assert members == {len(open_session(tmp_path, *flags, mask).micro_batches(0)[0])}


def test_a_micro_batch_is_never_larger_than_the_batch(flags):
    large, default = (runs.settings_of(*flags, *more) for more in (["--micro-batch-size", "64"], []))  # of 8 sequences
    memory = [estimate.memory(settings, torch.float32, kernels.reference) for settings in (large, default)]
    assert memory[0] == memory[1] and (large.data.micro_batch(), large.data.micro_batch(processes=2)) == (8, 4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_small_run_is_timed(flags, optimizer, capsys):
    estimate.estimate(runs.settings_of(*flags, "--optimizer", optimizer))
    out = capsys.readouterr().out
    time = r"time +\d+ seconds on CPU \(threads: 1\): \S+ s a step, the fastest of 3 at a batch size of 8"
    assert re.search(rf"{time}$", out, re.MULTILINE)
    assert "text: 60 documents" in out and " epochs of 20,992 tokens" in out
    estimate.estimate(runs.settings_of(*flags, "--first-sequence-length", "8"))
    assert re.search(f"{time}; the first steps, whose sequences are shorter, take less", capsys.readouterr().out)
