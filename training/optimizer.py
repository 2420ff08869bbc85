"""AdamW or Muon, with weight decay on matrices, and a separate learning rate for embedding and head.

Of the vectors, which decay would switch off, only the parameters of norms whose row in `NORMS` says so decay. A row of
the embedding, or of the head, learns only when its token occurs, so these two take a larger learning rate than the
matrices that learn from every token (as in Yang et al. 2022, Tensor Programs V, table 3).
"""

import fnmatch
import math
from collections import defaultdict

import torch
from torch import nn

from errors import UserError
from model.decoder import Decoder
from model.norm import is_norm_parameter
from training.muon import Muon
from training.settings import OptimizerSettings


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


def build_optimizer(model: Decoder, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), or `Muon` for the matrices of layers and AdamW for the rest."""
    decaying = {row.name for row in model.config.norm_parameters if row.decays}
    decay, vocabulary_decay = settings.weight_decay, settings.embedding_weight_decay
    vocabulary_decay = decay if vocabulary_decay is None else vocabulary_decay
    groups, rows = defaultdict(list), {}  # parameters by weight decay and learning rate multiplier; matrices of Muon
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if settings.optimizer == "muon" and parameter.ndim == 2 and name.startswith("layers."):
            module = name.split(".")[-2]
            rows[parameter] = [*model.config.packed_matrices.get(module, {module: len(parameter)}).values()]
        elif name.startswith(("embed_tokens.", "lm_head.")):
            groups[vocabulary_decay, settings.embedding_lr_multiplier].append(parameter)
        elif parameter.ndim < 2:
            decays = is_norm_parameter(name) and name.rpartition(".")[2] in decaying
            groups[decay if decays else 0.0, settings.norm_lr_multiplier].append(parameter)
        else:
            groups[decay, 1.0].append(parameter)
    groups = groups or {(decay, 1.0): []}  # AdamW wants one
    adamw = torch.optim.AdamW(
        [{"params": groups[key], "weight_decay": key[0], "lr_multiplier": key[1]} for key in groups],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=device.type in ("cuda", "cpu", "mps"),
    )
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
