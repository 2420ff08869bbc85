"""Rows and sequences more than 2^31 elements apart: with strides that large, in little memory."""

import mmap
import sys

import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from triton.runtime.interpreter import GridExecutor

    from kernels import activation, rope


@pytest.fixture
def far(monkeypatch):
    """A function that makes rows far apart; only the pages that are accessed take memory."""
    if sys.platform != "linux":
        pytest.skip("needs memory that is mapped and not reserved")
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)  # copies tensors onto themselves

    def spread(rows: torch.Tensor, stride: int) -> torch.Tensor:
        """The same rows (n, width), `stride` elements apart."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
        memory = mmap.mmap(-1, len(rows) * stride * rows.element_size(), flags=flags)
        wide = torch.frombuffer(memory, dtype=rows.dtype).as_strided(rows.shape, (stride, 1))
        return wide.copy_(rows)

    return spread


def test_a_stride_of_2_to_the_27_elements_reaches_beyond_2_to_the_31(far, draw):
    near = [draw(33, 8, dtype=torch.bfloat16) for _ in range(4)]
    results = []
    for x, residual, dy, ds in ([far(tensor, 2**27) for tensor in near], near):
        leaves = x.detach().requires_grad_(), residual.detach().requires_grad_()
        outputs = gpu.normalize(leaves[0], None, None, leaves[1], kind="rms", eps=1e-5)
        alone = gpu.normalize(leaves[0], kind="layer", eps=1e-5)[0]
        gradients = torch.autograd.grad((*outputs, alone), leaves, (dy, ds, dy))
        mlp = activation.swiglu_forward(x), *activation.swiglu_backward(dy[:, :4], x)
        results.append((*outputs, alone, *gradients, *mlp))
    assert all(map(torch.equal, *results))


def test_rotary_reaches_sequences_beyond_2_to_the_31_elements(far, draw):
    """Three of them, 2^30 + 1 elements apart."""
    wide, angles = far(draw(3, 96).bfloat16(), 2**30 + 1), draw(3, 16)
    for qkv, table in ((wide[:, None], angles[:1]), (wide[None], angles)):  # three sequences, then three positions
        gradients = qkv.unsqueeze(2).split(32, dim=-1)  # one head
        for weight in (None, draw(32)):
            for op, tensors, rest in (
                (rope.rotary_forward, [qkv], (table, table, 1, 1, weight, weight, 1e-5)),
                (rope.rotary_backward, [*gradients, qkv], (table, table, weight, weight, 1e-5)),
            ):
                assert all(map(torch.equal, op(*tensors, *rest), op(*(t.contiguous() for t in tensors), *rest)))
