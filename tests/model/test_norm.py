"""The norms that are there to be compared with: one token at a time, or, for BatchNorm, not."""

import pytest
import torch

from model.config import NORMS
from model.norm import UNFUSED, Norm

OTHERS = [*UNFUSED, "batch"]


def made(make_config, norm, **changes):
    """A norm with random gain and bias."""
    module, generator = Norm(make_config(norm=norm, **changes)), torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) + 0.5
    return module


@pytest.mark.parametrize("norm", OTHERS)
def test_the_stream_is_the_rounded_sum_and_the_output_has_the_dtype_of_x(make_config, norm):
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(2, 3, 48, generator=generator).bfloat16() for _ in range(2))
    y, s = made(make_config, norm)(x, residual)
    assert y.dtype == torch.bfloat16 and torch.equal(s, x + residual)
    alone, same = made(make_config, norm)(s)
    assert torch.equal(alone, y) and same is s


@pytest.mark.parametrize("norm", [*NORMS])
def test_only_batchnorm_looks_at_other_tokens_and_only_in_training(make_decoder, norm):
    decoder = make_decoder(norm=norm)
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97

    def leaks():
        with torch.no_grad():
            return not torch.equal(decoder(tokens)[:, :7], decoder(changed)[:, :7])

    assert decoder.training and leaks() == (norm == "batch")  # a token of the future alters the past: no language model
    decoder.eval()
    assert not leaks()


def test_batchnorm_keeps_running_averages_in_training_alone(make_config, relative):
    module, generator = made(make_config, "batch"), torch.Generator().manual_seed(3)
    x = torch.randn(4, 9, 48, generator=generator) * 2 + 1
    for _ in range(80):
        y, _ = module(x)
    rows = x.flatten(0, 1).double()
    assert relative(module.running_mean, rows.mean(0)) < 1e-3
    assert relative(module.running_var, rows.var(0)) < 1e-3
    standard = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + module.eps).sqrt()
    expected = standard * module.weight.detach().double() + module.bias.detach().double()
    assert relative(y.detach().flatten(0, 1), expected) < 1e-6
    module.eval()
    before = module.running_mean.clone()
    module(x * 5)
    assert torch.equal(module.running_mean, before)
    assert {"running_mean", "running_var"} <= module.state_dict().keys()


def test_eps_outside_the_root_is_the_same_norm_to_rounding(relative):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.3
    rms = x.square().mean(-1, keepdim=True).sqrt()
    inside, outside = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), x / (rms + 1e-6 / 2)
    assert relative(outside, inside) < 1e-6
