"""Every kernel beside its baselines and the machine's limit: `python -m benchmarks.kernels`.

For each shape: forward, backward and both, each the median of many interleaved calls on random data, on a GPU over
buffers that exceed its cache; separately, peak memory. The limit, torch's copy or its matrix product, is measured in
the same run. Prints tables in Markdown, and everything as JSON in its last line. Exit status 1: ours did not run, or a
baseline computed something else.
"""

import argparse
import gc
import math
import re
import statistics
import sys
from collections.abc import Callable

import torch

import kernels
from benchmarks import timing
from benchmarks.cases import OURS, Case, cases
from errors import UserError, exit_on_user_error
from model.device import choose_device, device_name, keep_freed_memory
from model.fused_decode import describe

PARTS = ("forward", "backward", "both")
ROUNDS = 5  # the baselines of a case take turns this often
MAX_DIFFERENCE = 2e-2  # relative, between two bfloat16 results


def as_tuple(out) -> tuple[torch.Tensor, ...]:
    """One tensor as a tuple of one."""
    return out if isinstance(out, tuple) else (out,)


def make_inputs(case: Case, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Inputs that take turns: on a GPU as many as exceed its cache together."""
    size = sum(tensor.nbytes for tensor in case.make())
    count = math.ceil(timing.BEYOND_CACHE / size) if device.type == "cuda" else 2
    return [case.make() for _ in range(min(count, 64))]


def make_calls(case: Case, name: str, sets: list) -> tuple[dict[str, list[Callable]], torch.Tensor]:
    """The calls of each part of a baseline, one for each set of inputs, and the first output on the first set."""
    baseline, prepare = case.baselines[name], case.prepare.get(name, lambda *tensors: tensors)
    inputs = [[tensor.detach() for tensor in prepare(*tensors)] for tensors in sets]
    learned = [[tensor.requires_grad_() for tensor in tensors[: case.num_learned]] for tensors in inputs]
    outputs = [as_tuple(baseline(*tensors)) for tensors in inputs]
    upstream = [[torch.randn_like(out) for out in one] for one in outputs]

    def forward(i):
        return baseline(*inputs[i])

    def backward(i):
        return torch.autograd.grad(outputs[i], learned[i], upstream[i], retain_graph=True)

    def both(i):
        return torch.autograd.grad(as_tuple(baseline(*inputs[i])), learned[i], upstream[i])

    runs = zip(PARTS, (forward, backward, both), strict=True)
    calls = {part: [lambda i=i, run=run: run(i) for i in range(len(sets))] for part, run in runs}
    return calls, outputs[0][0].detach()


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, dict]:
    """Seconds of each part and peak bytes, by baseline; their calls are interleaved.

    A baseline that cannot run this shape, or whose result differs from ours, has the reason instead, as `not_run`.
    """
    sets = make_inputs(case, device)
    found, calls, exact = {}, {}, None
    for name in case.baselines:
        try:
            made, output = make_calls(case, name, sets)
            exact = output if exact is None else exact
            difference = ((output.double() - exact.double()).norm() / exact.double().norm()).item()
            if not difference < MAX_DIFFERENCE:
                raise RuntimeError(f"its result and that of {next(iter(calls))} differ by {difference:.1e}")
            for part in made:
                for _ in range(2):
                    made[part][0]()
        except Exception as error:  # the others are measured anyway
            found[name] = {"not_run": describe(error)}
            continue
        calls[name], found[name] = made, {part: [] for part in made}
    turns = repeats // (5 * ROUNDS if case.flops else ROUNDS)  # products take milliseconds and vary less
    for name in timing.in_turns(calls, ROUNDS):
        for part, made in calls[name].items():
            found[name][part] += timing.times(made, device, max(turns, 2))
    for name, made in calls.items():
        found[name] = {part: statistics.median(found[name][part]) for part in PARTS}
        found[name]["peak_bytes"] = timing.peak_bytes(made["both"][0], device)
    return found


def shares(case: Case, seconds: dict[str, float], copy: float, product: float) -> dict[str, float]:
    """Fraction of the limit that each part reaches."""
    if case.flops:
        return {"both": case.flops / seconds["both"] / product}
    moved = case.forward_bytes, case.backward_bytes, case.forward_bytes + case.backward_bytes
    return {part: size / seconds[part] / copy for part, size in zip(PARTS, moved, strict=True)}


def print_table(case: Case, found: dict[str, dict]) -> None:
    """Markdown: a row per baseline."""
    print(f"### {case.name}\n")
    timing.print_header("", "forward µs", "backward µs", "both µs", "of the limit", "peak MB")
    for name, one in found.items():
        if "not_run" in one:
            timing.print_row(name, f"not run: {one['not_run']}", "", "", "", "")
            continue
        peak = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 1e6:,.1f}"
        share = ", ".join(f"{share:.0%}" for share in one["share_of_limit"].values())
        timing.print_row(name, *(f"{one[part] * 1e6:,.1f}" for part in PARTS), share, peak)
    print()


def main() -> int:
    """Measure what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name matches, such as 'rms norm'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=50, help="calls of each part (default: %(default)s)")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    chosen = [case for case in cases(device) if re.search(arguments.only, case.name)]
    if not chosen:
        raise UserError(f"no case matches --only {arguments.only!r}; without it all are measured.")
    keep_freed_memory()
    torch.manual_seed(0)
    copy, product = timing.copy_rate(device), timing.product_rate(device, torch.bfloat16)
    print(f"{device_name(device)}: copies {copy / 1e9:.4g} GB/s, products {product / 1e12:.3g} TFLOP/s\n")
    results, failed = [], False
    for case in chosen:
        found = measure(case, device, arguments.repeats)
        for one in found.values():
            if "not_run" not in one:
                one["share_of_limit"] = shares(case, one, copy, product)
        print_table(case, found)
        failed |= "not_run" in found[OURS] or any(" differ by " in one.get("not_run", "") for one in found.values())
        results.append({"name": case.name, "baselines": found})
        torch.compiler.reset()
        gc.collect()
    rates = {"copy_bytes_per_second": copy, "product_flops_per_second": product}
    timing.print_json(device, kernels=kernels.describe(device), **rates, cases=results)
    return int(failed)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
