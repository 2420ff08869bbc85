"""Muon: momentum whose matrices are orthogonalized before they update the weights.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the scale of Liu et al. 2025 (Muon is Scalable for LLM
Training, arXiv 2502.16982, equation 4), so that learning rate and weight decay mean what they mean for AdamW. Rows of
the update are divided by the root mean square that they usually have (NorMuon: Li et al. 2025, arXiv 2510.05491), and a
weight decays only where the update makes it smaller, too (Chen et al. 2025, arXiv 2510.12402). Many small matrices are
one batch: on two cores a third of the time of `torch.optim.Muon`.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from training.shard import whole_matrices

MOMENTUM = 0.95
ROW_DECAY = 0.95  # of the moving average of a row's mean square
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that each iteration applies to the singular values
ITERATIONS = 5
BATCH = 8  # matrices that are orthogonalized together; more would cost memory and gain nothing


class Muon(torch.optim.Optimizer):
    """Muon for the matrices in `group`, and the given AdamW for all other parameters, as one optimizer.

    rows: for each of these matrices, the rows of the matrices that it packs; each is orthogonalized by itself.
    dtype: in which they are orthogonalized. bfloat16 is exact enough, but slow where a machine lacks its instructions.
    """

    def __init__(self, group: dict, rows: dict[nn.Parameter, list[int]], adamw: torch.optim.AdamW, dtype: torch.dtype):
        super().__init__([group], adamw.defaults)
        self.matrices, self.rows, self.adamw, self.dtype = self.param_groups[0], rows, adamw, dtype
        self.param_groups += adamw.param_groups  # shared: who sets a learning rate or reads a moment sees one optimizer
        self.state = adamw.state

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.adamw.step()
        lr, decay = self.matrices["lr"], self.matrices["weight_decay"]
        matrices, same_shape = [], defaultdict(list)
        for parameter in self.matrices["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["row_squares"] = torch.zeros_like(parameter[:, :1])
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)  # Nesterov's
            matrices.append((self.rows[parameter], parameter, update, state["row_squares"]))
        with whole_matrices(matrices) as share:
            for rows, *tensors in share:
                for part in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
                    same_shape[part[0].shape].append(part)
            for parts in same_shape.values():
                for i in range(0, len(parts), BATCH):
                    self.update(parts[i : i + BATCH], lr, decay)

    def update(self, matrices: list[tuple[Tensor, Tensor, Tensor]], lr: float, decay: float) -> None:
        """Update matrices of one shape: each with its update (R, C) and the mean squares of its rows (R, 1)."""
        parts, updates, squares = zip(*matrices, strict=True)
        stacked = orthogonalize(torch.stack([update.to(self.dtype) for update in updates])).float()
        for part, update, square in zip(parts, stacked, squares, strict=True):
            square.lerp_(update.square().mean(1, keepdim=True), 1 - ROW_DECAY)
            rows = update / square.sqrt().clamp_min(1e-8)
            update = rows * (update.norm() / rows.norm())
            part.sub_(part * (update * part > 0), alpha=lr * decay)
            part.sub_(update, alpha=lr * 0.2 * math.sqrt(max(part.shape)))


def orthogonalize(matrices: Tensor) -> Tensor:
    """U V^T of each of the matrices U S V^T, roughly; (N, R, C) -> (N, R, C).

    A Newton-Schulz iteration: each step maps every singular value s to a s + b s^3 + c s^5, which brings those between
    about 0.001 and 1 into 0.7 to 1.2. The matrix is first divided by its Frobenius norm, so that none is above 1.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalize(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        x = polynomial @ x
    return x
