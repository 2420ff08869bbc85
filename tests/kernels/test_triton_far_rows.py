"""Rows more than 2^31 elements from the start of a tensor: the last program of a huge launch, in little memory."""

import mmap
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from kernels import cross_entropy, norm, rope, swiglu


@pytest.fixture
def far(monkeypatch):
    """A function that sets the index of a launch's only program, and one that makes huge tensors.

    Only the pages of the tensors that are accessed take memory.
    """
    if sys.platform != "linux":
        pytest.skip("needs memory that is mapped and not reserved")
    program_id, offset = InterpreterBuilder.create_get_program_id, [0]

    def shifted(self, axis):
        handle = program_id(self, axis)
        handle.data = handle.data + np.int32(offset[0] if axis == 0 else 0)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", shifted)
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)  # copies tensors onto themselves

    def huge(rows: int, last: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of `rows` rows that ends with those of `last`."""
        count = rows * last[0].numel()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
        memory = mmap.mmap(-1, count * last.element_size(), flags=flags)
        tensor = torch.frombuffer(memory, dtype=last.dtype).view(rows, *last.shape[1:])
        tensor[-len(last) :] = last
        return tensor

    def at(program: int) -> None:
        offset[0] = program

    return at, huge


WIDTH = 1024
FAR = 2**31 // WIDTH  # the row that begins at element 2^31


def assert_far_equals_near(far, launch: Callable, inputs: list, outputs: list, tile: int = 1) -> None:
    """A program on the last rows of huge tensors gives the same results as on small tensors.

    launch(inputs, outputs, rows); each tensor has `tile` rows, or is None.
    """
    at, huge = far
    rows = FAR // tile * tile + tile
    nan = [None if t is None else torch.full_like(t, float("nan")) for t in outputs]
    launch(inputs, nan, tile)
    big = [[None if t is None else huge(rows, t) for t in group] for group in (inputs, outputs)]
    at(FAR // tile)
    launch(*big, rows)
    for small, large in zip(nan, big[1], strict=True):
        if small is not None:
            assert small.isfinite().all() and torch.equal(large[-len(small) :], small)


def test_norms_reach_rows_beyond_2_to_the_31_elements(far, draw):
    half = torch.bfloat16
    x, residual, dy, ds = (draw(1, WIDTH, dtype=half) for _ in range(4))
    weight, statistics = draw(WIDTH), draw(2, 1).abs()
    size = dict(LAYER_NORM=True, ALIGNMENT=8, ROWS=1, BLOCK=WIDTH)
    strides = [WIDTH // 8] * 3

    def per_row(rows):
        """Two float32 numbers for each row, of which a kernel finds the second by the number of rows."""
        return torch.full((2, rows), float("nan"))

    def run_forward(inputs, outputs, rows):
        found = per_row(rows)
        norm.norm_forward_kernel[(1,)](*inputs, weight, weight, *outputs[:2], found, rows, *strides, 1e-5, **size)
        outputs[2][-1] = found[:, -1]

    assert_far_equals_near(far, run_forward, [x, residual], [x, x, statistics.T])
    far[0](0)

    def run_backward(inputs, outputs, rows):
        given = per_row(rows)
        given[:, -1:] = statistics
        norm.norm_backward_kernel[(1,)](
            *inputs, weight, given, *outputs, rows, *strides, WIDTH // 8, **size, DWEIGHT=True, DBIAS=True
        )

    assert_far_equals_near(far, run_backward, [dy, ds, x], [x, draw(1, 2 * WIDTH)])


def test_a_stride_of_2_to_the_27_elements_reaches_beyond_2_to_the_31(far, draw):
    _, huge = far
    x, residual, dy, ds = (huge(33, torch.zeros(1, 2**27, dtype=torch.bfloat16))[:, :8] for _ in range(4))
    results = []
    for tensor in (x, residual, dy, ds):
        tensor.copy_(draw(33, 8))
    for given in ((x, residual, dy, ds), [t.contiguous() for t in (x, residual, dy, ds)]):
        leaves = [t.detach().requires_grad_() for t in given[:2]]
        outputs = gpu.normalize(leaves[0], None, None, leaves[1], kind="rms", eps=1e-5)
        alone = gpu.normalize(leaves[0], kind="layer", eps=1e-5)[0]
        gradients = torch.autograd.grad((*outputs, alone), leaves, (*given[2:], given[2]))
        results.append((*outputs, alone, *gradients))
    assert all(map(torch.equal, *results))


def test_swiglu_reaches_rows_beyond_2_to_the_31_elements(far, draw):
    packed, hidden = draw(1, WIDTH, dtype=torch.bfloat16), draw(1, WIDTH // 2, dtype=torch.bfloat16)

    def run(inputs, outputs, rows):
        sizes = dict(ALIGNMENT=8, ROWS=1, BLOCK=WIDTH // 2)
        swiglu.swiglu_forward_kernel[(1,)](inputs[0], outputs[2], rows, WIDTH // 8, WIDTH // 16, **sizes)
        swiglu.swiglu_backward_kernel[(1,)](
            inputs[1], inputs[0], *outputs[:2], rows, WIDTH // 16, WIDTH // 8, WIDTH // 16, **sizes
        )

    assert_far_equals_near(far, run, [packed, hidden], [packed, hidden, hidden])


@pytest.mark.parametrize(("length", "head_norms"), [(8, True), (2**40, False)])
def test_rotary_reaches_rows_beyond_2_to_the_31_elements(far, draw, length, head_norms):
    """The last of many sequences of 8 tokens, or the end of one long sequence."""
    at, huge = far
    half, tokens = torch.bfloat16, 8
    qkv = draw(tokens, WIDTH, dtype=half)  # 8 heads of q, 4 of k and 4 of v, of 64 elements
    q, k, angles, weight = draw(tokens, 512, dtype=half), draw(tokens, 256, dtype=half), draw(tokens, 32), draw(64)
    weights = (weight, weight.flip(0)) if head_norms else (None, None)
    rows = FAR + tokens
    sizes = dict(H=8, K=4, HALF=32, ALIGNMENT=8, TOKENS=tokens, HEADS=4, BLOCK=32)

    def run(qkv, gradients, outputs, angles, rows):
        one_length = min(rows, length)
        strides = lambda width: (one_length * width // 8, width // 8)  # noqa: E731
        q, k, v, dqkv, parts = outputs
        tiles = 3 if head_norms else 4
        at((rows // tokens - 1) * tiles)
        rope.rotary_forward_kernel[(tiles,)](
            qkv, angles, angles, *weights, q, k, None if head_norms else v,
            one_length, *strides(WIDTH), 0, 1e-5, **sizes,
        )  # fmt: skip
        at((rows // tokens - 1) * 4)
        rope.rotary_backward_kernel[(4,)](
            *gradients, qkv, angles, angles, *weights, dqkv, parts, rows // tokens, one_length, *strides(WIDTH), 0,
            *(value for width in (512, 256, 256) for value in (*strides(width), 8)), 1e-5, **sizes, STAGES=1,
        )  # fmt: skip

    small = [torch.full_like(t, float("nan")) for t in (q, k, k, qkv)]
    run(qkv, (q, k, k.flip(0)), [*small, torch.empty(2, 128)], angles, tokens)
    big = [huge(rows, t) for t in (q, k, k, qkv)]
    big_angles = angles if length == tokens else huge(rows, angles)
    parts = torch.empty(rows // tokens * 2, 128)  # a partial sum for each program, and two tiles of q
    run(huge(rows, qkv), [huge(rows, t) for t in (q, k, k.flip(0))], [*big, parts], big_angles, rows)
    for near, distant in zip(small[: 4 - 2 * head_norms] + small[3:], big[: 4 - 2 * head_norms] + big[3:], strict=True):
        assert near.isfinite().all() and torch.equal(distant[-tokens:], near)


def test_rotary_reaches_sequences_and_heads_beyond_2_to_the_31_elements(far, draw):
    """Three of them, 2^30 + 1 elements apart: with a stride that 8 divides, only products beyond 2^34 wrap."""
    _, huge = far
    wide = huge(2**24 + 2, draw(1, 128).bfloat16()).flatten().as_strided((3, 96), (2**30 + 1, 1))
    wide.copy_(draw(3, 96))
    angles = draw(3, 16)
    for qkv, table in ((wide[:, None], angles[:1]), (wide[None], angles)):  # three sequences, then three positions
        gradients = qkv.unsqueeze(2).split(32, dim=-1)  # one head
        for weight in (None, draw(32)):
            for op, tensors, rest in (
                (rope.rotary_forward, [qkv], (table, table, 1, 1, weight, weight, 1e-5)),
                (rope.rotary_backward, [*gradients, qkv], (table, table, weight, weight, 1e-5)),
            ):
                assert all(map(torch.equal, op(*tensors, *rest), op(*(t.contiguous() for t in tensors), *rest)))
    heads = wide[None, None].split(32, dim=-1)  # three heads of one token
    strided, near = (
        rope.rotary_backward(*gradients, None, angles[:1], angles[:1], None, None, 1e-5)
        for gradients in (heads, [head.contiguous() for head in heads])
    )
    assert all(map(torch.equal, strided, near))


def test_the_loss_reaches_rows_beyond_2_to_the_31_elements(far, draw):
    logits, target, weight = draw(1, WIDTH, dtype=torch.bfloat16), torch.tensor([[77]]), draw(1, 1)
    loss = torch.zeros(1, 1)

    def run(inputs, outputs, rows):
        outputs[0][-1] = logits[0]  # replaced in place
        cross_entropy.cross_entropy_kernel[(1,)](
            outputs[0], *inputs, outputs[1], rows, WIDTH, WIDTH // 8, -100, BLOCK=WIDTH, GRADIENT=True
        )

    assert_far_equals_near(far, run, [target, weight], [logits, loss])
