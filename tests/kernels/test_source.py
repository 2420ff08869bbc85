"""What Triton's interpreter cannot see, as patterns in the source of the kernels."""

import re
from pathlib import Path

import pytest

FILES = (Path(__file__).parents[2] / "kernels").glob("*.py")
SOURCES = {path.name: text for path in FILES if "@triton.jit" in (text := path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", SOURCES)
def test_a_masked_load_says_what_is_outside(name):
    """Without `other`, a GPU loads undefined numbers there, and the interpreter 0."""
    loads = re.findall(r"tl\.load\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", SOURCES[name])
    assert loads and not [load for load in loads if "mask=" in load and "other=" not in load]


@pytest.mark.parametrize("name", SOURCES)
def test_sums_have_a_fixed_order_and_no_launch_waits_for_the_device(name):
    assert not re.findall(r"tl\.atomic_\w+|\.item\(|\.tolist\(|\.cpu\(|\.nonzero\(|torch\.equal", SOURCES[name])


@pytest.mark.parametrize("name", SOURCES)
def test_eps_is_cast_before_it_is_added(name):
    """torch.compile may type a number float64, and then so is all arithmetic with it."""
    assert not re.findall(r"[-+*/] eps\b", SOURCES[name])
