"""`normalize` against float64 definitions, forward and backward; the Triton kernels for every size, dtype and stride.

Tolerances: float32 results pass through a few roundings of 2^-24 = 6e-8, and gradients subtract sums of the same size:
1e-6. One rounding to bfloat16 alone is a relative L2 error of 1.66e-3; one more, as in many implementations before the
weight, would be 2.34e-3 (`rounding` in conftest.py). Sums over rows are float32: 1e-6.
"""

import pytest
import torch

from kernels import cpu, gpu, launch, reference
from tests.kernels.conftest import triton_only

kinds = pytest.mark.parametrize("kind", ["rms", "layer"])

ROWS, WIDTH, EPS = 37, 96, 1e-3
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def definition(x, weight=None, bias=None, residual=None, *, kind, eps=EPS):
    """The textbook formulas, in the dtype of their inputs."""
    s = x if residual is None else x + residual
    if kind == "layer":
        y = (s - s.mean(-1, keepdim=True)) / (s.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    else:
        y = s / ((s**2).mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight) + (0 if bias is None else bias), s


def pair(function, kind, eps=EPS):
    """Ours and the definition, of one kind."""
    return lambda *a: function(*a, kind=kind, eps=eps), lambda *a: definition(*a, kind=kind, eps=eps)


@kinds
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("dtype", "shape"), [(F32, (ROWS, WIDTH)), (BF16, (3, 5, 64)), (BF16, (1, 1, 37))])
def test_output_and_gradients_equal_float64(kernel, draw, assert_exact, kind, with_bias, with_residual, dtype, shape):
    """With a residual, later blocks also use the stream, so that it has a gradient; on a CPU it is rounded twice.

    Gradients of the parameters are sums in float32, of the rounded stream.
    """
    x, residual = draw(*shape, dtype=dtype), draw(*shape, mean=-0.7, dtype=dtype) if with_residual else None
    weight, bias = draw(shape[-1], mean=1.0), draw(shape[-1]) if with_bias else None
    upstream = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype) if with_residual else None
    rounded = 3.6e-3 * (2 if shape == (1, 1, 37) else 1)

    def tolerance(result_dtype, count):
        return 1e-6 if result_dtype == F32 and (dtype == F32 or not with_residual) else rounded

    assert_exact(*pair(kernel.normalize, kind), (x, weight, bias, residual), upstream, tolerance)


@pytest.mark.parametrize(("dtype", "std"), [(BF16, 1.0), (F16, 3e4)])
@kinds
def test_half_precision_is_rounded_once_and_squares_do_not_overflow(kernel, draw, relative, rounding, kind, dtype, std):
    x, weight, bias = draw(512, WIDTH, std=std).clamp(-6e4, 6e4).to(dtype), draw(WIDTH, mean=1.0), draw(WIDTH)
    y, s = kernel.normalize(x, weight, bias, kind=kind, eps=EPS)
    assert y.dtype == dtype and s is x
    expected, _ = definition(x.double(), weight.double(), bias.double(), kind=kind)
    assert relative(y, expected) < rounding(dtype, y.numel())


@kinds
def test_a_weight_and_a_bias_of_two_dtypes_are_numbers(kernel, draw, relative, kind):
    x, weight, bias = draw(ROWS, WIDTH), draw(WIDTH, mean=1.0), draw(WIDTH, dtype=BF16)
    y, _ = kernel.normalize(x, weight, bias, kind=kind, eps=EPS)
    assert relative(y, definition(x.double(), weight.double(), bias.double(), kind=kind)[0]) < 1e-6


@kinds
def test_the_residual_sum_is_rounded_once_and_what_is_normalized_is_the_rounded_sum(kernel, draw, kind):
    x, residual = (draw(512, WIDTH, mean=mean, dtype=BF16) for mean in (0.3, -2.0))
    weight = draw(WIDTH, mean=1.0)
    y, s = kernel.normalize(x, weight, None, residual, kind=kind, eps=EPS)
    total = x.double() + residual.double()
    assert torch.equal(s, total.bfloat16())
    exact, unrounded = (definition(t, weight.double(), kind=kind)[0].bfloat16() for t in (s.double(), total))
    # float32 statistics round a few values differently; normalizing the exact sum rounds many differently
    assert (y != exact).float().mean() < 0.002 and (unrounded != exact).float().mean() > 0.05


@kinds
def test_zero_tiny_and_huge_rows_equal_the_reference(kernel, draw, kind):
    x = draw(5, 104)
    x[0], x[1], x[2], x[3] = 0.0, x[1] * 1e-30, x[2] * 1e-3, x[3] * 1e15
    x[4] = 1e19 if kind == "rms" else x[4]  # its squares overflow: torch gives 0 as well
    y, _ = kernel.normalize(x, kind=kind, eps=EPS)
    expected, _ = reference.normalize(x, kind=kind, eps=EPS)
    assert ((y - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()
    assert not y[0].any() and (kind == "layer" or not y[4].any()) and y[1:4].any(-1).all()


def test_layernorm_of_a_large_mean_is_as_exact_as_its_input(kernel, draw, assert_exact):
    """A mean near 1e4 is rounded to 2^-11 at most, and the deviation is 1: the mean of squares minus the square of the
    mean would have no correct digit."""
    inputs, upstream = (draw(3, 512, mean=1e4), torch.ones(512)), (draw(3, 512), None)
    assert_exact(*pair(kernel.normalize, "layer"), inputs, upstream, lambda *_: 1e-3)


@kinds
def test_on_a_cpu_any_number_of_threads_gives_equal_bits(draw, evaluate, kind):
    inputs, upstream = (draw(300, 64), draw(64, mean=1.0), draw(64), draw(300, 64)), (draw(300, 64), draw(300, 64))
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(evaluate(pair(cpu.normalize, kind)[0], inputs, upstream))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *results))


LAYOUTS = {  # six rows of 96 elements
    "transposed": lambda draw: draw(96, 6).t(),
    "four dimensions": lambda draw: draw(2, 1, 3, 192)[..., :96],
    "one number for all": lambda draw: draw(1, 1).expand(6, 96),
    "a sequence dimension behind the heads": lambda draw: draw(1, 3, 2, 96).transpose(1, 2),
    "an odd number of elements apart": lambda draw: draw(6, 105)[:, 1:97],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_and_upstream_gradients_may_have_any_strides(kernel, draw, evaluate, relative, layout):
    x, residual, *upstream = (LAYOUTS[layout](draw) for _ in range(4))
    ours, _ = pair(kernel.normalize, "layer")
    vectors = draw(96, mean=1.0), draw(96)
    results = evaluate(ours, (x, *vectors, residual), upstream)
    expected = evaluate(ours, (x.contiguous(), *vectors, residual.contiguous()), [u.contiguous() for u in upstream])
    for strided, other in zip(results, expected, strict=True):
        assert torch.equal(strided, other) or relative(strided, other.double()) < 1e-6


# Each dtype of x with each of the residual. Tiles of several rows and of one; widths that 16 divides and does not, up
# to the widest that the kernels take. The bias has the weight's dtype.
@triton_only
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
        ("layer", 1, 4096, F32, F32, F32),
        ("rms", 1, 8192, F16, BF16, F16),
    ],
)
def test_triton_results_of_any_rows_and_dtypes_are_rounded_once(
    draw, assert_exact, rounding, kind, rows, width, dtype, residual_dtype, weight_dtype
):
    """What is normalized is the rounded sum: here the sum is exact, because its terms are small multiples of 1/16."""
    sixteenths = lambda dtype: (draw(rows, width) * 8).round().clamp(-40, 40).div(16).to(dtype)  # noqa: E731
    x, residual = sixteenths(dtype), None if residual_dtype is None else sixteenths(residual_dtype)
    weight = None if weight_dtype is None else draw(width, mean=1.0, dtype=weight_dtype)
    bias = None if residual is None else draw(width, dtype=weight_dtype)
    upstream = draw(rows, width, dtype=dtype), None if residual is None else draw(rows, width, dtype=residual_dtype)
    few = 2 if width < 8 else 1  # few numbers minus their mean cancel: one more rounding
    stream = residual_dtype or dtype  # the gradient of x is that of s, in the dtype of s, first

    def tolerance(result_dtype, count):
        return few * rounding(result_dtype, count) + (rounding(stream, count) if stream != dtype == result_dtype else 0)

    assert_exact(*pair(gpu.normalize, kind), (x, weight, bias, residual), upstream, tolerance)


@triton_only
@pytest.mark.parametrize(("kind", "width", "dtype"), [("rms", 4097, F32), ("layer", 8200, BF16)])
def test_wider_rows_are_those_of_the_reference_for_both_norms(draw, evaluate, kind, width, dtype):
    x, residual, *upstream = (draw(2, width, dtype=dtype) for _ in range(4))
    inputs = x, draw(width, mean=1.0), None, residual
    results, expected = (evaluate(pair(module.normalize, kind)[0], inputs, upstream) for module in (gpu, reference))
    assert all(map(torch.equal, results, expected))


# Tiles of 16 rows, at most 20 programs; tiles of a row, at most 32 and 8 programs.
@triton_only
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (337, 64), (7, 1024), (65, 4096)])
def test_sums_over_rows_are_right_for_fewer_and_more_rows_than_programs(draw, assert_exact, monkeypatch, rows, width):
    assert launch.multiprocessors(torch.device("cpu")) == 4
    inputs, upstream = (draw(rows, width), draw(width, mean=1.0), draw(width)), (draw(rows, width), None)
    empty = torch.empty
    nan = lambda *shape, **options: empty(*shape, **options).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", nan)  # a partial sum that no program wrote is then NaN
    assert_exact(*pair(gpu.normalize, "layer"), inputs, upstream)
