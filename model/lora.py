"""LoRA: beside each matrix W (out, in) of the layers, A (r, in) and B (out, r) learn, and all else stays as it is.

A layer's matrix then gives y = W x + (alpha / r) B A x (Hu et al. 2021, arXiv 2106.09685, section 4.1).
"""

import math

import torch
from torch import Tensor, nn

import kernels
from model.decoder import Decoder, generator_for
from model.linear import Linear


class LoraLinear(nn.Module):
    """A frozen `Linear` with A and B. If it packs n matrices, of `rows` each, so do they: A (n r, in), B (out, r)."""

    def __init__(self, linear: Linear, rows: list[int], rank: int, scale: float):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = rows
        self.scale = scale
        self.lora_A = Linear(self.weight.shape[1], rank * len(rows))
        self.lora_B = Linear(rank, len(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        reduced = (self.scale * self.lora_A(x)).chunk(len(self.rows), dim=-1)  # (..., r) each
        updates = [kernels.linear(z, b) for z, b in zip(reduced, self.lora_B.weight.split(self.rows), strict=True)]
        return kernels.linear(x, self.weight, self.bias) + torch.cat(updates, dim=-1)


@torch.no_grad()
def add_lora(decoder: Decoder, fields: dict, seed: int) -> Decoder:
    """Freeze the decoder; give each matrix of its layers an A, uniform within 1/sqrt(in) of 0 as in PEFT, and a B of 0.

    fields: `r`, `lora_alpha` and `base_model_name_or_path`, as in PEFT's adapter_config.json.
    """
    decoder.requires_grad_(False)
    decoder.lora = fields
    packed_matrices = decoder.config.packed_matrices
    scale = fields["lora_alpha"] / fields["r"]
    for layer in decoder.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in [*block.named_children()]:
                if isinstance(linear, Linear):
                    matrices = packed_matrices.get(name, {name: len(linear.weight)})
                    setattr(block, name, LoraLinear(linear, [*matrices.values()], fields["r"], scale))
    for name, parameter in decoder.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.uniform_(-bound, bound, generator=generator_for(seed, name))
        elif ".lora_B." in name:
            parameter.zero_()
    return decoder
