"""Loading weights into an existing decoder, whose norm may differ and nothing else; and centering them."""

import pytest
import torch

import kernels
from checkpoints.pretrained import load_weights
from errors import UserError
from model.config import NORMS
from model.decoder import Decoder, center_residual_writers
from model.norm import is_norm_parameter
from tests.conftest import edit_tensors

KINDS = [*({"norm": norm} for norm in NORMS), {"norm_bias": True}, {"norm": "layer", "norm_bias": False}]
PAIRS = [*zip(KINDS, KINDS[1:] + KINDS[:1], strict=True), *((kind, {}) for kind in KINDS), *(({}, k) for k in KINDS)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_report_names_parameters_that_two_norms_do_not_share(make_config, make_decoder, saved, source, target):
    decoder, start = Decoder(make_config(**target)), Decoder(make_config(**target)).state_dict()
    original, result = make_decoder(**source).state_dict(), decoder.state_dict()
    only_here, only_there = load_weights(decoder, saved(**source))
    new, dropped = result.keys() - original.keys(), original.keys() - result.keys()
    assert all(is_norm_parameter(name) for name in new | dropped)
    assert sorted(only_here) == sorted(f"model.{name}" for name in new)
    assert sorted(only_there) == sorted(f"model.{name}" for name in dropped)
    for name, tensor in result.items():
        assert torch.equal(tensor, start[name] if name in new else original[name]), name


def test_master_weights_stay_float32_when_the_checkpoint_is_bfloat16(make_decoder, saved):
    directory, decoder = saved(), make_decoder(seed=1)
    edit_tensors(directory, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    load_weights(decoder, directory)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert torch.equal(decoder.norm.weight, make_decoder().norm.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100, "intermediate_size": 88}, "vocab_size 97 instead of 100, intermediate_size 80 instead of"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, "num_attention_heads 6 instead of 12"),  # equal shapes
        ({"attention_bias": True, "qk_norm": True}, "attention_bias False instead of True, qk_norm False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings True instead of False"),
    ],
)
def test_weights_of_another_shape_are_refused_with_both_values_and_not_loaded(make_decoder, saved, changes, words):
    decoder = make_decoder(seed=1, **changes)
    before = decoder.norm.weight.clone()
    with pytest.raises(UserError, match=f"do not fit this model: {words}"):
        load_weights(decoder, saved())
    assert torch.equal(decoder.norm.weight, before)


def layer_and_rms(make_decoder, norm_bias: bool = True, **changes) -> tuple[Decoder, Decoder]:
    """A LayerNorm decoder, and RMSNorm with its weights, both in float64."""
    layer = make_decoder(norm="layer", norm_bias=norm_bias, **changes).double()
    rms = make_decoder(seed=1, norm_bias=norm_bias, **changes).double()
    rms.load_state_dict(layer.state_dict())
    layer.compute_dtype = rms.compute_dtype = torch.float64
    return layer, rms


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
def test_with_centered_weights_rmsnorm_computes_what_layernorm_did(make_decoder, tokens, relative, changes):
    layer, rms = layer_and_rms(make_decoder, tie_word_embeddings=False, **changes)
    expected = layer(tokens)
    assert relative(rms(tokens), expected) > 1e-3
    center_residual_writers(rms)
    assert relative(rms(tokens), expected) < 1e-10
    center_residual_writers(layer)
    assert relative(layer(tokens), expected) < 1e-10


@pytest.mark.usefixtures("reference")
@torch.no_grad()
def test_a_tied_embedding_is_not_centered_since_the_head_would_change(make_decoder, tokens, relative):
    layer, rms = layer_and_rms(make_decoder, tie_word_embeddings=True)
    expected, embedding = layer(tokens), layer.embed_tokens.weight.clone()
    center_residual_writers(layer)
    assert torch.equal(layer.embed_tokens.weight, embedding) and relative(layer(tokens), expected) < 1e-10
    uncentered = relative(rms(tokens), expected)
    center_residual_writers(rms)
    assert 1e-3 < relative(rms(tokens), expected) < uncentered


@pytest.mark.parametrize("placement", ["post", "sandwich", "output"])
def test_where_norms_write_to_the_stream_weights_cannot_be_centered(make_decoder, placement):
    with pytest.raises(ValueError, match=f"norms placed {placement} write to the residual stream"):
        center_residual_writers(make_decoder(norm_placement=placement))
