"""The estimate of what a run needs, compared with what it does need."""

import dataclasses
import re

import pytest
import torch

from model.decoder import Decoder
from training.estimate import activation_bytes, estimate
from training.settings import CONFIGS, config_path, parse


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
    stored, checkpointed = (activation_bytes(deep, 8, 32, torch.float32, checkpointing=on) for on in (False, True))
    assert checkpointed < 0.5 * stored  # the head, a layer, and the inputs of the others


def test_an_enormous_batch_is_estimated_from_a_smaller_one(settings):
    small, large = (
        activation_bytes(settings.model, count, 32, torch.float32, checkpointing=False) for count in (2**10, 2**40)
    )
    assert large == 2**30 * small


@pytest.mark.parametrize(
    "config", sorted(path.stem for path in CONFIGS.glob("*.toml") if "[model]" in path.read_text(encoding="utf-8"))
)
def test_the_header_of_a_config_states_the_memory_that_a_dry_run_estimates(config):
    header = re.search(r"# Memory: (\S+ [MG]B) on a CPU", config_path(config).read_text(encoding="utf-8"))[1]
    assert f"memory    {header}:" in estimate(parse(["--config", config], "test").settings)
