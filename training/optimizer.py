"""AdamW or Muon, with weight decay on matrices, and a separate learning rate for embedding and head.

Of the vectors, which decay would switch off, only the parameters of norms whose row in `NORMS` says so decay. A row of
the embedding, or of the head, learns only when its token occurs, so these two can take a larger learning rate
than the matrices, which learn from every token (as in Yang et al. 2022, Tensor Programs V, table 3).
"""

import fnmatch
import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from errors import UserError
from model.decoder import Decoder
from model.norm import is_norm_parameter
from training.processes import gathered
from training.settings import OptimizerSettings

MOMENTUM = 0.95  # this and what follows: of Muon
ROW_DECAY = 0.95  # decay of the moving average of a row's mean square
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # polynomial that each iteration applies to the singular values
ITERATIONS = 5
BATCH = 8  # matrices orthogonalized together: on two cores a third of the time of `torch.optim.Muon`


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match one of the patterns; `UserError` if one matches nothing, or all are."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        frozen = fnmatch.filter(parameters, pattern)
        for name in frozen:
            parameters[name].requires_grad_(False)
        if not frozen or not any(parameter.requires_grad for parameter in parameters.values()):
            problem = "leaves nothing to train" if frozen else "matches no parameter"
            raise UserError(f"--freeze {pattern} {problem}; the names are {', '.join([*parameters][:8])}, ...")


def build_optimizer(model: Decoder, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or `Muon` for the matrices of layers and AdamW for the rest."""
    decaying = {row.name for row in model.config.norm_parameters if row.decays}
    decay = settings.weight_decay
    vocabulary_decay = decay if settings.embedding_weight_decay is None else settings.embedding_weight_decay
    groups = defaultdict(list)  # parameters by weight decay and learning rate multiplier
    rows = defaultdict(list)  # of the matrices in each parameter of Muon
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if settings.optimizer == "muon" and parameter.ndim == 2 and name.startswith("layers."):
            module = name.split(".")[-2]
            for part, count in model.config.packed_matrices.get(module, {module: len(parameter)}).items():
                size = model.config.resolved_head_dim if part in ("q_proj", "k_proj") else count
                rows[parameter] += [size] * (count // size)
        elif name.startswith(("embed_tokens.", "lm_head.")):
            groups[vocabulary_decay, settings.embedding_lr_multiplier].append(parameter)
        elif parameter.ndim < 2:
            decays = is_norm_parameter(name) and name.rpartition(".")[2] in decaying
            groups[decay if decays else 0.0, settings.norm_lr_multiplier].append(parameter)
        else:
            groups[decay, 1.0].append(parameter)
    groups = groups or {(decay, 1.0): []}  # AdamW wants one
    adamw_groups = [{"params": groups[key], "weight_decay": key[0], "lr_multiplier": key[1]} for key in groups]
    adamw = torch.optim.AdamW(adamw_groups, settings.learning_rate, (settings.beta1, settings.beta2), fused=True)
    if not rows:
        return adamw
    dtype = torch.bfloat16 if model.compute_dtype == torch.bfloat16 else torch.float32
    return Muon({"params": [*rows], "weight_decay": decay, "lr_multiplier": 1.0}, rows, adamw, dtype)


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of step 0 <= step < steps: linear warm-up, then a decay to the final learning rate.

    cosine: half a cosine after the warm-up (Loshchilov and Hutter 2017, SGDR, equation 5).
    wsd: constant, then linear over the last `decay_fraction` of the steps (Hu et al. 2024, MiniCPM, section 4).
    """
    warmup = min(settings.warmup_steps, steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    wsd = settings.schedule == "wsd"
    decay_start = max(warmup, steps - round(settings.decay_fraction * steps)) if wsd else warmup
    progress = max(0, step + 1 - decay_start) / max(1, steps - decay_start)  # 0 before the decay, 1 at the last step
    remaining = 1 - progress if wsd else (1 + math.cos(math.pi * progress)) / 2
    final = settings.final_learning_rate
    return settings.learning_rate * (final + (1 - final) * remaining)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices in `group`, and the given AdamW for all other parameters, as one optimizer.

    Muon orthogonalizes the momentum of a matrix before it updates the weights: Jordan et al. 2024
    (kellerjordan.github.io/posts/muon), with the scale of Liu et al. 2025 (Muon is Scalable for LLM Training, arXiv
    2502.16982, equation 4), so that learning rate and weight decay mean what they mean for AdamW. Rows of the update
    are divided by the root mean square that they usually have (NorMuon: Li et al. 2025, arXiv 2510.05491), and a weight
    decays only where the update makes it smaller, too (Chen et al. 2025, arXiv 2510.12402).
    rows: how many each matrix in a parameter has. Each is orthogonalized alone, in `dtype`; a head of q or k is one.
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
        # (R, C + 1) each: one column more than the momentum has the mean squares of rows, so one gather moves both.
        updates = {}
        for parameter in self.matrices["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["row_squares"] = torch.zeros_like(parameter[:, :1])
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)  # Nesterov's
            updates[parameter] = torch.cat([update, state["row_squares"]], dim=1)
        same_shape = defaultdict(list)
        with gathered(updates) as owned:
            for parameter, packed in owned.items():
                for matrix in packed.split(self.rows[parameter]):
                    same_shape[matrix.shape].append(matrix)
            for matrices in same_shape.values():
                for i in range(0, len(matrices), BATCH):
                    orthogonalize_and_scale(matrices[i : i + BATCH], self.dtype)
        for parameter, packed in updates.items():
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
