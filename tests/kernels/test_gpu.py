"""What only a GPU can show: compiled values, repeatability, huge rows, CUDA graphs. `python -m pytest -m gpu`."""

import pytest
import torch

from kernels import gpu, reference
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.fused_decode import DecodeStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or gpu is None, reason="needs a CUDA device and Triton"),
]

if gpu is not None:
    from kernels import cross_entropy, swiglu

GPU = torch.device("cuda")
HALF = torch.bfloat16


def normal(*shape, mean=0.3, std=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator(GPU).manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device=GPU) * std + mean).to(dtype)


def gradients(function, inputs, upstream):
    """Outputs and gradients of all inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [u.to(o.dtype) for u, o in zip(upstream, out, strict=True)]
    return [o.detach() for o in out], torch.autograd.grad(out, inputs, upstream)


def assert_close(function, exact, inputs, upstream, relative, tolerances):
    """Outputs and gradients within tolerances of the same in float64; returns them."""
    found = gradients(function, inputs, upstream)
    expected = gradients(exact, [t.double() for t in inputs], [u.double() for u in upstream])
    ours, theirs = [*found[0], *found[1]], [*expected[0], *expected[1]]
    for i, (a, b, tolerance) in enumerate(zip(ours, theirs, tolerances, strict=True)):
        assert relative(a, b) < tolerance, f"{i}: {relative(a, b):.2e}"
    return ours


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *[(4099, 64), (4099, 512), (4099, 1000), (2048, 1024), (3001, 2048), (4096, 4096), (1000, 4104)],
        (513, 8192),
    ],
)
def test_norms_are_within_one_rounding_of_float64(relative, kind, rows, width):
    x, residual, dy, ds = (normal(rows, width, dtype=HALF, seed=i) for i in range(4))
    x, residual = ((t.float() * 16).round().clamp(-64, 64).div(16).to(HALF) for t in (x, residual))  # an exact sum
    weight, bias = normal(width, mean=1.0), normal(width)

    def ours(x, weight, bias, residual):
        return gpu.normalize(x, weight, bias, residual, kind=kind, eps=1e-5)

    def exact(x, weight, bias, residual):
        s = x + residual
        c = s - s.mean(-1, keepdim=True) if kind == "layer" else s
        return c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias, s

    one = 1.75e-3
    inputs, upstream = (x, weight, bias, residual), (dy, ds)
    first = assert_close(ours, exact, inputs, upstream, relative, (one, 1e-9, one, 1e-6, 1e-6, one))
    for _ in range(20):
        again = gradients(ours, inputs, upstream)
        assert all(map(torch.equal, first, [*again[0], *again[1]]))
    alone, _ = gpu.normalize(x[7:8], weight, bias, residual[7:8], kind=kind, eps=1e-5)
    assert torch.equal(alone, first[0][7:8])  # a row's result does not depend on the other rows


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_float32_rows_of_the_maximum_width_keep_their_digits(relative, kind):
    inputs, upstream = (normal(64, 4096), normal(4096, mean=1.0)), (normal(64, 4096, seed=1),)

    def exact(x, weight):
        c = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        return c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    ours = lambda x, w: gpu.normalize(x, w, kind=kind, eps=1e-5)[0]  # noqa: E731
    assert_close(ours, exact, inputs, upstream, relative, [1e-6] * 3)


def test_tensors_may_have_more_than_2_to_the_31_elements(relative):
    rows, width = 2**31 // 1024 + 3, 1024
    x = torch.empty(rows, width, device=GPU, dtype=HALF).normal_()
    y, _ = gpu.normalize(x, kind="rms", eps=1e-5)
    expected, _ = reference.normalize(x[-4:], kind="rms", eps=1e-5)
    assert relative(y[-4:], expected.double()) < 1.75e-3
    hidden = swiglu.swiglu_forward(x)
    gate, up = x[-4:].double().chunk(2, -1)
    assert relative(hidden[-4:], gate * torch.sigmoid(gate) * up) < 1.8e-3


@pytest.mark.parametrize(("gap", "head_norms"), [(0, False), (0, True), (3, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 128), (16, 8, 64), (3, 1, 80), (6, 2, 256)])
@pytest.mark.parametrize(("dtype", "one"), [(torch.float32, 1e-6), (torch.float16, 2.2e-4), (HALF, 1.75e-3)])
def test_rotary_is_within_one_rounding_of_float64(relative, head_norms, gap, heads, kv_heads, width, dtype, one):
    batch, length = 3, 1000
    angles = normal(length, width // 2, std=300.0).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    inputs = [normal(batch, length, (heads + 2 * kv_heads) * width + gap, dtype=dtype)[..., gap:]]
    inputs += [normal(width, mean=1.0, seed=i) for i in range(2 * head_norms)]
    # as from attention, heads before positions, or with odd strides
    upstream = [normal(batch, n, length, width + gap, dtype=dtype, seed=n) for n in (heads, kv_heads, kv_heads + 1)]
    upstream = [u[:, :n, :, gap:].transpose(1, 2) for u, n in zip(upstream, (heads, kv_heads, kv_heads), strict=True)]

    def ours(qkv, *weights):
        return gpu.rotary(qkv, cos, sin, heads, kv_heads, *(weights or (None, None)), 1e-5)

    def exact(qkv, *weights):
        q, k, v = qkv.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), dim=2)
        if weights:
            pairs = zip((q, k), weights, strict=True)
            q, k = (x * weight / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x, weight in pairs)
        turn = torch.complex(cos.double(), sin.double())[:, None]
        turned = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
        return *(torch.cat((z.real, z.imag), -1) for z in turned), v

    tolerances = [one, one, 1e-9, one, 3e-6, 3e-6][: 4 + 2 * head_norms]  # sums of the weights over all tokens
    first = assert_close(ours, exact, inputs, upstream, relative, tolerances)
    for _ in range(5):
        again = gradients(ours, inputs, upstream)
        assert all(map(torch.equal, first, [*again[0], *again[1]]))


@pytest.mark.parametrize(("dtype", "one"), [(torch.float32, 1e-6), (torch.float16, 2.2e-4), (HALF, 1.75e-3)])
@pytest.mark.parametrize(("rows", "width"), [(4099, 704), (1000, 2816), (5000, 40), (300, 1030)])
def test_the_activation_is_within_one_rounding_of_float64(relative, rows, width, dtype, one):
    gate_up, dhidden = normal(rows, 2 * width, std=3.0, dtype=dtype), normal(rows, width + 3, dtype=dtype)[:, 3:]
    doubles = gate_up.double().requires_grad_()
    gate, up = doubles.chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    (gradient,) = torch.autograd.grad(expected, doubles, dhidden.double())
    hidden = swiglu.swiglu_forward(gate_up)
    dgate_up, again = swiglu.swiglu_backward(dhidden, gate_up)
    assert torch.equal(hidden, again)
    assert relative(hidden, expected.detach()) < 1.05 * one and relative(dgate_up, gradient) < 1.05 * one


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_device_of_their_tensors():
    x = normal(33, 512, dtype=HALF)
    for function in (swiglu.swiglu_forward, lambda x: gpu.normalize(x, kind="rms", eps=1e-5)[0]):
        assert torch.equal(function(x.to("cuda:1")).cpu(), function(x).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
@pytest.mark.parametrize("vocabulary", [5003, 50304])
def test_the_loss_and_its_gradients_are_within_one_rounding_of_float64(relative, monkeypatch, vocabulary, dtype):
    """Of the logits as the product rounded them, and of softmax - onehot rounded once; see test_triton_loss.py."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x, weight = normal(1500, 256, mean=0.05, dtype=dtype), normal(vocabulary, 256, mean=0.0, std=0.1)
    targets = torch.arange(1500, device=GPU) * 7 % vocabulary
    targets[::5] = -100
    weights = normal(1500)
    rounded = weight.to(dtype).double()
    logits = cross_entropy.allocate_logits(1500, vocabulary, x)[:, :vocabulary]  # the same product, bit for bit
    logits = torch.mm(x, weight.to(dtype).T, out=logits).double()
    counted = targets != -100
    labels = targets.clamp(min=0)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none") * counted
    factor = weights.double() * counted
    delta = torch.softmax(logits, -1)
    delta[torch.arange(1500), labels] -= 1
    largest = factor.abs().max()
    delta = (delta * (factor / largest)[:, None]).to(dtype).double() * largest
    expected = (losses * factor).sum(), delta @ rounded, delta.T @ x.double()
    first = None
    for workspace in (2**30, 2**30, 1):  # the first two must be equal bit for bit
        monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)
        given = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = gpu.linear_cross_entropy(*given, targets, token_weights=weights)
        found = loss.detach(), *torch.autograd.grad(loss, given)
        # cuBLAS may choose another order of sums for chunks, and then some logits round to their other neighbour.
        tolerances = (1e-5, 1e-5, 1e-5) if dtype == torch.float32 else (1e-5, 1.8e-3, 3e-4)
        if workspace == 1 and dtype != torch.float32:
            tolerances = 1e-3, 4e-3, 4e-3
        for ours, exact, tolerance in zip(found, expected, tolerances, strict=True):
            assert relative(ours, exact) < tolerance
        first = first or found
        assert workspace == 1 or all(map(torch.equal, first, found))


def test_a_label_that_is_no_class_gives_nan_and_no_illegal_access():
    x, weight = normal(6, 64, dtype=HALF).requires_grad_(), normal(1000, 64, dtype=HALF)
    targets = torch.tensor([1000, 2**62, -1, -100, 5, 2**32 + 5], device=GPU)
    loss = gpu.linear_cross_entropy(x.detach(), weight, targets)
    gpu.linear_cross_entropy(x, weight, targets, token_weights=torch.ones(6, device=GPU)).backward()
    torch.cuda.synchronize()
    assert loss.isnan().tolist() == [True, True, True, False, False, True]
    assert x.grad.isnan().any(-1).tolist() == loss.isnan().tolist()


CONFIG = ModelConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, qk_norm=True,
)  # fmt: skip


def test_a_training_step_can_be_captured_in_a_cuda_graph_and_compiled_without_graph_breaks(relative):
    decoder = Decoder(CONFIG, seed=1, compute_dtype=HALF).to(GPU)
    tokens = torch.randint(1000, (2, 65), device=GPU)
    weights = normal(2, 64)

    def step(forward=decoder):
        loss = forward(tokens[:, :-1], tokens[:, 1:], token_weights=weights)
        loss.backward()
        return loss

    def grads():
        found = [p.grad.clone() for p in decoder.parameters()]
        decoder.zero_grad(set_to_none=True)
        return found

    expected = step(), grads()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    decoder.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for p in decoder.parameters():
        p.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, expected[0])
    for captured, eager in zip(grads(), expected[1], strict=True):
        assert relative(captured, eager.double()) < 1e-6  # attention's backward pass may sum in another order

    loss = step(torch.compile(decoder, fullgraph=True))
    assert relative(loss, expected[0].double()) < 5e-3
    for compiled, eager in zip(grads(), expected[1], strict=True):
        assert relative(compiled, eager.double()) < 3e-2


@pytest.mark.parametrize("lengths", [[37], [37, 5, 20], [3, 37, 5, 20, 1, 9, 36, 2]])
@torch.inference_mode()
def test_a_graph_of_the_decoding_step_gives_the_decoders_logits_at_every_position(relative, lengths):
    decoder = Decoder(CONFIG, seed=1, compute_dtype=torch.float32).to(GPU).eval()
    torch.backends.cuda.matmul.allow_tf32 = False
    padding = torch.tensor([max(lengths) - n for n in lengths], device=GPU)
    padding = padding if padding.any() else None
    caches = [KeyValueCache(CONFIG, len(lengths), room, device=GPU) for room in (200, 500)]  # of one and four ranges
    prompt = torch.randint(1000, (len(lengths), max(lengths)), device=GPU)
    for cache in caches:
        decoder(prompt, cache=cache, padding=padding)
    step = DecodeStep(decoder, caches[1])
    for _ in range(160):
        token = torch.randint(1000, (len(lengths), 1), device=GPU)
        expected = decoder(token, cache=caches[0], padding=padding)
        assert relative(step(token, padding), expected.double()) < 2e-5
    assert step.graph is not None and step.unavailable_reason is None


@pytest.mark.parametrize("room", [200, 1000])
@torch.inference_mode()
def test_a_decoding_step_in_bfloat16_gives_a_sequence_the_same_bits_in_a_batch_of_any_size(room):
    decoder = Decoder(CONFIG, seed=1, compute_dtype=HALF).to(GPU).eval()
    prompt = torch.randint(1000, (8, 150), device=GPU)
    token = torch.randint(1000, (8, 1), device=GPU)
    found = {}
    for batch in range(1, 9):
        cache = KeyValueCache(CONFIG, batch, room, device=GPU, dtype=HALF)
        for i in range(batch):  # one by one, so that the prefill is the same for every batch
            alone = KeyValueCache(CONFIG, 1, room, device=GPU, dtype=HALF)
            decoder(prompt[i : i + 1], cache=alone)
            cache.keys[:, i], cache.values[:, i] = alone.keys[:, 0], alone.values[:, 0]
        cache.length = 150
        step = DecodeStep(decoder, cache)
        step(token[:batch], None)
        assert step.unavailable_reason is None
        found[batch] = step.hidden.clone(), step.qkv.clone()
    for hidden, qkv in found.values():  # what the last layer's launches write, before cuBLAS's head
        assert torch.equal(hidden, found[8][0][: len(hidden)]) and torch.equal(qkv, found[8][1][: len(qkv)])
