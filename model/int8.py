"""Matrices quantized to 8 bits, for decoding on a CPU: a step reads half as many bytes of them as in bfloat16.

Absmax quantization with a scale per row (Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339, sections 2 and 3.1): a row
w is stored as the integers closest to w / s, with s = max |w| / 127. Inputs are not quantized.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 32  # of the length of a row; torch's product reads out of bounds where that is no multiple of 16
ROWS_AT_ONCE = 512  # in float32


@dataclass(frozen=True)
class Int8Matrix:
    """A quantized matrix: |W - values * scales[:, None]| <= scales[:, None] / 2."""

    values: Tensor  # (out_features, in_features) int8
    scales: Tensor  # (out_features,) bfloat16

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features), as of a tensor."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x W^T, bfloat16 (B, out_features), of x bfloat16 (B, in_features); sums are float32."""
        return torch._weight_int8pack_mm(x.contiguous(), self.values, self.scales)  # it crashes with an odd stride


def quantize(weight: Tensor) -> Int8Matrix:
    """The quantized matrix closest to a weight (out_features, in_features) of any dtype."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.bfloat16, device=weight.device)
    parts = (tensor.split(ROWS_AT_ONCE) for tensor in (weight.detach(), values, scales))
    for rows, rounded, scale in zip(*parts, strict=True):
        rows = rows.float()
        scale.copy_((rows.abs().amax(1) / 127).clamp(min=torch.finfo(torch.bfloat16).tiny))
        # At most 127.5 in size, since rounding a scale to bfloat16 moves it by 2^-8 at most: no value becomes 128.
        rounded.copy_((rows / scale[:, None]).round_())
    return Int8Matrix(values, scales)
