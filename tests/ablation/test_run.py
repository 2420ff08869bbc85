"""One run: the same bits however often it is stopped, a record of what was measured, and probes that say the truth."""

import dataclasses
import hashlib
import json
import math
import signal

import numpy as np
import pytest
import torch

from ablation import run as run_module
from ablation.plan import Plan, Run, run_settings
from ablation.results import Machine, RunResult, append_lines, read_results
from ablation.run import clipped, curves, probe_norm_inputs, settings_hash, train_run, update_ratio
from data.batches import validation_windows
from model.config import ModelConfig
from model.decoder import Decoder
from training import loop
from training.evaluate import evaluate
from training.metrics import Metrics
from training.session import set_up

MACHINE = Machine("CPU", "a processor", 1, 1, torch.__version__, "3", "Linux", "plain PyTorch", "float32")


def a_run(config, norm: str = "rms", **plan) -> tuple[Run, object]:
    """A run of a one-arm plan, and its settings."""
    plan = Plan(norms=(norm,), config=str(config), **plan)
    run = Run(plan.arms[0], "final", 1, 2e-2)
    return run, run_settings(plan, run)


def train(config, folder, norm: str = "rms", **options) -> RunResult | None:
    run, settings = a_run(config, norm)
    return train_run(run, settings, folder, MACHINE, 1, **options)


def same(result: RunResult) -> RunResult:
    """Without the time that it took."""
    return dataclasses.replace(result, seconds=0.0)


@pytest.fixture(scope="module")
def unstopped(config, tmp_path_factory) -> RunResult:
    return train(config, tmp_path_factory.mktemp("unstopped"))


@pytest.fixture
def calls(monkeypatch) -> tuple[list, dict]:
    """Counts training steps, and raises before a step what is put at its number."""
    counted, at, train_step = [], {}, loop.train_step  # at: step -> signal or exception

    def counting(*arguments):
        counted.append(1)
        action = at.pop(len(counted), None)
        if isinstance(action, signal.Signals):
            signal.raise_signal(action)
        elif action is not None:
            raise action
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", counting)
    return counted, at


@pytest.mark.parametrize(
    ("number", "what"), [(1, signal.SIGINT), (6, signal.SIGINT), (6, signal.SIGTERM), (11, signal.SIGINT)]
)
def test_a_stopped_run_resumes_and_ends_bit_for_bit_as_one_that_was_not(
    config, tmp_path, calls, unstopped, number, what
):
    counted, at = calls
    at[number] = what
    assert train(config, tmp_path / "run") is None and len(counted) == number
    resumed = train(config, tmp_path / "run")
    assert len(counted) == 12
    assert same(resumed) == same(unstopped)
    assert resumed.validation_curve and resumed.training_curve and len(resumed.update_ratio) == 12


def test_a_signal_at_the_last_step_does_not_lose_the_run(config, tmp_path, calls, unstopped):
    calls[1][12] = signal.SIGINT
    assert same(train(config, tmp_path / "run")) == same(unstopped)


def test_a_killed_run_resumes_from_its_last_save_bit_for_bit(config, tmp_path, calls, unstopped, monkeypatch):
    monkeypatch.setattr(run_module, "SAVE_SECONDS", 0.0)  # save after every step
    counted, at = calls
    at[8] = ZeroDivisionError("killed")
    with pytest.raises(ZeroDivisionError):
        train(config, tmp_path / "run")
    assert same(train(config, tmp_path / "run")) == same(unstopped)
    assert len(counted) == 8 + 5


def test_a_run_that_was_killed_before_its_record_was_written_is_trained_again(config, tmp_path, unstopped):
    first = train(config, tmp_path / "run", keep_weights=True)
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()
    assert same(train(config, tmp_path / "run")) == same(first) == same(unstopped)


def test_arms_of_a_seed_share_text_and_initial_weights_and_differ_in_their_loss(config, tmp_path, unstopped):
    results = [unstopped, *(train(config, tmp_path / norm, norm) for norm in ("layer", "none"))]
    assert len({result.initial_weights_hash for result in results}) == len({result.text for result in results}) == 1
    assert len({result.settings_hash for result in results}) == len({r.validation_loss for r in results}) == 3
    assert len({result.own_weights_hash for result in results}) == 3
    assert len({result.batches_hash for result in results}) == 1
    run, settings = a_run(config)
    seed_2 = dataclasses.replace(settings, run=dataclasses.replace(settings.run, seed=2))
    other = train_run(run, seed_2, tmp_path / "seed 2", MACHINE, 1)
    assert other.initial_weights_hash != unstopped.initial_weights_hash and other.text == unstopped.text
    assert other.own_weights_hash != unstopped.own_weights_hash and other.batches_hash != unstopped.batches_hash


def test_a_record_holds_what_the_run_measured(config, unstopped):
    run, settings = a_run(config)
    assert (unstopped.arm, unstopped.phase, unstopped.seed, unstopped.learning_rate) == (run.arm, "final", 1, 2e-2)
    assert unstopped.status == "completed" and unstopped.reason is None and unstopped.steps == 12
    for curve in (unstopped.training_curve, unstopped.validation_curve, unstopped.gradient_norm):
        assert [step for step, _ in curve] == list(range(1, 13))
    # An untrained model predicts each of the 300 tokens alike.
    assert unstopped.training_curve[0][1] == pytest.approx(math.log(300), rel=0.02)
    assert all(ratio > 0 for _, ratio in unstopped.update_ratio[:-1]) and unstopped.seconds > 0
    assert len(unstopped.probes.mean_over_std) == len(unstopped.probes.cosine_with_ones) == 5
    # The curve ends at the final loss, since the validation set is shorter than what the points use.
    assert unstopped.validation_curve[-1][1] == float(f"{unstopped.validation_loss:.6g}")
    nats = unstopped.validation_loss * unstopped.text.validation_tokens
    assert unstopped.bits_per_byte == pytest.approx(nats / math.log(2) / unstopped.text.validation_bytes)
    above = [norm > settings.optimizer.clip for _, norm in unstopped.gradient_norm]
    assert unstopped.clipped == float(f"{np.mean(above):.6g}")
    assert unstopped.settings_hash == settings_hash(settings)
    on_gpu = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, device="cuda:1"))
    assert settings_hash(on_gpu) == settings_hash(settings)


def test_points_along_a_run_are_the_loss_on_the_first_part_of_the_validation_set(config, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "CURVE_TOKENS", 300)  # two batches of 4 sequences of 32 tokens
    result = train(config, tmp_path / "run", keep_weights=True)
    _, settings = a_run(config)
    session = set_up(
        dataclasses.replace(settings, run=dataclasses.replace(settings.run, init_from=str(tmp_path / "run" / "last"))),
        tmp_path / "other",
        resume=False,
        log=lambda line: None,
    )
    windows = list(validation_windows(session.corpus.validation, 32, 4))
    first, everything = (
        evaluate(session.model, part, session.corpus.validation_bytes, session.device).loss
        for part in (windows[:2], windows)
    )
    assert len(windows) > 5 and result.validation_curve[-1] == (12, float(f"{first:.6g}"))
    assert result.validation_loss == everything != first


def test_the_losses_of_the_blocks_are_those_of_the_whole_validation_set(config, tmp_path, monkeypatch, unstopped):
    monkeypatch.setattr(run_module, "BLOCKS", 4)
    few = train(config, tmp_path / "run")
    assert few.validation_loss == unstopped.validation_loss
    tokens, batch = unstopped.text.validation_tokens, 4 * 32
    for blocks, batches in ((unstopped.validation_blocks, 1), (few.validation_blocks, 1 + (tokens // batch) // 4)):
        sizes = [min(batches * batch, tokens - start) for start in range(0, tokens, batches * batch)]
        assert len(blocks) == len(sizes) <= 64 and len(set(blocks)) > 1
        assert np.average(blocks, weights=sizes) == pytest.approx(unstopped.validation_loss, abs=1e-5)
    assert 1 < len(few.validation_blocks) <= 4 < len(unstopped.validation_blocks)


def test_the_hash_of_the_batches_is_that_of_what_was_trained_on(config, tmp_path, monkeypatch, unstopped):
    digest, split_batch = hashlib.blake2b(digest_size=16), loop.split_batch

    def noting(inputs, targets, *options):
        digest.update(inputs.tobytes() + targets.tobytes())
        return split_batch(inputs, targets, *options)

    monkeypatch.setattr(loop, "split_batch", noting)
    assert train(config, tmp_path / "run").batches_hash == digest.hexdigest() == unstopped.batches_hash


@pytest.mark.parametrize("bad_step", [2, 11])
def test_a_run_that_diverges_is_a_record_and_not_an_error(config, tmp_path, monkeypatch, bad_step):
    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda at, *rest: math.nan if at == bad_step else rate(at, *rest))
    result = train(config, tmp_path / "run")
    assert (result.status, result.validation_loss, result.bits_per_byte, result.probes) == (
        "diverged",
        None,
        None,
        None,
    )
    assert len(result.training_curve) == bad_step + 1 and "\n" not in result.reason and "--" not in result.reason
    assert ("validation loss" in result.reason) == (bad_step == 11)
    append_lines(tmp_path / "runs.jsonl", result)
    assert read_results(tmp_path / "runs.jsonl") == [result]


def test_evaluating_alone_does_no_step(config, tmp_path, calls):
    base = train(config, tmp_path / "base", "layer", keep_weights=True)
    counted = len(calls[0])
    run, settings = a_run(config, "layer")
    init = dataclasses.replace(settings.run, init_from=str(tmp_path / "base" / "last"))
    settings = dataclasses.replace(settings, run=init)
    found = train_run(run, settings, tmp_path / "evaluated", MACHINE, 1, evaluate_only=True)
    assert len(calls[0]) == counted == 12 and found.steps == 0
    assert found.validation_loss == base.validation_loss and found.probes == base.probes
    assert found.training_curve == found.validation_curve == found.update_ratio == []
    assert (found.clipped, found.batches_hash) == (None, "") and found.validation_blocks == base.validation_blocks
    assert found.own_weights_hash != base.own_weights_hash  # those that the other run ended with


def test_probes_measure_the_input_of_every_norm():
    model = Decoder(ModelConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1), seed=1)
    with torch.no_grad():
        model.embed_tokens.weight.add_(0.05)
    tokens = np.arange(24).reshape(2, 12)
    found = probe_norm_inputs(model, tokens, torch.device("cpu"))
    rows = torch.nn.functional.embedding(torch.from_numpy(tokens), model.embed_tokens.weight.detach()).double()
    mean, spread = rows.mean(-1).abs(), rows.var(-1, correction=0).sqrt()
    assert found.mean_over_std[0] == pytest.approx((mean / spread).mean().item(), rel=1e-5)
    cosine = torch.cosine_similarity(rows, torch.ones(16, dtype=torch.float64), dim=-1).abs().mean().item()
    assert found.cosine_with_ones[0] == pytest.approx(cosine, rel=1e-5)
    assert len(found.mean_over_std) == len(found.cosine_with_ones) == 3
    with torch.no_grad():
        model.embed_tokens.weight[tokens[1, 5], 3] = -70.0
    assert probe_norm_inputs(model, tokens, torch.device("cpu")).largest_activation == pytest.approx(70, abs=1)
    assert all(not module._forward_hooks for module in model.modules()) and model.training


def test_an_update_ratio_is_the_length_of_the_change_over_the_length_of_the_weights():
    model = Decoder(ModelConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1), seed=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert update_ratio(model, before) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.01
    assert update_ratio(model, before) == pytest.approx(0.01, rel=1e-4)


def test_update_ratios_are_of_the_step_that_they_are_noted_at(config, tmp_path, calls):
    """A step whose learning rate is 0 changes nothing: the schedule ends so."""
    result = train(config, tmp_path / "run")
    assert result.update_ratio[-1] == (12, 0.0) and result.update_ratio[-2][1] > 0
    run, settings = a_run(config, steps=48)
    long = train_run(run, settings, tmp_path / "long", MACHINE, 1)
    assert [step for step, _ in long.update_ratio] == list(range(4, 49, 4))


def write_metrics(folder, losses: list[float]) -> None:
    folder.mkdir()
    log = Metrics(folder, after_step=0)
    for number, loss in enumerate(losses, start=1):
        log.write(number, loss=loss, gradient_norm=2 * loss)
    log.close()


def test_a_long_curve_is_kept_in_sixty_points_that_are_means(tmp_path):
    losses = (3 + np.random.default_rng(0).normal(0, 0.1, 130)).tolist()
    write_metrics(tmp_path / "run", losses)
    found = curves(tmp_path / "run")
    steps = [step for step, _ in found["training_curve"]]
    assert len(steps) == 60 and steps[-1] == 130
    starts = [0, *steps[:-1]]
    for (end, mean), (_, norm), start in zip(found["training_curve"], found["gradient_norm"], starts, strict=True):
        expected = np.mean(losses[start:end])
        assert (mean, norm) == (pytest.approx(expected, rel=1e-5), pytest.approx(2 * expected, rel=1e-5))
        assert len(str(mean)) <= 7  # six digits


def test_a_spike_is_a_loss_far_above_the_twenty_steps_before_and_counts_once(tmp_path):
    losses = [9.0] * 5 + [3.0] * 60
    losses[40:43] = [4.0, 3.6, 3.9]  # one spike of three steps
    losses[50] = 3.6
    losses[55] = 3.4  # less than half a nat
    write_metrics(tmp_path / "run", losses)
    assert curves(tmp_path / "run")["spikes"] == 2 and clipped(tmp_path / "run", 8.0) == float(f"{5 / 65:.6g}")
    write_metrics(tmp_path / "infinite", [3.0] * 30 + [math.inf, 3.0])
    found = curves(tmp_path / "infinite")
    assert found["spikes"] == 1 and len(found["training_curve"]) == 31
    json.dumps(found, allow_nan=False)
