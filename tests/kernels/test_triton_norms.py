"""The Triton norms beyond the tests of all implementations: sizes, strides, dtypes, statistics, and sums over rows.

Tolerances: float32 results and gradients pass through a few roundings of 2^-24: 1e-6, and where a row's mean is far
from its spread that times their ratio. Half precision adds one rounding (`rounding` in conftest.py). Sums over rows are
float32: 1e-6.
"""

import pytest
import torch

from kernels import gpu, launch, reference

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

EPS = 1e-5


def run(x, weight, bias, residual, dy, ds, kind, function):
    """y, s and the gradients of all inputs that are given."""
    given = [t for t in (x, weight, bias, residual) if t is not None]
    leaves = [t.detach().requires_grad_() for t in given]
    named = iter(leaves)
    arguments = [None if t is None else next(named) for t in (x, weight, bias, residual)]
    y, s = function(*arguments, kind=kind, eps=EPS)
    outputs, upstream = ([y, s], [dy, ds]) if residual is not None else ([y], [dy])
    gradients = torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
    return y.detach(), s.detach(), gradients


def compare(x, weight, bias, residual, dy, ds, kind, relative, rounding):
    """Everything within one rounding of float64, which starts from the rounded sum as the kernel does."""
    y, s, gradients = run(x, weight, bias, residual, dy, ds, kind, gpu.normalize)
    doubles = [None if t is None else t.double() for t in (x, weight, bias, residual)]
    if residual is not None:
        assert torch.equal(s, (doubles[0] + doubles[3]).to(residual.dtype))
        doubles[0] = s.double() - doubles[3]
    y64, _, gradients64 = run(*doubles, dy.double(), ds.double(), kind, reference64)
    assert y.dtype == x.dtype and relative(y, y64) < rounding(y.dtype, y.numel())
    given = [t for t in (x, weight, bias, residual) if t is not None]
    for i, (ours, exact) in enumerate(zip(gradients, gradients64, strict=True)):
        few = 2 * (x.shape[-1] < 8)  # few numbers minus their mean cancel: one more rounding
        bound = (1 + few) * rounding(ours.dtype, ours.numel())
        if i == 0 and s.dtype != x.dtype:
            bound += rounding(s.dtype, ours.numel())  # the gradient of x is that of s, in the dtype of s, first
        assert ours.dtype == given[i].dtype and relative(ours, exact) < bound, i


def reference64(x, weight, bias, residual, *, kind, eps):
    """The textbook formulas, in the dtype of their inputs."""
    s = x if residual is None else x + residual
    centred = s - s.mean(-1, keepdim=True) if kind == "layer" else s
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight) + (0 if bias is None else bias), s


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# Each dtype of x with each of the residual. Tiles of several rows and of one; widths that 16,
# that 8 and that neither divides, up to the widest that the kernels take. The bias has the weight's dtype.
@pytest.mark.parametrize(
    ("kind", "rows", "width", "dtype", "residual_dtype", "weight_dtype"),
    [
        ("rms", 1, 2, F32, F32, F32),
        ("layer", 5, 3, F32, BF16, F32),
        ("rms", 3, 8, BF16, None, None),
        ("layer", 67, 64, F16, F16, F16),
        ("rms", 37, 192, BF16, F32, BF16),
        ("layer", 1, 250, BF16, BF16, F32),
        ("layer", 3, 760, F32, F16, F32),
        ("rms", 3, 1000, F16, None, F32),
        ("layer", 3, 1001, BF16, F16, F32),
        ("rms", 3, 1024, F16, F32, F32),
        ("layer", 3, 1096, F32, None, None),
        ("layer", 1, 4096, F32, F32, F32),
        ("rms", 1, 8192, F16, BF16, F16),
    ],
)
def test_any_rows_and_dtypes_are_within_one_rounding_of_float64(
    draw, relative, rounding, kind, rows, width, dtype, residual_dtype, weight_dtype
):
    x, dy = (draw(rows, width, dtype=dtype) for _ in range(2))
    residual = None if residual_dtype is None else draw(rows, width, mean=-0.5, dtype=residual_dtype)
    ds = draw(rows, width, dtype=residual_dtype or dtype)
    weight = None if weight_dtype is None else draw(width, mean=1.0, dtype=weight_dtype)
    bias = None if residual is None else draw(width, dtype=weight_dtype)
    compare(x, weight, bias, residual, dy, ds, kind, relative, rounding)


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "residual_dtype"),
    [("rms", 4097, F32, None), ("layer", 8200, BF16, BF16), ("layer", 4104, BF16, F32)],
)
def test_wider_rows_are_those_of_the_reference_for_both_norms(draw, kind, width, dtype, residual_dtype):
    x, dy, weight = draw(2, width, dtype=dtype), draw(2, width, dtype=dtype), draw(width, mean=1.0)
    residual = None if residual_dtype is None else draw(2, width, dtype=residual_dtype)
    results = []
    for function in (gpu.normalize, reference.normalize):
        y, s, gradients = run(x, weight, None, residual, dy, dy, kind, function)
        results.append((y, s, *gradients))
    assert all(map(torch.equal, *results))


LAYOUTS = {  # six rows of 96 elements
    "every other row": lambda draw, i: draw(12, 96)[::2],
    "every other element": lambda draw, i: draw(6, 192)[:, ::2],
    "transposed": lambda draw, i: draw(96, 6).t(),
    "four dimensions": lambda draw, i: draw(2, 1, 3, 192)[..., :96],
    "one row for all": lambda draw, i: draw(1, 96).expand(6, 96),
    "one number for all": lambda draw, i: draw(1, 1).expand(6, 96),
    "a sequence dimension behind the heads": lambda draw, i: draw(1, 3, 2, 96).transpose(1, 2),
    "an odd number of elements apart": lambda draw, i: draw(6, 105 + 8 * i)[:, 1:97],
    "a multiple of 8 elements apart": lambda draw, i: draw(6, 112 + 8 * i)[:, 1:97],
}


@pytest.mark.parametrize(
    ("layout", "strided"),
    [*((name, range(4)) for name in LAYOUTS), *(("an odd number of elements apart", [i]) for i in range(4))],
)
def test_inputs_and_upstream_gradients_may_have_any_strides(draw, layout, strided):
    """Tensors whose rows are a multiple of 8 apart are read 16 bytes at a time."""
    given = [LAYOUTS[layout](draw, i) for i in range(4)]
    copies = [tensor.contiguous() for tensor in given]
    weight, bias, results = draw(96, mean=1.0), draw(96), []
    for x, residual, dy, ds in (copies, [given[i] if i in strided else copies[i] for i in range(4)]):
        y, s, gradients = run(x, weight, bias, residual, dy, ds, "layer", gpu.normalize)
        results.append((y, s, *gradients))
    assert all(map(torch.equal, *results))


def test_a_gradient_that_two_norms_share_is_right_for_both_and_a_second_backward_pass_equals_the_first(draw, relative):
    x, weight, dy = draw(20, 96).requires_grad_(), draw(96, mean=1.0).requires_grad_(), draw(20, 96)

    def twice(function):
        a, s = function(x, weight, None, x, kind="rms", eps=EPS)
        b, _ = function(a + x, weight, None, s, kind="layer", eps=EPS)
        return a + b  # the same upstream gradient goes to both

    out = twice(gpu.normalize)
    first = torch.autograd.grad(out, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(out, (x, weight), dy)
    assert all(map(torch.equal, first, second))
    expected = torch.autograd.grad(twice(reference64), (x, weight), dy)
    for ours, other in zip(first, expected, strict=True):
        assert relative(ours, other.double()) < 3e-6


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((1, 64), (337, 64)),  # tiles of 16 rows, at most 20 programs
        *((7, 1024), (65, 4096)),  # tiles of a row, at most 32 and 8 programs
    ],
)
def test_sums_over_rows_are_right_for_fewer_and_more_rows_than_programs(draw, relative, monkeypatch, rows, width):
    assert launch.device_limits(torch.device("cpu")).multiprocessors == 4
    x, dy, weight, bias = draw(rows, width), draw(rows, width), draw(width, mean=1.0), draw(width)
    empty = torch.empty

    def poisoned(*shape, **options):
        return empty(*shape, **options).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)  # a partial sum that no program wrote is then NaN
    _, _, (dx, dweight, dbias) = run(x, weight, bias, None, dy, dy, "layer", gpu.normalize)
    monkeypatch.undo()
    doubles = [t.double() for t in (x, weight, bias)]
    _, _, (dx64, dweight64, dbias64) = run(*doubles, None, dy.double(), None, "layer", reference64)
    assert relative(dweight, dweight64) < 1e-6 and relative(dbias, dbias64) < 1e-6 and relative(dx, dx64) < 1e-6


def test_a_matrix_without_rows_has_gradients(draw):
    x, weight = torch.empty(0, 96, requires_grad=True), torch.ones(96, requires_grad=True)
    y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.empty(0, 96))
    assert y.shape == dx.shape == (0, 96) and torch.equal(dweight, torch.zeros(96))


def test_layernorm_of_a_large_mean_is_as_exact_as_its_input(draw, relative):
    width = 512
    x, dy = draw(3, width, mean=1e4), draw(3, width)
    weight = torch.ones(width)
    y, _, (dx, _) = run(x, weight, None, None, dy, dy, "layer", gpu.normalize)
    y64, _, (dx64, _) = run(x.double(), weight.double(), None, None, dy.double(), None, "layer", reference64)
    # The mean is rounded to 2^-11 at most, half the distance of float32 numbers near 1e4, and the deviation is 1.
    assert relative(y, y64) < 1e-3 and relative(dx, dx64) < 1e-3
    naive = (x.square().mean(-1) - x.mean(-1).square() - 1).abs().max()
    assert naive > 1  # the mean of squares minus the square of the mean would have no correct digit
    x = draw(3, width, mean=30.0, std=0.1, dtype=torch.bfloat16)
    y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
    y64, _ = reference64(x.double(), None, None, None, kind="layer", eps=EPS)
    assert relative(y, y64) < 2**-8  # few values, equal errors


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_zero_tiny_and_huge_rows_equal_the_reference(draw, kind):
    x = draw(5, 104)
    x[0], x[1], x[2], x[3] = 0.0, x[1] * 1e-30, x[2] * 1e-3, x[3] * 1e15
    x[4] = 1e19 if kind == "rms" else x[4]  # whose squares overflow: torch gives 0 as well
    y, _ = gpu.normalize(x, kind=kind, eps=EPS)
    expected, _ = reference.normalize(x, kind=kind, eps=EPS)
    assert ((y - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()
    assert not y[0].any() and (kind == "layer" or not y[4].any()) and y[1:4].any(-1).all()
