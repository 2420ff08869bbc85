"""Loading weights into an existing decoder: its norm may differ, and nothing else."""

import pytest
import torch

import kernels
from checkpoints.pretrained import load_weights, unpacked_tensors
from errors import UserError
from model.config import NORMS
from model.decoder import Decoder, center_residual_writers
from model.norm import is_norm_parameter

MODULES = [f"model.layers.{i}.{norm}" for i in range(3) for norm in ("input_layernorm", "post_attention_layernorm")]
BIASES = {f"{module}.bias" for module in [*MODULES, "model.norm"]}


def test_between_equal_norms_all_weights_are_kept(make_decoder, saved, tokens):
    decoder = make_decoder(seed=1)
    report = load_weights(decoder, saved())
    assert (report.new, report.dropped) == ([], [])
    assert set(report.kept) == set(unpacked_tensors(decoder.state_dict(), decoder.config))
    assert torch.equal(decoder(tokens), make_decoder()(tokens))


@pytest.mark.parametrize("source", NORMS)
@pytest.mark.parametrize("target", NORMS)
def test_between_any_two_norms_the_report_names_new_and_dropped_parameters(
    make_config, make_decoder, saved, source, target
):
    decoder, start = Decoder(make_config(norm=target)), Decoder(make_config(norm=target)).state_dict()
    original, result = make_decoder(norm=source).state_dict(), decoder.state_dict()
    report = load_weights(decoder, saved(norm=source))
    new, dropped = result.keys() - original.keys(), original.keys() - result.keys()
    assert all(is_norm_parameter(name) for name in new | dropped)
    assert set(report.new) == {f"model.{name}" for name in new} and len(report.new) == len(new)
    assert set(report.dropped) == {f"model.{name}" for name in dropped} and len(report.dropped) == len(dropped)
    for name, tensor in result.items():
        assert torch.equal(tensor, start[name] if name in new else original[name]), name


def test_from_rms_to_layer_norm_weights_are_kept_and_biases_are_new(make_config, make_decoder, saved):
    decoder, source = Decoder(make_config(norm="layer")), make_decoder()
    report = load_weights(decoder, saved())
    assert (set(report.new), report.dropped) == (BIASES, [])
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1 and name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert torch.equal(parameter, source.state_dict()[name])


def test_from_layer_to_rms_with_bias_everything_is_kept(make_decoder, saved):
    decoder, source = make_decoder(seed=1, norm_bias=True), make_decoder(norm="layer")
    report = load_weights(decoder, saved(norm="layer"))
    assert (report.new, report.dropped) == ([], [])
    assert all(torch.equal(parameter, source.state_dict()[name]) for name, parameter in decoder.named_parameters())


@pytest.mark.parametrize("target", [{"norm": "rms"}, {"norm": "layer", "norm_bias": False}])
def test_from_layer_biases_are_dropped_where_the_target_has_none(make_config, make_decoder, saved, target):
    decoder, source = Decoder(make_config(**target)), make_decoder(norm="layer")
    report = load_weights(decoder, saved(norm="layer"))
    assert (report.new, set(report.dropped)) == ([], BIASES)
    assert all(torch.equal(parameter, source.state_dict()[name]) for name, parameter in decoder.named_parameters())


def test_zero_biases_that_only_the_family_needs_are_neither_kept_nor_dropped(make_decoder, saved):
    report = load_weights(make_decoder(seed=1), saved(norm="layer", norm_bias=False))
    assert (report.new, report.dropped) == ([], [])


def test_master_weights_stay_float32_when_the_checkpoint_is_bfloat16(make_decoder, saved, edit_weights):
    directory, decoder = saved(), make_decoder(seed=1)
    edit_weights(directory, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    load_weights(decoder, directory)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert torch.equal(decoder.norm.weight, make_decoder().norm.weight.bfloat16().float())


def test_weights_of_other_sizes_are_refused_and_nothing_is_loaded(make_decoder, saved):
    directory, decoder = saved(), make_decoder(seed=1, vocab_size=100, intermediate_size=88)
    before = decoder.norm.weight.clone()
    message = "do not fit this model: vocab_size 97 instead of 100, intermediate_size 80 instead of 88;"
    with pytest.raises(UserError, match=message):
        load_weights(decoder, directory)
    assert torch.equal(decoder.norm.weight, before)


def test_weights_with_other_heads_but_equal_shapes_are_refused(make_decoder, saved):
    directory = saved(num_attention_heads=6, num_key_value_heads=6)
    message = "num_attention_heads 6 instead of 12, num_key_value_heads 6 instead of 12, head_dim 8 instead of 4;"
    with pytest.raises(UserError, match=message):
        load_weights(make_decoder(num_attention_heads=12, num_key_value_heads=12), directory)


DIFFERENCES = {
    "hidden_size 48 instead of 96": {"hidden_size": 96, "head_dim": 8},
    "num_hidden_layers 3 instead of 2": {"num_hidden_layers": 2},
    "num_key_value_heads 2 instead of 3": {"num_key_value_heads": 3},
    "head_dim 8 instead of 20": {"head_dim": 20},
    "attention_bias False instead of True": {"attention_bias": True},
    "attention_output_bias False instead of True": {"attention_output_bias": True},
    "qk_norm False instead of True": {"qk_norm": True},
    "tie_word_embeddings True instead of False": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize(("words", "changes"), DIFFERENCES.items(), ids=DIFFERENCES.keys())
def test_each_field_that_must_match_is_named_with_both_values(make_decoder, saved, words, changes):
    with pytest.raises(UserError, match=f"do not fit this model: {words}; use the same values"):
        load_weights(make_decoder(norm="layer", **changes), saved())


def test_context_rope_theta_and_norm_eps_may_differ(make_decoder, saved):
    decoder = make_decoder(seed=1, max_position_embeddings=128, rope_theta=500.0, norm_eps=1e-6)
    assert load_weights(decoder, saved()).new == []


@pytest.fixture
def converted(make_decoder):
    """A LayerNorm decoder, and RMSNorm with its weights centered, both in float64."""

    def convert(norm_bias: bool = True, **changes) -> tuple[Decoder, Decoder]:
        layer = make_decoder(norm="layer", norm_bias=norm_bias, **changes).double()
        rms = make_decoder(seed=1, norm_bias=norm_bias, **changes).double()
        rms.load_state_dict(layer.state_dict())
        layer.compute_dtype = rms.compute_dtype = torch.float64
        return layer, rms

    return convert


@pytest.fixture
def reference():
    """Compute in plain PyTorch, whose statistics are float32, in float64: promotion is what `float` means here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        kernels.use("reference", torch.device("cpu"))
        yield
    kernels.use("auto", torch.device("cpu"))


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_bias": False}, {"attention_output_bias": True, "qk_norm": True}, {"mlp": "relu"}],
    ids=["with bias", "without bias", "output bias and qk norm", "plain MLP"],
)
@torch.no_grad()
def test_with_centered_weights_rmsnorm_computes_what_layernorm_did(converted, tokens, relative, changes):
    layer, rms = converted(tie_word_embeddings=False, **changes)
    expected = layer(tokens)
    assert relative(rms(tokens), expected) > 1e-3
    center_residual_writers(rms)
    assert relative(rms(tokens), expected) < 1e-10
    center_residual_writers(layer)
    assert relative(layer(tokens), expected) < 1e-10


@pytest.mark.usefixtures("reference")
@torch.no_grad()
def test_a_tied_embedding_is_not_centered_since_the_head_would_change(converted, tokens, relative):
    layer, rms = converted(tie_word_embeddings=True)
    expected, embedding = layer(tokens), layer.embed_tokens.weight.clone()
    center_residual_writers(layer)
    assert torch.equal(layer.embed_tokens.weight, embedding) and relative(layer(tokens), expected) < 1e-10
    outputs = []
    layer.norm.register_forward_hook(lambda module, inputs, found: outputs.append(found[0]))
    layer(tokens)
    means = embedding.mean(1)
    layer.embed_tokens.weight -= means[:, None]
    found = layer(tokens)  # the stream is centered by every norm: only the head has changed
    assert relative(found, expected - outputs[0].sum(-1, keepdim=True) * means) < 1e-10
    assert relative(found, expected) > 1e-3
    uncentered = relative(rms(tokens), expected)
    center_residual_writers(rms)
    assert 1e-3 < relative(rms(tokens), expected) < uncentered


@pytest.mark.parametrize("placement", ["post", "sandwich", "output"])
def test_where_norms_write_to_the_stream_weights_cannot_be_centered(make_decoder, placement):
    with pytest.raises(ValueError, match=f"norms placed {placement} write to the residual stream"):
        center_residual_writers(make_decoder(norm_placement=placement))
