"""Claims about a norm alone, shown on random rows: invariance to scale, direction, and half precision.

The numbers do not depend on any run: the same on every machine up to rounding.
"""

import torch

import kernels

ROWS, WIDTH, EPS = 512, 256, 1e-5


def all_of_them() -> dict[str, float]:
    """Each number by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator) + 0.3
    found = {}
    for kind in kernels.NORM_KINDS:
        y, _ = kernels.normalize(x, torch.ones(WIDTH), kind=kind, eps=EPS)
        scaled, _ = kernels.normalize(10 * x, torch.ones(WIDTH), kind=kind, eps=EPS)
        found[f"{kind}_change_by_scale"] = ((scaled - y).norm() / y.norm()).item()
        found[f"{kind}_cosine_with_input"] = torch.cosine_similarity(x, y, dim=-1).mean().item()
        found[f"{kind}_gradient_by_scale"] = gradient_by_scale(kind, generator)
    return found | upcast(generator)


def gradient_by_scale(kind: str, generator: torch.Generator) -> float:
    """For norm(W x): length of the gradient of W where W is ten times as large, beside that where it is not."""
    x = torch.randn(ROWS, 64, generator=generator)
    weight = torch.randn(WIDTH, 64, generator=generator)
    upstream = torch.randn(ROWS, WIDTH, generator=generator)
    lengths = []
    for scale in (1.0, 10.0):
        scaled = (weight * scale).requires_grad_()
        y, _ = kernels.normalize(x @ scaled.T, torch.ones(WIDTH), kind=kind, eps=EPS)
        lengths.append(torch.autograd.grad(y, scaled, upstream)[0].norm())
    return (lengths[1] / lengths[0]).item()


def upcast(generator: torch.Generator) -> dict[str, float]:
    """RMSNorm of float16 rows of deviation 400, whose squares exceed float16: our error, and the share of rows that are
    lost without the float32 upcast."""
    x = (torch.randn(ROWS, WIDTH, generator=generator) * 400).half()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    ours, _ = kernels.normalize(x, torch.ones(WIDTH), kind="rms", eps=EPS)
    without = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    lost = ((without.double() - exact).norm(dim=-1) / exact.norm(dim=-1) > 0.1) | ~without.isfinite().all(-1)
    return {
        "float16_error_with_upcast": ((ours.double() - exact).norm() / exact.norm()).item(),
        "float16_rows_lost_without_upcast": lost.float().mean().item(),
    }
