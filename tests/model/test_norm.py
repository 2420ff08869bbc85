"""Every norm of `NORMS`: its parameters, its values and gradients against a formula, its dtypes; initial weights."""

import pytest
import torch

from errors import UserError
from model.config import BIAS, NORMS, PLACEMENTS, ModelConfig
from model.count import num_norm_parameters, num_parameters
from model.decoder import Decoder
from model.norm import FORMULAS, Norm, is_norm_parameter


@pytest.fixture
def make_norm(make_config):
    """A norm with random parameters."""

    def make(norm, **changes):
        module, generator = Norm(make_config(norm=norm, **changes)), torch.Generator().manual_seed(4)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) + 0.5
        return module

    return make


@pytest.mark.parametrize("norm_bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients_equal_a_float64_formula(make_norm, make_config, norm_formula, relative, norm, norm_bias):
    """Tolerance: rounding of float32, more where three elements alone give the statistic, which may all be small."""
    module, generator = make_norm(norm, norm_bias=norm_bias, norm_eps=1e-3).eval(), torch.Generator().manual_seed(6)
    for buffer in module.buffers():
        buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    x, residual, dy, ds = (torch.randn(2, 9, 48, generator=generator) + 0.3 for _ in range(4))
    x.requires_grad_(), residual.requires_grad_()
    y, s = module(x, residual)
    torch.autograd.backward((y, s), (dy, ds))

    exact_x, exact_residual = (t.detach().double().requires_grad_() for t in (x, residual))
    tensors = {name: t.detach().double().requires_grad_() for name, t in module.state_dict().items()}
    exact_s = exact_x + exact_residual
    exact_y = norm_formula(exact_s, make_config(norm=norm, norm_eps=1e-3), tensors)
    torch.autograd.backward((exact_y, exact_s), (dy.double(), ds.double()))

    pairs = {name: (parameter.grad, tensors[name].grad) for name, parameter in module.named_parameters()}
    pairs |= {"y": (y, exact_y), "s": (s, exact_s), "x": (x.grad, exact_x.grad)}
    pairs["residual"] = residual.grad, exact_residual.grad
    errors = {name: relative(ours.detach(), exact.detach()) for name, (ours, exact) in pairs.items()}
    assert max(errors.values()) < (1e-5 if norm == "prms" else 1e-6), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
def test_the_output_has_the_dtype_of_x_and_the_stream_is_the_rounded_sum(make_norm, norm, dtype):
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(2, 3, 48, generator=generator).to(dtype) for _ in range(2))
    module = make_norm(norm)
    y, s = module(x, residual)
    assert y.dtype == dtype and torch.equal(s, x + residual)
    y_of_sum, same = make_norm(norm)(s)
    assert torch.equal(y_of_sum, y) and same is s and torch.equal(make_norm(norm)(s.float())[0].to(dtype), y)
    y, _ = module(x.requires_grad_(), residual)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    assert x.grad.dtype == dtype
    assert {parameter.grad.dtype for parameter in module.parameters()} <= {torch.float32}


@pytest.mark.parametrize("norm_bias", [None, True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_has_the_parameters_of_its_row_and_the_bias_that_is_asked_for(make_config, norm, norm_bias):
    row = {parameter.name: parameter for parameter in NORMS[norm] if norm_bias is None or parameter.name != "bias"}
    if norm_bias and norm not in ("none", "srms"):  # these have no parameters, whatever is asked for
        row["bias"] = BIAS
    decoder = Decoder(make_config(norm=norm, norm_bias=norm_bias, norm_placement="sandwich"), seed=3)
    norms = [module for module in decoder.modules() if isinstance(module, Norm)]
    assert len(norms) == 3 * 4 + 1
    for module in norms:
        parameters = dict(module.named_parameters())
        assert parameters.keys() == row.keys()
        for name, parameter in parameters.items():
            assert parameter.shape == ((48,) if row[name].per_channel else ())
            assert (parameter == row[name].initial).all()


HEADS = {"qk_norm": True, "attention_bias": True, "attention_output_bias": True}
OTHERS = [{"norm": "layer", "norm_bias": False}, {"norm_bias": True}, {"tie_word_embeddings": False, "head_dim": 10}]


@pytest.mark.parametrize(
    "changes", [{"norm": norm, "norm_placement": place, **HEADS} for norm in NORMS for place in PLACEMENTS] + OTHERS
)
def test_parameters_are_counted_and_those_of_norms_recognized_by_name(make_config, changes):
    decoder = Decoder(config := make_config(**changes), seed=None)
    of_norms = {id(p) for module in decoder.modules() if isinstance(module, Norm) for p in module.parameters()}
    for name, parameter in decoder.named_parameters():
        assert is_norm_parameter(name) == is_norm_parameter(f"model.{name}") == (id(parameter) in of_norms), name
    assert all(is_norm_parameter(name) for name, _ in decoder.named_buffers() if "norm" in name)
    assert num_parameters(config) == sum(p.numel() for p in decoder.parameters())
    assert num_norm_parameters(config) == sum(p.numel() for p in decoder.parameters() if id(p) in of_norms)


def test_a_norm_without_a_formula_is_an_error_before_a_run_begins(make_config, monkeypatch):
    monkeypatch.delitem(FORMULAS, "dyt")
    with pytest.raises(UserError, match="the norm dyt has no row in FORMULAS"):
        Norm(make_config(norm="dyt"))


def test_norms_start_as_in_their_papers(make_config, relative):
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(8)) + 0.3
    outputs = {norm: Decoder(make_config(norm=norm)).norm(x)[0].detach() for norm in NORMS}
    for norm in ("srms", "offset"):
        assert relative(outputs[norm], outputs["rms"]) < 1e-6
    assert torch.equal(outputs["dyt"], torch.tanh(0.5 * x)) and torch.equal(outputs["derf"], torch.erf(0.5 * x))


def test_batchnorm_updates_running_averages_only_in_training(make_norm, relative):
    module, x = make_norm("batch"), torch.randn(4, 9, 48, generator=torch.Generator().manual_seed(3)) * 2 + 1
    for _ in range(80):
        y, _ = module(x)
    rows = x.flatten(0, 1).double()
    assert relative(module.running_mean, rows.mean(0)) < 1e-3 and relative(module.running_var, rows.var(0)) < 1e-3
    standard = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + module.eps).sqrt()
    expected = standard * module.weight.detach().double() + module.bias.detach().double()
    assert relative(y.detach().flatten(0, 1), expected) < 1e-6
    before = module.eval().running_mean.clone()
    module(x * 5)
    assert torch.equal(module.running_mean, before)
    assert {"running_mean", "running_var"} <= module.state_dict().keys()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": False}])
def test_the_choice_of_a_norm_changes_its_biases_and_nothing_else_of_what_a_seed_gives(make_config, changes):
    rms = Decoder(make_config(**changes), seed=3).state_dict()
    norms = [f"layers.{i}.{place}_layernorm" for i in range(3) for place in ("input", "post_attention")]
    biases = {f"{norm}.bias" for norm in [*norms, "norm"]}
    for norm, norm_bias, new in (("layer", None, biases), ("rms", True, biases), ("layer", False, set())):
        state = Decoder(make_config(norm=norm, norm_bias=norm_bias, **changes), seed=3).state_dict()
        assert state.keys() - rms.keys() == new and not any(state[name].any() for name in new)
        assert all(torch.equal(state[name], tensor) for name, tensor in rms.items())


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
