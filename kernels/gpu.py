"""The functions of `reference` for a GPU: Triton kernels where fusing saves memory traffic, torch's own elsewhere."""
# ruff: noqa: F401 - `kernels` looks the functions up by their names

import os
import tempfile

import torch
import triton

from kernels.activation import swiglu, swiglu_mlp
from kernels.cross_entropy import WORKSPACE, linear_cross_entropy
from kernels.norm import normalize
from kernels.reference import attention, linear  # torch's kernels for them (FlashAttention, cuDNN, cuBLAS) are fast
from kernels.rope import rotary

has_cache = "TRITON_CACHE_DIR" in os.environ or os.access(triton.knobs.cache.home_dir, os.W_OK)
if torch.cuda.is_available() and not has_cache:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # without one, Triton cannot compile
INTERPRETED = triton.knobs.runtime.interpret  # read when the kernels above were decorated
