"""Measurements of a norm alone on random rows, without any training: the same on every machine up to rounding."""

from collections.abc import Callable

import torch

import kernels
from ablation.analysis import Study
from ablation.effects import Effect, exact_effect

ROWS, WIDTH, EPS = 512, 256, 1e-5
KINDS = kernels.NORM_KINDS


def random_rows(seed: int, width: int = WIDTH, mean: float = 0.3) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed)) + mean


def normalize(x: torch.Tensor, kind: str) -> torch.Tensor:
    return kernels.normalize(x, torch.ones(WIDTH), kind=kind, eps=EPS)[0]


def output_change_by_scale(study: Study) -> list[Effect]:
    """Relative change of the output when the input is 10 times as large."""
    x = random_rows(0)
    changes = {}
    for kind in KINDS:
        y = normalize(x, kind)
        changes[kind] = ((normalize(10 * x, kind) - y).norm() / y.norm()).item()
    return [exact_effect(kind, change, "relative change") for kind, change in changes.items()]


def gradient_factor_by_scale(study: Study) -> list[Effect]:
    """For norm(W x): length of the gradient of W after multiplying W by 10, divided by its length before."""
    x, weight, upstream = random_rows(1, 64, 0.0), random_rows(2, 64, 0.0)[:WIDTH], random_rows(3, mean=0.0)
    effects = []
    for kind in KINDS:
        lengths = []
        for scale in (1.0, 10.0):
            scaled = (weight * scale).requires_grad_()
            lengths.append(torch.autograd.grad(normalize(x @ scaled.T, kind), scaled, upstream)[0].norm())
        effects.append(exact_effect(kind, (lengths[1] / lengths[0]).item(), "ratio"))
    return effects


def direction(kind: str) -> Callable[[Study], list[Effect]]:
    """Mean cosine of input and output, before the weight, of rows with mean 0.3 and standard deviation 1."""

    def measure(study: Study) -> list[Effect]:
        x = random_rows(0)
        cosine = torch.cosine_similarity(x.double(), normalize(x, kind).double(), dim=-1).mean().item()
        return [exact_effect(kind, cosine, "cosine")]

    return measure


def rows_lost_without_upcast(study: Study) -> list[Effect]:
    """Share of float16 rows with std 400, whose squares overflow, that are wrong by over a tenth without an upcast."""
    x = (random_rows(4, mean=0.0) * 400).half()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    without = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    lost = ((without.double() - exact).norm(dim=-1) / exact.norm(dim=-1) > 0.1) | ~without.isfinite().all(-1)
    return [exact_effect("without the upcast", lost.double().mean().item(), "of rows")]
