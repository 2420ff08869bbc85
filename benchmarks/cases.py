"""What `benchmarks.kernels` measures: shapes of each kernel, its baselines, the minimum of bytes or FLOP, and goals.

Bytes are what must be read and written once; goals are fractions of the copy rate, or of the matrix product rate.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from kernels import reference


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
    forward_bytes: float
    backward_bytes: float
    flops: float = 0.0
    """Of all matrix products, forward and backward; if not 0, they are the limit instead of the bytes."""
    goal: tuple[float, float] | None = None
    """Fractions of the limit to reach, forward and backward, if a goal is set."""


def cases(device: torch.device) -> Iterator[Case]:
    """Large shapes for a GPU, those of the default model for a CPU."""
    large = device.type == "cuda"
    dtype = torch.bfloat16
    shapes = [(4096, 256), (2048, 512)]
    if large:
        shapes = [(8192, 4096), (16384, 8192), (8192, 16384), (65536, 1024), (4096, 65536), (8192, 4104)]
    for rows, width in shapes:
        for kind in ("rms", "layer"):
            yield norm(device, kind, rows, width, dtype, residual=False)
            if rows * width <= 2**25:
                yield norm(device, kind, rows, width, dtype, residual=True)
    for rows, hidden, width in (
        ((8192, 4096, 14336), (8192, 1024, 2816), (256, 512, 1408)) if large else ((4096, 256, 704),)
    ):
        yield mlp(device, rows, hidden, width, dtype)
    for tokens, heads, kv_heads, width in ((16384, 32, 8, 128), (16384, 16, 8, 64)) if large else ((4096, 4, 2, 64),):
        for normed in (False, True):
            yield rotary(device, tokens, heads, kv_heads, width, dtype, normed)
    sizes = ((8192, 1024, 50304), (8192, 4096, 131072)) if large else ((4096, 256, 4096), (2048, 512, 6400))
    for rows, hidden, vocabulary in sizes:
        yield loss(device, rows, hidden, vocabulary, dtype)


def has_liger(device: torch.device) -> bool:
    """Whether Liger-Kernel can be compared with."""
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def random(device: torch.device, *shape: int, dtype: torch.dtype, mean: float = 0.3, std: float = 1.0) -> Tensor:
    """Normal numbers with a mean away from zero."""
    return (torch.randn(shape, device=device) * std + mean).to(dtype)


def norm(device, kind: str, rows: int, width: int, dtype: torch.dtype, residual: bool) -> Case:
    """RMSNorm or LayerNorm, alone or after the residual addition. Our weight is float32, others' in x's dtype."""

    def make():
        x = random(device, rows, width, dtype=dtype)
        weight = random(device, width, dtype=torch.float32, mean=1.0, std=0.1)
        return (x, weight, random(device, rows, width, dtype=dtype)) if residual else (x, weight)

    def using(module):
        def run(x, weight, stream=None):
            y, s = module.normalize(x, weight, None, stream, kind=kind, eps=1e-5)
            return y if stream is None else (y, s)

        return run

    def torch_own(x, weight, stream=None):
        s = x if stream is None else x + stream
        if kind == "rms":
            y = F.rms_norm(s, (width,), weight.to(dtype), 1e-5)
        else:
            y = F.layer_norm(s, (width,), weight.to(dtype), None, 1e-5)
        return y if stream is None else (y, s)

    baselines = {"ours": using(kernels.implementation(device)), "reference, eager": using(reference)}
    baselines[f"F.{kind}_norm"] = torch_own
    baselines["torch.compile"] = torch.compile(using(reference))
    if has_liger(device) and not residual:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def with_liger(x, weight):
            if kind == "rms":
                return LigerRMSNormFunction.apply(x, weight.to(dtype), 1e-5, 0.0, "llama", False)
            return LigerLayerNormFunction.apply(x, weight.to(dtype), torch.zeros_like(weight, dtype=dtype), 1e-5)

        baselines["Liger"] = with_liger
    elements, size = rows * width, torch.empty(0, dtype=dtype).element_size()
    goal = (
        ((0.93, 0.85 if kind == "rms" else 0.80) if width <= 8192 else (0.60, 0.60)) if width >= 2048 else (0.60, 0.60)
    )
    name = f"{kind} norm{' after addition' if residual else ''}, {rows} x {width}"
    moved = (4, 4) if residual else (2, 3)
    num_learned = 3 if residual else 2
    return Case(name, make, num_learned, baselines, moved[0] * size * elements, moved[1] * size * elements, goal=goal)


def mlp(device, rows: int, hidden: int, width: int, dtype: torch.dtype) -> Case:
    """The SwiGLU MLP; on a GPU also with gate, up and activation in one kernel."""

    def make():
        std = hidden**-0.5
        return (
            random(device, rows, hidden, dtype=dtype),
            random(device, 2 * width, hidden, dtype=dtype, mean=0.0, std=std),
            random(device, hidden, width, dtype=dtype, mean=0.0, std=std),
        )

    baselines = {
        "ours": kernels.implementation(device).swiglu_mlp,
        "reference, eager": reference.swiglu_mlp,
        "torch.compile": torch.compile(reference.swiglu_mlp),
    }
    if device.type == "cuda":
        baselines["ours, one kernel for gate and up"] = partial(run_fused_gate_up, device)
    if has_liger(device):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        def with_liger(x, gate_up, down):
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            return F.linear(LigerSiLUMulFunction.apply(gate, up), down)

        baselines["Liger"] = with_liger
    name = f"SwiGLU MLP, {rows} x {hidden}, {width} wide"
    return Case(name, make, 3, baselines, 0, 0, flops=18.0 * rows * hidden * width)


def run_fused_gate_up(device: torch.device, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Our MLP with `fused_gate_up`. Raises RuntimeError if the two usual steps ran instead of the one kernel."""
    kernels.use("triton", device, fused_gate_up=True)
    try:
        out = kernels.swiglu_mlp(x, gate_up_weight, down_weight)
        if kernels.swiglu.fused_gate_up_obstacles:
            raise RuntimeError(kernels.swiglu.fused_gate_up_obstacles[0])
        return out
    finally:
        kernels.use("auto", device)


def rotary(device, tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, normed: bool) -> Case:
    """q and k rotated, from the packed product, with or without the norm of each head."""
    length = 1024 if tokens > 4096 else 256

    def make():
        angles = torch.rand(length, width // 2, device=device) * 100
        qkv = random(device, tokens // length, length, (heads + 2 * kv_heads) * width, dtype=dtype)
        norm_weights = [random(device, width, dtype=torch.float32, mean=1.0, std=0.1) for _ in range(2 * normed)]
        return qkv, *norm_weights, angles.cos(), angles.sin()

    def using(function):
        def run(qkv, *rest):
            norm_weights = rest[:-2] if normed else (None, None)
            return function(qkv, *rest[-2:], heads, kv_heads, *norm_weights, 1e-6)

        return run

    baselines = {
        "ours": using(kernels.implementation(device).rotary),
        "reference, eager": using(reference.rotary),
        "torch.compile": torch.compile(using(reference.rotary)),
    }
    size = torch.empty(0, dtype=dtype).element_size()
    rotated, packed = tokens * (heads + kv_heads) * width, tokens * (heads + 2 * kv_heads) * width
    name = f"rotary{' with norms of heads' if normed else ''}, {tokens} tokens, {heads} + {kv_heads} heads of {width}"
    forward = 2 * size * (rotated if normed else packed)  # without the norms, ours also copies v: see kernels.rope
    backward = 2 * size * packed + size * rotated * normed
    goal = (0.85, 0.85) if normed else (0.90, 0.90)
    return Case(name, make, 1 + 2 * normed, baselines, forward, backward, goal=goal)


def loss(device, rows: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Case:
    """The head's product and the cross-entropy."""

    def make():
        weight = random(device, vocabulary, hidden, dtype=dtype, mean=0.0, std=hidden**-0.5)
        return random(device, rows, hidden, dtype=dtype), weight, torch.randint(vocabulary, (rows,), device=device)

    baselines = {
        "ours": kernels.implementation(device).linear_cross_entropy,
        "F.cross_entropy, all logits": reference.linear_cross_entropy,
        "torch.compile": torch.compile(reference.linear_cross_entropy),
    }
    if has_liger(device):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def with_liger(x, weight, targets):
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]  # the mean: gradients in forward

        baselines["Liger, mean"] = with_liger
    name = f"head and loss, {rows} x {hidden}, vocabulary {vocabulary}"
    return Case(name, make, 2, baselines, 0, 0, flops=6.0 * rows * hidden * vocabulary, goal=(0.0, 1 / 1.2))
