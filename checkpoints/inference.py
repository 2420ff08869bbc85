"""Weights for inference, in the dtype they are used in. Imports no tokenizer: benchmarks run where there is none."""

import torch

from checkpoints.pretrained import inference_dtype
from model.decoder import Decoder
from model.device import allocate
from model.linear import Linear


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and store the matrices in it, so that no step casts them. Norm weights and biases: float32."""
    decoder.compute_dtype = dtype
    parameters = [*decoder.parameters()]
    sizes = [(parameter.shape, inference_dtype(parameter, dtype)) for parameter in parameters]
    for parameter, data in zip(parameters, allocate(sizes, parameters[0].device), strict=True):
        parameter.data = data.copy_(parameter.data)


def quantize_matrices(decoder: Decoder) -> None:
    """Give decoding steps on a CPU the matrices of the layers and the head in int8 too; prompts use the others.

    Absmax quantization (Dettmers et al. 2022, arXiv 2208.07339, section 2): a row w is stored as the integers closest
    to w / s, with s = max |w| / 127. Inputs are not quantized.
    """
    lookup = None if decoder.lm_head is None else decoder.embed_tokens  # an untied embedding multiplies nothing
    linears = [module for module in decoder.modules() if isinstance(module, Linear) and module is not lookup]
    sizes = []
    for linear in linears:
        sizes += [(linear.weight.shape, torch.int8), (linear.weight.shape[:1], torch.float32)]
    memory = iter(allocate(sizes, linears[0].weight.device))
    for linear in linears:
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        linear.int8 = next(memory).copy_((weight / scales[:, None]).round()), next(memory).copy_(scales)
