"""The other Triton kernels where the general tests do not go, and what holds for all: far rows, compilers, choices.

Tolerances: float32 sums of a few hundred products: 1e-6; half precision adds its roundings (`rounding` in conftest.py).
"""

import mmap
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kernels
from kernels import gpu, reference

pytestmark = [
    pytest.mark.skipif(gpu is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

if gpu is not None:
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from kernels import cross_entropy, norms, rope, swiglu

CPU = torch.device("cpu")


@pytest.fixture
def triton():
    """The Triton kernels are chosen."""
    kernels.use("triton", CPU)
    yield
    kernels.use("auto", CPU)


# SwiGLU


@pytest.mark.parametrize(("rows", "width"), [(3, 704), (1, 8), (2, 1030), (5, 2824)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_and_product_are_rounded_once_forward_and_backward(draw, relative, rounding, dtype, rows, width):
    packed, upstream = draw(rows, 2 * width, std=3.0, dtype=dtype), draw(rows, width, dtype=dtype)
    wider = draw(rows, 2 * width + 16, dtype=dtype)
    wider[:, :-16] = packed
    doubles = packed.double().requires_grad_()
    gate, up = doubles.chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    (gradient,) = torch.autograd.grad(expected, doubles, upstream.double())
    for x in (packed, wider[:, :-16]):
        hidden = swiglu.swiglu_forward(x)
        dpacked, again = swiglu.swiglu_backward(upstream, x)
        assert torch.equal(hidden, again)
        assert relative(hidden, expected.detach()) < rounding(dtype, hidden.numel())
        assert relative(dpacked, gradient) < rounding(dtype, dpacked.numel())


@pytest.mark.parametrize(("rows", "hidden_size", "width"), [(70, 72, 136), (1, 8, 8), (129, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mlp_in_one_kernel_equals_float64_and_keeps_the_products(
    draw, relative, rounding, dtype, rows, hidden_size, width
):
    x, weight = draw(rows, hidden_size, dtype=dtype), draw(2 * width, hidden_size, std=0.2, mean=0.02, dtype=dtype)
    products = x.double() @ weight.double().T
    gate, up = products.chunk(2, -1)
    hidden, kept = swiglu.swiglu_gate_up(x, weight, True)
    assert relative(kept, products) < rounding(dtype, kept.numel())
    assert relative(hidden, gate * torch.sigmoid(gate) * up) < rounding(dtype, hidden.numel())
    alone, nothing = swiglu.swiglu_gate_up(x, weight, False)
    assert torch.equal(alone, hidden) and not nothing.numel()


def test_the_mlp_takes_the_one_kernel_where_it_was_measured_to_win_and_gives_the_same_gradients(
    draw, relative, monkeypatch
):
    inputs = draw(2, 5, 64), draw(2 * 88, 64, std=0.2, mean=0.02), draw(64, 88, std=0.2, mean=0.02)
    upstream = draw(2, 5, 64)

    def run(function, tensors):
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        y = function(*tensors)
        return y.detach(), *torch.autograd.grad(y, tensors, upstream.to(y.dtype))

    assert not swiglu.one_kernel_wins(10, 64, 88)
    two = run(gpu.swiglu_mlp, inputs)
    monkeypatch.setattr(swiglu, "WINS", ((10, 64),))
    assert swiglu.one_kernel_wins(10, 64, 88)
    assert not (swiglu.one_kernel_wins(11, 64, 88) or swiglu.one_kernel_wins(10, 72, 88))
    assert not swiglu.one_kernel_wins(10, 64, 84)  # not a size that descriptors take
    one = run(gpu.swiglu_mlp, inputs)
    expected = run(reference.swiglu_mlp, [tensor.double() for tensor in inputs])
    for a, b, c in zip(one, two, expected, strict=True):
        assert relative(a, c) < 1e-6 and relative(b, c) < 1e-6


def test_only_x_and_the_packed_product_are_kept_for_the_backward_pass_of_the_mlp(draw):
    x = draw(6, 32).requires_grad_()
    weights = draw(2 * 48, 32).requires_grad_(), draw(32, 48).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gpu.swiglu_mlp(x, *weights)
    activations = [t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}]
    assert sorted(t.numel() for t in activations) == [6 * 32, 6 * 96]


# Rotary positions


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 4), (6, 2)])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_its_gradients_are_rounded_once_for_any_heads(
    draw, relative, rounding, heads, kv_heads, width, normed
):
    angles = draw(2, 5, width // 2, mean=500.0, std=300.0, dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    gains = [draw(width, mean=1.0) for _ in range(2)] if normed else []
    for dtype in (torch.float32, torch.bfloat16):
        qkv = draw(2, 5, (heads + 2 * kv_heads) * width, dtype=dtype)
        before = qkv.clone()
        # as attention gives them back: heads in front of positions; and v with gaps
        upstream = [draw(2, n, 5, width, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads)]
        upstream.append(draw(2, 5, kv_heads, 2 * width, dtype=dtype)[..., ::2])

        def run(function, tensors, tables, upstream=upstream):
            tensors = [tensor.detach().requires_grad_() for tensor in tensors]
            weights = tensors[1:] or [None, None]
            out = function(tensors[0], *tables, heads, kv_heads, *weights, 1e-3)
            return out, torch.autograd.grad(out, tensors, [u.to(o.dtype) for u, o in zip(upstream, out, strict=True)])

        out, gradients = run(gpu.rotary, [qkv, *gains], (cos, sin))
        doubles = [t.double() for t in (qkv, *gains)]
        out64, gradients64 = run(float64_rotary, doubles, (cos.double(), sin.double()))
        for ours, exact in zip((*out, *gradients), (*out64, *gradients64), strict=True):
            assert relative(ours, exact) < rounding(ours.dtype, ours.numel())
        assert torch.equal(qkv, before)


def float64_rotary(qkv, cos, sin, heads, kv_heads, q_weight, k_weight, eps):
    """The definition, in whatever dtype comes in."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=-2)

    def turn(x, weight):
        if weight is not None:
            x = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        a, b = x.chunk(2, -1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return turn(q, q_weight), turn(k, k_weight), v


def test_turning_back_undoes_turning(draw, relative):
    qkv, angles = draw(1, 7, 3 * 64), draw(7, 32, std=100.0)
    cos, sin = angles.cos(), angles.sin()
    q, k = rope.rotary_forward(qkv, cos, sin, 1, 1, None, None, 0.0)
    v = qkv[..., 128:].unflatten(-1, (1, 64))
    back, *_ = rope.rotary_backward(q, k, v, None, cos, sin, None, None, 0.0)
    assert relative(back, qkv.double()) < 3e-7


# The loss


@pytest.mark.parametrize("workspace", [2**30, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_do_not_depend_on_chunks(draw, relative, monkeypatch, dtype, workspace):
    monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)  # 1 byte: chunks of the least size, 128
    rows, vocabulary = 261, 130
    assert cross_entropy.chunk_rows(rows, vocabulary, 2) == (rows if workspace > 1 else 128)
    x, weight, upstream = draw(rows, 24, dtype=dtype), draw(vocabulary, 24, mean=0.05, std=0.3), draw(rows)
    targets = torch.arange(rows) * 7 % vocabulary
    targets[::5], targets[1], targets[2] = -100, 0, vocabulary - 1

    def run(function, x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(x, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream.to(loss.dtype))

    found = run(gpu.linear_cross_entropy, x, weight)
    assert [t.dtype for t in found] == [torch.float32, dtype, torch.float32]
    expected = run(float64_loss, x.double(), weight.to(dtype).double())
    # bfloat16: logits of about 3 are off by 5e-3 before the exponential
    tolerances = (1e-6, 1e-6, 1e-6) if dtype == torch.float32 else (2e-3, 5e-3, 5e-3)
    for ours, exact, tolerance in zip(found, expected, tolerances, strict=True):
        assert relative(ours, exact) < tolerance


def float64_loss(x, weight, targets):
    """The definition, in whatever dtype comes in."""
    chosen = -torch.log_softmax(x @ weight.T, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, 0.0, chosen)


@pytest.mark.parametrize("workspace", [2**30, 1])
def test_nothing_to_predict_costs_nothing_and_frozen_inputs_get_no_gradient(draw, monkeypatch, workspace):
    monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)
    x, weight, upstream = draw(140, 16).requires_grad_(), draw(33, 16).requires_grad_(), draw(140)
    loss = gpu.linear_cross_entropy(x, weight, torch.full((140,), -100))
    assert not loss.any() and not any(g.any() for g in torch.autograd.grad(loss, (x, weight), upstream))
    targets = torch.arange(140) % 33
    both = torch.autograd.grad(gpu.linear_cross_entropy(x, weight, targets), (x, weight), upstream)
    for i, given in enumerate(((x, weight.detach()), (x.detach(), weight))):
        (alone,) = torch.autograd.grad(gpu.linear_cross_entropy(*given, targets), (x, weight)[i], upstream)
        assert torch.equal(alone, both[i])


def test_rows_longer_than_a_tile_and_logits_of_80_keep_their_digits(draw, relative):
    logits = draw(3, 9001, std=1.0) * torch.tensor([[1.0], [30.0], [-30.0]])
    logits[0, 4096], logits[1, 9000], logits[2, 0] = 80.0, -80.0, 80.0
    targets = torch.tensor([4096, 9000, 5])
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (delta,) = torch.autograd.grad(expected, exact, torch.ones(3, dtype=torch.float64))
    loss = cross_entropy.losses_of(logits, targets, -100, True)
    assert relative(loss, expected.detach()) < 1e-6
    assert relative(logits, delta) < 1e-6


def test_a_logit_that_is_not_a_number_shows_in_the_loss(draw):
    logits = draw(2, 50)
    logits[0, 7] = float("nan")
    loss = cross_entropy.losses_of(logits, torch.tensor([1, 1]), -100, False)
    assert loss[0].isnan() and loss[1].isfinite()


# Rows more than 2^31 elements from the beginning


@pytest.fixture
def far(monkeypatch):
    """Programs far out: a function that says where a launch's only program stands, and one that makes huge tensors.

    The tensors take no memory but for the pages that are touched.
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
        """A contiguous tensor of so many rows, with these as the last ones."""
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
FAR = 2**31 // WIDTH  # the row that begins 2^31 elements out


def assert_far_equals_near(far, launch: Callable, inputs: list, outputs: list, tile: int = 1) -> None:
    """A launch whose only program stands at the last rows of huge tensors gives what it gives on small ones.

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


@pytest.mark.parametrize("wide", [False, True])
def test_norms_reach_rows_beyond_2_to_the_31_elements(far, draw, wide):
    half = torch.bfloat16
    x, residual, dy, ds = (draw(1, WIDTH, dtype=half) for _ in range(4))
    weight, mean, rstd = draw(WIDTH), draw(1, 1).abs(), draw(1, 1).abs()
    size = dict(LAYER=True, UNIT=8)
    tile = {} if wide else {"ROWS": 1}
    rows_of = (lambda rows: ()) if wide else (lambda rows: (rows,))
    forward = norms.forward_wide_kernel if wide else norms.forward_kernel

    def run_forward(inputs, outputs, rows):
        forward[(1,)](
            *inputs, weight, weight, *outputs, *rows_of(rows), WIDTH // 8, WIDTH // 8, WIDTH // 8, 1e-5,
            **size, **tile, BLOCK=WIDTH,
        )  # fmt: skip

    assert_far_equals_near(far, run_forward, [x, residual], [x, x, mean, rstd])
    far[0](0)

    def run_backward(inputs, outputs, rows):
        strides = [WIDTH // 8] * 3
        common = inputs[0], inputs[1], inputs[2], weight, inputs[3], inputs[4], outputs[0]
        if wide:
            norms.backward_wide_kernel[(1,)](*common, *strides, WIDTH // 8, **size, BLOCK=WIDTH)
            gains = inputs[0], inputs[2], inputs[3], inputs[4], outputs[1], outputs[2]
            norms.gains_wide_kernel[(1,)](*gains, rows, *strides, **size, BLOCK=WIDTH)
        else:
            norms.backward_kernel[(1,)](
                *common, outputs[1], outputs[2], rows, *strides, WIDTH // 8, **size, **tile, BLOCK=WIDTH
            )

    assert_far_equals_near(far, run_backward, [dy, ds, x, mean, rstd], [x, draw(1, WIDTH), draw(1, WIDTH)])


def test_a_stride_of_2_to_the_27_elements_reaches_beyond_2_to_the_31(far, draw):
    _, huge = far
    rows = huge(33, draw(1, 2**27).bfloat16())[:, :8]
    rows.copy_(draw(33, 8))
    y = gpu.norm(rows, kind="rms", eps=1e-5)[0]
    assert torch.equal(y, gpu.norm(rows.contiguous(), kind="rms", eps=1e-5)[0])


def test_swiglu_reaches_rows_beyond_2_to_the_31_elements(far, draw):
    packed, hidden = draw(1, WIDTH, dtype=torch.bfloat16), draw(1, WIDTH // 2, dtype=torch.bfloat16)

    def run(inputs, outputs, rows):
        sizes = dict(UNIT=8, BLOCK=WIDTH // 2)
        swiglu.forward_kernel[(1,)](inputs[0], outputs[2], WIDTH // 8, WIDTH // 16, **sizes)
        swiglu.backward_kernel[(1,)](inputs[1], inputs[0], *outputs[:2], WIDTH // 16, WIDTH // 8, WIDTH // 16, **sizes)

    assert_far_equals_near(far, run, [packed, hidden], [packed, hidden, hidden])


def test_rotary_positions_reach_rows_beyond_2_to_the_31_elements(far, draw):
    tokens, half = 8, torch.bfloat16
    qkv = draw(tokens, WIDTH, dtype=half)  # 8 heads of q, 4 of k and 4 of v, of 64 elements
    q, k, angles, gain = draw(tokens, 512, dtype=half), draw(tokens, 256, dtype=half), draw(tokens, 32), draw(64)
    sizes = dict(H=8, K=4, HALF=32, UNIT=8, TOKENS=tokens, HEADS=4, BLOCK=32)

    def run_forward(inputs, outputs, rows):
        rope.forward_kernel[(1, 3)](
            inputs[0], angles, angles, gain, gain, *outputs, rows, tokens, WIDTH // 8, 0, 1e-5, **sizes
        )

    assert_far_equals_near(far, run_forward, [qkv], [q, k], tile=tokens)
    far[0](0)

    def run_backward(inputs, outputs, rows):
        strides = [value for width in (512, 256, 256) for value in (tokens * width // 8, width // 8, 8)]
        parts = torch.empty(rows // tokens * 2, 64)  # a part for each program, and two tiles of q
        rope.backward_kernel[(1, 4)](
            *inputs[1:], inputs[0], angles, angles, gain, gain, outputs[0], parts, parts,
            rows, tokens, WIDTH // 8, 0, *strides, 1e-5, **sizes,
        )  # fmt: skip

    assert_far_equals_near(far, run_backward, [qkv, q, k, k], [qkv], tile=tokens)


def test_the_loss_reaches_rows_beyond_2_to_the_31_elements(far, draw):
    logits, target = draw(1, WIDTH, dtype=torch.bfloat16), torch.tensor([[77]])
    loss = torch.zeros(1, 1)

    def run(inputs, outputs, rows):
        outputs[0][-1] = logits[0]  # replaced in place
        cross_entropy.loss_kernel[(1,)](
            outputs[0], inputs[0], outputs[1], WIDTH // 8, -100, UNIT=8, BLOCK=WIDTH, REPLACE=True
        )

    assert_far_equals_near(far, run, [target], [logits, loss])


# What torch makes of them


def operators():
    """Each operator with arguments that it takes."""
    x, gain, targets = torch.randn(6, 16), torch.randn(16), torch.randint(0, 9, (6,))
    qkv, angles = torch.randn(1, 6, 4 * 16), torch.randn(6, 8)
    q, k = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16)
    ops = torch.ops.prenorm
    statistic = torch.randn(6)
    return {
        "norm_forward": (ops.norm_forward, (x, x.clone(), gain, gain.clone(), True, 1e-5)),
        "norm_forward of rms": (ops.norm_forward, (x, None, gain, None, False, 1e-5)),
        "norm_backward": (
            ops.norm_backward,
            (x, x.clone(), x.clone(), gain, statistic, statistic.clone(), True, True, True),
        ),
        "norm_backward of rms": (
            ops.norm_backward,
            (x, None, x.clone(), gain, statistic[:0], statistic, False, True, False),
        ),
        "swiglu_forward": (ops.swiglu_forward, (x,)),
        "swiglu_backward": (ops.swiglu_backward, (x[:, :8], x)),
        "swiglu_gate_up": (ops.swiglu_gate_up, (x, torch.randn(16, 16), True)),
        "rotary_forward": (ops.rotary_forward, (qkv, angles, angles.clone(), 2, 1, gain, gain.clone(), 1e-5)),
        "rotary_backward": (
            ops.rotary_backward,
            (q, k, k.clone(), qkv, angles, angles.clone(), gain, gain.clone(), 1e-5),
        ),
        "loss_forward": (ops.loss_forward, (x, torch.randn(9, 16), targets, -100, True)),
        "loss_backward": (
            ops.loss_backward,
            (statistic, x, torch.randn(9, 16), targets, torch.randn(6, 9), -100, True, True),
        ),
    }


@pytest.mark.parametrize("name", operators() if gpu is not None else ())
def test_every_operator_keeps_its_promises_to_torch(name):
    operator, arguments = operators()[name]
    torch.library.opcheck(operator.default, arguments)


def test_every_operator_is_checked():
    registered = {name for name in dir(torch.ops.prenorm) if not name.startswith("_")} - {"name"}
    assert {name.partition(" ")[0] for name in operators()} == registered


def test_a_compiled_function_of_all_kernels_is_one_graph_with_equal_gradients(triton, draw):
    angles = draw(7, 8)
    cos, sin = angles.cos(), angles.sin()
    targets = torch.arange(14) % 9

    def model(x, gain, bias, qkv_weight, gate_up, down, head):
        y, s = kernels.norm(x, gain, kind="rms", eps=1e-5)
        q, k, v = kernels.rotary(y @ qkv_weight.T, cos, sin, 2, 1, gain[:16], gain[16:], 1e-5)
        a = kernels.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)
        y, s = kernels.norm(a, gain, bias, s, kind="layer", eps=1e-5)
        y, _ = kernels.norm(kernels.swiglu_mlp(y, gate_up, down), gain, None, s, kind="rms", eps=1e-5)
        return kernels.linear_cross_entropy(y.flatten(0, 1), head, targets)

    shapes = (2, 7, 32), (32,), (32,), (64, 32), (96, 32), (32, 48), (9, 32)
    inputs = [draw(*shape).requires_grad_() for shape in shapes]
    upstream = draw(14)
    losses = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        loss = run(*inputs)
        losses.append((loss.detach(), *torch.autograd.grad(loss, inputs, upstream)))
    assert all(map(torch.equal, *losses))


# Choices


def test_triton_is_refused_in_one_sentence_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match=r"cannot run on mps: they need an NVIDIA or AMD GPU$"):
        kernels.use("triton", torch.device("mps"))
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"cannot run on cpu: .*TRITON_INTERPRET=1"):
        kernels.use("triton", CPU)
    monkeypatch.setattr(kernels, "gpu", None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        kernels.use("triton", torch.device("cuda"))
    with pytest.raises(ValueError, match="'cuda' are none of auto, triton, torch, reference"):
        kernels.use("cuda", CPU)
    assert kernels.implementation(torch.device("cuda")) is reference
    assert kernels.describe(torch.device("cuda")) == "plain PyTorch (Triton is not installed)"


def test_a_gpu_is_asked_for_its_age_and_the_machine_for_a_compiler(monkeypatch):
    cuda = torch.device("cuda", 1)
    cases = ((7, 5), "gcc", "8.0"), ((9, 0), None, "C compiler"), ((9, 0), "gcc", None)
    for capability, compiler, words in cases:
        kernels.why_not_on_gpu.cache_clear()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(kernels.shutil, "which", lambda name, found=compiler: found)
        assert kernels.implementation(cuda) is (gpu if words is None else reference)
        assert (words or "Triton") in kernels.describe(cuda)
    kernels.why_not_on_gpu.cache_clear()


def test_what_was_chosen_runs_and_is_described_in_words(triton, monkeypatch):
    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(kernels, "why_not_on_gpu", lambda device: None)
    assert kernels.implementation(CPU) is kernels.implementation(cuda) is gpu
    assert kernels.describe(CPU) == "Triton, interpreted (slow)"
    kernels.use("torch", cuda)
    assert kernels.implementation(cuda) is reference and kernels.describe(cuda) == "plain PyTorch"
    assert kernels.describe(CPU) == "plain PyTorch with CPU functions"
    kernels.use("reference", cuda)
    assert kernels.implementation(cuda) is kernels.implementation(CPU) is reference
    kernels.use("auto", cuda)
    assert kernels.implementation(cuda) is gpu and kernels.implementation(CPU) is kernels.cpu
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert kernels.describe(cuda) == "Triton"
