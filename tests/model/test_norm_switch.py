"""`--norm` changes the norm and nothing else."""

import pytest
import torch

from model.config import ModelConfig
from model.decoder import Decoder


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": False}])
def test_shared_parameters_start_bit_equal_and_all_others_are_biases_of_norms(make_config, changes):
    kinds = {"rms": ("rms", None), "layer": ("layer", None)}
    kinds |= {"layer without bias": ("layer", False), "rms with bias": ("rms", True)}
    states = {
        name: Decoder(make_config(norm=norm, norm_bias=norm_bias, **changes), seed=3).state_dict()
        for name, (norm, norm_bias) in kinds.items()
    }
    for state in states.values():
        for name in state.keys() & states["rms"].keys():
            assert torch.equal(state[name], states["rms"][name])
    norms = [f"layers.{i}.{norm}" for i in range(3) for norm in ("input_layernorm", "post_attention_layernorm")]
    biases = {f"{norm}.bias" for norm in [*norms, "norm"]}
    assert states["layer without bias"].keys() == states["rms"].keys()
    assert states["layer"].keys() - states["rms"].keys() == biases
    assert states["layer"].keys() == states["rms with bias"].keys()
    assert not any(states["rms with bias"][name].any() for name in biases)
    assert not states["rms"].keys() - states["layer"].keys()


def test_initial_values_depend_on_the_seed_and_the_name_and_not_on_other_parameters(make_config):
    """More layers, another vocabulary and more options do not change layer 0, except the scale of its outputs."""
    first = Decoder(make_config(), seed=3).state_dict()
    other = make_config(num_hidden_layers=12, vocab_size=50, attention_bias=True, qk_norm=True, norm="layer")
    second = Decoder(other, seed=3).state_dict()
    for name in [name for name in first if name.startswith("layers.0.")]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # 1/sqrt(2 L): from 3 to 12 layers a factor 1/2
            torch.testing.assert_close(second[name], first[name] / 2, rtol=1e-6, atol=0)
        else:
            assert torch.equal(second[name], first[name])
    other, name = Decoder(make_config(), seed=4).state_dict(), "layers.{}.mlp.gate_up_proj.weight"
    drawn = torch.stack([first[name.format(0)], first[name.format(1)], other[name.format(0)]]).flatten(1)
    assert (torch.corrcoef(drawn) - torch.eye(3)).abs().max() < 0.05  # 7680 values: 4.4 sigma


def test_initial_weights_are_normal_with_the_documented_standard_deviation():
    """Tolerance: five standard errors, std/sqrt(2n) of the standard deviation and std/sqrt(n) of the mean."""
    biases = {"attention_bias": True, "attention_output_bias": True}
    config = ModelConfig(num_hidden_layers=8, **biases, qk_norm=True, norm="layer", initializer_range=0.03)
    for name, parameter in Decoder(config, seed=9).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0 if name.endswith("bias") else 1)).all()
            continue
        expected = 0.03 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.03
        count = parameter.numel()
        assert abs(parameter.std().item() / expected - 1) < 5 / (2 * count) ** 0.5
        assert abs(parameter.mean().item()) < 5 * expected / count**0.5
        kurtosis = ((parameter / parameter.std()) ** 4).mean().item()
        assert abs(kurtosis - 3) < 5 * (24 / count) ** 0.5
