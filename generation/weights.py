"""Weights for inference: stored in the dtype they are used in. Counts the bytes of them that a decoding step reads."""

import torch

from checkpoints.pretrained import inference_dtype
from model.decoder import Decoder
from model.int8 import ALIGNMENT, quantize
from model.linear import Linear


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and store the matrices in it, so that no step casts them. Norm weights and biases: float32."""
    decoder.compute_dtype = dtype
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(inference_dtype(parameter, dtype))


def quantize_matrices(decoder: Decoder) -> None:
    """Let decoding steps on a CPU use matrices in int8: of the layers and of the head, beside those in bfloat16.

    A matrix whose row length is no multiple of 32 stays in bfloat16. Raises ValueError if the decoder does not compute
    in bfloat16.
    """
    if decoder.compute_dtype != torch.bfloat16:
        raise ValueError(f"int8 matrices take inputs in bfloat16, and this decoder computes in {decoder.compute_dtype}")
    lookup = None if decoder.lm_head is None else decoder.embed_tokens  # an untied embedding multiplies nothing
    for module in decoder.modules():
        if isinstance(module, Linear) and module is not lookup and module.weight.shape[1] % ALIGNMENT == 0:
            module.int8 = quantize(module.weight)


def bytes_per_step(decoder: Decoder) -> int:
    """Bytes of weights that one decoding step reads, however many sequences are in the batch.

    The head's matrix product reads its whole matrix. An untied embedding is not counted: a step reads one row of it for
    each sequence. Where a matrix is quantized, its int8 values and its scales are read.
    """
    config = decoder.config
    total = sum(parameter.nbytes for parameter in decoder.parameters())
    for module in decoder.modules():
        if isinstance(module, Linear) and module.int8 is not None:
            total += module.int8.nbytes - module.weight.nbytes
    if config.tie_word_embeddings:
        return total
    return total - config.vocab_size * config.hidden_size * decoder.compute_dtype.itemsize
