"""What the compiler makes of the Triton kernels for four GPUs, without needing any of them.

In separate processes: a process either interprets kernels, as this one does, or compiles them. `python -m
benchmarks.resources` prints the table that is checked here.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from kernels import gpu

if gpu is not None:
    from kernels import launch, norm

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Maximum registers per thread: with 80, a multiprocessor runs three eighths of the threads that it can hold. More where
# a matrix product, a normalized head or a wide row is kept in registers.
BUDGET = 80
BUDGETS = {
    r"gate and up in one kernel, 32": 200,
    r"gate and up in one kernel, 256": 244,
    r"norm backward, \w+, 8192": 192,
    r"norm backward": 132,  # on AMD; test_the_backward_norms_keep_enough_bytes_in_flight is stricter for NVIDIA
    r"norm forward, \w+, 32768": 82,
    r"rotary backward, .*head norms": 128,
    r"loss": 64,  # a multiprocessor runs 1,024 threads: all its programs at once
    r"decode (qkv|gate_up), layer, 1 ": 96,
    r"decode .*, 8 sequences": 240,
    r"decode attention, 2 ": 116,  # Triton 3.6 takes 115 on AMD, 3.7 takes 104
    r"decode attention, 4 ": 176,
    r"decode attention, 8 ": 288,
}

# Bytes of a thread that may be spilled, where that costs less than a second pass over the row.
SPILLS = {r"norm backward, rms, 16384": 136, r"norm backward, layer, 4\d{3}": 16}


def compile_in_another_process(*arguments: str) -> str:
    """The last line of a Python process whose kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module", params=["sm_90 gfx942", pytest.param("sm_80 sm_100", marks=pytest.mark.slow)])
def kernels(request) -> list[dict]:
    """Every kernel that the model launches, compiled for two targets; instructions are counted on sm_90 alone."""
    arguments = "--targets", *request.param.split(), "--sass", "sm_90"
    return json.loads(compile_in_another_process("-m", "benchmarks.resources", *arguments))


def test_every_kernel_is_compiled_for_every_target(kernels):
    launches = {(one["launch"], one["kernel"]) for one in kernels}
    targets = {one["target"] for one in kernels}
    assert len(launches) > 40 and targets in ({"sm_90", "gfx942"}, {"sm_80", "sm_100"})
    assert {(one["launch"], one["kernel"], one["target"]) for one in kernels} == {
        (*launch, target) for launch in launches for target in targets
    }


def test_no_kernel_spills_registers_or_exceeds_its_budget(kernels):
    for one in kernels:
        budget = next((maximum for name, maximum in BUDGETS.items() if re.match(name, one["launch"])), BUDGET)
        spilled = next((maximum for name, maximum in SPILLS.items() if re.match(name, one["launch"])), 0)
        assert one["spilled"] <= spilled and one["registers"] <= budget, one


def test_blocks_fit_into_threads_registers_and_shared_memory(kernels):
    for one in kernels:
        threads = one["warps"] * (64 if one["target"] == "gfx942" else 32)
        assert threads <= 1024 and one["shared"] <= SHARED_MEMORY[one["target"]], one
        assert threads * one["registers"] <= 65536 * (2 if one["target"] == "gfx942" else 1), one


def test_the_backward_norms_keep_enough_bytes_in_flight(kernels):
    """An H100 needs about 30 KB in flight on each multiprocessor. What is loaded ahead is half of the shared memory."""
    checked = 0
    for one in kernels:
        if one["target"] == "gfx942" or one["kernel"] not in ("norm_backward_kernel", "norm_row_means_kernel"):
            continue
        registers = (one["registers"] + 7) // 8 * 8 * one["warps"] * 32
        resident = min(65536 // registers, SHARED_MEMORY[one["target"]] // (one["shared"] + 1024))
        if one["launch"] != "norm backward, rms, 16384":  # nothing is loaded ahead
            assert resident * one["shared"] / 2 >= 30e3, one
            checked += 1
        width = launch.tile_width(int(one["launch"].split(", ")[2]))
        block = min(width, norm.WIDE_BLOCK_BACKWARD) if one["warps"] == 4 else width  # of a row or of a tile
        programs, _ = norm.backward_geometry(block, 1, 2**30, 6 * block, launch.DeviceLimits(100, 32, True))
        if one["kernel"] == "norm_backward_kernel" and one["target"] == "sm_90":
            assert 100 * (resident - 1) <= programs <= 100 * resident, one
    assert checked > 10


def test_rows_are_read_and_written_16_bytes_at_a_time_even_if_only_8_and_not_16_divides_their_length(kernels):
    for one in kernels:
        if one["target"] != "sm_90" or one["launch"].startswith("decode"):
            continue  # the next test is for decoding
        loads, stores = ({int(width): count for width, count in one[kind].items()} for kind in ("loads", "stores"))
        assert max(loads.get(16, 0), loads.get(0, 0)) > 0, one  # 0: tiles by the TMA
        # A scalar of each row (statistic, target, weight) is narrow, but none is narrower than 4 bytes.
        assert not {1, 2} & {*loads, *stores}, one
        if not re.match("loss, |norm backward|rotary", one["launch"]):  # the loss alone writes scalars
            assert max(stores.get(16, 0), stores.get(0, 0)) > 0, one


def test_the_next_tile_of_heads_is_loaded_while_the_norms_of_one_are_computed(kernels):
    """Two buffers of shared memory for a tile: with one, the compiler waits for each load as soon as it is issued."""
    found = [one for one in kernels if re.match("rotary backward, head size (64|128), head norms", one["launch"])]
    found = [one for one in found if one["kernel"].startswith("rotary") and one["target"] != "gfx942"]
    assert len(found) == 2 * len({one["target"] for one in kernels} - {"gfx942"})
    for one in found:
        assert one["shared"] == 2 * 2048 * (4 * 2 + 2 * 4), one  # pairs: of the gradient and of qkv, cos and sin


def test_decoding_reads_weights_16_bytes_at_a_time(kernels):
    for one in kernels:
        if one["launch"].startswith("decode") and one["target"] == "sm_90":
            assert one["loads"].get("16", 0) >= 2, one
            if "attention" not in one["launch"]:  # each of 4 rows: the first tile, and in the loop the next one
                assert one["loads"]["16"] >= 8 and 8 not in map(int, one["loads"]), one


def test_arguments_typed_float64_by_torch_compile_cause_no_float64_arithmetic():
    pattern = "norm forward, layer, (256|65536)|rotary .*(64|128), head norms|decode (qkv, layer, 1|attention, 2) "
    arguments = "--float64-scalars", "--targets", "sm_90", "--only", pattern
    found = json.loads(compile_in_another_process("-m", "benchmarks.resources", *arguments))
    assert len(found) == 9
    assert not any(one["float64"] for one in found)


def test_no_number_of_tokens_causes_a_recompile():
    script = """
import json, torch
from benchmarks.resources import pretend
from kernels import cross_entropy, norm, rope, swiglu

recorder, variants = pretend("sm_90"), {}
for tokens in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 256, 1000):
    x, statistics = torch.empty(tokens, 256, dtype=torch.bfloat16), torch.empty(2, tokens)
    weight, angles, qkv = torch.empty(256), torch.empty(tokens, 32), torch.empty(1, tokens, 256, dtype=torch.bfloat16)
    calls = {
        "norm forward": lambda: norm.norm_forward(x, x, weight, weight, True, 1e-5),
        "norm backward": lambda: norm.norm_backward(x, x, x, weight, statistics, True, True, True),
        "swiglu": lambda: swiglu.swiglu_backward(swiglu.swiglu_forward(x), x),
        "rotary": lambda: rope.rotary_forward(qkv, angles, angles, 2, 1, None, None, 1e-5),
        "rotary with head norms": lambda: rope.rotary_forward(
            qkv, angles, angles, 2, 1, weight[:64], weight[:64], 1e-5
        ),
        "rotary backward": lambda: rope.rotary_backward(
            qkv[..., :128].unflatten(-1, (2, 64)), *[qkv[..., :64].unflatten(-1, (1, 64))] * 2, qkv, angles, angles,
            weight[:64], weight[:64], 1e-5,
        ),
        "loss": lambda: cross_entropy.cross_entropy(x, torch.zeros(tokens).long(), statistics, statistics, -100),
        "loss alone": lambda: cross_entropy.cross_entropy(x, torch.zeros(tokens).long(), None, statistics, -100),
    }
    for name, call in calls.items():
        for kernel, compiled in recorder.record(call):
            variants.setdefault(f"{name}: {kernel}", set()).add(compiled.hash)
print(json.dumps({name: len(found) for name, found in variants.items()}))
"""
    variants = json.loads(compile_in_another_process("-c", script))
    assert len(variants) == 11
    assert set(variants.values()) == {1}, variants


def test_each_thread_replaces_the_logits_that_it_has_read_itself():
    """So that no barrier is needed between reading and replacing: all accesses to logits have one layout of threads."""
    script = """
import json, re, torch
from benchmarks.resources import pretend
from kernels import cross_entropy

recorder, layouts = pretend("sm_90"), {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for vocabulary in (61, 6401, 50304, 131072):
        logits = cross_entropy.allocate_logits(16, vocabulary, torch.empty(0, dtype=dtype))[:, :vocabulary]
        arguments = logits, torch.zeros(16).long(), torch.ones(16), torch.ones(16), -100
        for _, kernel in recorder.record(lambda: cross_entropy.cross_entropy(*arguments)):
            found = re.findall(r"tt\\.(load|store).*: tensor<\\w+x8x!tt\\.ptr<\\w+>, (#\\w+)>", kernel.asm["ttgir"])
            layouts[f"{dtype}, {vocabulary}"] = found
print(json.dumps(layouts))
"""
    for name, found in json.loads(compile_in_another_process("-c", script)).items():
        assert sorted(kind for kind, _ in found) == ["load", "load", "load", "store"], (name, found)
        assert len({layout for _, layout in found}) == 1, (name, found)


def test_a_direct_launch_runs_what_triton_would_run_with_the_same_arguments():
    script = """
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from benchmarks.resources import TARGETS, Driver
from kernels import launch, norm

target, limits = TARGETS["sm_90"]
launch.device_limits = lambda device: limits
driver.set_active(Driver(target, 0))
launched = []

def without_a_device(kernel):
    def run(x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        # Outputs are new tensors: of tensors only the dtypes and the alignment are compared.
        described = [(a.dtype, a.data_ptr() % 16) if isinstance(a, torch.Tensor) else a for a in arguments]
        launched[-1].append((kernel.hash, (x, y, z), described))
    kernel.function, kernel._run = 0, run

CompiledKernel._init_handles = without_a_device

def tensor(*shape, dtype, offset=0):
    return torch.empty(torch.Size(shape).numel() + offset, dtype=dtype)[offset:].view(shape)

def launches(direct, call):
    launch.Kernel.direct = direct
    launched.append([])
    call()
    return launched[-1]

bf16, fp32 = torch.bfloat16, torch.float32
kernels, count = set(), 0
# Sizes and pointers divisible by 16 or not, both types, one launch backward or two; then everything again, compiled.
shapes = [(40, 1024, bf16, 0), (3, 1024, bf16, 8), (40, 1024, bf16, 1), (40, 1024, fp32, 0), (5, 1001, bf16, 0)]
for rows, width, dtype, offset in [*shapes, (2, 40000, bf16, 0), *shapes]:
    for layer_norm in (False, True):
        x, dy = tensor(rows, width, dtype=dtype, offset=offset), tensor(rows, width, dtype=dtype)
        weight, statistics = tensor(width, dtype=fp32), tensor(2, rows, dtype=fp32)
        residual, bias = dy if layer_norm else None, weight if layer_norm else None

        def forward():
            norm.norm_forward(x, residual, weight, bias, layer_norm, 1e-5)

        def backward():
            norm.norm_backward(dy, residual, x, weight, statistics, layer_norm, True, layer_norm)

        def with_stride(stride):
            tensors, numbers = (x, None, None, None, dy, dy, statistics), (rows, stride, 0, width, 1e-5)
            constants = {"LAYER_NORM": layer_norm, "ALIGNMENT": 1, "ROWS": 1, "BLOCK": 1024}
            norm.norm_forward_kernel[(1,)](*tensors, *numbers, **constants)

        for call in (forward, backward, lambda: with_stride(40), lambda: with_stride(2**40)):
            inspected = launches(False, call)
            assert launches(True, call) == inspected  # may be the first
            assert launches(True, call) == inspected
            kernels |= {hash for hash, _, _ in inspected}
            count += len(inspected)
print(len(kernels), count)
"""
    kernels, count = map(int, compile_in_another_process("-c", script).split())
    assert kernels > 20 and count > 100
