"""What `benchmarks.resources` reads off machine code: of kernels whose code is known, and of lines of SASS."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from benchmarks.resources import access_width, inspect, resident_programs, thread_bytes_in_flight

ROOT = Path(__file__).parent.parent.parent
KERNELS = """
import json
from dataclasses import asdict

import torch, triton
import triton.language as tl
from benchmarks.resources import inspect, pretend


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(y_ptr + column, tl.load(x_ptr + column))


@triton.jit
def sum_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


@triton.jit
def pipelined_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        total += tl.load(x_ptr + i * BLOCK + column)
    tl.store(y_ptr + column, total)


@triton.jit
def product_kernel(x_ptr, y_ptr, PRECISION: tl.constexpr):
    offset = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + offset)
    tl.store(y_ptr + offset, tl.dot(x, x, input_precision=PRECISION))


x = torch.empty(4096)
calls = {
    "copy": lambda: copy_kernel[(1,)](x, x, BLOCK=2048, num_warps=4),
    "sum in one warp": lambda: sum_kernel[(1,)](x, x, BLOCK=256, num_warps=1),
    "sum in four warps": lambda: sum_kernel[(1,)](x, x, BLOCK=1024, num_warps=4),
    "two stages": lambda: pipelined_kernel[(1,)](x, x, 9, BLOCK=512, STAGES=2, num_warps=4),
    "four stages": lambda: pipelined_kernel[(1,)](x, x, 9, BLOCK=512, STAGES=4, num_warps=4),
    "tf32": lambda: product_kernel[(1,)](x, x, PRECISION="tf32", num_warps=4),
    "ieee": lambda: product_kernel[(1,)](x, x, PRECISION="ieee", num_warps=4),
}
recorder = pretend("sm_90")
found = {}
for name, call in calls.items():
    (kernel_name, kernel), = recorder.record(call)
    found[name] = asdict(inspect(name, kernel_name, "sm_90", kernel))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Resources of each kernel."""
    script = tmp_path_factory.mktemp("kernels") / "kernels_to_compile.py"
    script.write_text(KERNELS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_nvidia_code_is_read_as_it_was_written(compiled):
    copy = compiled["copy"]
    # 2,048 float32 numbers of 128 threads: four loads of 16 bytes each, all before the first store.
    assert copy["loads"] == {"16": 4} and copy["stores"] == {"16": 4} and copy["bytes_in_flight"] == 8192
    assert copy["barriers"] == copy["async_copies"] == copy["tf32"] == 0
    assert copy["programs"] == 16 and copy["registers"] <= 32  # 64 warps, 4 of a program
    assert compiled["sum in one warp"]["barriers"] == 0 < compiled["sum in four warps"]["barriers"]
    assert compiled["two stages"]["async_copies"] > 0 and compiled["four stages"]["async_copies"] > 0
    # A block is 2,048 bytes; with n stages, n - 1 of them are on their way while one is used.
    assert compiled["two stages"]["bytes_in_flight"] == 2048 and compiled["four stages"]["bytes_in_flight"] == 3 * 2048
    assert compiled["tf32"]["tf32"] > 0 == compiled["ieee"]["tf32"]


def test_amd_code_is_read_as_it_was_written():
    code = """
        global_load_dwordx4 v[2:5], v[0:1], off
        s_waitcnt lgkmcnt(0)
        s_barrier
        global_store_dwordx2 v[6:7], v[2:3], off
        v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]
        .vgpr_count:     130
        .vgpr_spill_count: 2
        .sgpr_spill_count: 1
    """
    metadata = types.SimpleNamespace(shared=512, num_warps=4)
    found = inspect("a", "b", "gfx942", types.SimpleNamespace(asm={"amdgcn": code}, metadata=metadata))
    assert (found.registers, found.spilled, found.barriers, found.float64) == (130, 3, 1, 1)
    assert (found.loads, found.stores, found.async_copies) == ({16: 1}, {8: 1}, 0)
    assert found.programs == 3 and found.bytes_in_flight is None


def line(instruction: str) -> str:
    return f"        /*01a0*/              {instruction} ;        /* 0x0000000804087981 */\n"


def test_a_load_is_under_way_until_one_of_its_registers_is_named():
    first, second = line("@!P0 LDG.E.128 R4, desc[UR6][R2.64]"), line("LDG.E.128 R8, desc[UR6][R2.64+0x10]")
    use = line("FADD R20, R7, R21")
    assert thread_bytes_in_flight(first + second + use) == 32
    assert thread_bytes_in_flight(first + use + second) == 16
    assert thread_bytes_in_flight(first + line("FADD R20, R3, R21") + second) == 32
    assert thread_bytes_in_flight(first + line("STG.E.128 desc[UR6][R2.64], R4") + second) == 16
    assert thread_bytes_in_flight(line("LDG.E.U16 R8, desc[UR6][R2.64]") + line("LDG.E R9, desc[UR6][R2.64]")) == 6


def test_copies_are_under_way_until_their_group_is_waited_for():
    copy, close = line("LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64], P0"), line("LDGDEPBAR")
    wait = lambda left: line(f"DEPBAR.LE SB0, {left:#x}")  # noqa: E731
    assert thread_bytes_in_flight((copy + close) * 3) == 48
    assert thread_bytes_in_flight((copy + close + wait(0)) * 3) == 16
    assert thread_bytes_in_flight((copy + close + wait(1)) * 3) == 32
    assert thread_bytes_in_flight(copy + copy + close + wait(0) + copy) == 32


@pytest.mark.parametrize(
    ("modifiers", "width"), [("E.128", 16), ("E.64.STRONG", 8), ("E", 4), ("E.U16", 2), ("E.S8", 1)]
)
def test_the_width_of_an_access_is_in_its_modifiers(modifiers, width):
    assert access_width(modifiers) == width


def test_programs_of_a_multiprocessor_are_limited_by_registers_warps_or_shared_memory():
    # Blocks of 128 threads: 41 registers are rounded up to 48.
    assert [resident_programs("sm_90", registers, 4, 0) for registers in (41, 56, 64, 128, 255)] == [10, 9, 8, 4, 2]
    assert resident_programs("sm_90", 16, 1, 0) == 32 and resident_programs("sm_90", 32, 32, 0) == 2
    assert resident_programs("sm_90", 32, 4, 100 * 1024) == 2 and resident_programs("sm_80", 32, 4, 100 * 1024) == 1
    assert resident_programs("sm_90", 32, 4, 76 * 1024) == 2  # 228 / 76, less 1 KB for each
    assert resident_programs("gfx942", 128, 4, 0) == 4 and resident_programs("gfx942", 64, 4, 40 * 1024) == 1
