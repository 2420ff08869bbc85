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
    for ours, exact in zip(gradients, gradients64, strict=True):
        per_row = ours.shape == x.shape
        few = 2 * (x.shape[-1] < 8)  # few numbers minus their mean cancel: one more rounding
        bound = (1 + few) * rounding(ours.dtype if per_row else torch.float32, ours.numel())
        assert relative(ours, exact) < bound, ours.shape


def reference64(x, weight, bias, residual, *, kind, eps):
    """The textbook formulas, in the dtype of their inputs."""
    s = x if residual is None else x + residual
    centred = s - s.mean(-1, keepdim=True) if kind == "layer" else s
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight) + (0 if bias is None else bias), s


# Tiles of several rows, of one row, two passes; widths divisible by 16, by 8, by neither; rows below and above programs
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *[(3, 8), (199, 64), (37, 192), (1, 250), (37, 760), (3, 1000), (70, 1024), (37, 1096), (3, 1001), (37, 4096)],
        *[(1, 2), (5, 3), (17, 9000), (2, 40004)],
    ],
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_any_number_and_length_of_rows_is_within_one_rounding_of_float64(draw, relative, rounding, kind, rows, width):
    variants = (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)
    for i, (dtype, full) in enumerate(variants[: 1 if width > 8192 else 3]):
        x, dy, ds = (draw(rows, width, dtype=dtype) for _ in range(3))
        residual = draw(rows, width, mean=-0.5, dtype=dtype) if full else None
        weight, bias = draw(width, mean=1.0), draw(width) if full else None
        compare(x, weight if i != 1 or width % 16 else None, bias, residual, dy, ds, kind, relative, rounding)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_mix(draw, relative, rounding, dtype, residual_dtype, weight_dtype):
    x, dy = draw(40, 96, dtype=dtype), draw(40, 96, dtype=dtype)
    residual, ds = draw(40, 96, dtype=residual_dtype or dtype), draw(40, 96, dtype=residual_dtype or dtype)
    weight, bias = (draw(96, mean=1.0, dtype=weight_dtype or dtype) for _ in range(2))
    y, s, gradients = run(x, weight, bias, residual, dy, ds, "layer", gpu.normalize)
    assert (y.dtype, s.dtype) == (x.dtype, residual.dtype)
    assert [g.dtype for g in gradients] == [t.dtype for t in (x, weight, bias, residual)]
    s64 = s.double()
    doubles = s64 - residual.double(), weight.double(), bias.double(), residual.double()
    y64, _, gradients64 = run(*doubles, dy.double(), ds.double(), "layer", reference64)
    assert relative(y, y64) < rounding(dtype, y.numel())
    for ours, exact in zip(gradients, gradients64, strict=True):
        # the gradient of x is rounded to the residual's dtype first, which is no narrower
        assert relative(ours, exact) < rounding(ours.dtype, ours.numel())


def strided(name, draw, rows, width):
    """Rows of a larger tensor that are not contiguous."""
    wide = draw(2 * rows, 3 * width)
    return {
        "columns of a wider tensor": lambda: wide[:rows, width : 2 * width],
        "every other row": lambda: wide[::2, :width],
        "every other element": lambda: wide[:rows, : 2 * width : 2],
        "transposed": lambda: draw(width, rows).t(),
        "four dimensions": lambda: draw(2, 3, rows, 2 * width)[..., :width],
        "one row for all": lambda: draw(1, width).expand(rows, width),
        "one number for all": lambda: draw(1, 1).expand(rows, width),
        "a sequence dimension behind the heads": lambda: draw(2, rows, 3, width).transpose(1, 2),
    }[name]()


STRIDES = [
    "columns of a wider tensor",
    "every other row",
    "every other element",
    "transposed",
    "four dimensions",
    "one row for all",
    "one number for all",
    "a sequence dimension behind the heads",
]


@pytest.mark.parametrize("name", STRIDES)
def test_rows_may_have_any_strides_and_the_memory_around_them_does_not_change(draw, relative, name):
    x = strided(name, draw, 20, 96)
    base = x._base if x._base is not None else x
    before = base.clone()
    dy, residual = draw(*x.shape), draw(*x.shape)
    weight, bias = draw(96, mean=1.0), draw(96)
    for given in ((x, residual), (residual, x)):
        y, s, gradients = run(given[0], weight, bias, given[1], dy, dy, "layer", gpu.normalize)
        contiguous = given[0].contiguous(), weight, bias, given[1].contiguous(), dy, dy
        y2, s2, gradients2 = run(*contiguous, "layer", gpu.normalize)
        assert torch.equal(y, y2) and torch.equal(s, s2)
        assert all(map(torch.equal, gradients, gradients2))
    assert torch.equal(base, before)
    y, _, _ = run(x, weight, None, None, dy, dy, "rms", gpu.normalize)
    assert relative(y, reference.normalize(x, weight, kind="rms", eps=EPS)[0].double()) < 1e-6


@pytest.mark.parametrize("name", STRIDES)
def test_upstream_gradients_may_have_any_strides_and_stay_as_they_were(draw, name):
    dy = strided(name, draw, 20, 96)
    ds = strided(name, draw, 20, 96)
    before = dy.clone(), ds.clone()
    x, residual, weight = draw(*dy.shape), draw(*dy.shape), draw(96, mean=1.0)
    _, _, gradients = run(x, weight, None, residual, dy, ds, "layer", gpu.normalize)
    _, _, expected = run(x, weight, None, residual, dy.contiguous(), ds.contiguous(), "layer", gpu.normalize)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(dy, before[0]) and torch.equal(ds, before[1])


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
    ("rows", "width"), [*((rows, 64) for rows in (1, 2, 7, 8, 9, 131)), (1, 1024), (131, 1024), (2, 9000), (17, 9000)]
)
def test_sums_over_rows_are_right_for_fewer_and_more_rows_than_programs(draw, relative, monkeypatch, rows, width):
    assert launch.device_limits(torch.device("cpu")).multiprocessors == 4  # so at most 8 programs
    x, dy, weight, bias = draw(rows, width), draw(rows, width), draw(width, mean=1.0), draw(width)
    empty = torch.empty

    def poisoned(*shape, **options):
        return empty(*shape, **options).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)  # a partial sum that no program wrote is then NaN
    _, _, (_, dweight, dbias) = run(x, weight, bias, None, dy, dy, "layer", gpu.normalize)
    monkeypatch.undo()
    doubles = [t.double() for t in (x, weight, bias)]
    _, _, (_, dweight64, dbias64) = run(*doubles, None, dy.double(), None, "layer", reference64)
    assert relative(dweight, dweight64) < 1e-6 and relative(dbias, dbias64) < 1e-6


def test_a_frozen_weight_no_weight_and_no_rows_are_right(draw, relative):
    x, weight, dy = draw(20, 96).requires_grad_(), draw(96, mean=1.0), draw(20, 96)
    for frozen in (weight, None):
        y, _ = gpu.normalize(x, frozen, kind="rms", eps=EPS)
        (dx,) = torch.autograd.grad(y, x, dy)
        x64 = x.detach().double().requires_grad_()
        y64, _ = reference64(x64, None if frozen is None else weight.double(), None, None, kind="rms", eps=EPS)
        assert relative(dx, torch.autograd.grad(y64, x64, dy.double())[0]) < 1e-6
    for width in (96, 40000):
        x, weight = torch.empty(0, width, requires_grad=True), torch.ones(width, requires_grad=True)
        y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
        dx, dweight = torch.autograd.grad(y, (x, weight), torch.empty(0, width))
        assert y.shape == dx.shape == (0, width) and not dweight.any()


@pytest.mark.parametrize("width", [512, 40000])
def test_layernorm_of_a_large_mean_is_as_exact_as_its_input(draw, relative, width):
    x, dy = draw(3, width, mean=1e4), draw(3, width)
    weight = torch.ones(width)
    y, _, (dx, _) = run(x, weight, None, None, dy, dy, "layer", gpu.normalize)
    y64, _, (dx64, _) = run(x.double(), weight.double(), None, None, dy.double(), None, "layer", reference64)
    # x itself is rounded to 2^-24 of 1e4: 6e-4 of the deviation; subtracting the mean removes the common part
    assert relative(y, y64) < 6e-4 and relative(dx, dx64) < 6e-4
    naive = (x.square().mean(-1) - x.mean(-1).square() - 1).abs().max()
    assert naive > 1  # the mean of squares minus the square of the mean would have no correct digit
    x = draw(3, width, mean=30.0, std=0.1, dtype=torch.bfloat16)
    y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
    assert (
        relative(y, reference64(x.double(), None, None, None, kind="layer", eps=EPS)[0]) < 2**-8
    )  # few values, equal errors


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [96, 40000])
def test_zero_tiny_and_huge_rows_equal_the_reference(draw, kind, width):
    x = draw(5, width)
    x[0], x[1], x[2], x[3] = 0.0, x[1] * 1e-30, x[2] * 1e-3, x[3] * 1e15
    x[4] = 1e19 if kind == "rms" else x[4]  # whose squares overflow: torch gives 0 as well
    y, _ = gpu.normalize(x, kind=kind, eps=EPS)
    expected, _ = reference.normalize(x, kind=kind, eps=EPS)
    assert ((y - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()
    assert not y[0].any() and (kind == "layer" or not y[4].any()) and y[1:4].any(-1).all()
