"""The MLP. Gate and up are one packed matrix, for one large product."""

from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from model.config import ModelConfig
from model.linear import Linear

# What the gate goes through before it multiplies (Shazeer 2020, equations 5 and 6), and the plain MLP's activation.
ACTIVATIONS = {"geglu": F.gelu, "reglu": F.relu, "glu": F.sigmoid, "relu": F.relu, "gelu": F.gelu}


class MLP(nn.Module):
    """SwiGLU, fused, without biases; the other gates, to be compared with, are plain PyTorch."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)  # rows of gate, then of up
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's output (B, T, D) for normalized x (B, T, D)."""
        if self.kind == "swiglu":
            return kernels.swiglu_mlp(x, self.gate_up_proj.weight, self.down_proj.weight)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj((ACTIVATIONS[self.kind](gate.float()) * up.float()).to(x.dtype))


class PlainMLP(nn.Module):
    """Two matrices and an activation between them, half as wide again as a gated MLP: as many parameters."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.up_proj = Linear(config.hidden_size, config.intermediate_size * 3 // 2)
        self.down_proj = Linear(config.intermediate_size * 3 // 2, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The branch's output (B, T, D) for normalized x (B, T, D)."""
        return self.down_proj(self.activation(self.up_proj(x).float()).to(x.dtype))
