"""The functions of `reference.py` for a GPU: Triton kernels where fusing saves memory traffic, torch's own elsewhere.

Attention and `linear` are the reference's: torch's kernels for them (FlashAttention, cuDNN, cuBLAS) are fast already.
"""

import triton

from kernels.cross_entropy import WORKSPACE, linear_cross_entropy
from kernels.norm import normalize
from kernels.reference import attention, linear
from kernels.rope import rotary
from kernels.swiglu import swiglu_mlp

__all__ = ["WORKSPACE", "attention", "linear", "linear_cross_entropy", "normalize", "rotary", "swiglu_mlp"]

INTERPRETED = triton.knobs.runtime.interpret  # read when the kernels above were decorated
