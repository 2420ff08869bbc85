"""Runs of an ablation: paired by construction, probed, cut anywhere, never repeated."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ablation import conduct, demonstrations, probes, speed, switch, train
from ablation.plan import Plan, Run, arms_of, settings_of
from errors import UserError
from model.config import ModelConfig
from model.decoder import Decoder
from training import loop
from training.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of small documents, and where the tokens are kept."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        words = " ".join(f"word{(i * j) % 23} runs over {j}" for j in range(120))
        (folder / f"{i}.txt").write_text(words, encoding="utf-8")
    return folder


@pytest.fixture
def config(text, tmp_path) -> Path:
    """A configuration that trains in a second."""
    path = tmp_path / "small.toml"
    path.write_text(
        f"""[model]
vocab_size = 300
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 32
[data]
data = ["{text.as_posix()}"]
cache = "{(text / ".cache").as_posix()}"
sequence_length = 32
batch_size = 4
[optimizer]
steps = 12
learning_rate = 5e-3
warmup_steps = 2
""",
        encoding="utf-8",
    )
    return path


def settings_for(config: Path, norm: str = "rms", **changes) -> Settings:
    plan = Plan(arms=(norm,), config=str(config), **changes)
    return settings_of(plan, Run(arms_of(plan)[0], "final", 1, 5e-3))


def test_a_run_gives_loss_curves_probes_and_hashes_and_arms_of_a_seed_share_weights_and_text(config, tmp_path):
    rows = {norm: train.carry_out(settings_for(config, norm), tmp_path / norm) for norm in ("rms", "layer", "none")}
    shared = {(row["hashes"]["shared_weights"], row["hashes"]["text"]) for row in rows.values()}
    assert len(shared) == 1  # initial weights and text
    assert len({row["validation_loss"] for row in rows.values()}) == 3
    for row in rows.values():
        assert row["status"] == "done" and 2 < row["validation_loss"] < 7
        steps = [step for step, _ in row["curve"]]
        assert steps == list(range(1, 13)) and row["curve"][-1][1] < row["curve"][0][1]
        looked = row["probes"]
        assert len(looked["mean_over_deviation"]) == len(looked["cosine_with_ones"]) == 5
        assert all(0 <= c <= 1 for c in looked["cosine_with_ones"]) and looked["largest_activation"] > 0
        shares = [share for _, share in looked["update_share"]]
        assert all(0 < share < 1 for share in shares[:-1]) and shares[-1] < shares[0]  # the rate ends at 0
        assert len(looked["gradient_norm"]) == 12
        json.dumps(row)


def test_a_stopped_run_goes_on_and_ends_bit_for_bit_as_one_that_was_not(config, tmp_path, monkeypatch):
    settings = settings_for(config)
    whole = train.carry_out(settings, tmp_path / "whole", threads=1)
    step, calls = loop.train_step, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", interrupted)
    assert train.carry_out(settings, tmp_path / "cut", threads=1) is None
    assert len(calls) == 5
    found = train.carry_out(settings, tmp_path / "cut", threads=1)
    assert len(calls) == 12
    assert found["validation_loss"] == whole["validation_loss"] and found["curve"] == whole["curve"]


def test_a_run_that_diverges_is_a_row_and_no_error(config, tmp_path, monkeypatch):
    learning_rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda step, *args: learning_rate(step, *args) if step < 2 else math.nan)
    row = train.carry_out(settings_for(config), tmp_path / "run")
    assert row["status"] == "diverged" and row["validation_loss"] is None and len(row["curve"]) == 3


def test_probes_measure_what_they_say():
    model = Decoder(ModelConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1), seed=1)
    tokens = np.arange(24).reshape(2, 12)
    before = probes.copy_of_weights(model)
    found = probes.of_streams(model, tokens, torch.device("cpu"))
    rows = torch.nn.functional.embedding(torch.from_numpy(tokens), model.embed_tokens.weight.detach()).double()
    mean, spread = rows.mean(-1).abs(), rows.var(-1, correction=0).sqrt()
    assert found["mean_over_deviation"][0] == pytest.approx((mean / spread).mean().item(), rel=1e-5)
    ones = torch.ones(16, dtype=torch.float64)
    cosine = torch.cosine_similarity(rows, ones, dim=-1).abs().mean().item()
    assert found["cosine_with_ones"][0] == pytest.approx(cosine, rel=1e-5)
    assert len(found["cosine_with_ones"]) == 3
    assert probes.update_share(model, before) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.01
    assert probes.update_share(model, before) == pytest.approx(0.01, rel=1e-4)


def test_a_layernorm_run_is_switched_in_every_way_and_the_norms_alone_learn_where_it_says_so(config, tmp_path):
    settings = settings_for(config, "layer")
    train.carry_out(settings, tmp_path / "base", keep=True)
    base = switch.base_of(tmp_path / "base")
    rows = {v: switch.carry_out(settings, base, tmp_path / v, v, None) for v in switch.VARIANTS}
    assert [row["steps"] for row in rows.values()] == [0, 1, 1, 1]
    assert len({row["validation_loss"] for row in rows.values()}) == 4


def test_timing_gives_a_ratio_for_every_build_and_part(config, monkeypatch):
    monkeypatch.setattr(speed, "why_not_compile", lambda device: "not in a test")
    found = speed.measure(settings_for(config), torch.device("cpu"), blocks=6)
    assert {row["build"] for row in found["speed"]} == {"eager", "plain PyTorch with CPU functions"}
    assert [row["part"] for row in found["speed"][:5]] == [
        "norm forward",
        "norm backward",
        "forward",
        "forward and backward",
        "step",
    ]
    for row in found["speed"]:
        assert row["n"] == 6 and row["interval"][0] <= row["ratio"] <= row["interval"][1] and row["rms"] > 0
    assert all(0 < share < 1 for share in found["norm_share"].values())
    assert speed.kernels.implementation(torch.device("cpu")) is speed.kernels.cpu  # chosen as before


def test_blocks_take_turns(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    speed.interleaved(calls, torch.device("cpu"), 4)
    turns = [order[6:][i] for i in range(0, 32, speed.BLOCK)]
    assert turns == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_demonstrations_show_what_the_claims_say():
    found = demonstrations.all_of_them()
    assert found["rms_change_by_scale"] < 1e-4 and found["layer_change_by_scale"] < 1e-4
    assert found["rms_gradient_by_scale"] == pytest.approx(0.1, rel=1e-3)
    assert found["rms_cosine_with_input"] > 0.999999 > 0.99 > found["layer_cosine_with_input"]
    assert found["float16_rows_lost_without_upcast"] == 1 and found["float16_error_with_upcast"] < 2.5e-4


def ablate(config: Path, out: Path, *flags: str, **options):
    """The script in a process of its own."""
    command = [sys.executable, "ablate.py", "--config", str(config), "--out", str(out), "--no-speed", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_the_script_answers_reports_and_never_repeats_a_finished_run(config, tmp_path):
    out = tmp_path / "out"
    process = ablate(config, out, "--seeds", "2", "--jobs", "1", "--learning-rates", "1e-3", "5e-3")
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "rms minus layer:" in printed and "4 to choose rates (0.001, 0.005) and 4 to compare" in printed
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert len(results["runs"]) == 8 and len(results["valleys"]) == 2 and results["comparisons"][0]["n"] == 2
    for file in ("report.md", "report.html"):
        assert f"{results['comparisons'][0]['mean']:+.4f}"[1:] in (out / file).read_text(encoding="utf-8")
    times = [row["seconds"] for row in results["runs"]]

    process = ablate(config, out, "--seeds", "2", "--jobs", "1", "--learning-rates", "1e-3", "5e-3")
    printed, errors = process.communicate(timeout=300)
    again = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert process.returncode == 0 and [row["seconds"] for row in again["runs"]] == times
    process = ablate(config, out, "--seeds", "2", "--steps", "13")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and "another steps" in errors and "Traceback" not in errors


def test_a_killed_comparison_keeps_what_is_finished(config, tmp_path):
    out = tmp_path / "out"
    process = ablate(config, out, "--seeds", "6", "--jobs", "1", start_new_session=True)
    finished = out / "results.json"
    while not finished.exists() or len(json.loads(finished.read_text(encoding="utf-8"))["runs"]) < 2:
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(finished.read_text(encoding="utf-8"))["runs"]
    process = ablate(config, out, "--seeds", "3", "--jobs", "1")
    _, errors = process.communicate(timeout=300)
    after = json.loads(finished.read_text(encoding="utf-8"))["runs"]
    assert process.returncode == 0, errors
    assert after[: len(before)] == before and {row["seed"] for row in after} >= {1, 2, 3}


def test_results_that_cannot_be_compared_are_refused(config, tmp_path):
    for broken in ("{", "[]", '{"plan": {}}', '{"plan": 3, "runs": [], "switched": []}'):
        (tmp_path / "results.json").write_text(broken, encoding="utf-8")
        with pytest.raises(UserError, match="not readable"):
            conduct.begin(Plan(config=str(config)), tmp_path, "cpu", 1)
    plan = Plan(config=str(config))
    text = json.dumps({"plan": dataclasses.asdict(plan) | {"bound": 0.5}, "runs": [], "switched": []})
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="another bound"):
        conduct.begin(plan, tmp_path, "cpu", 1)
