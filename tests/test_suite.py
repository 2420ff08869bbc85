"""The test suite itself: how kernels run in it, with and without `-m gpu`, and that its tests find bugs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutations

PROBE = """
import os, pytest
import probed  # as a conftest.py of a package may import the kernels

@pytest.mark.{mark}
def test_environment():
    assert (os.environ.get("TRITON_INTERPRET"), os.environ.get("CUDA_VISIBLE_DEVICES")) == {expected}
    assert probed.INTERPRETED == {interpreted}
"""


@pytest.mark.parametrize(
    ("arguments", "mark", "expected"),
    [((), "cpu", ("1", "")), (("-m", "gpu"), "gpu", (None, None))],
)
def test_kernels_are_compiled_for_a_gpu_only_with_m_gpu(tmp_path, arguments, mark, expected):
    inner = tmp_path / "inner"
    inner.mkdir()
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "probed.py").write_text('import os\nINTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"\n')
    (inner / "conftest.py").write_text("import probed\n")
    (inner / "test_probe.py").write_text(PROBE.format(mark=mark, expected=expected, interpreted=expected[0] == "1"))
    hidden = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "-o",
        "pythonpath=.",
        "-W",
        "ignore",
        "--rootdir",
        ".",
        *arguments,
    ]
    done = subprocess.run([*command, "inner"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_every_mutation_has_its_line_and_its_test():
    assert not [mutation for mutation in mutations.MUTATIONS if not mutation.is_found]
    for mutation in mutations.MUTATIONS:
        file, name = mutation.test.partition("[")[0].split("::")
        assert f"def {name}(" in (mutations.ROOT / file).read_text(encoding="utf-8"), mutation


@pytest.mark.slow
def test_every_mutation_is_killed():
    """Five minutes; `python tests/mutations.py PATTERN` tries some of them."""
    assert mutations.main() == 0
