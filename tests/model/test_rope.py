"""The tables of rotary position embeddings.

Tolerance: angles are computed in float64, so the error of an element is its rounding to float32, at most 2^-25 = 3e-8.
Twice that allows for errors of the float64 cosines.
"""

import cmath
import math

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints.families import from_json
from model.rope import Rope, frequencies

LONG = 131072
SHAPE = dict(vocab_size=9, hidden_size=128, intermediate_size=9, max_position_embeddings=LONG, num_hidden_layers=1)
SHAPE |= dict(num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_tables_equal_complex_powers_at_positions_up_to_131071(make_config, theta):
    config = make_config(max_position_embeddings=LONG, rope_theta=theta, head_dim=8)
    cos, sin = Rope(config)(0, LONG)
    for position in (0, 1, 2, 255, 257, 4095, 65537, LONG - 1):
        for pair in range(4):
            rotation = cmath.exp(1j * position / math.pow(theta, pair / 4))
            assert abs(cos[position, pair].item() - rotation.real) < 6e-8
            assert abs(sin[position, pair].item() - rotation.imag) < 6e-8


def test_tables_stay_float32_when_the_model_changes_its_dtype(make_decoder):
    decoder = make_decoder()
    before = decoder.rope.cos.clone()
    decoder.to(torch.bfloat16)
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert decoder.rope.cos.dtype == decoder.rope.sin.dtype == torch.float32
    assert torch.equal(decoder.rope.cos, before)


def test_left_padding_shifts_positions_which_the_table_must_hold_and_cache_positions_need_not(make_config):
    """Padding gets position 0."""
    rope = Rope(make_config())  # 64 positions
    cos, sin = rope(2, 4, torch.tensor([0, 4]))
    assert torch.equal(cos[0], rope.cos[2:6]) and torch.equal(sin[0], rope.sin[2:6])
    assert torch.equal(cos[1], rope.cos[[0, 0, 0, 1]]) and torch.equal(sin[1], rope.sin[[0, 0, 0, 1]])
    cos, _ = rope(66, 1, torch.tensor([3, 66]))
    assert torch.equal(cos[:, 0], rope.cos[[63, 0]])
    with pytest.raises(IndexError):
        rope(66, 1, torch.tensor([2, 66]))


def test_a_table_grows_with_the_text_to_what_a_complete_one_has(make_config, relative):
    """Also for padded texts, and for training after it grew while generating."""
    config = make_config(max_position_embeddings=2**24)
    rope = Rope(config)
    assert len(rope.cos) == 2**15
    with torch.inference_mode():
        cos, sin = rope(2**15 - 1, 2)  # the last row, and one more
        assert 2**15 + 1 <= len(rope.cos) <= 2**17 and not rope.cos.is_inference()
        padded, _ = rope(70_000, 1, torch.tensor([0, 69_000]))
    angles = torch.outer(torch.arange(2**15 - 1, 2**15 + 1).double(), frequencies(config))
    assert relative(cos, angles.cos()) < 1e-7 and relative(sin, angles.sin()) < 1e-7
    assert torch.equal(padded[1, 0], rope.cos[1000])
    assert relative(padded[0, 0], (70_000 * frequencies(config)).cos()) < 1e-7


def test_any_scaling_has_the_frequencies_of_transformers_also_with_ramps_beyond_the_pairs():
    """Tolerance: transformers computes the frequencies in float32, with about four roundings of 6e-8.

    It also rounds the kept part of yarn, 1 minus the ramp, to 2^-24, which counts `factor` times as much in a frequency
    that is nearly divided by it; and the ramp's ends, which may be 25 times its length.
    """
    random = np.random.default_rng(8)

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** random.random())

    for _ in range(100):
        scaling = {"factor": between(0.3, 100), "rope_theta": between(10, 1e7)}
        scaling["original_max_position_embeddings"], slow = int(between(4, 1e6)), between(0.01, 10)
        fast, truncate = slow * between(2, 50), bool(random.integers(2))
        shape = SHAPE | {"head_dim": 2 * int(random.integers(1, 65))}
        llama3 = {"rope_type": "llama3", "low_freq_factor": slow, "high_freq_factor": fast}
        yarn = {"rope_type": "yarn", "beta_slow": slow, "beta_fast": fast, "truncate": truncate}
        for rope in (scaling | llama3, scaling | yarn):
            config = from_json({"model_type": "llama", **shape, "rope_parameters": rope})
            theirs = transformers.LlamaConfig(**shape, rope_parameters=rope)
            expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
            rtol = 4e-7 + 2**-24 * 25 * rope["factor"]
            torch.testing.assert_close(frequencies(config), expected.double(), rtol=rtol, atol=0)
            assert config.rope_scaling.get("attention_factor", 1.0) == pytest.approx(factor, rel=1e-12)
