"""Every kernel beside its baselines and the machine's limit: `python -m benchmarks.kernels`.

For each shape: forward, backward and both, each the median of many interleaved calls on random data, on a GPU over
buffers that exceed its cache; separately, host time and peak memory. The limit, torch's copy or its matrix product, is
measured in the same run. Prints tables in Markdown and everything as JSON in its last line; `--out` also writes that
line to a file and draws a picture beside it.
"""

import argparse
import gc
import math
import platform
import re
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

import kernels
from benchmarks.cases import Case, cases
from benchmarks.output import check_out, pattern, positive, write
from benchmarks.timing import BEYOND_CACHE, copy_rate, host_seconds, peak_bytes, product_rate, times
from errors import UserError, exit_on_user_error
from model.device import choose_device, device_name, keep_freed_memory, processor

PARTS = ("forward", "backward", "both")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito 2008


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, dict]:
    """Seconds of each part, host seconds of both and peak bytes, by baseline; their calls are interleaved."""
    first = case.make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    count = max(2, math.ceil(BEYOND_CACHE / size)) if device.type == "cuda" else 2
    sets = [first, *(case.make() for _ in range(min(count, 64) - 1))]
    for tensors in sets:
        for tensor in tensors[: case.num_learned]:
            tensor.requires_grad_()
    exact = None
    found = {}
    runs = {}
    for name, baseline in case.baselines.items():
        try:
            outputs = [as_tuple(baseline(*tensors)) for tensors in sets]
        except Exception as error:  # the others are measured even if one cannot run this shape
            if name == "ours":
                raise
            found[name] = {"not_run": (str(error) or type(error).__name__).splitlines()[0][:200]}
            continue
        upstream = [[torch.randn_like(out) for out in one] for one in outputs]
        if exact is None:
            exact = outputs[0][0].detach()
        elif exact.shape == outputs[0][0].shape:  # a mean instead of losses cannot be compared here
            error = (outputs[0][0].detach().double() - exact.double()).norm() / exact.double().norm()
            if not error < 2e-2:
                raise SystemExit(f"{case.name}: {name} and ours differ by {error:.1e}")

        def forward(i, baseline=baseline):
            return baseline(*sets[i])

        def backward(i, outputs=outputs, upstream=upstream):
            return torch.autograd.grad(outputs[i], sets[i][: case.num_learned], upstream[i], retain_graph=True)

        def both(i, baseline=baseline, upstream=upstream):
            return torch.autograd.grad(as_tuple(baseline(*sets[i])), sets[i][: case.num_learned], upstream[i])

        runs[name] = {
            part: [lambda i=i, run=run: run(i) for i in range(len(sets))]
            for part, run in zip(PARTS, (forward, backward, both), strict=True)
        }
        found[name] = {part: [] for part in PARTS}
        for part in PARTS:
            for _ in range(2):
                runs[name][part][0]()
    rounds = 5
    for _ in range(rounds):
        for name, calls in runs.items():
            for part in PARTS:
                found[name][part] += times(calls[part], device, max(repeats // rounds, 2))
    for name, calls in runs.items():
        for part in PARTS:
            found[name][part] = statistics.median(found[name][part])
        found[name]["host"] = host_seconds(calls["both"][0], device)
        found[name]["peak_bytes"] = peak_bytes(calls["both"][0], device)
    return found


def as_tuple(out) -> tuple[torch.Tensor, ...]:
    """One tensor as a tuple of one."""
    return out if isinstance(out, tuple) else (out,)


def shares(case: Case, found: dict, copy: float, product: float) -> dict[str, float]:
    """Fraction of the limit that each part reaches."""
    if case.flops:
        return {"both": case.flops / found["both"] / product}
    moved = {"forward": case.forward_bytes, "backward": case.backward_bytes}
    moved["both"] = sum(moved.values())
    return {part: moved[part] / found[part] / copy for part in PARTS}


def table(case: Case, found: dict[str, dict], copy: float, product: float) -> str:
    """Markdown: a row per baseline."""
    limit = f"{product / 1e12:.3g} TFLOP/s of a product" if case.flops else f"{copy / 1e9:.4g} GB/s of a copy"
    lines = [f"### {case.name}\n", f"Limit: {limit}, measured in this run."]
    if case.goal is not None:
        goals = [f"{goal:.0%} {part}" for goal, part in zip(case.goal, PARTS, strict=False) if goal]
        lines.append(f"Goal on an H200: {', '.join(goals)}.")
    lines += [
        "",
        "| | forward µs | backward µs | both µs | of the limit | host µs | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        if "not_run" in one:
            lines.append(f"| {name} | not run: {one['not_run']} | | | | | |")
            continue
        reached = ", ".join(f"{share:.0%}" for share in shares(case, one, copy, product).values())
        microseconds = " | ".join(f"{one[part] * 1e6:,.1f}" for part in PARTS)
        host = "" if math.isnan(one["host"]) else f"{one['host'] * 1e6:,.0f}"
        peak = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 1e6:,.1f}"
        lines.append(f"| {name} | {microseconds} | {reached} | {host} | {peak} |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict], path: Path, title: str) -> None:
    """The time of each baseline over ours, forward and backward together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(results)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    baselines = list(dict.fromkeys(name for result in results for name in result["baselines"]))
    for i, baseline in enumerate(baselines):
        points = [
            (result["baselines"][baseline]["both"] / result["baselines"]["ours"]["both"], row)
            for row, result in enumerate(results)
            if "both" in result["baselines"].get(baseline, {})
        ]
        if points:
            style = {"color": COLOURS[i % 6], "marker": "os^Dvx"[i % 6], "s": 36, "zorder": 3}
            axes.scatter(*zip(*points, strict=True), label=baseline, **style)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(results)), [result["name"] for result in results])
    axes.invert_yaxis()
    axes.grid(axis="both", alpha=0.3)
    axes.set_xlabel("forward and backward, time relative to ours")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", type=pattern, default="", metavar="PATTERN", help="cases whose name matches, such as 'rms norm'"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=positive, default=50, help="calls of each part (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there, a picture beside it")
    arguments = parser.parse_args()
    check_out(arguments.out)
    device = choose_device(arguments.device)
    keep_freed_memory()
    torch.manual_seed(0)
    copy, product = copy_rate(device), product_rate(device, torch.bfloat16)
    machine = {
        "device": device_name(device),
        "processor": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": kernels.describe(device),
        "copy_bytes_per_second": copy,
        "product_flops_per_second": product,
    }
    results = []
    chosen = [case for case in cases(device) if re.search(arguments.only, case.name)]
    if not chosen:
        raise UserError(f"no case matches --only {arguments.only!r}; without it all are measured.")
    for case in tqdm(chosen, unit="case"):
        found = measure(case, device, arguments.repeats)
        with tqdm.external_write_mode():
            print(table(case, found, copy, product), flush=True)
        for one in found.values():
            if "not_run" not in one:
                one["share_of_limit"] = shares(case, one, copy, product)
                one["host"] = None if math.isnan(one["host"]) else one["host"]
        results.append({"name": case.name, "goal": case.goal, "baselines": found})
        torch.compiler.reset()
        gc.collect()
    write({"machine": machine, "cases": results}, arguments.out)
    if arguments.out is not None:
        draw(results, arguments.out.with_suffix(".png"), f"{machine['device']}, {machine['processor']}")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
