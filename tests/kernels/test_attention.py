"""`attention` against a loop over positions in float64 with keys and values repeated explicitly; and `linear`.

Tolerances: float32: 1e-6. In bfloat16 the output's rounding (1.66e-3), that of the probabilities (1.66e-3, averaged
over the keys) and on a CPU that of the scores (relative 1.66e-3 of scores of a few units): 5e-3; gradients 1e-2.
Of every function: any input may be frozen and any output unused, and nothing given is written to.
"""

import pytest
import torch

from kernels import cpu

B, H, K, T, D = 2, 6, 2, 19, 64  # heads wide enough for the CPU's own path in bfloat16
DTYPES = pytest.mark.parametrize(("dtype", "out"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])


def definition(q, k, v):
    k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    rows = []
    for t in range(q.shape[2]):
        scores = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1) / D**0.5  # (B, H, t + 1)
        rows.append((torch.softmax(scores, -1)[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, dim=2)


@DTYPES
@pytest.mark.parametrize("lengths", [None, ((7, 12), (1, 18))], ids=["causal", "documents"])
def test_output_and_gradients_equal_the_float64_definition(kernel, draw, evaluate, relative, dtype, out, lengths):
    """Of each document as if it were alone, too."""
    inputs = [draw(B, T, heads, D).to(dtype).transpose(1, 2) for heads in (H, K, K)]
    upstream, mask = draw(B, H, T, D).to(dtype), None
    if lengths is not None:
        documents = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(row)) for row in lengths])
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()

    def exact(*inputs):
        rows = []
        for i, row in enumerate(lengths or [(T,)] * B):
            alone = zip(*(x[i : i + 1].split(row, 2) for x in inputs), strict=True)
            rows.append(torch.cat([definition(*document) for document in alone], 2))
        return torch.cat(rows)

    results = evaluate(lambda *inputs: kernel.attention(*inputs, mask), inputs, (upstream,))
    expected = evaluate(exact, [t.double() for t in inputs], (upstream.double(),))
    for i, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert relative(ours, theirs) < (out if i == 0 or dtype == torch.float32 else 1e-2)


@DTYPES
def test_a_query_sees_the_positions_of_its_mask_and_a_single_one_without_mask_all(kernel, draw, relative, dtype, out):
    k, v = (draw(B, K, T, D).to(dtype) for _ in range(2))
    for length, masks in ((5, B), (1, B), (1, None), (T, 1)):  # the last for all sequences
        q = draw(B, H, length, D).to(dtype)
        mask = draw(masks or 1, 1, length, T) > (0 if masks else -100)
        mask[..., 3] = True  # each query sees at least one position
        scores = q.double() @ k.double().repeat_interleave(H // K, dim=1).transpose(2, 3) / D**0.5
        p = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        expected = p @ v.double().repeat_interleave(H // K, dim=1)
        assert relative(kernel.attention(q, k, v, mask if masks else None), expected) < out


ANGLES, TARGETS, WEIGHT = torch.linspace(-2, 3, 40).view(5, 8), torch.arange(10), torch.tensor(0.3)
COS, SIN = ANGLES.cos(), ANGLES.sin()
CALLS = {  # a call, and the shapes of its inputs
    "norm": (lambda kernel, *t: kernel.normalize(*t, kind="layer", eps=1e-5), [(2, 5, 16), (16,), (16,), (2, 5, 16)]),
    "rotary": (lambda kernel, qkv: kernel.rotary(qkv, COS, SIN, 2, 1), [(1, 5, 64)]),
    "head norms": (lambda kernel, qkv, *g: kernel.rotary(qkv, COS, SIN, 2, 1, *g, 1e-3), [(1, 5, 64), (16,), (16,)]),
    "attention": (lambda kernel, q, k, v: kernel.attention(q, k, v), [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]),
    "swiglu": (lambda kernel, gate_up: kernel.swiglu(gate_up), [(2, 5, 48)]),
    "mlp": (lambda kernel, x, gate_up, down: kernel.swiglu_mlp(x, gate_up, down), [(2, 5, 16), (48, 16), (16, 24)]),
    "linear": (lambda kernel, x, weight, bias: kernel.linear(x, weight, bias), [(2, 5, 16), (24, 16), (24,)]),
    "losses": (lambda kernel, x, weight: kernel.linear_cross_entropy(x, weight, TARGETS), [(10, 16), (50, 16)]),
    "loss": (lambda kernel, *t: kernel.linear_cross_entropy(*t, TARGETS, token_weight=WEIGHT), [(10, 16), (50, 16)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_frozen_or_unused_has_no_gradient_and_changes_no_other(kernel, draw, name):
    function, shapes = CALLS[name]
    inputs = [draw(*shape) for shape in shapes]
    outputs = function(kernel, *inputs)
    upstream = [draw(*out.shape) for out in (outputs if isinstance(outputs, tuple) else [outputs])]
    given = [*inputs, *upstream]
    before = [tensor.clone() for tensor in given]

    def gradients(needed, upstream):
        some = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(inputs)]
        outputs = function(kernel, *some)
        pairs = zip(outputs if isinstance(outputs, tuple) else [outputs], upstream, strict=True)
        used = [(out, u) for out, u in pairs if u is not None and out.requires_grad]
        torch.autograd.backward(*zip(*used, strict=True))
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in some]

    everything = range(len(inputs))
    expected = gradients(everything, upstream)
    assert all(gradient.any() for gradient in expected)
    for i in everything:
        alone = gradients([i], upstream)
        assert [bool(gradient.any()) for gradient in alone] == [i == j for j in everything]
        assert torch.equal(alone[i], expected[i])
    for j in range(len(upstream)):
        used = [u if i == j else None for i, u in enumerate(upstream)]
        zeros = [u if i == j else torch.zeros_like(u) for i, u in enumerate(upstream)]
        assert all(map(torch.equal, gradients(everything, used), gradients(everything, zeros)))
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 24), (2, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layer_and_its_gradients_equal_the_float64_definition(draw, assert_exact, shape, transposed):
    weight = draw(shape[-1], 56).t() if transposed else draw(56, shape[-1])

    def twice(function):  # its gradient is not contiguous
        return lambda *inputs: function(*inputs).transpose(0, -1) * 2

    inputs, upstream = (draw(*shape), weight, draw(56)), draw(*shape[:-1], 56).transpose(0, -1)
    assert_exact(twice(cpu.linear), twice(lambda x, weight, bias: x @ weight.T + bias), inputs, (upstream,))
