"""The estimate of what a run needs, compared with what it does need."""

import dataclasses
import re

import pytest
import torch

import kernels
from model.decoder import Decoder
from model.lora import add_lora
from tests.training.runs import settings_of
from training import estimate
from training.settings import CONFIGS, OptimizerSettings, load_settings

CPU = torch.device("cpu")
MODELS = sorted(path for path in CONFIGS.glob("*.toml") if "[model]" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_formula_counts_what_the_forward_pass_keeps(settings, name, rank, monkeypatch):
    chosen, kept = pytest.importorskip(f"kernels.{name}"), {}
    monkeypatch.setattr(kernels, "implementation", lambda device: chosen)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    model, tokens = Decoder(settings.model), torch.randint(0, 400, (8, 32))
    if rank is not None:
        run = dataclasses.replace(settings.run, lora=rank, init_from="x")
        settings = dataclasses.replace(settings, run=run, optimizer=OptimizerSettings())
        add_lora(model, {"r": rank, "lora_alpha": 8, "base_model_name_or_path": "x"}, seed=1)
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert estimate.memory(settings, torch.float32, CPU)["gradients"] == 4 * learned
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    weights = {p.data_ptr() for p in model.parameters()}
    size = sum(storage.nbytes() for address, storage in kept.items() if address not in weights)
    assert estimate.memory(settings, torch.float32, CPU)["activations"] == pytest.approx(size, rel=0.05)
    deep = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_hidden_layers=8))
    less = dataclasses.replace(deep, machine=dataclasses.replace(deep.machine, activation_checkpointing=True))
    assert estimate.kept_elements(less, fused=True) < 0.5 * estimate.kept_elements(deep, fused=True)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_header_of_a_config_states_the_memory_of_the_formula(path):
    sizes = estimate.memory(load_settings(path), torch.bfloat16, CPU)
    stated = re.search(r"# Memory: (\S+ [MG]B), by the formula", path.read_text(encoding="utf-8"))[1]
    assert stated == estimate.format_bytes(sum(sizes.values()))


def test_a_step_of_several_micro_batches_has_one_update_of_the_weights(flags, monkeypatch):
    now = [0.0]

    def train_step(model, micro_batches, *_):
        now[0] += 2.0 + len(micro_batches)  # seconds of an update, and of each pass

    monkeypatch.setattr(estimate, "train_step", train_step)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])
    settings = settings_of(*flags, "--micro-batch-size", "2", "--steps", "10")  # of 8 sequences
    assert estimate.measure_time(settings, CPU, torch.float32) == 10 * (2 + 4)


def test_a_micro_batch_is_never_larger_than_the_batch(flags):
    large, default = (settings_of(*flags, *more) for more in (["--micro-batch-size", "64"], []))  # of 8 sequences
    assert estimate.memory(large, torch.float32, CPU) == estimate.memory(default, torch.float32, CPU)
    assert (large.data.micro_batch(), large.data.micro_batch(processes=2)) == (8, 4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_small_run_is_timed(flags, optimizer, capsys):
    estimate.estimate(settings_of(*flags, "--optimizer", optimizer))
    out = capsys.readouterr().out
    assert re.search(
        r"time +\d+ seconds on CPU \(threads: 1\): \S+ s a step, the fastest of 3 at a batch size of 8", out
    )
    assert "text      about 0.37" in out and "epochs of 2" in out
