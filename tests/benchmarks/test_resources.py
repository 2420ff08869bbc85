"""What the compiler makes of every kernel that the model launches, on the table of `benchmarks.resources`."""

import json
import os
import re
import subprocess
import sys

import pytest

from kernels import gpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(gpu is None, reason="Triton is not installed")]

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Maximum registers of a thread: with 80, a multiprocessor runs three eighths of the threads that it can hold. More
# where matrix rows, normalized heads or a wide row are kept in registers.
BUDGETS = {
    r"norm, \w+, 4104: norm_backward": 192,
    r"norm, .*: norm_(backward|row)": 132,
    r"rotary, .*head norms: rotary_backward": 128,
    r"loss": 64,  # a multiprocessor runs 1,024 threads: all its programs at once
    r"decoding, .* 1 sequences, 2 heads .*attention": 116,
    r"decoding, .* 1 sequences, 4 heads .*attention": 176,
    r"decoding, .*attention": 288,
    r"decoding, .* 8 sequences": 240,
    r"": 82,
}
# Bytes that may be spilled, where that costs less than a second pass over the row.
SPILLS = {r"norm, layer, 4096, float32: norm_backward": 16}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """The rows of all targets, by target, launch and kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.resources"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {f"{row['target']}, {row['launch']}: {row['kernel']}": row for row in found}


def test_every_kernel_fits_every_target_without_spills_and_within_its_budget(rows):
    kernels = {target: {row["kernel"] for row in rows.values() if row["target"] == target} for target in SHARED_MEMORY}
    assert len(kernels["sm_90"]) > 10 and all(found == kernels["sm_90"] for found in kernels.values())
    for name, row in rows.items():
        launch = name.partition(", ")[2]
        threads = row["warps"] * (64 if row["target"] == "gfx942" else 32)
        assert threads <= 1024 and row["shared"] <= SHARED_MEMORY[row["target"]], name
        assert threads * row["registers"] <= 65536 * (2 if row["target"] == "gfx942" else 1), name
        assert row["registers"] <= next(n for pattern, n in BUDGETS.items() if re.match(pattern, launch)), name
        assert row["spilled"] <= next((n for pattern, n in SPILLS.items() if re.match(pattern, launch)), 0), name


def test_rows_are_read_16_bytes_at_a_time_even_if_only_8_and_not_16_divides_their_length(rows):
    for name, row in rows.items():
        if row["widths"] is not None:
            assert 16 in row["widths"], name
            # A scalar of each row (statistic, label, weight) has 4 or 8 bytes, and one of the decoded token has 2.
            assert min(row["widths"]) >= 4 or row["kernel"] == "decode_project_kernel", name
