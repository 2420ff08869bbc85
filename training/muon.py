"""Muon: momentum whose matrices are orthogonalized before they update the weights.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the scale of Liu et al. 2025 (Muon is Scalable for LLM
Training, arXiv 2502.16982, equation 4), so that learning rate and weight decay mean what they mean for AdamW. Rows of
the update are divided by the root mean square that they usually have (NorMuon: Li et al. 2025, arXiv 2510.05491), and a
weight decays only where the update makes it smaller, too (Chen et al. 2025, arXiv 2510.12402).
"""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from training.processes import gathered

MOMENTUM = 0.95
ROW_DECAY = 0.95  # decay of the moving average of a row's mean square
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # polynomial that each iteration applies to the singular values
ITERATIONS = 5
BATCH = 8  # matrices orthogonalized together: on two cores a third of the time of `torch.optim.Muon`


class Muon(torch.optim.Optimizer):
    """Muon for the matrices in `group`, and the given AdamW for all other parameters, as one optimizer.

    rows: of the matrices that each parameter packs, which are orthogonalized by themselves, in `dtype`.
    """

    def __init__(self, group: dict, rows: dict[nn.Parameter, list[int]], adamw: torch.optim.AdamW, dtype: torch.dtype):
        super().__init__([group], adamw.defaults)
        self.matrices, self.rows, self.adamw, self.dtype = self.param_groups[0], rows, adamw, dtype
        self.param_groups += adamw.param_groups  # shared: who sets a learning rate or reads a moment sees one optimizer
        self.state = adamw.state

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        lr, decay = self.matrices["lr"], self.matrices["weight_decay"]
        parameters = [parameter for parameter in self.matrices["params"] if parameter.grad is not None]
        # (R, C + 1) each: one column more than the momentum has the mean squares of rows, so one gather moves both.
        updates, same_shape = [], defaultdict(list)
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["row_squares"] = torch.zeros_like(parameter[:, :1])
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)  # Nesterov's
            updates.append(torch.cat([update, state["row_squares"]], dim=1))
        with gathered(updates) as owned:
            for i, packed in owned.items():
                for matrix in packed.split(self.rows[parameters[i]]):
                    same_shape[matrix.shape].append(matrix)
            for matrices in same_shape.values():
                for i in range(0, len(matrices), BATCH):
                    orthogonalize_and_scale(matrices[i : i + BATCH], self.dtype)
        for parameter, packed in zip(parameters, updates, strict=True):
            update = packed[:, :-1]
            self.state[parameter]["row_squares"].copy_(packed[:, -1:])
            same_sign = update * parameter > 0  # decay only where the update shrinks the weight, too
            parameter.sub_(parameter * same_sign, alpha=lr * decay)
            parameter.sub_(update, alpha=lr)


def orthogonalize_and_scale(matrices: list[Tensor], dtype: torch.dtype) -> None:
    """Change momentum to updates, in place. Each matrix (R, C + 1): momentum (R, C), mean squares of rows (R, 1)."""
    stacked = orthogonalize(torch.stack([matrix[:, :-1].to(dtype) for matrix in matrices])).float()
    for matrix, update in zip(matrices, stacked, strict=True):
        squares = matrix[:, -1:].lerp_(update.square().mean(1, keepdim=True), 1 - ROW_DECAY)
        rows = update / squares.sqrt().clamp_min(1e-8)
        matrix[:, :-1] = rows * (0.2 * math.sqrt(max(update.shape)) * update.norm() / rows.norm().clamp_min(1e-8))


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
