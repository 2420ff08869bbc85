"""Weights for inference: stored in the dtype they are used in. Counts the bytes of them that a decoding step reads."""

import torch

from model.decoder import Decoder
from model.linear import Linear
from model.pretrained import inference_dtype


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and store the matrices in it, so that no step casts them. Norm weights and biases: float32."""
    decoder.compute_dtype = dtype
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(inference_dtype(parameter, dtype))


def bytes_per_step(decoder: Decoder) -> int:
    """Bytes of weights that one decoding step reads, however many sequences are in the batch.

    The head's matrix product reads its whole matrix. An untied embedding is not counted: a step reads one row of it for
    each sequence.
    """
    config = decoder.config
    total = sum(parameter.nbytes for parameter in decoder.parameters())
    for module in decoder.modules():
        if isinstance(module, Linear) and module.int8 is not None:
            total += sum(part.nbytes for part in module.int8) - module.weight.nbytes
    if config.tie_word_embeddings:
        return total
    return total - config.vocab_size * config.hidden_size * decoder.compute_dtype.itemsize
