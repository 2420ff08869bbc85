"""What Triton compiles, and when, without a GPU: in separate processes, because this one interprets kernels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import gpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(gpu is None, reason="Triton is not installed")]


def run_compiled(*command: str) -> object:
    """The last line that a Python command prints, as JSON, from a process whose kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]  # also a kernel that needs more shared memory than there is
    return json.loads(done.stdout.splitlines()[-1])


def test_no_number_of_tokens_causes_a_recompile():
    script = """
import json, torch
from fake_driver import compiled_kernels, pretend
from kernels import activation, cross_entropy, norm, rope

pretend("sm_90")
compiled = []
for tokens in (100, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128, 129, 256, 1000):
    x, statistics = torch.empty(tokens, 256, dtype=torch.bfloat16), torch.empty(2, tokens)
    weight, angles, qkv = torch.empty(256), torch.empty(tokens, 32), torch.empty(1, tokens, 256, dtype=torch.bfloat16)
    heads = [qkv[..., : n * 64].unflatten(-1, (n, 64)) for n in (2, 1, 1)]
    head_norms = weight[:64], weight[:64], 1e-5
    targets = torch.zeros(tokens).long()
    norm.norm_forward(x, x, weight, weight, "layer", 1e-5)
    norm.norm_backward(x, x, x, weight, statistics, "layer", True, True)
    activation.swiglu_backward(activation.swiglu_forward(x), x)
    rope.rotary_forward(qkv, angles, angles, 2, 1, None, None, 1e-5)
    rope.rotary_forward(qkv, angles, angles, 2, 1, *head_norms)
    rope.rotary_backward(*heads, qkv, angles, angles, *head_norms)
    cross_entropy.cross_entropy(x, targets, statistics, gradient=True)
    cross_entropy.cross_entropy(x, targets, statistics, gradient=False)
    compiled.append(sorted({kernel.hash: kernel.name for kernel in compiled_kernels()}.values()))
print(json.dumps(compiled))
"""
    first, *others = run_compiled("-c", script)
    assert len(first) == 9 and all(names == first for names in others)


def test_each_thread_replaces_the_logits_that_it_has_read_itself():
    """So that no barrier is needed between reading and replacing: all accesses to logits have one layout of threads."""
    script = """
import json, torch
from fake_driver import compiled_kernels, pretend
from kernels import cross_entropy

pretend("sm_90")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for vocabulary in (61, 6401, 50304, 131072):
        logits = cross_entropy.allocate_logits(16, vocabulary, torch.empty(0, dtype=dtype))[:, :vocabulary]
        cross_entropy.cross_entropy(logits, torch.zeros(16).long(), torch.ones(16), gradient=True)
print(json.dumps([kernel.asm["ttgir"] for kernel in compiled_kernels()]))
"""
    codes = run_compiled("-c", script)
    assert len(codes) == 12
    for code in codes:
        accesses = re.findall(r"tt\.(load|store).*: tensor<\w+x8x!tt\.ptr<\w+>, (#\w+)>", code)
        assert sorted(kind for kind, _ in accesses) == ["load", "load", "load", "store"], accesses
        assert len({layout for _, layout in accesses}) == 1, accesses


# Maximum registers of a thread: with 80, a multiprocessor runs three eighths of the threads that it can hold. More
# where matrix rows, normalized heads or a wide row are kept in registers.
BUDGETS = {
    r".* norm .*: norm_backward": 132,
    r"rotary with norms of heads.*: rotary_backward": 128,
    r"head and loss": 64,  # a multiprocessor runs 1,024 threads: all its programs at once
    r"decoding, .* 1 sequences, 2 heads .*attention": 116,
    r"decoding, .* 1 sequences, 4 heads .*attention": 176,
    r"decoding, .*attention": 288,
    r"decoding, .* 8 sequences": 240,
    r"": 82,
}
# Registers that may be spilled, where that costs less than a second pass over the row.
SPILLS = {r"layer norm .* 4096: norm_backward": 2}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_fits_without_spills_and_within_its_budget(target):
    needs = run_compiled(Path(__file__).parent / "fake_driver.py", target)
    rows = {f"{row['launch']}: {row['kernel']}": row for row in needs}
    assert len({row["kernel"] for row in rows.values()}) > 10
    for name, row in rows.items():
        assert 32 * row["warps"] * row["registers"] <= 65536, name
        assert row["registers"] <= next(n for pattern, n in BUDGETS.items() if re.match(pattern, name)), name
        assert row["spilled"] <= next((n for pattern, n in SPILLS.items() if re.match(pattern, name)), 0), name
