"""Every kernel beside its baselines and the machine's limit: `python -m benchmarks.kernels [--only 'rms norm']`.

For each shape: forward, backward and both on random data, on a GPU over buffers that exceed its cache. The limit,
torch's copy or its matrix product, is measured in the same run. Exit status 1: something did not run.
"""

import gc
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from benchmarks import timing
from errors import UserError, reading
from kernels import reference
from model.device import keep_freed_memory
from model.machine import device_name

BF16 = torch.bfloat16
BEYOND_CACHE = 256e6  # bytes of inputs that take turns, more than a GPU's cache holds; memory does not limit products
OURS, REFERENCE, COMPILED, PYTORCH = "ours", "reference", "torch.compile", "PyTorch's function"
REPEATS, REPEATS_OF_PRODUCTS = 10, 2  # calls in a turn; products take milliseconds and vary less
# Shapes by device: large ones on a GPU, those of configs/tiny.toml and small.toml on a CPU.
NORMS = {"cuda": [(8192, 4096), (16384, 8192), (65536, 1024), (32768, 768), (8192, 4104)]}
NORMS["cpu"] = [(4096, 256), (2048, 512)]
MLPS = {"cuda": [(8192, 4096, 14336), (8192, 1024, 2816)], "cpu": [(4096, 256, 704)]}  # rows, hidden, width
ROTARIES = {"cuda": [(16384, 32, 8, 128), (16384, 16, 8, 64)], "cpu": [(4096, 4, 2, 64)]}  # tokens, heads, k/v, width
LOSSES = {"cuda": [(8192, 1024, 50304), (8192, 4096, 131072)], "cpu": [(4096, 256, 4096), (2048, 512, 6400)]}


@dataclass
class Case:
    name: str
    make: Callable[[], tuple]  # new random inputs, tensors or None
    variants: dict[str, Callable]  # functions of the inputs that return tuples
    moved: tuple[int, int] = (0, 0)  # bytes that the forward and the backward pass must move once
    flops: float = 0.0  # of all products, forward and backward: the limit instead of the bytes, if not 0


def all_cases(device: torch.device) -> list[Case]:
    cases = []
    for kind, shape, after in itertools.product(("rms", "layer"), NORMS[device.type], (False, True)):
        cases.append(norm_case(device, kind, *shape, after))
    cases += [mlp_case(device, *shape) for shape in MLPS[device.type]]
    for shape, normed in itertools.product(ROTARIES[device.type], (False, True)):
        cases.append(rotary_case(device, *shape, normed))
    return cases + [loss_case(device, *shape) for shape in LOSSES[device.type]]


def random(device: torch.device, *shape: int, mean: float = 0.3, std: float = 1.0) -> Tensor:
    """Normal numbers, which get a gradient: vectors in float32, as those of norms in training, else in bfloat16."""
    dtype = torch.float32 if len(shape) == 1 else BF16
    return (torch.randn(shape, device=device) * std + mean).to(dtype).requires_grad_()


def by_all(device: torch.device, call: Callable) -> dict[str, Callable]:
    """Ours, the reference and its compiled version; `call` gets a module of functions and the inputs."""
    fast, eager = partial(call, kernels.implementation(device)), partial(call, reference)
    return {OURS: fast, REFERENCE: eager, COMPILED: torch.compile(lambda *inputs: eager(*inputs))}


def norm_case(device: torch.device, kind: str, rows: int, width: int, after_addition: bool) -> Case:
    """RMSNorm, or LayerNorm with its bias. torch's own norm gets both vectors in bfloat16."""
    outputs = 2 if after_addition else 1  # y, and the sum

    def make():
        bias = random(device, width, mean=1.0, std=0.1) if kind == "layer" else None
        residual = random(device, rows, width) if after_addition else None
        return random(device, rows, width), random(device, width, mean=1.0, std=0.1), bias, residual

    def call(module, x, weight, bias, residual):
        return module.normalize(x, weight, bias, residual, kind=kind, eps=1e-5)[:outputs]

    def torch_own(x, weight, bias, residual):
        total = x if residual is None else x + residual
        if kind == "rms":
            return (F.rms_norm(total, (width,), weight.to(BF16), 1e-5), total)[:outputs]
        return (F.layer_norm(total, (width,), weight.to(BF16), bias.to(BF16), 1e-5), total)[:outputs]

    size = rows * width * BF16.itemsize
    moved = (4 * size, 4 * size) if after_addition else (2 * size, 3 * size)
    name = f"{kind} norm after addition" if after_addition else f"{kind} norm"
    return Case(f"{name}, {rows} x {width}", make, by_all(device, call) | {PYTORCH: torch_own}, moved)


def mlp_case(device: torch.device, rows: int, hidden: int, width: int) -> Case:
    def make():
        matrices = {"mean": 0.0, "std": hidden**-0.5}
        gate_up, down = random(device, 2 * width, hidden, **matrices), random(device, hidden, width, **matrices)
        return random(device, rows, hidden), gate_up, down

    variants = by_all(device, lambda module, *inputs: (module.swiglu_mlp(*inputs),))
    return Case(f"SwiGLU MLP, {rows} x {hidden}, {width} wide", make, variants, flops=18.0 * rows * hidden * width)


def rotary_case(device: torch.device, tokens: int, heads: int, kv_heads: int, width: int, normed: bool) -> Case:
    """q and k rotated, from the packed product, with or without the norm of each head."""
    length = 1024 if tokens > 4096 else min(tokens, 256)

    def make():
        angles = torch.rand(length, width // 2, device=device) * 100
        qkv = random(device, tokens // length, length, (heads + 2 * kv_heads) * width)
        weights = [random(device, width, mean=1.0, std=0.1) if normed else None for _ in range(2)]
        return qkv, angles.cos(), angles.sin(), *weights

    def call(module, qkv, cos, sin, *weights):
        return module.rotary(qkv, cos, sin, heads, kv_heads, *weights, 1e-6)

    # Forward: q and k alone, although ours also copies v (see `kernels.rope`). Backward: the gradients of q, k and v
    # become packed ones; with the norms, q and k are read again.
    size = BF16.itemsize * tokens * width
    rotated, packed = size * (heads + kv_heads), size * (heads + 2 * kv_heads)
    moved = (2 * rotated, 2 * packed + rotated if normed else 2 * packed)
    name = "rotary with norms of heads" if normed else "rotary"
    return Case(f"{name}, {tokens} tokens, {heads} + {kv_heads} heads of {width}", make, by_all(device, call), moved)


def loss_case(device: torch.device, rows: int, hidden: int, vocabulary: int) -> Case:
    """The head's product and the mean cross-entropy, as training calls it: the forward pass computes the gradients."""

    def make():
        x, weight = random(device, rows, hidden), random(device, vocabulary, hidden, mean=0.0, std=hidden**-0.5)
        return x, weight, torch.randint(vocabulary, (rows,), device=device), torch.tensor(1 / rows, device=device)

    variants = by_all(device, lambda module, *inputs: (module.linear_cross_entropy(*inputs),))
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        variants[PYTORCH] = lambda x, weight, targets, _: (F.linear_cross_entropy(x, weight, targets),)
    name = f"head and loss, {rows} x {hidden}, vocabulary {vocabulary}"
    return Case(name, make, variants, flops=6.0 * rows * hidden * vocabulary)


def make_blocks(variant: Callable, sets: list[tuple], device: torch.device, repeats: int) -> timing.Blocks:
    """A variant's blocks: calls on all sets of inputs in turn."""
    learned = [[x for x in inputs if x is not None and x.requires_grad] for inputs in sets]
    outputs = [variant(*inputs) for inputs in sets]
    upstream = [[torch.randn_like(out) for out in one] for one in outputs]
    calls = {
        "forward": lambda i: variant(*sets[i]),
        "backward": lambda i: torch.autograd.grad(outputs[i], learned[i], upstream[i], retain_graph=True),
        "both": lambda i: torch.autograd.grad(variant(*sets[i]), learned[i], upstream[i]),
    }
    in_turn = {section: [partial(call, i) for i in range(len(sets))] for section, call in calls.items()}
    return {section: partial(timing.block, every, device, repeats) for section, every in in_turn.items()}


def compare(case: Case, device: torch.device) -> timing.Table:
    """Measure a case and print its table; the limit is torch's copy of as many bytes, or its product."""
    if case.flops:
        count = repeats = REPEATS_OF_PRODUCTS
        work, limit = {"both": case.flops}, partial(timing.multiplying, device, BF16)
    else:
        size = sum(x.nbytes for x in case.make() if x is not None)
        count = math.ceil(BEYOND_CACHE / size) if device.type == "cuda" else 2
        repeats = max(REPEATS, count)
        forward, backward = case.moved
        work = {"forward": forward, "backward": backward, "both": forward + backward}
        limit = partial(timing.copying, device)
    sets = [case.make() for _ in range(count)]  # of inputs, which take turns
    makers = {name: partial(make_blocks, call, sets, device, repeats) for name, call in case.variants.items()}
    return timing.compare(case.name, makers, work, limit, turns=5)


def measure(only: str = "") -> list[timing.Table]:
    """Every kernel beside its baselines and the machine's limit.

    Args:
        only: A regular expression: cases whose name matches, such as 'rms norm'.
    """
    with reading(f"--only {only}", "give a regular expression"):
        pattern = re.compile(only)
    device = timing.default_device()
    timing.use_kernels("auto", device)
    keep_freed_memory()
    torch.manual_seed(0)
    print(device_name(device))
    tables = []
    for case in all_cases(device):
        if pattern.search(case.name):
            tables.append(compare(case, device))
            torch.compiler.reset()
            gc.collect()
    if not tables:
        raise UserError(f"--only {only}: no case; they are {', '.join(case.name for case in all_cases(device))}.")
    return tables


if __name__ == "__main__":
    timing.run(measure, "benchmarks.kernels")
