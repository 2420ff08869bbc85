"""What the compiler makes of the Triton kernels for four GPUs, without needing any of them.

In separate processes: a process either interprets kernels, as this one does, or compiles them.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from kernels import gpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(gpu is None, reason="Triton is not installed")]

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Maximum registers per thread: with 80, a multiprocessor runs three eighths of the threads that it can hold. More where
# a normalized head or a wide row is kept in registers.
BUDGET = 80
BUDGETS = {
    r"norm backward, \w+, 8192": 192,  # on AMD, as the next line; 128 on NVIDIA
    r"norm backward": 132,
    r"rotary backward, .*head norms": 128,
    r"loss": 64,  # a multiprocessor runs 1,024 threads: all its programs at once
    r"decode (qkv|gate_up), layer, 1 ": 96,
    r"decode .*, 8 sequences": 240,
    r"decode attention, 2 ": 116,  # Triton 3.6 takes 115 on AMD, 3.7 takes 104
    r"decode attention, 4 ": 176,
    r"decode attention, 8 ": 288,
}
SPILLS = {r"norm backward, layer, 4\d{3}": 16}  # bytes of a thread


def compile_in_another_process(*arguments: str) -> object:
    """The last line of a Python process whose kernels are compiled, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_spills_registers_or_exceeds_its_budget_or_what_a_block_may_have():
    found = compile_in_another_process("-m", "benchmarks.resources", "--targets", *SHARED_MEMORY, "--sass")
    assert {one["target"] for one in found} == {*SHARED_MEMORY} and len({one["launch"] for one in found}) > 40
    for one in found:
        budget = next((maximum for name, maximum in BUDGETS.items() if re.match(name, one["launch"])), BUDGET)
        spilled = next((maximum for name, maximum in SPILLS.items() if re.match(name, one["launch"])), 0)
        assert one["spilled"] <= spilled and one["registers"] <= budget, one
        threads = one["warps"] * (64 if one["target"] == "gfx942" else 32)
        assert threads <= 1024 and one["shared"] <= SHARED_MEMORY[one["target"]], one
        assert threads * one["registers"] <= 65536 * (2 if one["target"] == "gfx942" else 1), one


def test_rows_are_read_and_written_16_bytes_at_a_time_even_if_only_8_and_not_16_divides_their_length():
    script = """
import json
from benchmarks.resources import launches, pretend
recorder = pretend("sm_90")
print(json.dumps({f"{n}: {name}": k.asm["ptx"] for n, call in launches() for name, k in recorder.record(call)}))
"""
    found = compile_in_another_process("-c", script)
    assert len(found) > 40
    for name, ptx in found.items():
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", ptx), name
        # A scalar of each row (statistic, target, weight) is narrow, but none is narrower than 4 bytes.
        assert name.startswith("decode") or not re.search(r"(?:ld|st)\.global\S*\.b(?:8|16)\b", ptx), name


def test_no_number_of_tokens_causes_a_recompile():
    script = """
import json, torch
from benchmarks.resources import pretend
from kernels import cross_entropy, norm, rope, swiglu

recorder, variants = pretend("sm_90"), {}
for tokens in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 256, 1000):
    x, statistics = torch.empty(tokens, 256, dtype=torch.bfloat16), torch.empty(2, tokens)
    weight, angles, qkv = torch.empty(256), torch.empty(tokens, 32), torch.empty(1, tokens, 256, dtype=torch.bfloat16)
    heads = [qkv[..., : n * 64].unflatten(-1, (n, 64)) for n in (2, 1, 1)]
    head_norms = weight[:64], weight[:64], 1e-5
    targets = torch.zeros(tokens).long()
    calls = {
        "norm forward": lambda: norm.norm_forward(x, x, weight, weight, True, 1e-5),
        "norm backward": lambda: norm.norm_backward(x, x, x, weight, statistics, True, True, True),
        "swiglu": lambda: swiglu.swiglu_backward(swiglu.swiglu_forward(x), x),
        "rotary": lambda: rope.rotary_forward(qkv, angles, angles, 2, 1, None, None, 1e-5),
        "rotary with head norms": lambda: rope.rotary_forward(qkv, angles, angles, 2, 1, *head_norms),
        "rotary backward": lambda: rope.rotary_backward(*heads, qkv, angles, angles, *head_norms),
        "loss": lambda: cross_entropy.cross_entropy(x, targets, statistics, statistics, -100),
        "loss alone": lambda: cross_entropy.cross_entropy(x, targets, None, statistics, -100),
    }
    for name, call in calls.items():
        for kernel, compiled in recorder.record(call):
            variants.setdefault(f"{name}: {kernel}", set()).add(compiled.hash)
print(json.dumps({name: len(found) for name, found in variants.items()}))
"""
    variants = compile_in_another_process("-c", script)
    assert len(variants) == 11
    assert set(variants.values()) == {1}, variants


def test_each_thread_replaces_the_logits_that_it_has_read_itself():
    """So that no barrier is needed between reading and replacing: all accesses to logits have one layout of threads."""
    script = """
import json, torch
from benchmarks.resources import pretend
from kernels import cross_entropy

recorder, found = pretend("sm_90"), {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for vocabulary in (61, 6401, 50304, 131072):
        logits = cross_entropy.allocate_logits(16, vocabulary, torch.empty(0, dtype=dtype))[:, :vocabulary]
        arguments = logits, torch.zeros(16).long(), torch.ones(16), torch.ones(16), -100
        for _, kernel in recorder.record(lambda: cross_entropy.cross_entropy(*arguments)):
            found[f"{dtype}, {vocabulary}"] = kernel.asm["ttgir"]
print(json.dumps(found))
"""
    for name, code in compile_in_another_process("-c", script).items():
        found = re.findall(r"tt\.(load|store).*: tensor<\w+x8x!tt\.ptr<\w+>, (#\w+)>", code)
        assert sorted(kind for kind, _ in found) == ["load", "load", "load", "store"], (name, found)
        assert len({layout for _, layout in found}) == 1, (name, found)
