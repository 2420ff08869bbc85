"""The fused decoding step against the decoder itself, in Triton's interpreter.

Tolerances between two float32 orders of the same sums, through two layers: 2e-6, as between decoders.
"""

import pytest
import torch

import kernels
from model.cache import KeyValueCache
from model.fused_decode import MAX_SEQUENCES, DecodeStep, make_decode_step

pytestmark = pytest.mark.skipif(kernels.gpu is None, reason="Triton is not installed")

CPU = torch.device("cpu")
VARIANTS = {
    "rms": {},
    "layer, untied": {"norm": "layer", "tie_word_embeddings": False},
    "layer without bias": {"norm": "layer", "norm_bias": False},
    "biases and qk norm": {"attention_bias": True, "qk_norm": True},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 20, "qk_norm": True},
}


def steps(decoder, count, lengths):
    """Logits of `count` further tokens by the decoder and by the step, whose prompts end together."""
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padding = padding if padding.any() else None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(97, (len(lengths), max(lengths) + count), generator=generator)
    caches = [KeyValueCache(decoder.config, len(lengths), max(lengths) + count) for _ in range(2)]
    found, expected = [], []
    for cache in caches:
        cache.keys.fill_(float("nan"))  # what lies behind the last column must not matter
        decoder(tokens[:, : max(lengths)], cache=cache, padding=padding)
    step = DecodeStep(decoder, caches[1], padding)
    for column in range(max(lengths), max(lengths) + count):
        token = tokens[:, column : column + 1]
        expected.append(decoder(token, cache=caches[0], padding=padding))
        found.append(step(token, padding).clone())
        assert caches[0].length == caches[1].length == column + 1
    return torch.cat(found, 1), torch.cat(expected, 1), caches


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_and_cache_equal_those_of_the_decoder(make_decoder, relative, variant):
    decoder = make_decoder(num_hidden_layers=2, **variant).eval()
    found, expected, caches = steps(decoder, 2, [5, 2])
    assert relative(found, expected) < 2e-6
    assert relative(caches[1].values, caches[0].values) < 2e-6
    for b, first in enumerate((0, 3)):
        assert relative(caches[1].keys[:, b, :, first:], caches[0].keys[:, b, :, first:]) < 2e-6


@torch.inference_mode()
def test_texts_of_more_columns_than_all_ranges_together_and_of_one_column_are_right(make_decoder, relative):
    decoder = make_decoder(max_position_embeddings=200, num_hidden_layers=1).eval()
    found, expected, _ = steps(decoder, 1, [170, 33, 1])
    assert relative(found, expected) < 2e-6
    found, expected, _ = steps(decoder, 1, [1])
    assert relative(found, expected) < 2e-6


@torch.inference_mode()
def test_it_is_taken_for_few_texts_where_triton_runs_and_a_full_cache_is_refused(make_decoder):
    decoder = make_decoder().eval()

    def taken(texts):
        return make_decode_step(decoder, KeyValueCache(decoder.config, texts, 4), None) is not None

    assert not taken(1)
    kernels.use("triton", CPU)
    try:
        assert taken(1) and taken(MAX_SEQUENCES) and not taken(MAX_SEQUENCES + 1)
    finally:
        kernels.use("auto", CPU)
    cache = KeyValueCache(decoder.config, 1, 4)
    cache.length = 4
    with pytest.raises(ValueError, match="room for 4 tokens"):
        DecodeStep(decoder, cache, None)(torch.zeros(1, 1, dtype=torch.int64), None)
