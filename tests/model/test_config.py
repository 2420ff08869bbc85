"""ModelConfig: which values it refuses, and counts that must equal those of the real modules."""

import subprocess
import sys

import pytest
import torch

import kernels
from errors import UserError
from model.config import NORMS, PLACEMENTS, ModelConfig
from model.count import flops_per_token, num_parameters
from model.decoder import Decoder


def test_configuration_and_families_import_no_torch():
    code = "import sys, model.config, checkpoints.families, checkpoints.find; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_model_has_four_million_parameters():
    assert num_parameters(ModelConfig()) == 4_000_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 50}, "hidden_size 50 is no multiple of 6 heads; set head_dim"),
        ({"head_dim": 7}, "heads are 7 wide"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"norm": "instance"}, "norm is 'instance': Expected rms, layer, "),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0 and needs a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor '4' and needs a number"),
    ],
)
def test_an_impossible_configuration_is_an_error_that_says_how_to_fix_it(make_config, changes, words):
    with pytest.raises(UserError, match=words):
        make_config(**changes)


def test_a_head_dim_that_changes_nothing_gives_an_equal_configuration(make_config):
    assert make_config(head_dim=8) == make_config() and make_config(head_dim=8).resolved_head_dim == 8
    assert make_config(head_dim=10) != make_config() and make_config(head_dim=10, hidden_size=50).head_dim == 10


@pytest.mark.parametrize("norm", NORMS)
def test_writing_the_default_bias_explicitly_gives_an_equal_configuration(make_config, norm):
    default = make_config(norm=norm)
    assert default.norm_bias is None and make_config(norm=norm, norm_bias=default.has_norm_bias) == default
    other = make_config(norm=norm, norm_bias=not default.has_norm_bias)
    if norm in ("none", "srms"):  # they have no parameters, whatever is asked for
        assert other == default and not other.norm_parameters
    else:
        assert other != default and other.has_norm_bias != default.has_norm_bias


@pytest.mark.parametrize(
    "changes",
    [
        *({"norm": norm} for norm in NORMS),
        *({"norm_placement": placement, "norm": "derf"} for placement in PLACEMENTS),
        {"norm": "layer", "norm_bias": False},
        {"norm_bias": True},
        {"attention_bias": True, "attention_output_bias": True, "qk_norm": True},
        {"tie_word_embeddings": False, "head_dim": 10},
    ],
)
def test_num_parameters_of_a_configuration_equals_that_of_the_module(make_config, changes):
    config = make_config(**changes)
    assert num_parameters(config) == sum(parameter.numel() for parameter in Decoder(config, seed=None).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_are_three_times_the_forward_products_that_torch_counts(make_config, tied, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(kernels, "_choice", "reference")  # it knows no products of oneDNN's
    config = make_config(tie_word_embeddings=tied)
    length = 16
    decoder, tokens = Decoder(config), torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(tokens, torch.zeros_like(tokens))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in counts.items() if "attention" in op)
    products = sum(flops for op, flops in counts.items() if "attention" not in op)
    heads = config.num_attention_heads * config.resolved_head_dim
    exact_attention = 4 * config.num_hidden_layers * heads * length * length  # q k^T and p v, without causality
    assert attention in (0, exact_attention)  # fused kernels for a CPU are not all counted
    assert flops_per_token(config, length) * length == 3 * (products + exact_attention)
