"""The fused decoding step against `Decoder.forward`, in Triton's interpreter.

Tolerance: the two add the same float32 numbers in different orders, through two layers: 2e-6, as in test_decoder.py.
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
    "biases and qk norm": {"norm_bias": True, "attention_bias": True, "qk_norm": True},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 20, "qk_norm": True},
}


def steps(decoder, count, lengths):
    """Logits of `count` tokens after left-padded prompts of these lengths, from the fused step and from the decoder."""
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padding = padding if padding.any() else None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(97, (len(lengths), max(lengths) + count), generator=generator)
    caches = [KeyValueCache(decoder.config, len(lengths), max(lengths) + count) for _ in range(2)]
    found, expected = [], []
    for cache in caches:
        cache.keys.fill_(float("nan"))  # positions that are not filled must not be read
        decoder(tokens[:, : max(lengths)], cache=cache, padding=padding)
    step = DecodeStep(decoder, caches[1], padding)
    for position in range(max(lengths), max(lengths) + count):
        token = tokens[:, position : position + 1]
        expected.append(decoder(token, cache=caches[0], padding=padding))
        found.append(step(token, padding).clone())
        assert caches[0].length == caches[1].length == position + 1
    return torch.cat(found, 1), torch.cat(expected, 1), caches


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_and_cache_equal_the_decoders(make_decoder, relative, variant):
    decoder = make_decoder(num_hidden_layers=2, **variant).eval()
    found, expected, caches = steps(decoder, 2, [5, 2])
    assert relative(found, expected) < 2e-6
    assert relative(caches[1].values, caches[0].values) < 2e-6
    for b, first in enumerate((0, 3)):
        assert relative(caches[1].keys[:, b, :, first:], caches[0].keys[:, b, :, first:]) < 2e-6


@torch.inference_mode()
def test_prompts_of_one_token_and_of_more_tokens_than_one_pass_of_all_splits_are_right(make_decoder, relative):
    decoder = make_decoder(max_position_embeddings=200, num_hidden_layers=1).eval()
    found, expected, _ = steps(decoder, 1, [170, 33, 1])
    assert relative(found, expected) < 2e-6
    found, expected, _ = steps(decoder, 1, [1])
    assert relative(found, expected) < 2e-6


@torch.inference_mode()
def test_the_fused_step_is_used_with_triton_for_small_batches_and_refuses_a_full_cache(make_decoder):
    decoder = make_decoder().eval()

    def used(batch_size):
        return make_decode_step(decoder, KeyValueCache(decoder.config, batch_size, 4), None) is not None

    assert not used(1)
    kernels.use("triton", CPU)
    try:
        assert used(1) and used(MAX_SEQUENCES) and not used(MAX_SEQUENCES + 1)
    finally:
        kernels.use("auto", CPU)
    cache = KeyValueCache(decoder.config, 1, 4)
    cache.length = 4
    with pytest.raises(ValueError, match="room for 4 tokens"):
        DecodeStep(decoder, cache, None)(torch.zeros(1, 1, dtype=torch.int64), None)
