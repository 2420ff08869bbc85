"""The benchmark of decoding, and the decoder with a static cache that it compares with."""

import json
import sys

import pytest
import torch

from benchmarks import decoding
from benchmarks.static_cache import StaticDecoder
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from training.settings import DataSettings, Settings

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = ModelConfig(64, num_key_value_heads=2, max_position_embeddings=100, **SHAPE)


@pytest.mark.parametrize("more", [{}, {"norm": "layer", "tie_word_embeddings": False}, {"norm_placement": "post"}])
@torch.inference_mode()
def test_a_static_cache_gives_the_decoders_logits_at_every_position(relative, more):
    config = ModelConfig(**{**vars(MODEL), **more})
    decoder = Decoder(config, seed=1).eval()
    for parameter in decoder.parameters():
        parameter.normal_(0.1, 0.2)
    prompt, caches = torch.randint(64, (3, 5)), [KeyValueCache(config, 3, 20) for _ in range(2)]
    caches[1].keys.fill_(7.0)  # what is beyond the position must be hidden
    caches[1].values.fill_(7.0)
    for cache in caches:
        decoder(prompt, cache=cache)
    step = StaticDecoder(decoder, caches[1])
    for _ in range(15):
        token = torch.randint(64, (3, 1))
        assert relative(step(token), decoder(token, cache=caches[0]).double()) < 2e-6
    assert caches[1].length == 20


def test_a_static_cache_is_refused_a_sliding_window():
    config = ModelConfig(**{**vars(MODEL), "sliding_window": 8})
    with pytest.raises(ValueError, match="sliding window"):
        StaticDecoder(Decoder(config), KeyValueCache(config, 1, 16))


def test_every_variant_is_timed_or_says_why_not(monkeypatch, capsys):
    settings = Settings(model=MODEL, data=DataSettings(sequence_length=8))
    monkeypatch.setattr(decoding, "read_settings", lambda name: settings)
    monkeypatch.setattr(decoding.kernels, "triton_unavailable_reason", lambda device: "not in this test")
    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(decoding, "copy_rate", lambda device: 1e10)
    flags = ["--device", "cpu", "--sequences", "1", "2", "--cached", "16", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["decoding", *flags])
    decoding.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["sequences"], row["variant"]) for row in results["steps"]] == [
        (sequences, variant) for sequences in (1, 2) for variant in decoding.VARIANTS
    ]
    ran = {row["variant"] for row in results["steps"] if "seconds" in row}
    assert {"decoder", decoding.STATIC} <= ran and decoding.COMPILED not in ran
