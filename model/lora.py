"""LoRA: beside each matrix W (out, in) of the layers, A (r, in) and B (out, r) learn, and all else stays as it is."""

import math

import torch
from torch import Tensor, nn

import kernels
from model.decoder import Decoder, generator_for
from model.linear import Linear


class LoraLinear(nn.Module):
    """y = W x + (alpha / r) B A x (Hu et al. 2021, arXiv 2106.09685, section 4.1), with W and its bias frozen.

    If W packs n matrices, with `packed_rows` rows, then A (n r, in) and B (out, r) pack theirs in the same order.
    """

    def __init__(self, linear: Linear, packed_rows: list[int], rank: int, scale: float):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed_rows = packed_rows
        self.scale = scale
        self.lora_A = Linear(self.weight.shape[1], rank * len(packed_rows))
        self.lora_B = Linear(rank, len(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        reduced = (self.scale * self.lora_A(x)).chunk(len(self.packed_rows), dim=-1)  # (..., r) each
        b_matrices = self.lora_B.weight.split(self.packed_rows)
        updates = [kernels.linear(z, b) for z, b in zip(reduced, b_matrices, strict=True)]
        return kernels.linear(x, self.weight, self.bias) + torch.cat(updates, dim=-1)


@torch.no_grad()
def add_lora(decoder: Decoder, fields: dict, seed: int) -> Decoder:
    """Freeze the decoder; each matrix of its layers gets an A, uniform within 1/sqrt(in) as in PEFT, and a B of 0."""
    decoder.requires_grad_(False)
    decoder.lora = fields
    for name, linear in [*decoder.layers.named_modules(prefix="layers")]:
        if isinstance(linear, Linear):
            rows = decoder.config.packed_matrices.get(name.rpartition(".")[2], {name: len(linear.weight)})
            lora = LoraLinear(linear, [*rows.values()], fields["r"], fields["lora_alpha"] / fields["r"])
            bound = 1 / math.sqrt(linear.weight.shape[1])
            lora.lora_A.weight.uniform_(-bound, bound, generator=generator_for(seed, f"{name}.lora_A.weight"))
            lora.lora_B.weight.zero_()
            decoder.set_submodule(name, lora)
    return decoder
