"""Every kernel beside its baselines and the machine's limit: `python -m benchmarks.kernels`.

For each shape: forward, backward and both on random data, on a GPU over buffers that exceed its cache. The limit,
torch's copy or its matrix product, is measured in the same run. Exit status 1: ours did not run.
"""

import argparse
import gc
import math
import re
import sys
from functools import partial

import torch
from torch import Tensor

import kernels
from benchmarks import timing
from benchmarks.cases import OURS, Case, cases
from errors import exit_on_user_error
from model.device import choose_device, device_name, keep_freed_memory

PARTS = ("forward", "backward", "both")
TURNS = 5


def as_tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One tensor as a tuple of one."""
    return out if isinstance(out, tuple) else (out,)


def make_blocks(
    case: Case, name: str, sets: list[tuple[Tensor, ...]], device: torch.device, repeats: int
) -> dict[str, timing.Block]:
    """A baseline's block for each part: calls on all sets of inputs in turn."""
    baseline = case.baselines[name]
    inputs = [[tensor.detach() for tensor in tensors] for tensors in sets]
    learned = [[tensor.requires_grad_() for tensor in tensors[: case.num_learned]] for tensors in inputs]
    outputs = [as_tuple(baseline(*tensors)) for tensors in inputs]
    upstream = [[torch.randn_like(out) for out in one] for one in outputs]

    def forward(i):
        return baseline(*inputs[i])

    def backward(i):
        return torch.autograd.grad(outputs[i], learned[i], upstream[i], retain_graph=True)

    def both(i):
        return torch.autograd.grad(as_tuple(baseline(*inputs[i])), learned[i], upstream[i])

    return {
        run.__name__: partial(timing.block, [partial(run, i) for i in range(len(sets))], device, repeats)
        for run in (forward, backward, both)
    }


def limits(case: Case, copy: float, product: float) -> dict[str, float]:
    """Seconds that each part needs at the machine's rates; of a case of products, both passes together."""
    if case.flops:
        return {"both": case.flops / product}
    moved = case.forward_bytes, case.backward_bytes, case.forward_bytes + case.backward_bytes
    return {part: size / copy for part, size in zip(PARTS, moved, strict=True)}


def compare(case: Case, device: torch.device, repeats: int, copy: float, product: float) -> dict:
    """Measure a case and print its table."""
    size = sum(tensor.nbytes for tensor in case.make())
    count = math.ceil(timing.BEYOND_CACHE / size) if device.type == "cuda" else 2
    sets = [case.make() for _ in range(count)]  # inputs that take turns; on a GPU they exceed its cache together
    repeats = max(2, repeats // (5 * TURNS if case.flops else TURNS))  # products take milliseconds and vary less
    makers = {name: partial(make_blocks, case, name, sets, device, repeats) for name in case.baselines}
    return timing.compare(case.name, makers, dict.fromkeys(makers, limits(case, copy, product)), TURNS)


def main() -> int:
    """Measure what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name matches, such as 'rms norm'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=50, help="calls of each part (default: %(default)s)")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    chosen = [case for case in cases(device) if re.search(arguments.only, case.name)]
    keep_freed_memory()
    torch.manual_seed(0)
    copy, product = timing.copy_rate(device), timing.product_rate(device, torch.bfloat16)
    print(f"{device_name(device)}: copies {copy / 1e9:.4g} GB/s, products {product / 1e12:.3g} TFLOP/s\n")
    tables = []
    for case in chosen:
        tables.append(compare(case, device, arguments.repeats, copy, product))
        torch.compiler.reset()
        gc.collect()
    rates = {"copy_bytes_per_second": copy, "product_flops_per_second": product}
    timing.print_json(device, kernels=kernels.describe(device), **rates, tables=tables)
    return int(any(OURS in table["not_run"] for table in tables))


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
