"""The decoder: against a second, plain implementation, with a cache, with padding, compiled and checkpointed.

Tolerances between two float32 orders of the same sums, through three layers: 2e-6, as against transformers.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import kernels
from model.attention import attention_mask
from model.cache import KeyValueCache
from model.config import GATED, NORMS, PLACEMENTS
from model.decoder import Decoder, attend_to_previous_token


def tolerance(decoder):
    """Twenty times larger for prms, whose statistic comes from three elements, which may all be small at once."""
    return 2e-6 * (20 if decoder.config.norm == "prms" else 1)


VARIANTS = {
    "layer without bias, untied": {"norm": "layer", "norm_bias": False, "tie_word_embeddings": False},
    "rms with bias": {"norm_bias": True},
    "biases and qk norm": {"attention_bias": True, "attention_output_bias": True, "qk_norm": True},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 20},
    "no grouping": {"num_key_value_heads": 6},
    "post": {"norm_placement": "post", "norm": "layer"},
    "sandwich": {"norm_placement": "sandwich", "norm": "offset"},
    "output": {"norm_placement": "output", "norm": "derf"},
    **{norm: {"norm": norm} for norm in NORMS},
    **{mlp: {"mlp": mlp} for mlp in GATED},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def decoder(request, make_decoder):
    """Each variant of the decoder."""
    return make_decoder(**request.param).eval()


def double_weights(decoder):
    """Copies of a decoder's parameters and buffers in float64, by name."""
    return {name: tensor.detach().double() for name, tensor in decoder.state_dict().items()}


def plain_logits(config, weights, tokens, norm_formula):
    """The same model written a second time: in float64, with loops, complex rotations and explicitly repeated keys."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.resolved_head_dim
    length = len(tokens)

    def norm(x, name):
        tensors = {key.removeprefix(f"{name}."): t for key, t in weights.items() if key.startswith(f"{name}.")}
        return norm_formula(x, config, tensors)

    def rotate(x):  # (T, heads, d)
        half = width // 2
        angle = torch.arange(length)[:, None] * config.rope_theta ** (-torch.arange(half).double() / half)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
        return torch.cat((z.real, z.imag), -1)

    def head_norm(x, name):
        if not config.qk_norm:
            return x
        return x / ((x**2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def attention(x, name):
        qkv = x @ weights[f"{name}.qkv_proj.weight"].T + weights.get(f"{name}.qkv_proj.bias", 0)
        q, k, v = qkv.split((heads * width, kv_heads * width, kv_heads * width), -1)
        q = rotate(head_norm(q.reshape(length, heads, width), f"{name}.q_norm"))
        k = rotate(head_norm(k.reshape(length, kv_heads, width), f"{name}.k_norm"))
        v = v.reshape(length, kv_heads, width)
        outputs = torch.empty(length, heads, width, dtype=torch.float64)
        for head in range(heads):
            group = head // (heads // kv_heads)
            for t in range(length):
                probabilities = torch.softmax(k[: t + 1, group] @ q[t, head] / width**0.5, 0)
                outputs[t, head] = probabilities @ v[: t + 1, group]
        return outputs.flatten(1) @ weights[f"{name}.o_proj.weight"].T + weights.get(f"{name}.o_proj.bias", 0)

    def activation(x):
        normal_cdf = 0.5 * (1 + torch.erf(x / 2**0.5))
        kinds = {"swiglu": x * torch.sigmoid(x), "glu": torch.sigmoid(x), "reglu": x * (x > 0), "geglu": x * normal_cdf}
        return {**kinds, "relu": kinds["reglu"], "gelu": kinds["geglu"]}[config.mlp]

    def mlp(x, name):
        if config.mlp in ("relu", "gelu"):
            hidden = activation(x @ weights[f"{name}.up_proj.weight"].T)
        else:
            gate, up = (x @ weights[f"{name}.gate_up_proj.weight"].T).chunk(2, -1)
            hidden = activation(gate) * up
        return hidden @ weights[f"{name}.down_proj.weight"].T

    x = weights["embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        layer, place = f"layers.{i}.", config.norm_placement
        for block, name, before, after in (
            (attention, "self_attn", "input_layernorm", "attention_output_layernorm"),
            (mlp, "mlp", "post_attention_layernorm", "mlp_output_layernorm"),
        ):
            y = norm(x, layer + before) if place in ("pre", "sandwich") else x
            y = block(y, layer + name)
            x = x + (norm(y, layer + after) if place in ("sandwich", "output") else y)
            x = norm(x, layer + before) if place == "post" else x
    if config.norm_placement != "post":
        x = norm(x, "norm")
    return x @ weights.get("lm_head.weight", weights["embed_tokens.weight"]).T


@torch.no_grad()
def test_logits_equal_those_of_a_plain_float64_implementation(decoder, tokens, relative, norm_formula):
    logits = decoder(tokens)
    assert logits.dtype == torch.float32
    for row, ids in zip(logits, tokens, strict=True):
        expected = plain_logits(decoder.config, double_weights(decoder), ids, norm_formula)
        assert relative(row, expected) < tolerance(decoder)


def test_gradients_equal_those_of_the_plain_float64_implementation(decoder, tokens, relative, norm_formula):
    """Tolerance: forward and backward pass have three times the products of the forward pass.

    The gradient of a scalar (dyt, derf) is a sum over tokens and channels that cancels, to 1/360 in one case. So its
    error is relative to the sum of the sizes of its terms, which a weight for each token and channel has as gradient.
    The slope exp(-u^2) of derf has 2 u^2 times the relative error of u: up to 18, since beyond u = 3 it is almost 0.
    """
    upstream = torch.randn(24, 97, generator=torch.Generator().manual_seed(3))
    decoder(tokens[:1]).backward(upstream[None])
    weights = {
        name: (tensor.expand(24, 48).clone() if tensor.ndim == 0 else tensor).requires_grad_()
        for name, tensor in double_weights(decoder).items()
    }
    plain_logits(decoder.config, weights, tokens[0], norm_formula).backward(upstream.double())
    for name, parameter in decoder.named_parameters():
        actual, terms = parameter.grad, weights[name].grad
        error = relative(actual, terms) if actual.ndim else (actual - terms.sum()) / terms.abs().sum()
        assert abs(error) < 3 * tolerance(decoder) * (18 if decoder.config.norm == "derf" else 1), name


@torch.no_grad()
def test_losses_are_the_cross_entropy_of_the_logits_or_0_and_logits_may_be_the_last(decoder, tokens, relative):
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    losses = decoder(tokens, targets)
    logits = decoder(tokens)
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    assert losses.shape == tokens.shape and losses.dtype == torch.float32
    assert (losses[:, -1] == 0).all()
    assert relative(losses, expected) < tolerance(decoder)
    assert relative(decoder(tokens, last_only=True), logits[:, -1:]) < tolerance(decoder)
    total = decoder(tokens, targets, token_weight=torch.tensor(0.3))
    assert total.shape == () and total.item() == pytest.approx(0.3 * losses.sum().item(), rel=1e-6)


@torch.no_grad()
def test_decoding_with_a_cache_gives_the_same_logits(decoder, tokens, relative):
    cache = KeyValueCache(decoder.config, 2, 24)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(float("nan"))  # positions that are not filled yet must not be read
    logits = [decoder(chunk, cache=cache) for chunk in tokens.split([1, 5, 9, 1, 7, 1], 1)]
    assert cache.length == 24
    assert relative(torch.cat(logits, 1), decoder(tokens)) < tolerance(decoder)


@torch.no_grad()
def test_a_padded_batch_gives_the_same_logits_as_each_sequence_alone(decoder, tokens, relative):
    """Sequences of 24, 17 and 1 tokens, prefilled together, then five more tokens each."""
    rows = [tokens[0], tokens[1, :17], tokens[0, 3:4]]
    padding = torch.tensor([24 - len(row) for row in rows])
    batch = torch.stack([F.pad(row, (24 - len(row), 0), value=7) for row in rows])
    more = tokens.new_tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [50, 60, 70, 80, 90]])
    cache = KeyValueCache(decoder.config, 3, 29)
    logits = [decoder(batch, cache=cache, padding=padding)]
    logits += [decoder(chunk, cache=cache, padding=padding) for chunk in more.split((1, 2, 2), 1)]
    logits = torch.cat(logits, 1)
    assert torch.isfinite(logits).all()
    for row, out, pad, rest in zip(rows, logits, padding, more, strict=True):
        alone = decoder(torch.cat((row, rest))[None])[0]
        assert relative(out[pad:], alone) < tolerance(decoder)


def test_attention_masks_are_as_drawn_in_the_docstring():
    def drawn(mask):
        return ["".join("#" if seen else "." for seen in row) for row in mask]

    cpu = torch.device("cpu")
    masks = attention_mask(0, 4, cpu, padding=torch.tensor([0, 2]))[:, 0]
    assert drawn(masks[0]) == ["#...", "##..", "###.", "####"]
    assert drawn(masks[1]) == ["#...", ".#..", "..#.", "..##"]
    assert drawn(attention_mask(3, 2, cpu)[0, 0]) == ["####.", "#####"]
    documents = torch.tensor([[1, 1, 2, 2]])
    assert drawn(attention_mask(0, 4, cpu, documents=documents)[0, 0]) == ["#...", "##..", "..#.", "..##"]
    assert attention_mask(0, 4, cpu) is None and attention_mask(3, 1, cpu) is None


def test_gradients_of_packed_documents_equal_those_of_one_document_a_row(decoder, relative):
    """Tolerance: as for other gradients; a document that starts later in a row is rotated by other, larger angles.

    Scalars, whose gradients cancel, are left out.
    """
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(12))
    targets = ids.roll(-1, 1).masked_fill(torch.arange(24) % 5 == 0, -100)
    lengths = ((7, 1, 16), (12, 9, 3))
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths])
    weight = torch.tensor(0.05)

    def gradients(batches):
        decoder.zero_grad()
        for batch in batches:
            decoder(*batch, token_weight=weight).backward()
        return {name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.ndim}

    cut = [zip(ids[[i]].split(row, 1), targets[[i]].split(row, 1), strict=True) for i, row in enumerate(lengths)]
    alone = gradients(batch for row in cut for batch in row)
    packed = gradients([(ids, targets, documents)])
    for name, expected in alone.items():
        assert relative(packed[name], expected) < 3 * tolerance(decoder), name


def test_activation_checkpointing_gives_the_same_gradients_bit_for_bit(decoder, tokens):
    targets, upstream = tokens.roll(-1, 1), torch.rand(2, 24)
    gradients, calls = [], []
    decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for decoder.activation_checkpointing in (False, True):
        decoder.zero_grad()
        decoder(tokens, targets).backward(upstream)
        gradients.append([parameter.grad.clone() for parameter in decoder.parameters()])
    assert all(map(torch.equal, *gradients)) and len(calls) == 1 + 2  # layers are computed again


@pytest.mark.parametrize("norm", ["rms", "batch"])
def test_the_forward_pass_compiles_without_graph_breaks(make_decoder, tokens, relative, norm):
    torch._dynamo.reset()
    decoder = make_decoder(norm=norm, qk_norm=True, num_hidden_layers=2)
    targets = tokens.roll(-1, 1)
    compiled = torch.compile(decoder, backend="eager", fullgraph=True)
    assert relative(compiled(tokens, targets), decoder(tokens, targets)) < tolerance(decoder)
    upstream, parameters = torch.rand(2, 24), [*decoder.parameters()]
    gradients = (torch.autograd.grad(run(tokens, targets), parameters, upstream) for run in (compiled, decoder))
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < 3 * tolerance(decoder)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_activations_have_the_compute_dtype_and_master_weights_stay_float32(make_decoder, tokens, relative, placement):
    """Tolerance: 25 independent roundings to bfloat16 of 1.66e-3 each add up to 8e-3; twice that."""
    decoder = make_decoder(norm_placement=placement)
    expected = decoder(tokens).detach()
    decoder.compute_dtype = torch.bfloat16
    seen = []
    decoder.layers[1].register_forward_hook(lambda module, inputs, outputs: seen.extend(outputs))
    logits = decoder(tokens)
    assert {x.dtype for x in seen if x is not None} == {torch.bfloat16}
    assert logits.dtype == torch.float32
    assert 1e-4 < relative(logits, expected) < 1.6e-2
    loss = decoder(tokens, tokens.roll(-1, 1))
    loss.backward(torch.randn(loss.shape, generator=torch.Generator().manual_seed(7)))
    assert {p.dtype for p in decoder.parameters()} == {p.grad.dtype for p in decoder.parameters()} == {torch.float32}


def test_more_tokens_than_the_context_holds_are_an_error(make_decoder, tokens):
    decoder = make_decoder(max_position_embeddings=24)
    with pytest.raises(ValueError, match="25 tokens exceed the context of 24"):
        decoder(torch.cat((tokens, tokens[:, :1]), 1))


@pytest.mark.parametrize("shape", [{"head_dim": 64}, {"head_dim": 8, "num_key_value_heads": 1}])
def test_a_head_can_begin_by_attending_to_the_token_before(make_decoder, monkeypatch, shape):
    decoder = Decoder(make_decoder(attention_bias=True, **shape).config, seed=1)
    attend_to_previous_token(decoder)
    probabilities = []

    def attention(q, k, v, mask):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        probabilities.append(scores.masked_fill(future, float("-inf")).softmax(-1))
        return torch.zeros_like(q)

    monkeypatch.setattr(kernels, "attention", attention)
    with torch.no_grad():
        decoder(torch.arange(20)[None])
    before = probabilities[0].diagonal(-1, -2, -1)[0]  # (H, T - 1)
    assert (probabilities[0][0, 0].argmax(-1)[1:] == torch.arange(19)).all() and before[0].mean() > 0.8
    assert before[1:].mean() < 0.5


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_score_of_the_token_before_is_larger_by_what_the_docstring_says(make_decoder, monkeypatch, qk_norm):
    decoder = make_decoder(attention_bias=True, head_dim=64, qk_norm=qk_norm)
    decoder = Decoder(dataclasses.replace(decoder.config, initializer_range=1e-6), seed=1)
    attend_to_previous_token(decoder)
    scores = []
    attention = lambda q, k, v, mask: scores.append((q @ k[:, :1].mT / 8)[0, 0]) or torch.zeros_like(q)  # noqa: E731
    monkeypatch.setattr(kernels, "attention", attention)
    decoder(torch.arange(20)[None])
    itself, before, two_before = (scores[0].diagonal(-n) for n in range(3))
    expected = torch.full_like(before, 1.396 if qk_norm else 4)
    torch.testing.assert_close(before - itself[1:], expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(before[1:] - two_before, expected[1:], rtol=1e-3, atol=0)
