"""What only a GPU can show: compiled values, repeatability, CUDA graphs. `python -m pytest -m gpu`."""

import itertools

import pytest
import torch

from generation.steps import GpuDecodeStep
from kernels import gpu
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from tests.kernels import test_norm, test_rotary, test_swiglu, test_triton_loss

pytestmark = pytest.mark.gpu

if gpu is not None:
    from kernels import cross_entropy

GPU = torch.device("cuda")
HALF, DTYPES = torch.bfloat16, [torch.float32, torch.float16, torch.bfloat16]


def cases(smoke: tuple, *axes: list) -> list:
    """All combinations; the one that is `smoke` runs with `-m smoke` too, so that each kernel runs once."""
    marks = [pytest.mark.smoke]
    return [pytest.param(*case, marks=marks if case == smoke else []) for case in itertools.product(*axes)]


def normal(*shape, mean=0.3, std=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator(GPU).manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device=GPU) * std + mean).to(dtype)


@pytest.fixture
def assert_exact_and_repeatable(assert_exact, evaluate):
    """As `assert_exact`, and equal bit for bit in further runs."""

    def check(function, definition, inputs, upstream, *tolerance):
        first = assert_exact(function, definition, inputs, upstream, *tolerance)
        for _ in range(10):
            assert all(map(torch.equal, first, evaluate(function, inputs, upstream)))
        return first

    return check


SIZES = [(4099, 64), (4099, 512), (4099, 1000), (2048, 1024), (3001, 2048), (4096, 4096), (1000, 4104), (513, 8192)]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("size", "dtype"), [*cases(((2048, 1024), HALF), SIZES, [HALF]), ((64, 4096), torch.float32)])
def test_norms_are_within_one_rounding_of_float64(assert_exact_and_repeatable, kind, size, dtype):
    rows, width = size
    x, residual = (normal(rows, width, seed=i).mul(16).round().clamp(-64, 64).div(16).to(dtype) for i in range(2))
    weight, bias = normal(width, mean=1.0), normal(width)  # the sum of x and residual is exact
    upstream = [normal(rows, width, dtype=dtype, seed=i) for i in (2, 3)]
    ours, exact = test_norm.pair(gpu.normalize, kind, 1e-5)
    y, *_ = assert_exact_and_repeatable(ours, exact, (x, weight, bias, residual), upstream)
    alone, _ = ours(x[7:8], weight, bias, residual[7:8])
    assert torch.equal(alone, y[7:8])  # a row's result does not depend on the other rows


HEADS = [(32, 8, 128), (16, 8, 64), (3, 1, 80), (6, 2, 256)]


@pytest.mark.parametrize(
    ("dtype", "heads", "gap"), cases((HALF, HEADS[0], (0, False)), DTYPES, HEADS, [(0, False), (0, True), (3, True)])
)
def test_rotary_is_within_one_rounding_of_float64(assert_exact_and_repeatable, rounding, dtype, heads, gap):
    (heads, kv_heads, width), (gap, head_norms), batch, length = heads, gap, 3, 1000
    angles = normal(length, width // 2, std=300.0).double()
    inputs = [normal(batch, length, (heads + 2 * kv_heads) * width + gap, dtype=dtype)[..., gap:]]
    inputs += [normal(width, mean=1.0, seed=i) for i in range(2 * head_norms)]
    # as from attention, heads before positions, or with odd strides
    upstream = [normal(batch, n, length, width + gap, dtype=dtype, seed=n) for n in (heads, kv_heads, kv_heads + 1)]
    upstream = [u[:, :n, :, gap:].transpose(1, 2) for u, n in zip(upstream, (heads, kv_heads, kv_heads), strict=True)]

    def tolerance(result_dtype, count):
        return 3e-6 if count == width else rounding(result_dtype, count)  # gradients of weights: sums over all tokens

    pair = test_rotary.pair(gpu, angles, heads, kv_heads)
    assert_exact_and_repeatable(*pair, inputs, upstream, tolerance)


@pytest.mark.parametrize(
    ("dtype", "size"), cases((HALF, (1000, 2816)), DTYPES, [(4099, 704), (1000, 2816), (5000, 40), (300, 1030)])
)
def test_the_activation_is_within_one_rounding_of_float64(assert_exact_and_repeatable, rounding, dtype, size):
    rows, width = size
    inputs, upstream = [normal(rows, 2 * width, std=3.0, dtype=dtype)], [normal(rows, width + 3, dtype=dtype)[:, 3:]]
    pair = gpu.swiglu, test_swiglu.definition
    assert_exact_and_repeatable(*pair, inputs, upstream, lambda *size: 1.05 * rounding(*size))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_device_of_their_tensors():
    x = normal(33, 512, dtype=HALF)
    for function in (gpu.swiglu, lambda x: gpu.normalize(x, kind="rms", eps=1e-5)[0]):
        assert torch.equal(function(x.to("cuda:1")).cpu(), function(x).cpu())


@pytest.mark.parametrize(("dtype", "vocabulary"), cases((HALF, 5003), DTYPES, [5003, 50304]))
def test_the_loss_and_gradients_are_within_one_rounding_of_float64(relative, evaluate, monkeypatch, vocabulary, dtype):
    """Of the logits as the product rounded them, and of softmax - onehot rounded once; see test_triton_loss.py."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x, weight = normal(1500, 256, mean=0.05, dtype=dtype), normal(vocabulary, 256, mean=0.0, std=0.1)
    targets = torch.arange(1500, device=GPU) * 7 % vocabulary
    targets[::5] = -100
    token_weight = torch.tensor(0.37, device=GPU)
    logits = cross_entropy.allocate_logits(1500, vocabulary, x)[:, :vocabulary]  # the same product, bit for bit
    torch.mm(x, weight.to(dtype).T, out=logits)
    expected = test_triton_loss.rounded_reference(x, weight, targets, 0.37, logits)
    results = []
    for workspace in (2**30, 2**30, 1):
        monkeypatch.setattr(cross_entropy, "WORKSPACE", workspace)
        loss = lambda x, weight: gpu.linear_cross_entropy(x, weight, targets, token_weight)  # noqa: E731
        results.append(evaluate(loss, (x, weight), [torch.tensor(1.0)]))
        # cuBLAS may choose another order of sums for chunks, and then some logits round to their other neighbour.
        tolerances = (1e-5, 1e-5, 1e-5) if dtype == torch.float32 else (1e-5, 1.8e-3, 3e-4)
        if workspace == 1 and dtype != torch.float32:
            tolerances = 1e-3, 4e-3, 4e-3
        for ours, exact, tolerance in zip(results[-1], expected, tolerances, strict=True):
            assert relative(ours, exact) < tolerance
    assert all(map(torch.equal, results[0], results[1]))


CONFIG = ModelConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, qk_norm=True,
)  # fmt: skip


def test_a_training_step_can_be_captured_in_a_cuda_graph_and_compiled_without_graph_breaks(relative):
    decoder = Decoder(CONFIG, seed=1, compute_dtype=HALF).to(GPU)
    tokens, token_weight = torch.randint(1000, (2, 65), device=GPU), torch.tensor(0.37, device=GPU)

    def step(forward=decoder):
        loss = forward(tokens[:, :-1], tokens[:, 1:], token_weight=token_weight)
        loss.backward()
        return loss

    def grads():
        gradients = [p.grad.clone() for p in decoder.parameters()]
        decoder.zero_grad(set_to_none=True)
        return gradients

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


@pytest.mark.parametrize("lengths", [*cases(([37],), [[37]]), [37, 5, 20], [3, 37, 5, 20, 1, 9, 36, 2]])
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
    step = GpuDecodeStep(decoder, caches[1])
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
    states = {}
    for batch in range(1, 9):
        cache = KeyValueCache(CONFIG, batch, room, device=GPU, dtype=HALF)
        for i in range(batch):  # one by one, so that the prefill is the same for every batch
            alone = KeyValueCache(CONFIG, 1, room, device=GPU, dtype=HALF)
            decoder(prompt[i : i + 1], cache=alone)
            cache.keys[:, i], cache.values[:, i] = alone.keys[:, 0], alone.values[:, 0]
        cache.length = 150
        step = GpuDecodeStep(decoder, cache)
        step(token[:batch], None)
        assert step.unavailable_reason is None
        states[batch] = step.hidden.clone(), step.qkv.clone()
    for hidden, qkv in states.values():  # what the last layer's launches write, before cuBLAS's head
        assert torch.equal(hidden, states[8][0][: len(hidden)]) and torch.equal(qkv, states[8][1][: len(qkv)])
