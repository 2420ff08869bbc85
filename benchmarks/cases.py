"""What `benchmarks.kernels` measures: shapes of each kernel, its baselines, and what it must move or compute once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from kernels import reference

BF16 = torch.bfloat16
OURS = "ours"


@dataclass
class Case:
    """One kernel on one shape."""

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    """New random inputs; those that get gradients come first."""
    num_learned: int
    """How many of the inputs get gradients."""
    baselines: dict[str, Callable]
    """What is measured, by name; `ours` is the first. Each takes the inputs and returns one tensor or a tuple."""
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    flops: float = 0.0
    """Of all matrix products, forward and backward; if not 0, they are the limit instead of the bytes."""


def cases(device: torch.device) -> Iterator[Case]:
    """The cases of a device: large shapes for a GPU, those of the default model for a CPU."""
    if device.type != "cuda":
        for rows, width in ((4096, 256), (2048, 512)):
            for kind in ("rms", "layer"):
                yield from (norm(device, kind, rows, width, after_addition) for after_addition in (False, True))
        yield mlp(device, 4096, 256, 704)
        yield from (rotary(device, 4096, 4, 2, 64, normed) for normed in (False, True))
        yield from (loss(device, *sizes) for sizes in ((4096, 256, 4096), (2048, 512, 6400)))
        return
    for kind in ("rms", "layer"):
        for rows, width, after_addition in (
            (8192, 4096, False), (8192, 4096, True), (16384, 8192, False), (65536, 1024, False), (32768, 768, True),
            (8192, 4104, False),  # divisible by 8 and not by 16
        ):  # fmt: skip
            yield norm(device, kind, rows, width, after_addition)
    yield from (mlp(device, *sizes) for sizes in ((8192, 4096, 14336), (8192, 1024, 2816)))
    for sizes in ((16384, 32, 8, 128), (16384, 16, 8, 64)):
        yield from (rotary(device, *sizes, normed) for normed in (False, True))
    yield from (loss(device, *sizes) for sizes in ((8192, 1024, 50304), (8192, 4096, 131072)))


def random(device: torch.device, *shape: int, dtype: torch.dtype = BF16, mean: float = 0.3, std: float = 1.0) -> Tensor:
    """Normal numbers with a mean away from zero."""
    return (torch.randn(shape, device=device) * std + mean).to(dtype)


def by_all(device: torch.device, using: Callable) -> dict[str, Callable]:
    """Ours, the reference and its compiled version, each made of a module of functions."""
    baselines = {OURS: using(kernels.implementation(device)), "reference, eager": using(reference)}
    return baselines | {"torch.compile": torch.compile(using(reference))}


def norm(device: torch.device, kind: str, rows: int, width: int, after_addition: bool = False) -> Case:
    """RMSNorm, or LayerNorm with its bias, alone or after the residual addition.

    Weight and bias are float32, as in training. torch's own norm gets them in x's dtype.
    """
    num_vectors, own = (1, F.rms_norm) if kind == "rms" else (2, F.layer_norm)

    def make():
        vectors = [random(device, width, dtype=torch.float32, mean=1.0, std=0.1) for _ in range(num_vectors)]
        return random(device, rows, width), *vectors, *(random(device, rows, width) for _ in range(after_addition))

    def using(module):
        def run(x, *rest):
            vectors, stream = rest[:num_vectors], rest[-1] if after_addition else None
            y, s = module.normalize(x, *(*vectors, None)[:2], stream, kind=kind, eps=1e-5)
            return (y, s) if after_addition else y

        return run

    def torch_own(x, *rest):
        s = x + rest[-1] if after_addition else x
        y = own(s, (width,), *(one.to(BF16) for one in rest[:num_vectors]), eps=1e-5)
        return (y, s) if after_addition else y

    baselines = by_all(device, using) | {f"F.{own.__name__}": torch_own}
    size = rows * width * BF16.itemsize
    forward, backward = (4 * size, 4 * size) if after_addition else (2 * size, 3 * size)
    name = f"{kind} norm{' after addition' if after_addition else ''}, {rows} x {width}"
    return Case(name, make, 1 + num_vectors + after_addition, baselines, forward, backward)


def mlp(device: torch.device, rows: int, hidden: int, width: int) -> Case:
    """The SwiGLU MLP."""

    def make():
        std = hidden**-0.5
        shapes = (2 * width, hidden), (hidden, width)
        return random(device, rows, hidden), *(random(device, *shape, mean=0.0, std=std) for shape in shapes)

    def using(module):
        return lambda x, gate_up, down: module.linear(module.swiglu(module.linear(x, gate_up)), down)

    baselines = by_all(device, using)
    name = f"SwiGLU MLP, {rows} x {hidden}, {width} wide"
    return Case(name, make, 3, baselines, flops=18.0 * rows * hidden * width)


def rotary(device: torch.device, tokens: int, heads: int, kv_heads: int, width: int, normed: bool) -> Case:
    """q and k rotated, from the packed product, with or without the norm of each head."""
    length = 1024 if tokens > 4096 else min(tokens, 256)

    def make():
        angles = torch.rand(length, width // 2, device=device) * 100
        qkv = random(device, tokens // length, length, (heads + 2 * kv_heads) * width)
        norm_weights = [random(device, width, dtype=torch.float32, mean=1.0, std=0.1) for _ in range(2 * normed)]
        return qkv, *norm_weights, angles.cos(), angles.sin()

    def using(module):
        def run(qkv, *rest):
            norm_weights = rest[:-2] if normed else (None, None)
            return module.rotary(qkv, *rest[-2:], heads, kv_heads, *norm_weights, 1e-6)

        return run

    size = BF16.itemsize * tokens * width
    rotated, packed = size * (heads + kv_heads), size * (heads + 2 * kv_heads)
    name = f"rotary{' with norms of heads' if normed else ''}, {tokens} tokens, {heads} + {kv_heads} heads of {width}"
    # Forward: q and k alone, although without the norms ours also copies v (see `kernels.rope`). Backward: the
    # gradients of q, k and v become packed ones; with the norms, q and k are read again.
    return Case(name, make, 1 + 2 * normed, by_all(device, using), 2 * rotated, 2 * packed + rotated * normed)


def loss(device: torch.device, rows: int, hidden: int, vocabulary: int) -> Case:
    """The head's product and the mean cross-entropy, as training calls it: the forward pass computes the gradients."""

    def make():
        weight, mean = random(device, vocabulary, hidden, mean=0.0, std=hidden**-0.5), torch.tensor(1 / rows)
        return random(device, rows, hidden), weight, torch.randint(vocabulary, (rows,), device=device), mean.to(device)

    def ours(x, weight, targets, mean):
        return kernels.linear_cross_entropy(x, weight, targets, token_weights=mean)

    def all_logits(x, weight, targets, mean):
        return reference.linear_cross_entropy(x, weight, targets).mean()

    baselines = {OURS: ours, "F.cross_entropy, all logits": all_logits, "torch.compile": torch.compile(all_logits)}
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        baselines["F.linear_cross_entropy"] = lambda *inputs: F.linear_cross_entropy(*inputs[:3])
    name = f"head and loss, {rows} x {hidden}, vocabulary {vocabulary}"
    return Case(name, make, 2, baselines, flops=6.0 * rows * hidden * vocabulary)
