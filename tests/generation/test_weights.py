"""Weights stored in the dtype of the activations change no result, and the bytes that a step reads are counted."""

import torch

from generation.weights import bytes_per_step, cast_weights, quantize_matrices
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


def test_bytes_per_step_do_not_count_an_untied_embedding():
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    tied = Decoder(ModelConfig(**shape))
    untied = Decoder(ModelConfig(**shape, tie_word_embeddings=False))
    assert bytes_per_step(tied) == 4 * tied.num_parameters() == bytes_per_step(untied)
    cast_weights(untied, torch.bfloat16)
    vectors = sum(p.numel() for p in untied.parameters() if p.ndim == 1)
    assert bytes_per_step(untied) == 2 * tied.num_parameters() + 2 * vectors
    quantize_matrices(untied)
    scales = sum(len(p) for name, p in untied.named_parameters() if p.ndim == 2 and not name.endswith("tokens.weight"))
    assert bytes_per_step(untied) == tied.num_parameters() - vectors + 4 * scales + 4 * vectors
