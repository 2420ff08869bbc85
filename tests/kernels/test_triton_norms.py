"""The Triton norms beyond the tests of all implementations: sizes, strides, dtypes, statistics, and sums over rows.

Tolerances: float32 results and gradients pass through a few roundings of 2^-24: 1e-6, and where a row's mean is far
from its spread that times their ratio. Half precision adds one rounding (`rounding` in conftest.py). Sums over rows are
float32: 1e-6.
"""

import pytest
import torch

from kernels import gpu, launch, reference

if gpu is not None:
    from kernels import norm

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


@pytest.fixture
def two_passes(monkeypatch):
    """All rows count as wide: small tensors then go through the kernels for wide rows, in blocks of 64 columns."""
    for name in ("MAX_SINGLE_PASS_FORWARD", "MAX_SINGLE_PASS_BACKWARD"):
        monkeypatch.setattr(norm, name, 0)
    for name in ("WIDE_BLOCK_FORWARD", "WIDE_BLOCK_MEANS", "WIDE_BLOCK_BACKWARD"):
        monkeypatch.setattr(norm, name, 64)


@pytest.fixture(params=["one pass", "two passes"])
def passes(request):
    """Each test runs through the kernels for rows that fit into registers and through those for wider rows."""
    if request.param == "two passes":
        request.getfixturevalue("two_passes")


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# Tiles of several rows, of one row, two passes; widths divisible by 16, by 8, by neither; rows below and above programs
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *[(3, 8), (67, 64), (37, 192), (1, 250), (9, 760), (3, 1000), (20, 1024), (9, 1096), (3, 1001), (5, 4096)],
        *[(1, 2), (5, 3)],
    ],
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_any_number_and_length_of_rows_is_within_one_rounding_of_float64(draw, relative, rounding, kind, rows, width):
    variants = (F32, F32), (BF16, None), (BF16, BF16), (F16, F32)
    for i, (dtype, residual_dtype) in enumerate(variants[: 2 if width > 700 else 4]):
        x, dy = (draw(rows, width, dtype=dtype) for _ in range(2))
        residual = None if residual_dtype is None else draw(rows, width, mean=-0.5, dtype=residual_dtype)
        ds = draw(rows, width, dtype=residual_dtype or dtype)
        weight, bias = draw(width, mean=1.0), None if residual is None else draw(width)
        compare(x, weight if i != 1 or width % 16 else None, bias, residual, dy, ds, kind, relative, rounding)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 104), (18, 77), (2, 200), (3, 16)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_wide_rows_are_within_one_rounding_of_float64(two_passes, draw, relative, rounding, kind, rows, width):
    slope = torch.linspace(-3, 3, width)  # blocks of a row differ in mean
    for dtype, residual_dtype in ((F32, F32), (BF16, None), (BF16, F32), (F16, F16)):
        x, dy = (draw(rows, width).add(slope).to(dtype), draw(rows, width, dtype=dtype))
        residual = None if residual_dtype is None else draw(rows, width, mean=-0.5, dtype=residual_dtype)
        ds = draw(rows, width, dtype=residual_dtype or dtype)
        compare(x, draw(width, mean=1.0), draw(width), residual, dy, ds, kind, relative, rounding)


@pytest.mark.parametrize(("kind", "rows", "width"), [("rms", 1, 17000), ("layer", 2, 16384), ("rms", 2, 12000)])
def test_rows_on_both_sides_of_the_limits_are_within_one_rounding_of_float64(
    draw, relative, rounding, kind, rows, width
):
    x, residual, dy, ds = (draw(rows, width, dtype=BF16) for _ in range(4))
    bias = draw(width) if kind == "layer" else None
    compare(x, draw(width, mean=1.0), bias, residual, dy, ds, kind, relative, rounding)


@pytest.mark.parametrize("width", [32768, 32776, 131072])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_widest_rows_are_normalized_within_one_rounding_of_float64(draw, relative, rounding, kind, width):
    x, residual, weight = draw(1, width, dtype=F16), draw(1, width, dtype=BF16), draw(width, mean=1.0)
    y, s = gpu.normalize(x, weight, None, residual, kind=kind, eps=EPS)
    assert torch.equal(s, (x.float() + residual.float()).bfloat16())
    assert relative(y, reference64(s.double(), weight.double(), None, None, kind=kind, eps=EPS)[0]) < rounding(
        F16, width
    )


@pytest.mark.parametrize("weight_dtype", [None, F32])
@pytest.mark.parametrize("residual_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_dtypes_mix(passes, draw, relative, rounding, dtype, residual_dtype, weight_dtype):
    kind = "layer"  # RMSNorm is the same code without the mean
    x, dy = draw(6, 104, dtype=dtype), draw(6, 104, dtype=dtype)
    residual, ds = draw(6, 104, dtype=residual_dtype), draw(6, 104, dtype=residual_dtype)
    weight, bias = (draw(104, mean=1.0, dtype=weight_dtype or dtype) for _ in range(2))
    y, s, gradients = run(x, weight, bias, residual, dy, ds, kind, gpu.normalize)
    assert (y.dtype, s.dtype) == (x.dtype, residual.dtype)
    assert torch.equal(s, (x.float() + residual.float()).to(residual.dtype))
    assert [g.dtype for g in gradients] == [t.dtype for t in (x, weight, bias, residual)]
    s64 = s.double()
    doubles = s64 - residual.double(), weight.double(), bias.double(), residual.double()
    y64, _, gradients64 = run(*doubles, dy.double(), ds.double(), kind, reference64)
    assert relative(y, y64) < rounding(dtype, y.numel())
    for i, (ours, exact) in enumerate(zip(gradients, gradients64, strict=True)):
        bound = rounding(ours.dtype, ours.numel())
        if i == 0 and residual_dtype != dtype:
            bound += rounding(residual_dtype, ours.numel())  # the gradient of x is that of s, in the dtype of s, first
        assert relative(ours, exact) < bound, i


@pytest.mark.parametrize("upstream", ["y", "s", "y and s"])
@pytest.mark.parametrize("needed", ["x", "weight", "bias", "residual", "x and weight", "weight and bias"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_any_output_may_lack_an_upstream_gradient_and_any_input_may_need_none(
    passes, draw, relative, rounding, kind, needed, upstream
):
    x, weight, bias, residual = draw(4, 72, dtype=BF16), draw(72, mean=1.0), draw(72), draw(4, 72)
    given = {"y": draw(4, 72, dtype=BF16), "s": draw(4, 72)}

    def gradients(function, *inputs):
        named = dict(zip(("x", "weight", "bias", "residual"), (t.detach().clone() for t in inputs), strict=True))
        leaves = [named[name].requires_grad_() for name in needed.split(" and ")]
        outputs = dict(zip("ys", function(*named.values(), kind=kind, eps=EPS), strict=True))
        chosen = [name for name in upstream.split(" and ") if outputs[name].requires_grad]
        pairs = [outputs[name] for name in chosen], [given[name].to(outputs[name].dtype) for name in chosen]
        found = torch.autograd.grad(pairs[0], leaves, pairs[1], allow_unused=True) if chosen else [None] * len(leaves)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    inputs = x, weight, bias, residual
    exact = gradients(reference64, *(t.double() for t in inputs))
    for ours, other in zip(gradients(gpu.normalize, *inputs), exact, strict=True):
        assert ours.dtype == (BF16 if ours.shape == x.shape and needed.startswith("x") else F32)
        assert relative(ours, other) < rounding(ours.dtype, ours.numel()) if other.any() else not ours.any()


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


@pytest.mark.parametrize("spacing", [105, 112])
@pytest.mark.parametrize("name", ["x", "residual", "dy", "ds", "all"])
def test_rows_of_each_tensor_may_be_an_odd_number_of_elements_apart(passes, draw, name, spacing):
    """8 divides the width, so that tensors whose rows are a multiple of 8 apart are read 16 bytes at a time."""
    named = {key: draw(5, 104, mean=mean) for key, mean in (("x", 0.3), ("residual", -0.5), ("dy", 0.1), ("ds", 0.7))}
    weight, bias = draw(104, mean=1.0), draw(104)

    def call(x, residual, dy, ds):
        return [
            *run(x, weight, bias, residual, dy, ds, "layer", gpu.normalize),
            *run(x, weight, None, None, dy, ds, "rms", gpu.normalize),
        ]

    expected = call(**named)
    for i, (key, tensor) in enumerate(named.items()):
        if name in (key, "all"):
            named[key] = draw(5, spacing + 2 * i)[:, 1:105] if name == "all" else draw(5, spacing)[:, 1:105]
            named[key].copy_(tensor)
    for ours, other in zip(call(**named), expected, strict=True):
        assert all(map(torch.equal, ours, other)) if isinstance(ours, tuple) else torch.equal(ours, other)


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
    ("rows", "width"),
    [
        *((rows, 64) for rows in (1, 15, 16, 17, 131, 320, 321, 337, 700)),  # tiles of 16 rows, at most 20 programs
        *((rows, 1024) for rows in (1, 7, 8, 16, 17, 257)),  # tiles of a row, at most 32 programs
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


@pytest.mark.parametrize(
    ("block", "column_tiles", "rows", "programs", "stages"),
    [
        (64, 1, 100_000, 660, 3),  # five for each of an H100's multiprocessors
        (1024, 1, 100_000, 1056, 3),
        (4096, 1, 100_000, 264, 3),
        (8192, 1, 100_000, 132, 3),
        (16384, 1, 100_000, 132, 1),
        (1024, 64, 100_000, 16, 3),
        *[
            (1024, 1, 8000, 1000, 3),
            (64, 1, 1600, 100, 3),
            (1024, 1, 7, 1, 3),
            (1024, 1, 0, 1, 3),
            (1024, 2000, 99, 1, 3),
        ],
    ],
)
def test_programs_are_as_many_as_fit_and_each_has_at_least_eight_rows(block, column_tiles, rows, programs, stages):
    limits = launch.DeviceLimits(132, 32, True)
    found, options = norm.backward_geometry(block, column_tiles, rows, 6 * block, limits)
    assert (found, options["STAGES"]) == (programs, stages)


def test_sums_over_many_wide_rows_are_right(two_passes, draw, relative):
    """Two tiles of columns, at most 10 programs for each, and 11 tiles of 16 rows."""
    s, weight, dy = draw(171, 104), draw(104, mean=1.0), draw(171, 104)
    s64, mean = s.double(), s.double().mean(-1)
    rstd = ((s64 - mean[:, None]).square().mean(-1) + EPS).rsqrt()
    dx, sums = norm.norm_backward(dy, None, s, weight, torch.stack((rstd, mean)).float(), True, True, True)
    doubles = s64, weight.double(), torch.zeros(104, dtype=torch.float64), None
    _, _, gradients64 = run(*doubles, dy.double(), None, "layer", reference64)
    assert all(relative(ours, other) < 1e-6 for ours, other in zip((dx, *sums), gradients64, strict=True))


@pytest.mark.parametrize("width", [1, 12, 104, 1000])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1023, 1025, 2500])
def test_a_column_sum_is_right_for_any_number_of_rows(draw, relative, rows, width):
    x = draw(rows, width, mean=1.0)
    assert relative(norm.column_sum(x), x.double().sum(0)) < 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_operators_return_what_their_schemas_say(passes, draw, relative, rounding, kind, dtype):
    layer_norm = kind == "layer"
    x, residual, dy = (draw(2, 9, 72, mean=mean, dtype=dtype) for mean in (0.3, -1.0, 0.3))
    ds, weight, bias = draw(2, 9, 72, dtype=dtype), draw(72, mean=1.0), draw(72)
    y, s, statistics = torch.ops.prenorm.norm_forward(x, residual, weight, bias, layer_norm, EPS)
    assert y.shape == s.shape == x.shape and statistics.shape == (1 + layer_norm, 18)
    s64 = s.double().view(18, 72)
    mean64 = s64.mean(-1) if layer_norm else torch.zeros(18, dtype=torch.float64)
    rstd64 = ((s64 - mean64[:, None]).square().mean(-1) + EPS).rsqrt()
    assert relative(statistics[0], rstd64) < 3e-7
    assert not layer_norm or relative(statistics[1], mean64) < 1e-6
    y64, _, gradients64 = run(
        s64, weight.double(), bias.double(), torch.zeros_like(s64), *(t.double().view(18, 72) for t in (dy, ds)),
        kind, reference64,
    )  # fmt: skip
    assert relative(y.view(18, 72), y64) < rounding(dtype, y.numel())
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        dx, sums = torch.ops.prenorm.norm_backward(dy, ds, s, weight, statistics, layer_norm, *needs)
        assert dx.shape == x.shape and dx.dtype == dtype and sums.dtype == F32 and sums.shape == (sum(needs), 72)
        assert relative(dx.view(18, 72), gradients64[0]) < rounding(dtype, dx.numel())
        expected = [g for g, needed in zip(gradients64[1:3], needs, strict=True) if needed]
        assert all(relative(ours, other) < 1e-6 for ours, other in zip(sums, expected, strict=True))


def test_compiled_norms_equal_the_eager_ones_forward_and_backward(draw):
    x, dy = (draw(2, 9, 72, dtype=BF16) for _ in range(2))
    residual, ds, weight, bias = draw(2, 9, 72), draw(2, 9, 72), draw(72, mean=1.0), draw(72)

    def both(x, residual, weight, bias):
        y, s = gpu.normalize(x, weight, bias, residual, kind="layer", eps=EPS)
        return y, s, gpu.normalize(y, weight, kind="rms", eps=EPS)[0]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = []
    for function in (both, compiled):
        leaves = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
        outputs = function(*leaves)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, (dy, ds, -dy))))
    assert all(map(torch.equal, *results))


def test_a_frozen_weight_no_weight_and_no_rows_are_right(passes, draw, relative):
    x, weight, dy = draw(20, 96).requires_grad_(), draw(96, mean=1.0), draw(20, 96)
    for frozen in (weight, None):
        y, _ = gpu.normalize(x, frozen, kind="rms", eps=EPS)
        (dx,) = torch.autograd.grad(y, x, dy)
        x64 = x.detach().double().requires_grad_()
        y64, _ = reference64(x64, None if frozen is None else weight.double(), None, None, kind="rms", eps=EPS)
        assert relative(dx, torch.autograd.grad(y64, x64, dy.double())[0]) < 1e-6
    x, weight = torch.empty(0, 96, requires_grad=True), torch.ones(96, requires_grad=True)
    y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.empty(0, 96))
    assert y.shape == dx.shape == (0, 96) and torch.equal(dweight, torch.zeros(96))


def test_layernorm_of_a_large_mean_is_as_exact_as_its_input(passes, draw, relative):
    width = 512
    x, dy = draw(3, width, mean=1e4), draw(3, width)
    weight = torch.ones(width)
    y, _, (dx, _) = run(x, weight, None, None, dy, dy, "layer", gpu.normalize)
    y64, _, (dx64, _) = run(x.double(), weight.double(), None, None, dy.double(), None, "layer", reference64)
    # The mean is rounded to 2^-11 at most, half the distance of float32 numbers near 1e4, and the deviation is 1. In
    # two passes this happens for each of the 8 blocks. The last roundings are those of the sums.
    assert relative(y, y64) < 1.5e-3 and relative(dx, dx64) < 1.5e-3
    naive = (x.square().mean(-1) - x.mean(-1).square() - 1).abs().max()
    assert naive > 1  # the mean of squares minus the square of the mean would have no correct digit
    x = draw(3, width, mean=30.0, std=0.1, dtype=torch.bfloat16)
    y, _ = gpu.normalize(x, weight, kind="layer", eps=EPS)
    assert (
        relative(y, reference64(x.double(), None, None, None, kind="layer", eps=EPS)[0]) < 2**-8
    )  # few values, equal errors


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_zero_tiny_and_huge_rows_equal_the_reference(passes, draw, kind):
    x = draw(5, 104)
    x[0], x[1], x[2], x[3] = 0.0, x[1] * 1e-30, x[2] * 1e-3, x[3] * 1e15
    x[4] = 1e19 if kind == "rms" else x[4]  # whose squares overflow: torch gives 0 as well
    y, _ = gpu.normalize(x, kind=kind, eps=EPS)
    expected, _ = reference.normalize(x, kind=kind, eps=EPS)
    assert ((y - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()
    assert not y[0].any() and (kind == "layer" or not y[4].any()) and y[1:4].any(-1).all()
