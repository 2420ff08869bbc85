"""What the compiler makes of the Triton kernels for four GPUs, without needing any of them.

`python -m benchmarks.resources` prints a row for each kernel that the model launches, and all rows as JSON in its last
line. A driver without a GPU replaces the real one, so that kernels are compiled and not run.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from errors import usable_cores
from generation.weights import cast_weights
from kernels import gpu, launch
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.fused_decode import DecodeStep

# The target, its multiprocessors, and the warps of the largest block.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 108, 32),
    "sm_90": (GPUTarget("cuda", 90, 32), 132, 32),
    "sm_100": (GPUTarget("cuda", 100, 32), 148, 32),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 304, 16),
}
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


class Recorder:
    """Compiles whatever is launched, and launches nothing."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, CompiledKernel]] = []
        run = JITFunction.run

        def compile_only(function, *arguments, grid, warmup, **options) -> None:
            kernel = run(function, *arguments, grid=grid, warmup=True, **options)
            self.compiled.append((function.__name__, kernel))

        JITFunction.run = compile_only

    def record(self, call: Callable[[], object]) -> list[tuple[str, CompiledKernel]]:
        """Names and code of the kernels that a call launches."""
        self.compiled.clear()
        call()
        return list(self.compiled)


def pretend(name: str) -> Recorder:
    """From now on, launches in this process compile for a target."""
    target, multiprocessors, warps = TARGETS[name]
    limits = launch.device_limits(torch.device("cpu"))._replace(multiprocessors=multiprocessors, max_warps=warps)
    launch.device_limits = lambda device: limits
    number = list(TARGETS).index(name)  # the key of Triton's cache
    functions = {"get_current_target": lambda: target, "get_current_device": lambda: number}
    driver.set_active(SimpleNamespace(**functions, get_current_stream=lambda device: 0))
    return Recorder()


def both_passes(function: Callable, *inputs: object, **options: object) -> None:
    """Call a function of `kernels.gpu` and its backward pass."""
    out = function(*inputs, **options)
    outputs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all functions that launch kernels, with shapes for each launch geometry."""

    def new(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    for kind in ("rms", "layer"):
        for width, dtype in ((256, BFLOAT16), (4104, BFLOAT16), (8192, BFLOAT16), (4096, FLOAT32)):
            x, weight = new(40, width, dtype=dtype), new(width, dtype=FLOAT32)
            bias = weight if kind == "layer" else None
            name = f"norm, {kind}, {width}{', float32' if dtype == FLOAT32 else ''}"
            yield name, partial(both_passes, gpu.normalize, x, weight, bias, x, kind=kind, eps=1e-5)
    for width in (2824, 248):  # divisible by 8 and not by 16
        matrices = new(2 * width, 64), new(64, width)
        yield f"swiglu, {width}", partial(both_passes, gpu.swiglu_mlp, new(40, 64), *matrices)
    for width, normed in ((64, True), (128, False), (128, True), (256, True)):
        qkv, angles = new(2, 24, 16 * width), torch.empty(24, width // 2)
        weights = [new(width, dtype=FLOAT32) for _ in range(2)] if normed else (None, None)
        name = f"rotary, head size {width}{', head norms' if normed else ''}"
        yield name, partial(both_passes, gpu.rotary, qkv, angles, angles, 8, 4, *weights)
    labels, token_weights = torch.zeros(16, dtype=torch.int64), torch.ones(16)
    for vocabulary in (61, 50257, 131072):
        x, head = new(16, 64), new(vocabulary, 64)
        call = partial(both_passes, gpu.linear_cross_entropy, x, head, labels, token_weights=token_weights)
        yield f"loss, vocabulary {vocabulary}", call
    for kind, heads, kv_heads, sequences, positions in (
        ("rms", 32, 8, 1, 4096), ("layer", 32, 8, 8, 4096), ("rms", 16, 8, 1, 256), ("rms", 32, 4, 1, 4096),
    ):  # fmt: skip
        config = ModelConfig(64, 2048, 8192, 1, heads, kv_heads, norm=kind, max_position_embeddings=positions)
        name = f"decoding, {kind}, {sequences} sequences, {heads // kv_heads} heads of {2048 // heads} share keys"
        yield name, partial(decoding_step, config, sequences)


@torch.inference_mode()
def decoding_step(config: ModelConfig, sequences: int) -> None:
    """Launch the kernels of one fused decoding step."""
    decoder = Decoder(config, seed=None).eval()
    cast_weights(decoder, BFLOAT16)
    device = decoder.embed_tokens.weight.device
    cache = KeyValueCache(config, sequences, config.max_position_embeddings, device=device, dtype=BFLOAT16)
    DecodeStep(decoder, cache).step(torch.zeros(sequences, 1, dtype=torch.int64, device=device), None)


def inspect(kernel: CompiledKernel) -> dict[str, int | list[int] | None]:
    """Warps and shared memory of a program; a thread's registers and spills; widths of its global loads in bytes.

    Spills are bytes of stack on NVIDIA and registers on AMD, whose widths are not read.
    """
    found = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        count = {name: int(n) for name, n in re.findall(r"\.(\w+_count):\s*(\d+)", kernel.asm["amdgcn"])}
        spilled = count["vgpr_spill_count"] + count["sgpr_spill_count"]
        return found | {"registers": count["vgpr_count"], "spilled": spilled, "widths": None}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    loads = re.findall(r"ld\.global(?:\.[a-zA-Z]\w*(?:::\w+)?)*?(?:\.v(\d))?\.[bfsu](\d+)", kernel.asm["ptx"])
    widths = {int(vector or 1) * int(bits) // 8 for vector, bits in loads}
    widths |= {int(size, 16) for size in re.findall(r"cp\.async\.c[ag].*?\], (0x\w+)", kernel.asm["ptx"])}
    return found | {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "widths": sorted(widths)}


def measure(target: str) -> list[dict]:
    """A row for each kernel."""
    recorder, rows = pretend(target), {}
    for name, call in launches():
        for kernel_name, kernel in recorder.record(call):
            rows.setdefault(kernel.hash, {"launch": name, "kernel": kernel_name, "target": target} | inspect(kernel))
    return list(rows.values())


def main() -> None:
    """Print the table, then the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="GPUs to compile for")
    arguments = parser.parse_args()
    if gpu.INTERPRETED:
        raise SystemExit("python -m benchmarks.resources compiles kernels: run it without TRITON_INTERPRET.")
    # A process for each target: Triton caches what it knows about a target.
    with ProcessPoolExecutor(usable_cores(), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        results = [pool.submit(measure, target) for target in arguments.targets]
        rows = [row for result in results for row in result.result()]
    columns = ("launch", "kernel", "target", "warps", "registers", "spilled", "shared", "widths")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
