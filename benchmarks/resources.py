"""Registers, spills and shared memory of every Triton kernel that the model launches: `python -m benchmarks.resources`.

On a GPU each kernel runs on small inputs. `--target sm_90` compiles the same launches for an NVIDIA GPU that is not
there: a driver without a GPU replaces the real one, and launches nothing. Prints a table and, last, its rows as JSON.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks import timing
from generation.weights import cast_weights
from kernels import cross_entropy, decode, gpu, norm, rope, swiglu
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.fused_decode import DecodeStep

TARGETS = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KB of shared memory that a program can have
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def pretend(target: str) -> None:
    """From now on, launches in this process compile for a target and do nothing else."""
    arch = int(target.removeprefix("sm_"))
    properties = {"max_shared_mem": TARGETS[target] * 1024}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
            get_current_device=lambda: arch,  # the key of Triton's caches
            get_current_stream=lambda device: 0,
            launcher_cls=lambda source, metadata: lambda *arguments: None,
            utils=SimpleNamespace(get_device_properties=lambda device: properties, load_binary=read_binary),
        )
    )


def read_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
    """What a driver says of a kernel that it loads: registers of a thread, spilled ones, and maximum threads."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    return name, name, used["REG"], (used["STACK"] + used["LOCAL"]) // 4, 1024


def compiled_kernels() -> Iterator[CompiledKernel]:
    """All kernels that this process has compiled."""
    for module in (cross_entropy, decode, norm, rope, swiglu):
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                for kernels, *_ in function.device_caches.values():
                    yield from kernels.values()


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


def main() -> None:
    """Print the table, then the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resources", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="compile for this GPU instead of using the one that is here")
    arguments = parser.parse_args()
    if arguments.target is None:
        torch.set_default_device("cuda")
    else:
        pretend(arguments.target)
    columns, rows = ("launch", "kernel", "warps", "registers", "spilled", "shared"), {}
    timing.print_header(*columns)
    for name, call in launches():
        call()
        for kernel in compiled_kernels():
            if kernel.hash not in rows:
                sizes = kernel.metadata.num_warps, kernel.n_regs, kernel.n_spills, kernel.metadata.shared
                rows[kernel.hash] = dict(zip(columns, (name, kernel.name, *sizes), strict=True))
                timing.print_row(*rows[kernel.hash].values())
    timing.print_json(torch.get_default_device(), target=arguments.target, kernels=[*rows.values()])


if __name__ == "__main__":
    main()
