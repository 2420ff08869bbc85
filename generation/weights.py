"""The weights of a model that only generates: kept in the dtype they are used in, and how much of them a step reads."""

import torch

from model.decoder import Decoder


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and keep the matrices in it, so that no step casts them anew; gains and biases in float32."""
    decoder.compute_dtype = dtype
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype if parameter.ndim >= 2 else torch.float32)


def bytes_per_step(decoder: Decoder) -> int:
    """Bytes of weights that one decoding step has to read, however many sequences share it.

    An embedding of its own is looked up, not read; tied to the head it is read there.
    """
    config = decoder.config
    total = sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
    if config.tie_word_embeddings:
        return total
    return total - config.vocab_size * config.hidden_size * decoder.compute_dtype.itemsize
