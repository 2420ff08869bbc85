"""What the compiler makes of every Triton kernel for four GPUs, without needing any of them.

`python -m benchmarks.resources` prints registers, spilled bytes, the width of memory accesses and how much memory
traffic a multiprocessor can have under way as a table, and more as JSON in its last line. The launches are those of the
functions that the model calls: a driver without a GPU replaces the real one, so that kernels are compiled and not run.
"""

import argparse
import json
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

from benchmarks.arguments import pattern
from errors import usable_cores
from kernels import cross_entropy, decode, gpu, launch, norm, rope, swiglu

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), launch.DeviceLimits(108, 32)),
    "sm_90": (GPUTarget("cuda", 90, 32), launch.DeviceLimits(132, 32)),
    "sm_100": (GPUTarget("cuda", 100, 32), launch.DeviceLimits(148, 32)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), launch.DeviceLimits(304, 16)),
}
# Warps and bytes of shared memory of a multiprocessor, by the CUDA programming guide, or of a compute unit of CDNA 3.
CAPACITY = {"sm_80": (64, 164 * 1024), "sm_90": (64, 228 * 1024), "sm_100": (64, 228 * 1024), "gfx942": (32, 64 * 1024)}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)([^;]*);")  # of NVIDIA's SASS
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
    """Global loads in the code by their width in bytes; 0 for tiles loaded by the TMA."""
    stores: dict[int, int]
    float64: int
    """Arithmetic instructions on 64-bit floating point numbers."""
    tf32: int
    """Matrix instructions that round float32 to 10 bits; counted on NVIDIA only."""
    barriers: int
    """Places where the warps of a program wait for each other."""
    async_copies: int
    """Instructions that copy from global to shared memory while the program runs, by the TMA or without it."""
    programs: int
    """Programs that fit a multiprocessor at the same time."""
    bytes_in_flight: int | None
    """Bytes that one program may have asked the memory for and not yet received, if all its threads keep up; None where
    the code does not say: on AMD, and for tiles by the TMA."""


class Driver:
    """Replaces a GPU's driver: names a target, and has no device."""

    def __init__(self, target: GPUTarget, device: int):
        self.target, self.device = target, device

    def get_current_target(self) -> GPUTarget:
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
            self.compiled.append((function.__name__, kernel))
            return kernel

        def pack_arguments(*arguments):
            options, signature, *rest = pack(*arguments)
            if self.float64_scalars:
                signature = {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}
            return options, signature, *rest

        JITFunction.run, JITFunction._pack_args = compile_only, pack_arguments
        self.float64_scalars = False

    def record(self, call: Callable[[], object]) -> list[tuple[str, triton.compiler.CompiledKernel]]:
        """Kernels that a call launches."""
        self.compiled.clear()
        call()
        return list(self.compiled)


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls: for each kernel, shapes for each launch geometry, and the options that take most registers."""

    def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def norm_call(width: int, kind: str, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
        layer_norm, x, weight = kind == "layer", empty(40, width, dtype=dtype), empty(width, dtype=FLOAT32)
        statistics = empty(1 + layer_norm, 40, dtype=FLOAT32)
        bias = weight if layer_norm else None
        if backward:
            return lambda: norm.norm_backward(x, x, x, weight, statistics, layer_norm, True, layer_norm)
        return lambda: norm.norm_forward(x, x, weight, bias, layer_norm, 1e-5)

    for kind in ("rms", "layer"):
        for width in (256, 1024, 4104, 8192):
            yield f"norm forward, {kind}, {width}", norm_call(width, kind, BFLOAT16, False)
        for width in (256, 1024, 4088, 8192):
            yield f"norm backward, {kind}, {width}", norm_call(width, kind, BFLOAT16, True)
    yield "norm forward, layer, 4096, float32", norm_call(4096, "layer", FLOAT32, False)
    yield "norm backward, layer, 4096, float32", norm_call(4096, "layer", FLOAT32, True)

    for width in (2824, 248):  # divisible by 8 and not by 16
        packed, hidden = empty(40, 2 * width), empty(40, width)
        yield f"swiglu forward, {width}", lambda packed=packed: swiglu.swiglu_forward(packed)
        yield f"swiglu backward, {width}", lambda a=(hidden, packed): swiglu.swiglu_backward(*a)

    for width, head_norms, dtype in (
        (64, True, BFLOAT16), (128, False, BFLOAT16), (128, True, BFLOAT16), (256, True, FLOAT32)
    ):  # fmt: skip
        angles, weight = empty(24, width // 2, dtype=FLOAT32), empty(width, dtype=FLOAT32)
        qkv, q, k = (empty(2, 24, *shape, dtype=dtype) for shape in ((16 * width,), (8, width), (4, width)))
        weights = (weight, weight) if head_norms else (None, None)
        name = f"head size {width}{', head norms' if head_norms else ''}{', float32' if dtype == FLOAT32 else ''}"
        yield f"rotary forward, {name}", lambda a=(qkv, angles, angles, 8, 4, *weights, 1e-6): rope.rotary_forward(*a)
        yield (
            f"rotary backward, {name}",
            lambda a=(q, k, k, qkv, angles, angles, *weights, 1e-6): rope.rotary_backward(*a),
        )

    labels, token = torch.zeros(16, dtype=torch.int64), empty(16, dtype=FLOAT32)
    for vocabulary, weights in ((61, token), (50257, None), (50257, token), (131072, token)):
        logits = cross_entropy.allocate_logits(16, vocabulary, empty(0))[:, :vocabulary]
        name = f"loss{'' if weights is None else ' and gradient'}, vocabulary {vocabulary}"
        yield name, lambda a=(logits, labels, weights, token, -100): cross_entropy.cross_entropy(*a)

    weight = empty(4096)
    for batch in (1, 8):
        s, packed = empty(batch, 2048), empty(batch, 24 * 128, dtype=FLOAT32)
        layer_norm, rms_norm = ("layer", weight, weight, 1e-5), ("rms", weight, None, 1e-5)
        a = s, layer_norm, empty(24 * 128, 2048), weight, packed
        yield f"decode qkv, layer, {batch} sequences", lambda a=a: decode.qkv(*a)
        for norm_arguments in (layer_norm, rms_norm):
            a = s, norm_arguments, empty(8192, 2048), empty(batch, 4096)
            yield f"decode gate_up, {norm_arguments[0]}, {batch} sequences", lambda a=a: decode.gate_up(*a)
        a = empty(batch, 4096), empty(2048, 4096), s
        yield f"decode project, {batch} sequences", lambda a=a: decode.project(*a)
    position, padding = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for width, heads, kv_heads, positions in ((64, 32, 8, 4096), (128, 16, 8, 256), (128, 32, 4, 4096)):
        keys, splits = empty(1, kv_heads, positions, width), decode.splits_for(positions)
        shape = 1, heads, splits
        partials = tuple(empty(*sizes, dtype=FLOAT32) for sizes in ((*shape, width), shape, shape))
        qkv, angles = empty(1, (heads + 2 * kv_heads) * width, dtype=FLOAT32), empty(64, width // 2, dtype=FLOAT32)
        a = (
            qkv,
            (weight, weight),
            1e-5,
            (angles, angles),
            position,
            padding,
            keys,
            keys,
            partials,
            empty(1, heads, width),
        )
        yield f"decode attention, {heads // kv_heads} heads of {width} share keys", lambda a=a: decode.attention(*a)


def inspect(
    name: str, kernel_name: str, target: str, kernel: triton.compiler.CompiledKernel, sass: bool = True
) -> Resources:
    """Read a compiled kernel's machine code; without `sass`, NVIDIA's resource usage alone, and no instructions."""
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
        return Resources(
            **common,
            registers=field("vgpr_count"),
            spilled=field("vgpr_spill_count") + field("sgpr_spill_count"),
            float64=len(re.findall(r"\bv_(?:add|mul|fma|div|rcp|rsq|sqrt)\w*_f64", code)),
            tf32=0,
            barriers=len(re.findall(r"\bs_barrier\b", code)),
            async_copies=len(re.findall(r"\b(?:global|buffer)_load_.*\blds\b", code)),
            programs=resident_programs(target, field("vgpr_count"), common["warps"], common["shared"]),
            bytes_in_flight=None,
            **by_width(accesses),
        )
    code = disassemble(kernel, sass)
    accesses = []
    for kind, modifiers in re.findall(r"\b(LDG|STG|LDGSTS)\.([\w.]+)", code):
        accesses.append(("store" if kind == "STG" else "load", access_width(modifiers)))
    accesses += [("load", 0)] * len(re.findall(r"\bUTMALDG", code)) + [("store", 0)] * len(
        re.findall(r"\bUTMASTG", code)
    )
    registers = int(re.search(r"REG:(\d+)", code).group(1))
    by_tma = "UTMALDG" in code
    return Resources(
        **common,
        registers=registers,
        spilled=int(re.search(r"STACK:(\d+)", code).group(1)) + int(re.search(r"LOCAL:(\d+)", code).group(1)),
        float64=len(re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP|MUFU\.\w+64\w)\b", code)),
        tf32=len(re.findall(r"\b\w*MMA\.\S*TF32", code)),
        barriers=len(re.findall(r"\bBAR\.", code)),
        async_copies=len(re.findall(r"\b(?:LDGSTS|UTMALDG)\b", code)),
        programs=resident_programs(target, registers, common["warps"], common["shared"]),
        bytes_in_flight=None if by_tma or not sass else 32 * common["warps"] * thread_bytes_in_flight(code),
        **by_width(accesses),
    )


def disassemble(kernel: triton.compiler.CompiledKernel, sass: bool) -> str:
    """Resource usage of a kernel that was compiled for NVIDIA and, with `sass`, its instructions: half a second."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", *(["-sass"] if sass else []), file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def access_width(modifiers: str) -> int:
    """Bytes of a SASS memory access by its modifiers, such as E.128 or E.U16; 4 if they name none."""
    width = next((int(bits) // 8 for bits in re.findall(r"\b(128|64)\b", modifiers)), 4)
    return next((int(bits) // 8 for bits in re.findall(r"\b[US](16|8)\b", modifiers)), width)


def resident_programs(target: str, registers: int, warps: int, shared: int) -> int:
    """Programs that fit a multiprocessor at once by registers, warps and shared memory.

    NVIDIA gives registers to a warp in units of 256, from the 16,384 of one of four partitions, and a program takes
    1,024 bytes of shared memory more than it asks for. AMD gives a lane registers in units of 8, from 512.
    """
    max_warps, max_shared = CAPACITY[target]
    if target.startswith("gfx"):
        fitting = 4 * (512 // max(8, -(-registers // 8) * 8))
    else:
        fitting = 4 * (16384 // (-(-registers * 32 // 256) * 256))
        shared += 1024
    return min(min(fitting, max_warps) // warps, 32, max_shared // max(shared, 1))


def thread_bytes_in_flight(code: str) -> int:
    """The maximum, over all places in SASS, of the bytes of global loads that a thread waits for there.

    The code is read once, from top to bottom. A load is under way until an instruction names one of the registers that
    it fills. Asynchronous copies are under way in groups, which LDGDEPBAR closes, until DEPBAR waits for all but the
    last few. Loads that an iteration of a loop starts for the next one are counted only as far as the code before the
    loop starts them too, so that this is a lower bound for loops that Triton did not pipeline.
    """
    loads: list[tuple[set[int], int]] = []
    groups = [0]  # bytes of copies; the last group is still open
    maximum = 0
    for opcode, operands in INSTRUCTION.findall(code):
        name, _, modifiers = opcode.partition(".")
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        loads = [(filled, size) for filled, size in loads if filled.isdisjoint(registers)]
        width = access_width(modifiers)
        if name == "LDG" and registers:
            loads.append((set(range(registers[0], registers[0] + max(width // 4, 1))), width))
        elif name == "LDGSTS":
            groups[-1] += width
        elif name == "LDGDEPBAR":
            groups.append(0)
        elif name == "DEPBAR" and "SB0" in operands:
            left = int(operands.split(",")[1], 16)
            groups = groups[max(len(groups) - 1 - left, 0) :]
        maximum = max(maximum, sum(groups) + sum(size for _, size in loads))
    return maximum


def by_width(accesses: list[tuple[str, int]]) -> dict[str, dict[int, int]]:
    """Counts of loads and of stores by width."""
    counts = {"loads": {}, "stores": {}}
    for kind, width in accesses:
        counts[f"{kind}s"][width] = counts[f"{kind}s"].get(width, 0) + 1
    return counts


def pretend(name: str) -> Recorder:
    """From now on, launches in this process compile for a target."""
    target, limits = TARGETS[name]
    launch.device_limits = lambda device: limits
    driver.set_active(Driver(target, list(TARGETS).index(name)))
    return Recorder()


def measure(name: str, only: str, float64_scalars: bool, sass: bool) -> list[Resources]:
    """Compile launches for a target; with float64_scalars, as torch.compile may type them, all numbers are float64."""
    recorder = pretend(name)
    recorder.float64_scalars = float64_scalars
    found, seen = [], set()
    for label, call in launches():
        if not re.search(only, label):
            continue
        for kernel_name, kernel in recorder.record(call):
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                found.append(inspect(label, kernel_name, name, kernel, sass))
    return found


def table(found: list[Resources]) -> str:
    """Markdown: a row per launch, and a column per target."""
    targets = list(dict.fromkeys(one.target for one in found))
    rows = {}
    for one in found:
        widths = "/".join("tile" if width == 0 else str(width) for width in sorted(one.loads, reverse=True))
        flight = "" if one.bytes_in_flight is None else f" x {one.bytes_in_flight / 1024:.3g} KB"
        cell = f"{one.registers}, {one.spilled}, {widths}, {one.programs}{flight}"
        rows.setdefault((one.launch, one.kernel), {})[one.target] = cell
    lines = ["| launch | kernel | " + " | ".join(targets) + " |", "|---" * (2 + len(targets)) + "|"]
    lines += [f"| {a} | {b} | " + " | ".join(row.get(t, "") for t in targets) + " |" for (a, b), row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table, then the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="GPUs to compile for")
    parser.add_argument("--only", type=pattern, default="", metavar="PATTERN", help="launches whose name matches")
    parser.add_argument("--float64-scalars", action="store_true", help="type all numbers float64, as torch.compile may")
    parser.add_argument(
        "--sass", nargs="*", choices=TARGETS, default=list(TARGETS), help="NVIDIA GPUs whose instructions are counted"
    )
    arguments = parser.parse_args()
    if gpu.INTERPRETED:
        raise SystemExit("python -m benchmarks.resources compiles kernels: run it without TRITON_INTERPRET.")
    # A process for each target: Triton caches what it knows about a target.
    with ProcessPoolExecutor(usable_cores(), mp_context=get_context("spawn")) as pool:
        options = arguments.only, arguments.float64_scalars
        results = [pool.submit(measure, target, *options, target in arguments.sass) for target in arguments.targets]
        found = [one for result in results for one in result.result()]
    print(
        "Each cell: registers of a thread, bytes spilled, widths of global loads in bytes, programs that fit a"
        " multiprocessor, and the bytes that each of them has under way at most (not known for tiles by the TMA).\n"
    )
    print(table(found))
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    sys.exit(main())
