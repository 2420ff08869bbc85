"""Matrices quantized to 8 bits: how they are rounded, and that a decoding step computes with exactly those."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generation.generate import generate
from generation.settings import Sampling
from generation.weights import cast_weights, quantize_matrices
from model.cache import KeyValueCache
from model.cpu_decode import CpuDecodeStep
from model.int8 import ROWS_AT_ONCE, Int8Matrix, quantize
from model.linear import Linear

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
VARIANTS = {
    "rms": {},
    "layer, biases, qk norm": {"norm": "layer", "attention_bias": True, "qk_norm": True},
    "rms, an MLP of another width": {"intermediate_size": 80},
}


def quantized(weight):
    """Values and scales of a quantized weight."""
    matrix = quantize(weight)
    return matrix.values, matrix.scales


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (7, torch.float32), (ROWS_AT_ONCE + 3, torch.bfloat16)]
)
def test_each_number_is_rounded_to_the_closest_of_255_multiples_of_the_scale_of_its_row(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.logspace(-6, 6, rows)[:, None]
    weight = ((torch.randn(rows, 64, generator=generator) + 0.3) * sizes).to(dtype)
    values, scales = quantized(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.bfloat16
    assert values.shape == (rows, 64) and scales.shape == (rows,)
    exact, scale = weight.double(), scales.double()[:, None]
    assert (exact.abs().amax(1, keepdim=True) / 127 / scale - 1).abs().max() <= 2**-8  # the scale's own rounding
    assert ((values * scale - exact).abs() <= (0.5 + 1e-6) * scale).all()


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite():
    weight = torch.zeros(3, 32)
    weight[1], weight[2, 5] = 1e-42, torch.finfo(torch.float32).max
    values, scales = quantized(weight)
    assert torch.isfinite(scales).all() and (scales > 0).all() and (values[:2] == 0).all() and values[2, 5] == 127


@given(
    batch=st.integers(1, 17),
    out_features=st.integers(1, 40),
    blocks=st.integers(1, 9),
    beyond=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_that_of_the_quantized_matrix_for_rows_of_any_multiple_of_32(
    batch, out_features, blocks, beyond, seed
):
    generator = torch.Generator().manual_seed(seed)
    matrix = quantize(torch.randn(out_features, 32 * blocks, generator=generator) + 0.3)
    x = (torch.randn(batch, 32 * blocks + beyond, generator=generator) + 0.3).bfloat16()[:, : 32 * blocks]
    exact = x.double() @ (matrix.values * matrix.scales.double()[:, None]).T
    error = (matrix.multiply(x).double() - exact).norm() / exact.norm()
    assert error < 2**-8  # one rounding to bfloat16


def with_quantized_weights(decoder):
    """A decoder whose weights are the numbers that the quantized matrices of this one stand for."""
    expected = copy.deepcopy(decoder)
    for module in expected.modules():
        if isinstance(module, Linear) and module.int8 is not None:
            matrix, module.int8 = module.int8, None
            module.weight.data = matrix.values * matrix.scales.float()[:, None]
    return expected


def logits(decoder, tokens, make_step=None):
    cache = KeyValueCache(decoder.config, *tokens.shape, dtype=decoder.compute_dtype)
    step = make_step and make_step(decoder, cache)
    found = [
        decoder(token, cache=cache) if step is None else step(token, None).clone() for token in tokens.split(1, dim=1)
    ]
    return torch.cat(found, 1)


@pytest.mark.parametrize(("batch", "variant"), [*zip([1, 3, 16], VARIANTS.values(), strict=True)], ids=VARIANTS.keys())
@torch.inference_mode()
def test_a_step_computes_with_the_quantized_matrices_as_exactly_as_the_decoder_in_bfloat16(
    make_decoder, relative, variant, batch
):
    original = make_decoder(**(SIZES | variant), tie_word_embeddings=False).eval()
    decoder = copy.deepcopy(original)
    cast_weights(decoder, torch.bfloat16)
    quantize_matrices(decoder)
    expected = with_quantized_weights(decoder).float()
    if "intermediate_size" in variant:  # a matrix that stays as it is
        assert decoder.layers[0].mlp.down_proj.int8 is None and decoder.layers[0].mlp.gate_up_proj.int8 is not None
    tokens = torch.randint(97, (batch, 6), generator=torch.Generator().manual_seed(3))
    narrow = copy.deepcopy(expected)
    cast_weights(narrow, torch.bfloat16)
    expected.compute_dtype = torch.float32
    exact, found = logits(expected, tokens), logits(decoder, tokens, CpuDecodeStep)
    assert relative(found, exact) < 1.1 * relative(logits(narrow, tokens), exact)
    assert relative(found, logits(original, tokens)) > relative(found, exact)


def test_an_untied_embedding_is_not_quantized_and_a_tied_one_is_the_head(make_decoder):
    tied, untied = (make_decoder(**SIZES, tie_word_embeddings=tied).eval() for tied in (True, False))
    for decoder in (tied, untied):
        cast_weights(decoder, torch.bfloat16)
        quantize_matrices(decoder)
    assert untied.embed_tokens.int8 is None and isinstance(untied.lm_head.int8, Int8Matrix)
    assert isinstance(tied.embed_tokens.int8, Int8Matrix)
    step = CpuDecodeStep(tied, KeyValueCache(tied.config, 1, 4, dtype=torch.bfloat16))
    assert step.head is tied.embed_tokens.int8 and step.embedding.dtype == torch.bfloat16


def test_generation_uses_the_quantized_matrices_after_the_prompt_alone(make_decoder):
    decoder = make_decoder(**SIZES).eval()
    cast_weights(decoder, torch.bfloat16)
    first = generate(decoder, [[1, 2, 3]], max_new_tokens=1, sampling=Sampling(temperature=0)).tokens[0]
    quantize_matrices(decoder)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.int8.values.zero_()  # so that all logits of a step are equal, and the first token is the likeliest
    found = generate(decoder, [[1, 2, 3]], max_new_tokens=4, sampling=Sampling(temperature=0)).tokens[0]
    assert found == [*first, 0, 0, 0] and first != [0]


def test_a_decoder_that_does_not_compute_in_bfloat16_is_refused(make_decoder):
    with pytest.raises(ValueError, match="inputs in bfloat16, and this decoder computes in torch"):
        quantize_matrices(make_decoder(**SIZES))
