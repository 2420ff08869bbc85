"""The CPU's functions against the reference in float64: values and gradients, float32 and bfloat16.

bfloat16 rounds with a relative error of 2^-9 uniformly distributed, 1.1e-3 in the root mean square and 1.7e-3 for
the results of a few roundings; each tolerance below says how many roundings it allows.
"""

import inspect

import pytest
import torch
from torch import Tensor

import kernels
from kernels import cpu, reference

ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1.8e-3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def normal(*shape: int, dtype: torch.dtype, mean: float = 0.3, std: float = 1.0) -> Tensor:
    return (torch.randn(shape) * std + mean).to(dtype).requires_grad_()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def compare(fast, exact, inputs: list[Tensor], tolerances: tuple[float, float]) -> None:
    """Outputs within the first tolerance of float64, gradients under random upstream gradients within the second."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = fast(*inputs), exact(*doubles)
    upstream = [torch.randn_like(tensor) + 0.1 for tensor in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all() and relative_error(a, b) < tolerances[0]
    gradients = torch.autograd.grad(found, inputs, [u.to(f.dtype) for u, f in zip(upstream, found, strict=True)])
    rounded = [u.to(f.dtype).double() for u, f in zip(upstream, found, strict=True)]
    for i, (a, b) in enumerate(zip(gradients, torch.autograd.grad(expected, doubles, rounded), strict=True)):
        assert a.dtype == inputs[i].dtype
        assert relative_error(a, b) < tolerances[1], f"gradient {i}: {relative_error(a, b):.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 1, 37), (2, 100, 256)])
def test_norms_and_their_gradients_equal_the_float64_reference(dtype, kind, bias, residual, shape):
    inputs = [normal(*shape, dtype=dtype), normal(shape[-1], dtype=torch.float32, mean=1.0)]
    inputs += [normal(shape[-1], dtype=torch.float32)] if bias else []
    inputs += [normal(*shape, dtype=dtype, mean=-0.2)] if residual else []

    def apply(function):
        def call(x, weight, *rest):
            b = rest[0] if bias else None
            return function(x, weight, b, rest[-1] if residual else None, kind=kind, eps=1e-5)

        return call

    # in bfloat16: the sum with the residual, the output, and in the backward pass the two gradients' sum
    factor = 1 if dtype == torch.float32 else 2
    tolerances = factor * ONE_ROUNDING[dtype], factor * ONE_ROUNDING[dtype]
    compare(apply(cpu.normalize), apply(reference.normalize), inputs, tolerances)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_gradient_of_the_norm_weight_is_summed_in_float32(kind):
    x, weight = normal(4096, 32, dtype=torch.bfloat16), normal(32, dtype=torch.float32, mean=1.0)
    y, _ = cpu.normalize(x, weight, kind=kind, eps=1e-5)
    upstream = (torch.randn(y.shape) + 0.5).to(y.dtype)
    found = torch.autograd.grad(y, weight, upstream)[0]
    doubles = x.detach().double(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(
        reference.normalize(*doubles, kind=kind, eps=1e-5)[0], doubles[1], upstream.double()
    )[0]
    assert relative_error(found, expected) < 1e-5  # 4096 float32 sums; in bfloat16 it is 5e-2


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_causal_attention_of_short_bfloat16_sequences_equals_the_float64_reference(heads, kv_heads):
    inputs = [normal(2, n, 33, 64, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
    # scores, probabilities and outputs are rounded: a score of size 8 is off by 2^-9 of itself, and its exponential by
    # that much absolutely; torch's own fused kernel, which keeps scores in float32, is within 2.5e-3
    compare(lambda *x: (cpu.CausalAttention.apply(*x),), lambda *x: (reference.attention(*x),), inputs, (6e-3, 1e-2))


def test_causal_attention_in_float32_is_exact_to_rounding():
    inputs = [normal(2, n, 17, 8, dtype=torch.float32) for n in (4, 2, 2)]
    compare(lambda *x: (cpu.CausalAttention.apply(*x),), lambda *x: (reference.attention(*x),), inputs, (1e-6, 2e-6))


def test_frozen_inputs_get_no_gradient_and_do_not_change_the_others():
    x, weight = normal(40, 16, dtype=torch.float32), normal(50, 16, dtype=torch.float32)
    targets, upstream = torch.randint(0, 50, (40,)), torch.randn(40) + 0.1
    both = torch.autograd.grad(cpu.linear_cross_entropy(x, weight, targets), (x, weight), upstream)
    for i, inputs in enumerate(((x, weight.detach()), (x.detach(), weight))):
        alone = torch.autograd.grad(cpu.linear_cross_entropy(*inputs, targets), inputs[i], upstream)[0]
        assert torch.equal(alone, both[i])
    upstream = torch.randn(40, 16) + 0.1
    gradients = []
    for weight in (torch.ones(16), torch.ones(16, requires_grad=True)):
        y, _ = cpu.normalize(x, weight, kind="rms", eps=1e-5)
        gradients.append(torch.autograd.grad(y, x, upstream)[0])
    assert torch.equal(*gradients) and gradients[0].any()


def test_inputs_and_upstream_gradients_are_never_written_to():
    qkv = normal(2, 8, 4 * 64, dtype=torch.bfloat16)
    cos = sin = torch.rand(8, 32)
    q, k, v = cpu.rotary(qkv, cos, sin, 2, 1)
    out = cpu.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    y, s = cpu.normalize(out, torch.ones(64), residual=out, kind="layer", eps=1e-5)
    upstream = torch.randn_like(y)
    before = qkv.detach().clone(), upstream.clone(), out.detach().clone()
    torch.autograd.grad((y, s), qkv, (upstream, upstream))
    assert torch.equal(qkv, before[0]) and torch.equal(upstream, before[1]) and torch.equal(out, before[2])


def test_a_cpu_tensor_goes_to_the_cpu_functions():
    assert kernels.implementation(torch.device("cpu")) is cpu
    assert kernels.implementation(torch.device("meta")) is reference


def test_every_public_function_takes_the_arguments_of_its_reference():
    for name in ("normalize", "rotary", "attention", "swiglu_mlp", "linear_cross_entropy"):
        expected = inspect.signature(getattr(reference, name))
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(cpu, name)) == expected
        assert kernels.gpu is None or inspect.signature(getattr(kernels.gpu, name)) == expected
