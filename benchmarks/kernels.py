"""Every kernel beside its baselines and the machine's limit: `python -m benchmarks.kernels`.

For each shape: forward, backward and both, each the median of many interleaved calls on random data, on a GPU over
buffers that exceed its cache; separately, host time, peak memory and memory kept for the backward pass. The limit,
torch's copy or its matrix product, is measured in the same run. Prints tables in Markdown, and everything as JSON in
its last line. Exit status 1: ours did not run, or a baseline computed something else.
"""

import argparse
import gc
import json
import math
import platform
import re
import statistics
import sys
from collections.abc import Callable

import torch

import kernels
from benchmarks.arguments import pattern, positive
from benchmarks.cases import OURS, RMS_TWIN, Case, cases
from benchmarks.timing import BEYOND_CACHE, copy_rate, host_seconds, kept_bytes, peak_bytes, product_rate, times
from errors import UserError, exit_on_user_error
from model.device import choose_device, device_name, keep_freed_memory, processor

PARTS = ("forward", "backward", "both")
ROUNDS = 5  # the baselines of a case take turns this often
MAX_DIFFERENCE = 2e-2  # relative, between two bfloat16 results


def parts_of(case: Case) -> tuple[str, ...]:
    """The parts of a case that are timed: all, or only forward where nothing is learned."""
    return PARTS if case.num_learned else ("forward",)


def as_tuple(out) -> tuple[torch.Tensor, ...]:
    """One tensor as a tuple of one."""
    return out if isinstance(out, tuple) else (out,)


def make_inputs(case: Case, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Inputs that take turns: on a GPU as many as exceed its cache together."""
    first = case.make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    count = math.ceil(BEYOND_CACHE / size) if device.type == "cuda" else 2
    return [first, *(case.make() for _ in range(min(count, 64) - 1))]


def make_calls(case: Case, name: str, sets: list) -> tuple[dict[str, list[Callable]], torch.Tensor]:
    """The calls of each part of a baseline, one for each set of inputs, and the first output on the first set."""
    baseline = case.baselines[name]
    prepare = case.prepare.get(name, lambda *tensors: tensors)
    inputs, learned = [], []
    for tensors in sets:
        prepared = [tensor.detach() for tensor in prepare(*tensors)]
        # Packed inputs may have become several: then all of them learn.
        count = case.num_learned if len(prepared) == len(tensors) else len(prepared)
        learned.append([tensor.requires_grad_() for tensor in prepared[:count]])
        inputs.append(prepared)
    if not case.num_learned:
        calls = [lambda tensors=tensors: baseline(*tensors) for tensors in inputs]
        return {"forward": calls}, as_tuple(calls[0]())[0]
    outputs = [as_tuple(baseline(*tensors)) for tensors in inputs]
    upstream = [[torch.randn_like(out) for out in one] for one in outputs]

    def forward(i):
        return baseline(*inputs[i])

    def backward(i):
        return torch.autograd.grad(outputs[i], learned[i], upstream[i], retain_graph=True)

    def both(i):
        return torch.autograd.grad(as_tuple(baseline(*inputs[i])), learned[i], upstream[i])

    runs = dict(zip(PARTS, (forward, backward, both), strict=True))
    calls = {part: [lambda i=i, run=run: run(i) for i in range(len(sets))] for part, run in runs.items()}
    return calls, outputs[0][0].detach()


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, dict]:
    """Seconds of each part, host seconds, peak and kept bytes, by baseline; their calls are interleaved.

    A baseline that cannot run this shape, or whose result differs from ours, has the reason instead, as `not_run`.
    """
    sets = make_inputs(case, device)
    found, calls, exact = {}, {}, None
    for name in case.baselines:
        try:
            made, output = make_calls(case, name, sets)
            if exact is not None and name != RMS_TWIN and exact.shape == output.shape:
                difference = ((output.double() - exact.double()).norm() / exact.double().norm()).item()
                if not difference < MAX_DIFFERENCE:
                    raise RuntimeError(f"its result and that of {next(iter(calls))} differ by {difference:.1e}")
            for part in made:
                for _ in range(2):
                    made[part][0]()
        except Exception as error:  # the others are measured anyway
            found[name] = {"not_run": (str(error) or type(error).__name__).splitlines()[0][:200]}
            continue
        exact = output if exact is None else exact
        calls[name], found[name] = made, {part: [] for part in made}
    turns = repeats // (5 * ROUNDS if case.flops else ROUNDS)  # products take milliseconds and vary less
    for _ in range(ROUNDS):
        for name, made in calls.items():
            for part in made:
                found[name][part] += times(made[part], device, max(turns, 2))
    for name, made in calls.items():
        longest = made[parts_of(case)[-1]][0]
        found[name] = {part: statistics.median(found[name][part]) for part in made} | {
            "host": host_seconds(longest, device),
            "peak_bytes": peak_bytes(longest, device),
            "kept_bytes": kept_bytes(made["forward"][0], device) if case.measure_kept else None,
        }
    return found


def shares(case: Case, found: dict, copy: float, product: float) -> dict[str, float]:
    """Fraction of the limit that each part reaches."""
    if case.flops:
        part = parts_of(case)[-1]
        return {part: case.flops / found[part] / product}
    moved = {"forward": case.forward_bytes, "backward": case.backward_bytes}
    moved["both"] = sum(moved.values())
    return {part: moved[part] / found[part] / copy for part in parts_of(case)}


def table(case: Case, found: dict[str, dict], copy: float, product: float) -> str:
    """Markdown: a row per baseline."""
    limit = f"{product / 1e12:.3g} TFLOP/s of a product" if case.flops else f"{copy / 1e9:.4g} GB/s of a copy"
    lines = [
        f"### {case.name}\n",
        f"Limit: {limit}, measured in this run.",
        "",
        "| | forward µs | backward µs | both µs | of the limit | host µs | peak MB | kept MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        if "not_run" in one:
            lines.append(f"| {name} | not run: {one['not_run']} | | | | | | |")
            continue
        reached = ", ".join(f"{share:.0%}" for share in shares(case, one, copy, product).values())
        microseconds = " | ".join(f"{one[part] * 1e6:,.1f}" if part in one else "" for part in PARTS)
        host = "" if one["host"] is None else f"{one['host'] * 1e6:,.0f}"
        peak, kept = ("" if one[key] is None else f"{one[key] / 1e6:,.1f}" for key in ("peak_bytes", "kept_bytes"))
        lines.append(f"| {name} | {microseconds} | {reached} | {host} | {peak} | {kept} |")
    return "\n".join(lines) + "\n"


def measure_all(chosen: list[Case], device: torch.device, repeats: int, results: dict) -> bool:
    """Measure the cases into `results`, print each when it is done, and return whether one failed."""
    machine, failed = results["machine"], False
    copy, product = machine["copy_bytes_per_second"], machine["product_flops_per_second"]
    for i, case in enumerate(chosen):
        found = measure(case, device, repeats)
        for one in found.values():
            if "not_run" not in one:
                one["share_of_limit"] = shares(case, one, copy, product)
        print(f"[{i + 1} of {len(chosen)}]\n\n{table(case, found, copy, product)}", flush=True)
        failed |= "not_run" in found[OURS] or any(" differ by " in one.get("not_run", "") for one in found.values())
        results["cases"].append({"name": case.name, "baselines": found})
        torch.compiler.reset()
        gc.collect()
    return failed


def main() -> int:
    """Measure what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", type=pattern, default="", metavar="PATTERN", help="cases whose name matches, such as 'rms norm'"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=positive, default=50, help="calls of each part (default: %(default)s)")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    chosen = [case for case in cases(device) if re.search(arguments.only, case.name)]
    if not chosen:
        raise UserError(f"no case matches --only {arguments.only!r}; without it all are measured.")
    machine = {
        "device": device_name(device),
        "processor": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": kernels.describe(device),
    }
    results = {"machine": machine, "cases": []}
    keep_freed_memory()
    torch.manual_seed(0)
    machine["copy_bytes_per_second"] = copy_rate(device)
    machine["product_flops_per_second"] = product_rate(device, torch.bfloat16)
    failed = measure_all(chosen, device, arguments.repeats, results)
    print(json.dumps(results))
    return int(failed)


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
