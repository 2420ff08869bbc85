"""The Triton loss beyond the tests of all implementations: its rounding, chunks, labels, infinities and precision.

Expected values are float64 functions of the logits as the product rounded them, and of the gradient of the logits
rounded once more. What is left: float32 sums of a few hundred terms, 1e-6 for losses. A float32 gradient of the logits
may fall on the other side of a rounding boundary than the float64 one: one in ten thousand elements, each by 2^-8 in
bfloat16, which is 4e-5 of the weight's float32 gradient. dx is rounded once more.
"""

import pytest
import torch
from torch.nn import functional as F

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

if gpu is not None:
    from kernels import cross_entropy

V, D = 301, 24  # two blocks of 256 classes, and no multiple of 8


def make_inputs(draw, rows: int, dtype=torch.bfloat16, mean: float = 0.0):
    """x with a row stride that 8 does not divide, weight whose logits have a mean, targets at the edges of blocks."""
    x, weight = draw(rows, D + 3).to(dtype)[:, :D], draw(V, D, mean=0.05, std=0.3)
    x[:, 0] = 1
    weight[:, 0] += mean
    targets = torch.arange(rows) * 7 % V
    edges = torch.tensor([0, 255, 256, V - 1, -100])[:rows]
    targets[: len(edges)] = edges
    targets[11::5] = -100
    return x, weight, targets


def rounded_reference(x, weight, targets, token_weight, logits=None):
    """Weighted loss, dx and dweight in float64, of logits and of their gradient, each rounded once to x's dtype."""
    weight = weight.to(x.dtype)
    logits = (torch.mm(x, weight.T) if logits is None else logits).double()
    loss = F.cross_entropy(logits, targets, reduction="sum") * token_weight
    delta = torch.softmax(logits, -1) - F.one_hot(targets.clamp(min=0), len(weight))
    delta = (delta * (targets != -100)[:, None]).to(x.dtype).double() * token_weight
    return loss, delta @ weight.double(), delta.T @ x.double()


def run(evaluate, x, weight, targets, token_weight, upstream=1.0):
    """The weighted sum of the losses, dx and dweight."""
    loss = lambda x, weight: gpu.linear_cross_entropy(x, weight, targets, torch.tensor(token_weight))  # noqa: E731
    return evaluate(loss, (x, weight), [torch.tensor(upstream)])


@pytest.fixture
def assert_rounded_once(relative, rounding):
    def check(results, expected):
        dtype = results[1].dtype
        flips = 0 if dtype == torch.float32 else 1e-4
        assert relative(results[0], expected[0]) < 1e-6
        assert relative(results[1], expected[1]) < rounding(dtype, results[1].numel()) + flips
        assert relative(results[2], expected[2]) < 1e-6 + flips

    return check


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 0.0), (torch.bfloat16, -50.0), (torch.float16, 50.0)])
def test_logits_their_gradient_and_dx_are_rounded_once(draw, evaluate, assert_rounded_once, dtype, mean):
    x, weight, targets = make_inputs(draw, 37, dtype, mean)
    for token_weight in (0.37, -2.1):
        inputs = x, weight, targets, token_weight
        assert_rounded_once(run(evaluate, *inputs), rounded_reference(*inputs))


@pytest.mark.parametrize("rows", [1, 8, 9, 20])
def test_chunks_change_nothing(draw, evaluate, assert_rounded_once, monkeypatch, rows):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda rows, vocabulary, itemsize: 8)
    inputs = *make_inputs(draw, rows), 0.37
    assert_rounded_once(run(evaluate, *inputs), rounded_reference(*inputs))


def test_without_a_counted_token_losses_and_gradients_are_0(draw, evaluate):
    x, weight, _ = make_inputs(draw, 9)
    weight[:, 0] = torch.where(torch.arange(V) % 2 == 0, float("nan"), float("-inf"))  # ignored rows are not read
    targets = torch.full((9,), -100)
    assert not run(evaluate, x, weight, targets, 0.37)[0].any()
    logits, loss = torch.full((9, 304), float("nan")), torch.full((9,), float("nan"))
    cross_entropy.cross_entropy(logits[:, :V], targets, loss, gradient=True)
    assert not logits.any() and not loss.any()
    _, dx, dweight = run(evaluate, x[:0], weight, targets[:0], 0.37)
    assert dx.shape == (0, D) and dweight.shape == (V, D) and not dweight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_second_backward_pass_gives_equal_gradients_and_leaves_those_of_the_first(draw, relative, dtype):
    x, weight, targets = make_inputs(draw, 9, dtype)
    inputs = x.requires_grad_(), weight.to(dtype).requires_grad_()  # the gradient has the weight's dtype
    loss = gpu.linear_cross_entropy(*inputs, targets, torch.tensor(-1.3))
    upstream = torch.tensor(0.37)
    first = torch.autograd.grad(loss, inputs, upstream, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    plain = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, upstream)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, copies))
    for scaled, gradient in zip(first, plain, strict=True):
        assert scaled.dtype == dtype
        assert relative(scaled, gradient.double() * 0.37) < (1e-6 if dtype == torch.float32 else 3e-3)  # two roundings


def test_float16_keeps_a_small_weight_under_a_scaler(draw, evaluate, relative, rounding):
    """1/N of a large batch times a small probability is below 6e-8, the smallest number of float16."""
    x, weight, targets = make_inputs(draw, 37, torch.float16)
    _, *gradients = run(evaluate, x, weight, targets, 1e-7, upstream=2.0**20)
    _, dx, dweight = rounded_reference(x, weight, targets, 1e-7)
    assert relative(gradients[0], dx * 2.0**20) < rounding(torch.float16, dx.numel()) + 1e-4
    assert relative(gradients[1], dweight * 2.0**20) < 1e-4


def loss_and_gradient(logits, targets):
    """One call of the kernel on a copy of logits (n, V): losses, and softmax - onehot."""
    buffer = cross_entropy.allocate_logits(*logits.shape, logits)
    buffer[:, logits.shape[1] :] = float("-inf")
    view = buffer[:, : logits.shape[1]]
    view.copy_(logits)
    loss, alone = torch.full((2, len(logits)), float("nan"))
    cross_entropy.cross_entropy(view, targets, loss, gradient=True)
    assert not buffer[loss.isfinite(), logits.shape[1] :].any()  # some products read the padding: 0 times NaN is NaN
    buffer[:, logits.shape[1] :], gradient = float("-inf"), view.clone()
    view.copy_(logits)
    cross_entropy.cross_entropy(view, targets, alone, gradient=False)
    assert torch.equal(view.view(torch.int32), logits.view(torch.int32))
    assert torch.equal(alone.isnan(), loss.isnan()) and torch.equal(alone.nan_to_num(), loss.nan_to_num())
    return loss, gradient


@pytest.mark.parametrize("width", [8, 13, 257, 4099, 140_003])
def test_rows_of_any_length_with_logits_of_80_are_exact_to_float32(draw, width):
    logits = draw(4, width, std=1.0) * torch.tensor([[1.0], [30.0], [-30.0], [1.0]])
    logits[0, width // 2], logits[1, -1], logits[2, 0] = 80.0, -80.0, 80.0
    logits[3] -= 90  # all below 0: sums that begin at a maximum of 0 would vanish
    targets = torch.tensor([width // 2, width - 1, 5, 0])
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (delta,) = torch.autograd.grad(expected.sum(), exact)
    loss, gradient = loss_and_gradient(logits, targets)
    for row in range(4):
        tolerance = 2e-7 * logits[row].abs().max().item()
        assert loss[row].item() == pytest.approx(expected[row].item(), rel=1e-6, abs=tolerance)
        assert (gradient[row] - delta[row]).norm() < 1e-6 * delta[row].norm() + 3e-7


def test_blocks_of_minus_infinity_have_no_probability_wherever_they_are():
    logits = torch.full((5, 600), float("-inf"))  # blocks of 256
    logits[0, 512:], logits[1, :256], logits[2, 256:512], logits[3, 599] = torch.randn(88), 1.5, -2.0, -3e38
    targets = torch.tensor([599, 3, 300, 599, 0])
    expected = F.cross_entropy(logits, targets, reduction="none")
    loss, delta = loss_and_gradient(logits, targets)
    assert torch.allclose(loss[:4], expected[:4], rtol=1e-6) and loss[4].isnan() and expected[4].isnan()
    onehot = F.one_hot(targets, 600)
    assert torch.allclose(delta[:4], torch.softmax(logits[:4], -1) - onehot[:4], atol=1e-7)
    assert delta[4].isnan().all()


@pytest.mark.parametrize("width", [300, 304])
def test_a_label_that_is_no_class_gives_nan_and_leaves_other_rows_alone(draw, width):
    wrong = [width, width + 3, 511, 512, -1, -99, -101, 2**31, 2**32 + 5, -(2**32) + 5, 2**62]
    targets = torch.tensor([*wrong, -100, 5])
    logits = draw(len(targets), width)
    loss, delta = loss_and_gradient(logits, targets)
    assert loss[:-2].isnan().all() and delta[:-2].isnan().all()
    assert loss[-2] == 0 and not delta[-2].any()
    assert loss[-1].item() == pytest.approx(F.cross_entropy(logits[-1], targets[-1]).item(), rel=1e-6)
    assert delta[-1].isfinite().all()
