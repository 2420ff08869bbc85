"""What the compiler makes of every Triton kernel for four GPUs, none of which needs to be there.

`python -m benchmarks.resources` prints registers, spilled bytes and the width of memory accesses as a table, and as
JSON in its last line. The launches are those of the functions that the model calls: a driver that names a GPU and has
none stands in for the real one, so that they compile and stop.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.output import pattern
from kernels import cross_entropy, decode, gpu, launch, norms, rope, swiglu

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), launch.Properties(108, 32, copy_engine=False)),
    "sm_90": (GPUTarget("cuda", 90, 32), launch.Properties(132, 32, copy_engine=True)),
    "sm_100": (GPUTarget("cuda", 100, 32), launch.Properties(148, 32, copy_engine=True)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), launch.Properties(304, 16, copy_engine=False)),
}
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass
class Resources:
    """One compiled kernel."""

    launch: str
    kernel: str
    target: str
    warps: int
    registers: int
    spilled: int
    """Bytes of stack on NVIDIA, spilled registers on AMD."""
    shared: int
    """Bytes of shared memory."""
    loads: dict[int, int]
    """Global loads in the code by their width in bytes, the copy engine's as 0."""
    stores: dict[int, int]
    float64: int
    """Arithmetic instructions on 64-bit floating point numbers."""


class Driver:
    """Stands in for a GPU's driver: names a target, and has no device."""

    def __init__(self, target: GPUTarget, device: int):
        self.target, self.device = target, device

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The key of Triton's cache: a number per target."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0


class Recorder:
    """Compiles whatever is launched, and launches nothing."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, triton.compiler.CompiledKernel]] = []
        run, pack = JITFunction.run, JITFunction._pack_args

        def compile_only(function, *arguments, grid, warmup, **options):
            kernel = run(function, *arguments, grid=grid, warmup=True, **options)
            self.compiled.append((f"{function.module.removeprefix('kernels.')}.{function.__name__}", kernel))
            return kernel

        def widened(*arguments):
            options, signature, *rest = pack(*arguments)
            if self.float64_scalars:
                signature = {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}
            return options, signature, *rest

        JITFunction.run, JITFunction._pack_args = compile_only, widened
        self.float64_scalars = False

    def record(self, call: Callable[[], object]) -> list[tuple[str, triton.compiler.CompiledKernel]]:
        """Kernels that a call launches."""
        self.compiled.clear()
        call()
        return list(self.compiled)


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls: for each kernel the shapes that choose another geometry, and the heaviest options of each."""

    def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def norm(width: int, kind: str, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
        layer, x, gain = kind == "layer", empty(40, width, dtype=dtype), empty(width, dtype=FLOAT32)
        statistic = empty(40, dtype=FLOAT32)
        bias = gain if layer else None
        if backward:
            return lambda: norms.norm_backward(x, x, x, gain, statistic, statistic, layer, True, layer)
        return lambda: norms.norm_forward(x, x, gain, bias, layer, 1e-5)

    for kind in ("rms", "layer"):
        for width in (256, 1024, 4104, 32768, 65536):
            yield f"norm forward, {kind}, {width}", norm(width, kind, BFLOAT16, False)
        for width in (256, 1024, 4088, 8192, 16384):
            yield f"norm backward, {kind}, {width}", norm(width, kind, BFLOAT16, True)
    yield "norm forward, layer, 4096, float32", norm(4096, "layer", FLOAT32, False)
    yield "norm backward, layer, 4096, float32", norm(4096, "layer", FLOAT32, True)

    packed, hidden = empty(40, 2 * 2824), empty(40, 2824)  # divisible by 8 and not by 16
    yield "swiglu forward", lambda: swiglu.swiglu_forward(packed)
    yield "swiglu backward", lambda: swiglu.swiglu_backward(hidden, packed)
    for rows in (32, 256):
        x, weight = empty(rows, 512), empty(1024, 512)
        yield f"swiglu in one kernel, {rows} rows", lambda x=x, weight=weight: swiglu.swiglu_gate_up(x, weight, True)

    for width in (64, 128):
        angles, gain = empty(24, width // 2, dtype=FLOAT32), empty(width, dtype=FLOAT32)
        qkv, q, k = empty(2, 24, 16 * width), empty(2, 24, 8, width), empty(2, 24, 4, width)
        for gains in ((None, None), (gain, gain)):
            name = f"head size {width}{', normed' if gains[0] is not None else ''}"
            yield (
                f"rotary forward, {name}",
                lambda a=(qkv, angles, angles, 8, 4, *gains, 1e-6): rope.rotary_forward(*a),
            )
            yield (
                f"rotary backward, {name}",
                lambda a=(q, k, k, qkv, angles, angles, *gains, 1e-6): rope.rotary_backward(*a),
            )

    logits, targets = empty(16, 6408), torch.zeros(16, dtype=torch.int64)
    for replace in (False, True):
        name = f"loss{' and gradient' if replace else ''}"
        yield name, lambda replace=replace: cross_entropy.losses_of(logits, targets, -100, replace)

    s, table = empty(2, 2048), empty(64, 64, dtype=FLOAT32)
    column = padding = torch.zeros(2, dtype=torch.int64)
    q, cache, gain = empty(2, 16, 128), empty(2, 8, 64, 128), empty(4096)
    parts = empty(2, 16, 4, 128, dtype=FLOAT32), empty(2, 16, 4, dtype=FLOAT32), empty(2, 16, 4, dtype=FLOAT32)
    given = "layer", gain, gain, 1e-5
    for gains in ((None, None), (gain, gain)):
        name = f"decode qkv, layer{', normed heads' if gains[0] is not None else ''}"
        a = s, given, empty(32 * 128, 2048), gain, gains, (table, table), column, padding, q, cache, cache
        yield name, lambda a=a: decode.qkv(*a)
    yield "decode gate_up, layer", lambda: decode.gate_up(s, given, empty(8192, 2048), empty(2, 4096))
    yield "decode attention", lambda: decode.attention(q, cache, cache, column, padding, parts)
    yield "decode project parts", lambda: decode.project(parts, empty(2048, 2048), s)
    yield "decode project", lambda: decode.project(empty(2, 4096), empty(2048, 4096), s)


def inspect(name: str, kernel_name: str, target: str, kernel: triton.compiler.CompiledKernel) -> Resources:
    """Read a compiled kernel's machine code."""
    common = {"launch": name, "kernel": kernel_name, "target": target, "shared": kernel.metadata.shared}
    common["warps"] = kernel.metadata.num_warps
    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        field = lambda key: int(re.search(rf"\.{key}:\s*(\d+)", code).group(1))  # noqa: E731
        widths = {
            "dwordx4": 16,
            "dwordx2": 8,
            "dwordx3": 12,
            "dword": 4,
            "ushort": 2,
            "short": 2,
            "ubyte": 1,
            "byte": 1,
        }
        found = re.findall(r"(?:global|buffer)_(load|store)_(dwordx\d|dword|ushort|short|ubyte|byte)", code)
        accesses = [(kind, widths[width]) for kind, width in found]
        spilled = field("vgpr_spill_count") + field("sgpr_spill_count")
        float64 = len(re.findall(r"\bv_(?:add|mul|fma|div|rcp|rsq|sqrt)\w*_f64", code))
        return Resources(
            **common, registers=field("vgpr_count"), spilled=spilled, float64=float64, **by_width(accesses)
        )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = subprocess.run(
            [tool, "--dump-resource-usage", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    accesses = []
    for kind, modifiers in re.findall(r"\b(LDG|STG|LDGSTS)\.([\w.]+)", code):
        width = next((int(bits) // 8 for bits in re.findall(r"\b(128|64)\b", modifiers)), 4)
        width = next((int(bits) // 8 for bits in re.findall(r"\b[US](16|8)\b", modifiers)), width)
        accesses.append(("store" if kind == "STG" else "load", width))
    accesses += [("load", 0)] * len(re.findall(r"\bUTMALDG", code)) + [("store", 0)] * len(
        re.findall(r"\bUTMASTG", code)
    )
    return Resources(
        **common,
        registers=int(re.search(r"REG:(\d+)", code).group(1)),
        spilled=int(re.search(r"STACK:(\d+)", code).group(1)) + int(re.search(r"LOCAL:(\d+)", code).group(1)),
        float64=len(re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP|MUFU\.\w+64\w)\b", code)),
        **by_width(accesses),
    )


def by_width(accesses: list[tuple[str, int]]) -> dict[str, dict[int, int]]:
    """Counts of loads and of stores by width."""
    counts = {"loads": {}, "stores": {}}
    for kind, width in accesses:
        counts[f"{kind}s"][width] = counts[f"{kind}s"].get(width, 0) + 1
    return counts


def pretend(name: str) -> Recorder:
    """From here on, launches in this process compile for a target."""
    target, properties = TARGETS[name]
    launch.properties = lambda device: properties
    driver.set_active(Driver(target, list(TARGETS).index(name)))
    return Recorder()


def measure(name: str, only: str, float64_scalars: bool) -> list[Resources]:
    """Compile launches for a target; with float64_scalars as if a compiler had typed all numbers so."""
    recorder = pretend(name)
    recorder.float64_scalars = float64_scalars
    found, seen = [], set()
    for label, call in launches():
        if not re.search(only, label):
            continue
        for kernel_name, kernel in recorder.record(call):
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                found.append(inspect(label, kernel_name, name, kernel))
    return found


def table(found: list[Resources]) -> str:
    """Markdown: a row per launch, and for each target registers, spilled bytes and the widths of loads."""
    targets = list(dict.fromkeys(one.target for one in found))
    rows = {}
    for one in found:
        widths = "/".join("tile" if width == 0 else str(width) for width in sorted(one.loads, reverse=True))
        cell = f"{one.registers}, {one.spilled}, {widths}"
        rows.setdefault((one.launch, one.kernel), {})[one.target] = cell
    lines = ["| launch | kernel | " + " | ".join(targets) + " |", "|---" * (2 + len(targets)) + "|"]
    lines += [f"| {a} | {b} | " + " | ".join(row.get(t, "") for t in targets) + " |" for (a, b), row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table, then the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="GPUs to compile for")
    parser.add_argument("--only", type=pattern, default="", metavar="PATTERN", help="launches whose name matches")
    parser.add_argument("--float64-scalars", action="store_true", help="numbers typed float64, as by a compiler")
    arguments = parser.parse_args()
    if gpu.INTERPRETED:
        raise SystemExit("python -m benchmarks.resources compiles kernels: run it without TRITON_INTERPRET.")
    # A process for each: what Triton keeps of a target is not meant to be changed.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        options = arguments.only, arguments.float64_scalars
        parts = [pool.submit(measure, target, *options) for target in arguments.targets]
        found = [one for part in parts for one in part.result()]
    print("Each cell: registers of a thread, bytes spilled, widths of global loads in bytes.\n")
    print(table(found))
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    sys.exit(main())
