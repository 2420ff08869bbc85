"""Compiles the Triton kernels for a GPU that is not there: a driver without one replaces the real driver.

As a program it prints what each kernel needs on a target, a JSON list: `python tests/kernels/fake_driver.py sm_90`.
"""

import json
import re
import subprocess
import sys
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

import kernels
from benchmarks.decoding import cast_weights
from benchmarks.kernels import OURS, loss_case, make_blocks, mlp_case, norm_case, rotary_case
from generation.steps import GpuDecodeStep
from kernels import activation, cross_entropy, decode, norm, rope
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder

CPU = torch.device("cpu")
TARGETS = {"sm_80": 163, "sm_90": 227, "sm_100": 227}  # KB of shared memory that a program can have


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
    kernels.triton_unavailable_reason = lambda device: None
    kernels.use("triton", CPU)


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
    """All kernels that this process has compiled: `n_regs`, `n_spills` and `metadata` say what they need."""
    for module in (activation, cross_entropy, decode, norm, rope):
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                for compiled, *_ in function.device_caches.values():
                    yield from compiled.values()


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all functions that launch kernels, with shapes for each launch geometry."""
    some = [norm_case(CPU, kind, 40, width, True) for kind in ("rms", "layer") for width in (256, 4096, 8192)]
    some += [mlp_case(CPU, 40, 64, width) for width in (256, 2816)]
    some += [rotary_case(CPU, 48, 8, 4, width, normed) for width in (64, 128, 256) for normed in (False, True)]
    some += [loss_case(CPU, 16, 64, vocabulary) for vocabulary in (61, 50257, 131072)]
    for case in some:
        yield case.name, make_blocks(case.variants[OURS], [case.make()], CPU, 1)["both"]
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
    cast_weights(decoder, torch.bfloat16)
    cache = KeyValueCache(config, sequences, config.max_position_embeddings, device=CPU, dtype=torch.bfloat16)
    GpuDecodeStep(decoder, cache).compute_logits(torch.zeros(sequences, 1, dtype=torch.int64), None)


if __name__ == "__main__":
    pretend(sys.argv[1])
    rows = {}
    for name, call in launches():
        call()
        for kernel in compiled_kernels():
            sizes = {"warps": kernel.metadata.num_warps, "registers": kernel.n_regs, "spilled": kernel.n_spills}
            rows.setdefault(kernel.hash, {"launch": name, "kernel": kernel.name, **sizes})
    print(json.dumps([*rows.values()]))
