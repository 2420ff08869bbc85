"""The MLP. The gate and up matrices are packed into one, for one large matrix product."""

from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from model.config import ModelConfig
from model.linear import Linear

# The activation of the gate (Shazeer 2020, equations 5 and 6), or of the plain MLP.
ACTIVATIONS = {"geglu": F.gelu, "reglu": F.relu, "glu": F.sigmoid, "relu": F.relu, "gelu": F.gelu}


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), without biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)  # rows of gate, then rows of up
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gate_up = self.gate_up_proj(x)
        if self.kind == "swiglu":
            return self.down_proj(kernels.swiglu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj((ACTIVATIONS[self.kind](gate.float()) * up.float()).to(x.dtype))


class PlainMLP(nn.Module):
    """down(activation(up(x))), 1.5 times as wide as a gated MLP and so with as many parameters."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.up_proj = Linear(config.hidden_size, config.intermediate_size * 3 // 2)
        self.down_proj = Linear(config.intermediate_size * 3 // 2, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down_proj(self.activation(self.up_proj(x).float()).to(x.dtype))
