"""The MLP. The gate and up matrices are packed into one, for one large matrix product."""

from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from model.config import GATED, ModelConfig
from model.linear import Linear

# The activation of the gate (Shazeer 2020, equations 5 and 6), or of the plain MLP. SwiGLU's, silu, is in its kernel.
ACTIVATIONS = {"geglu": F.gelu, "reglu": F.relu, "glu": F.sigmoid, "relu": F.relu, "gelu": F.gelu}


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) or, without a gate, down(activation(up(x))); no biases."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        if GATED[self.kind]:
            self.gate_up_proj = Linear(config.hidden_size, 2 * config.mlp_width)  # rows of gate, then rows of up
        else:
            self.up_proj = Linear(config.hidden_size, config.mlp_width)
        self.down_proj = Linear(config.mlp_width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            if isinstance(self.down_proj, Linear):  # not what LoRA has in the place of all matrices
                return kernels.swiglu_mlp(x, self.gate_up_proj.weight, self.down_proj.weight)
            hidden = kernels.swiglu(self.gate_up_proj(x))
        elif GATED[self.kind]:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            hidden = ACTIVATIONS[self.kind](gate.float()) * up.float()
        else:
            hidden = ACTIVATIONS[self.kind](self.up_proj(x).float())
        return self.down_proj(hidden.to(x.dtype))
