"""What the compiler makes of every kernel that the model launches: registers, and whether it spills any."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import gpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(gpu is None, reason="Triton is not installed")]

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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, Path(__file__).parent / "fake_driver.py", target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]  # a kernel that needs more shared memory than there is
    rows = {f"{row['launch']}: {row['kernel']}": row for row in json.loads(done.stdout)}
    assert len({row["kernel"] for row in rows.values()}) > 10
    for name, row in rows.items():
        assert 32 * row["warps"] * row["registers"] <= 65536, name
        assert row["registers"] <= next(n for pattern, n in BUDGETS.items() if re.match(pattern, name)), name
        assert row["spilled"] <= next((n for pattern, n in SPILLS.items() if re.match(pattern, name)), 0), name
