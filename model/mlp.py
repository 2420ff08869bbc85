"""The gated MLP. Gate and up are one packed matrix, for one large product."""

from torch import Tensor, nn

import kernels
from model.config import ModelConfig
from model.linear import Linear


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)  # rows of gate, then of up
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's output (B, T, D) for normalized x (B, T, D)."""
        return kernels.swiglu_mlp(x, self.gate_up_proj.weight, self.down_proj.weight)
