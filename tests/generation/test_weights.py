"""Weights stored in the dtype of the activations change no result."""

import torch

from generation.weights import cast_weights
from model.config import ModelConfig
from model.decoder import Decoder


def test_matrices_stored_in_bfloat16_give_the_same_logits_as_matrices_cast_at_each_step():
    config = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_bias=True, initializer_range=0.3)
    cast = Decoder(config, seed=2, compute_dtype=torch.bfloat16)
    stored = Decoder(config, seed=2)
    with torch.no_grad():
        for decoder in (cast, stored):
            for index, parameter in enumerate(p for p in decoder.parameters() if p.ndim < 2):
                parameter += torch.randn(len(parameter), generator=torch.Generator().manual_seed(index))
    cast_weights(stored, torch.bfloat16)
    tokens = torch.tensor([[1, 5, 9, 33, 2]])
    assert torch.equal(stored(tokens), cast(tokens))
    assert {p.dtype for p in stored.parameters() if p.ndim == 2} == {torch.bfloat16}
    assert {p.dtype for p in stored.parameters() if p.ndim == 1} == {torch.float32}
