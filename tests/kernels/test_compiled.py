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

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Maximum registers per thread: with 80, a multiprocessor runs three eighths of the threads that it can hold. More where
# a matrix product, a normalized head or a wide row is kept in registers.
BUDGET = 80
BUDGETS = {
    r"gate and up in one kernel, 32": 200,
    r"gate and up in one kernel, 256": 244,
    r"norm backward, \w+, 256": 96,
    r"norm backward, \w+, 8192": 128,
    r"norm forward, \w+, 32768": 82,
    r"rotary backward, .*head norms": 128,
    r"decode (qkv|gate_up), layer, 1 ": 96,
    r"decode .*, 8 sequences": 240,
    r"decode attention, 2 ": 112,
    r"decode attention, 4 ": 176,
    r"decode attention, 8 ": 288,
}


def compile_in_another_process(*arguments: str) -> str:
    """The last line of a Python process whose kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    """Every kernel that the model launches, compiled for every target."""
    return json.loads(compile_in_another_process("-m", "benchmarks.resources"))


def test_every_kernel_is_compiled_for_every_target(kernels):
    launches = {(one["launch"], one["kernel"]) for one in kernels}
    assert len(launches) > 40
    assert {(one["launch"], one["kernel"], one["target"]) for one in kernels} == {
        (*launch, target) for launch in launches for target in SHARED_MEMORY
    }


def test_no_kernel_spills_registers_or_exceeds_its_budget(kernels):
    for one in kernels:
        budget = next((maximum for name, maximum in BUDGETS.items() if re.match(name, one["launch"])), BUDGET)
        assert one["spilled"] == 0 and one["registers"] <= budget, one


def test_blocks_fit_into_threads_registers_and_shared_memory(kernels):
    for one in kernels:
        threads = one["warps"] * (64 if one["target"] == "gfx942" else 32)
        assert threads <= 1024 and one["shared"] <= SHARED_MEMORY[one["target"]], one
        assert threads * one["registers"] <= 65536 * (2 if one["target"] == "gfx942" else 1), one


def test_rows_are_read_and_written_16_bytes_at_a_time_even_if_only_8_and_not_16_divides_their_length(kernels):
    for one in kernels:
        if one["target"] == "gfx942" or one["launch"].startswith("decode"):
            continue  # AMD's masked accesses are narrower; the next test is for decoding
        loads, stores = ({int(width): count for width, count in one[kind].items()} for kind in ("loads", "stores"))
        assert max(loads.get(16, 0), loads.get(0, 0)) > 0, one  # 0: tiles by the TMA
        # A scalar of each row (statistic, target, the target's logit) is narrow, and each has one load.
        assert loads.get(2, 0) <= (1 if one["kernel"].startswith("cross_entropy") else 0) and 1 not in loads, one
        assert 2 not in stores, one
        if not one["launch"].startswith(("loss", "norm backward", "rotary")):
            assert max(stores.get(16, 0), stores.get(0, 0)) > 0, one


def test_decoding_reads_weights_16_bytes_at_a_time(kernels):
    for one in kernels:
        if one["launch"].startswith("decode") and one["target"] != "gfx942":
            assert one["loads"].get("16", 0) >= 2, one
            if "attention" not in one["launch"]:  # each of 4 rows: the first tile, and in the loop the next one
                assert one["loads"]["16"] >= 8 and 8 not in map(int, one["loads"]), one


def test_arguments_typed_float64_by_torch_compile_cause_no_float64_arithmetic():
    pattern = "norm forward, layer, (256|65536)|rotary .*head norms|decode (qkv, layer, 1|attention, 2) "
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
    x, statistic = torch.empty(tokens, 256, dtype=torch.bfloat16), torch.empty(tokens)
    weight, angles, qkv = torch.empty(256), torch.empty(tokens, 32), torch.empty(1, tokens, 256, dtype=torch.bfloat16)
    calls = {
        "norm forward": lambda: norm.norm_forward(x, x, weight, weight, True, 1e-5),
        "norm backward": lambda: norm.norm_backward(x, x, x, weight, statistic, statistic, True, True, True),
        "swiglu": lambda: swiglu.swiglu_backward(swiglu.swiglu_forward(x), x),
        "rotary": lambda: rope.rotary_forward(qkv, angles, angles, 2, 1, weight[:64], weight[:64], 1e-5),
        "rotary backward": lambda: rope.rotary_backward(
            qkv[..., :128].unflatten(-1, (2, 64)), *[qkv[..., :64].unflatten(-1, (1, 64))] * 2, qkv, angles, angles,
            weight[:64], weight[:64], 1e-5,
        ),
        "loss": lambda: cross_entropy.compute_losses(x, torch.zeros(tokens, dtype=torch.int64), -100, True),
    }
    for name, call in calls.items():
        for kernel, compiled in recorder.record(call):
            variants.setdefault(f"{name}: {kernel}", set()).add(compiled.hash)
print(json.dumps({name: len(found) for name, found in variants.items()}))
"""
    variants = json.loads(compile_in_another_process("-c", script))
    assert len(variants) == 9
    assert set(variants.values()) == {1}, variants
