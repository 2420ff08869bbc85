"""Matrices rounded to 8 bits, for decoding on a CPU: a step reads half as many bytes as in bfloat16.

Each row w of a matrix has a scale s = max |w| / 127, and is stored as the integers closest to w / s, as the rows of
Dettmers et al. 2022 (LLM.int8(), arXiv 2208.07339, section 2). Their inputs are not rounded: a product is exact but for
the weights. Prompts are still read with the matrices in bfloat16, whose products of many rows are faster.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from errors import UserError
from model.decoder import Decoder
from model.linear import Linear

MULTIPLE = 32  # of the length of a row: for others torch's product reads other memory, or crashes
ROWS = 2**12  # of a matrix that are rounded at once, in float32


class Int8(NamedTuple):
    """A matrix W, to half a scale per number: W = values * scales[:, None]."""

    values: Tensor  # (out_features, in_features) int8
    scales: Tensor  # (out_features,) bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def times(self, x: Tensor) -> Tensor:
        """x W^T, bfloat16 (B, out_features), of x bfloat16 (B, in_features)."""
        return torch._weight_int8pack_mm(x.contiguous(), self.values, self.scales)


def rounded_to_int8(weight: Tensor) -> Int8:
    """The matrix closest to a weight (out_features, in_features) of any dtype."""
    values, scales = [], []
    for rows in weight.detach().split(ROWS):
        rows = rows.float()
        scale = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
        values.append((rows / scale).round().to(torch.int8))  # at most 127 (1 + 2^-8), rounded
        scales.append(scale.flatten())
    return Int8(torch.cat(values), torch.cat(scales))


def round_to_int8(decoder: Decoder) -> None:
    """Let decoding steps on a CPU use rounded matrices, of the layers and of the head.

    A matrix whose rows are no multiple of 32 long stays as it is. Raises `UserError` where that are all.
    """
    embedding = None if decoder.lm_head is None else decoder.embed_tokens  # if it is not the head as well
    for module in decoder.modules():
        if isinstance(module, Linear) and module is not embedding and module.weight.shape[1] % MULTIPLE == 0:
            module.int8 = rounded_to_int8(module.weight)
    if all(getattr(module, "int8", None) is None for module in decoder.modules()):
        raise UserError(f"--dtype int8 needs a hidden size that is a multiple of {MULTIPLE}; use bfloat16.")
