"""The test suite itself: its tests find bugs, and kernels are interpreted in it."""

import os
import subprocess
import sys

import pytest

from kernels import gpu
from tests import mutations


@pytest.mark.skipif(gpu is None, reason="Triton is not installed")
def test_kernels_are_interpreted_without_m_gpu():
    assert gpu.INTERPRETED  # with it they are compiled, as tests/kernels/test_gpu.py demands


@pytest.mark.parametrize("mark", ["gpu", "smoke"])
def test_tests_for_a_gpu_do_not_pass_without_one(mark):
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "tests/kernels", "-m", mark]
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=mutations.ROOT, env=no_gpu, capture_output=True)
    assert done.returncode and b"need a CUDA device" in done.stderr


def test_every_mutation_has_its_line_and_its_test():
    for mutation in mutations.MUTATIONS:
        assert (mutations.ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation
        file, name = mutation.test.partition("[")[0].split("::")
        assert f"def {name}(" in (mutations.ROOT / file).read_text(encoding="utf-8"), mutation


@pytest.mark.slow
def test_every_mutation_is_killed():
    """Five minutes; `python tests/mutations.py PATTERN` tries some of them."""
    assert mutations.main() == 0
