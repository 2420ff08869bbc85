"""One run: a row of what was measured, and probes that say the truth."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ablation import run as run_module
from ablation.execute import check_arms
from ablation.plan import Plan, Run, run_settings
from ablation.records import Row
from ablation.run import digest, perturb, train_run
from data.batches import validation_windows
from errors import UserError
from files import read_toml
from model.decoder import Decoder
from training import loop
from training.evaluate import evaluate
from training.session import Session, set_up

RUN = Run("rms", "final", 1, 2e-2)


@pytest.fixture
def trained_rms(trained) -> Row:
    return next(row for row in trained.rows if (row.arm, row.phase, row.seed) == ("rms", "final", 1))


@pytest.fixture
def session(trained, tmp_path) -> Session:
    return set_up(run_settings(trained.plan, RUN), tmp_path, resume=False)


def test_arms_of_a_seed_share_text_batches_and_initial_weights_and_differ_in_their_loss(trained, trained_rms):
    finals = {(row.arm, row.seed): row for row in trained.rows if row.phase == "final"}
    layer, other = finals["layer", 1], finals["rms", 2]
    for name in ("weights_hash", "batches_hash"):
        assert getattr(layer, name) == getattr(trained_rms, name) != getattr(other, name)
    assert layer.settings_hash != trained_rms.settings_hash and layer.loss != trained_rms.loss
    assert layer.text_hash == trained_rms.text_hash == other.text_hash


def test_a_row_holds_what_the_run_measured(session, trained_rms):
    assert (trained_rms.status, trained_rms.tokens) == ("completed", 12 * 4 * 32) and trained_rms.seconds > 0
    # From a model that predicts each of the 300 tokens alike, to the final loss: the whole validation set is used.
    assert [step for step, _ in trained_rms.curve] == list(range(1, 13))
    assert trained_rms.curve[0][1] == pytest.approx(math.log(300), rel=0.15)
    assert trained_rms.curve[-1][1] == float(f"{trained_rms.loss:.6g}")
    assert trained_rms.batches_hash == digest(array for step in range(12) for array in session.batch(step)[:2])
    nats = trained_rms.loss * (len(session.corpus.validation) - 1)
    assert trained_rms.bits_per_byte == pytest.approx(nats / math.log(2) / session.corpus.validation_bytes)


def test_a_run_with_document_masks_is_measured_with_them(config, trained_rms):
    plan = Plan(config=str(config), arms={"rms": {}, "masked": {"document_mask": True}})
    row = train_run(plan, dataclasses.replace(RUN, arm="masked"), "cpu", 1, 1)
    assert row.status == "completed" and row.curve[-1][1] == float(f"{row.loss:.6g}") != trained_rms.curve[-1][1]


def test_conversations_are_compared_on_the_same_tokens(config, trained_rms, tmp_path):
    (tokenizer,) = Path(read_toml(config)["data"]["data"][0]).glob(".cache/tokenizers/*/tokenizer.json")
    said = (f'{{"role": "user", "content": "{i}?"}}, {{"role": "assistant", "content": "word{i}"}}' for i in range(9))
    (tmp_path / "chat.jsonl").write_text("".join(f'{{"messages": [{messages}]}}\n' for messages in said))
    shared = {"data": [[str(tmp_path / "chat.jsonl")]], "tokenizer": [str(tokenizer)]}
    plan = Plan(config=str(config), arms={"rms": {}, "layer": {"norm": "layer"}}, vary=shared)
    check_arms(plan)
    row = train_run(plan, RUN, "cpu", 1, 1)
    assert (row.status, row.bits_per_byte) == ("completed", None) and row.batches_hash
    with pytest.raises(UserError, match="give all arms the same"):
        check_arms(dataclasses.replace(plan, vary=shared | {"sequence_length": [16, 32]}))


def test_a_run_that_diverges_is_a_row_and_not_an_error(trained):
    row = train_run(trained.plan, dataclasses.replace(RUN, learning_rate=1e17), "cpu", 1, 1)
    assert (row.status, row.loss, row.mean_over_std) == ("diverged", None, None)
    assert row.reason.startswith("step 2: the loss is ") and row.tokens == 4 * 32


def test_probes_measure_the_stream_and_the_attention(session, trained_rms):
    """Against the definitions, in a session whose model is the one that was trained."""
    [*loop.train_steps(session)]
    probes = run_module.probe(session)
    assert probes == {name: getattr(trained_rms, name) for name in probes} and len(probes) == 2
    streams, model = [], session.model
    for norm in [m for m in model.modules() if isinstance(m, run_module.Norm)]:
        norm.register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1].double()))
    batch = next(validation_windows(session.corpus.validation, 32, 4))
    evaluate(model, [batch], 1, session.device)
    x = torch.stack(streams).flatten(1, 2).numpy()  # (norms, tokens, D)
    ratio = np.abs(x.mean(-1)) / x.std(-1)
    assert probes["mean_over_std"] == pytest.approx(ratio[2:].mean(), rel=1e-3)
    cosine = np.abs(x.sum(-1)) / np.linalg.norm(x, axis=-1) / math.sqrt(x.shape[-1])
    assert probes["cosine_with_ones"] == pytest.approx(cosine.mean(), rel=1e-3)


def test_perturbed_runs_start_from_weights_that_differ_by_so_much(make_config):
    models = [Decoder(make_config(), seed=1) for _ in range(2)]
    perturb(models[1], 5, 0.05)
    changes = [(b / a - 1)[a != 0].flatten() for a, b in zip(*(m.parameters() for m in models), strict=True)]
    assert torch.cat(changes).std().item() == pytest.approx(0.05, rel=0.02)
