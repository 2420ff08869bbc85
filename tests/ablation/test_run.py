"""One run: a row of what was measured, and probes that say the truth."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from ablation import run as run_module
from ablation.plan import Plan, Run, run_settings
from ablation.records import Row
from ablation.run import count_spikes, digest, perturb, settings_hash, train_run
from data.batches import validation_windows
from model.decoder import Decoder
from training import loop
from training.evaluate import evaluate
from training.session import set_up


def plan_of(config, **fields) -> Plan:
    return Plan(config=str(config), vary={"norm": ["rms", "layer", "none"]}, **fields)


def train(config, arm: str = "rms", seed: int = 1) -> Row:
    return train_run(plan_of(config), Run(arm, "final", seed, 2e-2), "cpu", 1, 1)


@pytest.fixture(scope="module")
def trained_rms(config) -> Row:
    return train(config)


def test_arms_of_a_seed_share_text_batches_and_initial_weights_and_differ_in_their_loss(config, trained_rms):
    rows = [trained_rms, *(train(config, arm) for arm in ("layer", "none"))]
    for name in ("weights_hash", "text_hash", "batches_hash", "device"):
        assert len({getattr(row, name) for row in rows}) == 1
    assert len({row.settings_hash for row in rows}) == len({row.loss for row in rows}) == 3
    other = train(config, seed=2)
    assert other.text_hash == trained_rms.text_hash
    assert other.weights_hash != trained_rms.weights_hash and other.batches_hash != trained_rms.batches_hash


def test_a_row_holds_what_the_run_measured(config, tmp_path, trained_rms):
    settings = run_settings(plan_of(config), Run("rms", "final", 1, 2e-2))
    assert (trained_rms.arm, trained_rms.phase, trained_rms.seed, trained_rms.learning_rate) == (
        "rms",
        "final",
        1,
        2e-2,
    )
    assert (trained_rms.status, trained_rms.steps, trained_rms.tokens) == ("completed", 12, 12 * 4 * 32)
    assert [step for step, _ in trained_rms.curve] == list(range(1, 13)) and trained_rms.seconds > 0
    # An untrained model predicts each of the 300 tokens alike; the curve ends at the final loss, since the validation
    # set is shorter than what the points use.
    assert trained_rms.curve[0][1] == pytest.approx(math.log(300), rel=0.15)
    assert trained_rms.curve[-1][1] == float(f"{trained_rms.loss:.6g}")
    session = set_up(settings, tmp_path, resume=False, log=lambda _: None)
    assert trained_rms.parameters == session.model.num_parameters()
    batches = [session.batch(step) for step in range(12)]
    assert trained_rms.batches_hash == digest(*(inputs.tobytes() + targets.tobytes() for inputs, targets in batches))
    nats = trained_rms.loss * (len(session.corpus.validation) - 1)
    assert trained_rms.bits_per_byte == pytest.approx(nats / math.log(2) / session.corpus.validation_bytes)
    elsewhere = dataclasses.replace(settings, machine=dataclasses.replace(settings.machine, device="cuda:1"))
    assert trained_rms.settings_hash == settings_hash(settings) == settings_hash(elsewhere)


@pytest.mark.parametrize("bad_step", [2, 11])
def test_a_run_that_diverges_is_a_row_and_not_an_error(config, monkeypatch, bad_step):
    train_step, steps = loop.train_step, itertools.count(1)

    def diverging(*arguments):
        if next(steps) == bad_step:
            raise loop.Diverged("the loss is nan; and more")
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", diverging)
    row = train(config)
    assert (row.status, row.loss, row.kurtosis) == ("diverged", None, None) and "the loss is nan" in row.reason
    assert row.steps == bad_step - 1 == len(row.curve)


def test_probes_measure_the_stream_and_the_attention(config, tmp_path, trained_rms):
    """Against the definitions, in a session whose model is the one that was trained."""
    settings = run_settings(plan_of(config), Run("rms", "final", 1, 2e-2))
    session = set_up(settings, tmp_path, resume=False, log=lambda _: None)
    [*loop.train_steps(session)]
    probes = run_module.probe(session)
    assert probes == {name: getattr(trained_rms, name) for name in probes} and len(probes) == 6
    streams, model = [], session.model
    for norm in [m for m in model.modules() if isinstance(m, run_module.Norm)]:
        norm.register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1].double()))
    tokens, targets = next(iter(validation_windows(session.corpus.validation, 32, 4)))
    evaluate(model, [(tokens, targets)], 1, session.device)
    x = torch.stack(streams).flatten(1, 2).numpy()  # (norms, tokens, D)
    assert len(x) == 5
    ratio = np.abs(x.mean(-1)) / x.std(-1)
    assert probes["mean_over_std"] == pytest.approx(ratio[2:].mean(), rel=1e-3)
    cosine = np.abs(x.sum(-1)) / np.linalg.norm(x, axis=-1) / math.sqrt(x.shape[-1])
    assert probes["cosine_with_ones"] == pytest.approx(cosine.mean(), rel=1e-3)
    kurtosis = (x**4).mean(-1) / (x**2).mean(-1) ** 2
    assert probes["kurtosis"] == pytest.approx(kurtosis.mean(-1).max(), rel=1e-3)
    channels = np.sqrt((x**2).mean(1))
    largest = channels.max(-1) / np.sort(channels, -1)[:, (channels.shape[1] - 1) // 2]
    assert probes["largest_channel"] == pytest.approx(largest.max(), rel=1e-3)
    assert probes["largest_activation"] == pytest.approx(np.abs(x).max(), rel=1e-3)


def test_attention_to_the_first_token_is_uniform_where_keys_are_equal(config, tmp_path):
    settings = run_settings(plan_of(config), Run("rms", "final", 1, 2e-2))
    session = set_up(settings, tmp_path, resume=False, log=lambda _: None)
    for layer in session.model.layers:
        torch.nn.init.zeros_(layer.self_attn.qkv_proj.weight)
    uniform = np.mean([1 / (position + 1) for position in range(16, 32)])
    assert run_module.probe(session)["first_token_attention"] == pytest.approx(uniform, rel=1e-3)


def test_a_spike_is_a_loss_far_above_the_twenty_steps_before_and_counts_once():
    assert count_spikes([3.0] * 25 + [4.0, 4.0, 3.0, 3.4] + [3.0] * 5 + [9.0]) == 2
    assert count_spikes([3.0] * 20 + [4.0]) == 1 and count_spikes([3.0] * 19 + [4.0]) == 0


def test_perturbed_runs_start_from_weights_that_differ_by_so_much(make_config):
    models = [Decoder(make_config(), seed=1) for _ in range(2)]
    perturb(models[1], 5, 0.05)
    changes = [(b / a - 1)[a != 0].flatten() for a, b in zip(*(m.parameters() for m in models), strict=True)]
    assert torch.cat(changes).std().item() == pytest.approx(0.05, rel=0.02)
