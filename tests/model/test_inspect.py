"""What `inspect` measures: against transformers, and for our norms and placements against a float64 implementation.

Tolerance 1e-5: float32 streams have relative errors of about 1e-6, and the kurtosis is a fourth power of them.
"""

import dataclasses
import functools

import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained, save_pretrained
from errors import UserError
from model.config import NORMS
from model.inspect import CHANGES, QUANTILES, inspect, surgery
from tests.conftest import SHAPE
from tests.model.test_decoder import double_weights, plain_logits

PAIRS = [*((norm, "pre") for norm in NORMS)]
PAIRS += [(norm, placement) for norm in ("rms", "layer") for placement in ("post", "sandwich", "output")]
OURS = {"ours, as Llama": {"attention_bias": True}, "ours, as Qwen3": {"qk_norm": True, "tie_word_embeddings": False}}
CLOSE = dict(rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.fixture
def ids(tokens):
    """18 tokens, of which many occur twice, two of them in a row."""
    return [*(tokens[0, :16] % 9).tolist(), 8, 8]


def check(inside, rows, logits, ids, rtol=1e-5):
    """Compare with figures computed from what norms read (N, T, D) and the logits after each layer (L, T, V)."""
    rows, probabilities = rows.double(), logits.double().softmax(-1)
    square_sums = (rows**2).sum(-1)
    expected = {
        "rms": (square_sums / rows.shape[-1]).sqrt(),
        "mean_over_std": rows.mean(-1).abs() / rows.var(-1, correction=0).sqrt(),
        "kurtosis": (rows**4).mean(-1) / (rows**2).mean(-1) ** 2,
        "largest_channel": rows.abs().argmax(-1),
        "largest_share": rows.abs().amax(-1) ** 2 / square_sums,
        "top_probabilities": probabilities.sort(-1, descending=True).values[..., :5],
        "losses": -probabilities[-1, range(len(ids) - 1), ids[1:]].log(),
    }
    close = CLOSE | {"rtol": rtol}
    torch.testing.assert_close({name: getattr(inside, name) for name in expected}, expected, **close)
    torch.testing.assert_close(inside.top_probabilities, probabilities.gather(-1, inside.top_ids), **close)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", *OURS])
def test_figures_are_those_of_hidden_states_and_attentions_in_transformers(make_decoder, ids, tmp_path, family):
    if family in OURS:
        save_pretrained(make_decoder(**OURS[family]), tmp_path)
    else:
        torch.manual_seed(3)
        config = getattr(transformers, f"{family}Config")(**SHAPE, initializer_range=0.2)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape) if parameter.ndim == 1 else 0.01
        model.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    inside, read = inspect(load_pretrained(tmp_path), ids), []
    for name in inside.norms:
        model.model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    outputs = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    streams = outputs.hidden_states[:-1]  # before each layer; the last one is normalized
    assert len(read) == 7 and all(map(torch.equal, read[:-1:2], streams))
    lenses = [model.lm_head(model.model.norm(stream)) for stream in (*streams[1:], read[6])]
    assert torch.equal(lenses[-1], outputs.logits) and inside.chance == pytest.approx((2 / torch.pi / 48) ** 0.5)
    check(inside, torch.cat(read[:7]), torch.cat(lenses), ids)
    weights, tokens, steps = torch.cat(outputs.attentions), torch.tensor(ids), torch.arange(len(ids))
    after_same = [weights[..., j + 1] * ((tokens == ids[j]) & (steps > j)) for j in steps[:-1]]
    previous = torch.nn.functional.pad(weights[..., steps[1:], steps[:-1]], (1, 0))
    expected = previous, weights[..., steps, steps], weights[..., 0], torch.stack(after_same).sum(0)
    for name, values in zip(("to_previous", "to_itself", "to_first", "after_same"), expected, strict=True):
        torch.testing.assert_close(getattr(inside, name), values, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(("norm", "placement"), PAIRS)
def test_every_norm_and_placement_has_the_figures_of_a_float64_model(make_decoder, norm_formula, ids, norm, placement):
    decoder = make_decoder(norm=norm, norm_placement=placement)
    config, weights, read, logits = decoder.config, double_weights(decoder), [], []

    def recording_formula(x, config, tensors):
        read.append(x)
        return norm_formula(x, config, tensors)

    for layers in (1, 2, 3):  # the logit lens is the output of a model with fewer layers
        read.clear()
        config = dataclasses.replace(config, num_hidden_layers=layers)
        logits.append(plain_logits(config, weights, torch.tensor(ids), recording_formula))
    rtol = 2e-4 if norm == "prms" else 1e-5  # a statistic of three channels
    check(inspect(decoder, ids), torch.stack(read), torch.stack(logits), ids, rtol)


def test_gains_and_biases_are_quantiles_over_the_channels_and_1_and_0_where_there_are_none(make_decoder, ids):
    layer, offset, none = (make_decoder(norm=norm) for norm in ("layer", "offset", "none"))
    ones, zeros, at = torch.ones(48), torch.zeros(48), torch.tensor(QUANTILES)
    cases = [(layer, layer.norm.weight, layer.norm.bias), (offset, 1 + offset.norm.offset, zeros), (none, ones, zeros)]
    for decoder, gain, bias in cases:
        inside = inspect(decoder, ids)
        assert torch.equal(inside.gain[-1], gain.quantile(at)) and torch.equal(inside.bias[-1], bias.quantile(at))


OF_TEXT = {  # norms with the statistics of all rows x instead of each row's, before weight and bias
    "rms": lambda x, eps: x / ((x**2).mean() + eps).sqrt(),
    "layer": lambda x, eps: (x - x.mean()) / (x.var(correction=0) + eps).sqrt(),
    "center": lambda x, eps: x - x.mean(),
    "prms": lambda x, eps: x / ((x[:, :3] ** 2).mean() + eps).sqrt(),
    "l2": lambda x, eps: x / (48 * (x**2).mean()).sqrt(),
    "group": lambda x, eps: torch.cat([OF_TEXT["layer"](slice, eps) for slice in x.split(6, -1)], -1),
}
OF_TEXT |= {"srms": OF_TEXT["rms"], "offset": OF_TEXT["rms"]}


def changed_formula(norm_formula, change, x, config, tensors):
    """The norm of float64 rows with one thing changed."""
    if change == "norm":
        return x
    if change == "mean" and config.norm in ("layer", "center"):
        config = dataclasses.replace(config, norm={"layer": "rms", "center": "none"}[config.norm])
    elif change == "mean":
        x = x - x.mean(-1, keepdim=True)
    elif change == "statistics" and config.norm in OF_TEXT:
        gain = tensors.get("weight", 1) * (1 + tensors.get("offset", 0))
        return OF_TEXT[config.norm](x, config.norm_eps) * gain + tensors.get("bias", 0)
    neutral = {"bias": {"bias": 0}, "gain": {"weight": 1, "offset": 0}}
    return norm_formula(x, config, tensors | neutral.get(change, {}))


@torch.no_grad()
@pytest.mark.parametrize(("norm", "placement"), PAIRS)
def test_surgery_on_all_norms_changes_losses_as_in_a_float64_model(make_decoder, norm_formula, ids, norm, placement):
    decoder, tokens = make_decoder(norm=norm, norm_placement=placement), torch.tensor(ids)

    def exact_losses(formula):
        logits = plain_logits(decoder.config, double_weights(decoder), tokens, formula)
        return torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")

    before = exact_losses(norm_formula)
    for change in CHANGES:
        expected = exact_losses(functools.partial(changed_formula, norm_formula, change)) - before
        torch.testing.assert_close(surgery(decoder, ids, change), expected, **CLOSE)


def test_surgery_on_one_norm_changes_no_other_and_what_changes_nothing_gives_exactly_the_same_losses(make_decoder, ids):
    decoder, changed = make_decoder(), make_decoder()
    assert torch.equal(surgery(decoder, ids, "bias"), torch.zeros(17))  # RMSNorm has none
    changed.layers[1].input_layernorm.weight.data.fill_(1)
    expected = inspect(changed, ids).losses - inspect(decoder, ids).losses
    assert expected.any() and torch.equal(surgery(decoder, ids, "gain", "layers.1.input_layernorm"), expected)
    assert torch.equal(surgery(changed, ids, "gain", "layers.1.input_layernorm"), torch.zeros(17))


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_the_decoder_is_left_as_it_was_and_evaluated_in_float32_whatever_its_dtypes_and_mode(make_decoder, ids, norm):
    decoder, wide = make_decoder(norm=norm).train(), make_decoder(norm=norm).eval()
    if norm == "layer":
        decoder.bfloat16(), wide.bfloat16().float()
    decoder.compute_dtype = torch.bfloat16
    torch.testing.assert_close(inspect(decoder, ids).losses, inspect(wide, ids).losses, **CLOSE)
    surgery(decoder, ids, "statistics")
    assert decoder.training and decoder.norm.training and decoder.compute_dtype == torch.bfloat16
    assert all(torch.equal(tensor.float(), wide.state_dict()[name]) for name, tensor in decoder.state_dict().items())
    assert not any(module._forward_hooks for module in decoder.modules())


def test_other_lengths_changes_and_norms_are_refused(make_decoder):
    decoder = make_decoder(max_position_embeddings=2000)
    assert inspect(decoder, [3]).losses.shape == (0,)
    refused = {"has 0 tokens; give 1 to 1024": ([], "mean"), "has 1025 tokens": ([3] * 1025, "mean")}
    refused |= {"changes are mean, bias": ([3], "means"), "norms are all, layers.0.input": ([3], "mean", "layers.0")}
    for words, arguments in refused.items():
        with pytest.raises(UserError, match=words):
            surgery(decoder, *arguments)
    with pytest.raises(UserError, match="the text has 65 tokens"):
        inspect(make_decoder(), [3] * 65)
