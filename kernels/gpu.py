"""The functions of `reference` for a GPU: Triton kernels where fusing saves memory traffic, torch's own elsewhere."""
# ruff: noqa: F401 - `kernels` looks the functions up by their names

import os
import tempfile

import triton

from kernels.activation import swiglu, swiglu_mlp
from kernels.cross_entropy import WORKSPACE, linear_cross_entropy
from kernels.norm import normalize
from kernels.reference import attention, linear  # torch's kernels for them (FlashAttention, cuDNN, cuBLAS) are fast
from kernels.rope import rotary

if "TRITON_CACHE_DIR" not in os.environ and not os.access(triton.knobs.cache.home_dir, os.W_OK):
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # without a cache, Triton cannot compile
INTERPRETED = triton.knobs.runtime.interpret  # read when the kernels above were decorated
