"""The functions of `reference.py` for a GPU: Triton kernels where fusing saves memory traffic, torch's own elsewhere.

Attention is `reference.attention`: torch's fused kernels for it (FlashAttention, cuDNN) are fast already.
"""

import triton

from kernels.cross_entropy import linear_cross_entropy
from kernels.norm import normalize
from kernels.reference import attention
from kernels.rope import rotary
from kernels.swiglu import swiglu_mlp

__all__ = ["attention", "linear_cross_entropy", "normalize", "rotary", "swiglu_mlp"]

INTERPRETED = triton.knobs.runtime.interpret  # read when the kernels above were decorated
