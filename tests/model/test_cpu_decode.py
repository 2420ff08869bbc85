"""The decoding step for a CPU against `Decoder.forward`.

Tolerance: the two add the same float32 numbers in different orders, through three layers: 3e-6.
"""

import copy

import pytest
import torch

import kernels
from generation.generate import generate
from model import cpu_decode
from model.cache import KeyValueCache
from model.cpu_decode import CpuDecodeStep
from model.fused_decode import decode_step_for

VARIANTS = {
    "rms": {},
    "rms with bias, biases of q, k and v": {"norm_bias": True, "attention_bias": True},
    "rms, qk norm, wide heads": {"qk_norm": True, "head_dim": 20},
    "layer, biases, qk norm, untied": {
        "norm": "layer", "attention_bias": True, "qk_norm": True, "tie_word_embeddings": False,
    },
    "layer without bias, one kv head": {"norm": "layer", "norm_bias": False, "num_key_value_heads": 1},
    "a kv head for each head": {"num_key_value_heads": 6},
    "a sliding window in some layers": {
        "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}  # fmt: skip
LENGTHS = [5, 2, 1], [4], [3] * 8, [1], [4, 7], [1], [5, 2, 1], [3] * 8  # of the prompts, one for each variant


def steps(decoder, lengths, count=3):
    """Logits and caches of `count` tokens after left-padded prompts of these lengths, from the step and the decoder."""
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padding = padding if padding.any() else None
    tokens = torch.randint(97, (len(lengths), max(lengths) + count), generator=torch.Generator().manual_seed(3))
    caches = [
        KeyValueCache(decoder.config, len(lengths), max(lengths) + count + 2, dtype=decoder.compute_dtype)
        for _ in range(2)
    ]
    for cache in caches:
        cache.keys_and_values.fill_(float("nan"))  # positions that are not filled must not be read
        decoder(tokens[:, : max(lengths)], cache=cache, padding=padding)
    step, found, expected = CpuDecodeStep(decoder, caches[1]), [], []
    for position in range(max(lengths), max(lengths) + count):
        token = tokens[:, position : position + 1]
        expected.append(decoder(token, cache=caches[0], padding=padding))
        found.append(step(token, padding).clone())
        assert caches[0].length == caches[1].length == position + 1
    return torch.cat(found, 1), torch.cat(expected, 1), caches


@pytest.mark.parametrize(("variant", "lengths"), [*zip(VARIANTS.values(), LENGTHS, strict=True)], ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_and_cache_equal_the_decoders_and_parameters_stay(make_decoder, relative, monkeypatch, variant, lengths):
    monkeypatch.setattr(cpu_decode, "LARGE", 97 * 48)  # so that the head alone is large
    decoder = make_decoder(**variant).eval()
    before = copy.deepcopy(decoder.state_dict())
    found, expected, caches = steps(decoder, lengths)
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())
    assert found.shape == (len(lengths), 3, 97) and found.dtype == torch.float32
    assert relative(found, expected) < 3e-6
    for sequence, length in enumerate(lengths):
        filled = slice(max(lengths) - length, max(lengths) + 3)
        expected_kv, found_kv = (cache.keys_and_values[:, :, sequence, :, filled] for cache in caches)
        assert relative(found_kv, expected_kv) < 3e-6


@pytest.mark.parametrize("threads", [1, 2, 3])  # 98 rows are not divisible by 3
@torch.inference_mode()
def test_logits_are_the_same_with_any_number_of_threads(make_decoder, relative, threads):
    decoder = make_decoder(vocab_size=98).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, expected, _ = steps(decoder, [4])
    finally:
        torch.set_num_threads(before)
    assert relative(found, expected) < 3e-6


@pytest.mark.parametrize(
    ("dtype", "norm", "lengths"), [(torch.bfloat16, "rms", [5, 2, 1]), (torch.float16, "layer", [4])]
)
@torch.inference_mode()
def test_narrow_dtypes_err_no_more_than_the_decoder_does(make_decoder, relative, dtype, norm, lengths):
    decoder = make_decoder(norm=norm, attention_bias=True, qk_norm=True).eval()
    exact, _, _ = steps(decoder, lengths)
    decoder.compute_dtype = dtype  # the weights stay float32, as in training: the step casts them once
    found, expected, _ = steps(decoder, lengths)
    error = relative(found, exact)
    # Rounding errors of the two are different, but of one size: their ratio is 0.9 to 1.15 for other random weights.
    assert 0 < error < 1.25 * relative(expected, exact)


@torch.inference_mode()
def test_rms_rows_of_any_size_and_mean_are_normalized_as_exactly_as_by_the_formula(make_decoder, relative):
    decoder = make_decoder(num_hidden_layers=1).eval()
    step = CpuDecodeStep(decoder, KeyValueCache(decoder.config, 1, 4))
    for scale, mean in ((1, 0), (1, 100), (1e-4, 0), (1e4, 1e4), (0, 0), (0, 3)):
        row = torch.randn(1, 48, dtype=torch.float64) * scale + mean
        torch.mul(row[:, None].float(), step.signs, out=step.stream)
        exact = row.float().double()
        exact = exact * (exact.square().mean() + decoder.config.norm_eps).rsqrt() * decoder.norm.weight
        found = step.normalize(step.norm)
        if row.any():
            assert relative(found, exact) < 1e-6
        else:
            assert not found.any()  # eps prevents 0/0; NaN would count as nonzero


@pytest.mark.parametrize("variant", ["rms", "layer, biases, qk norm, untied", "a sliding window in some layers"])
def test_text_is_the_same_with_and_without_the_step(make_decoder, variant):
    decoder = make_decoder(**VARIANTS[variant]).eval()
    prompts = [[1, 2, 3], [4], list(range(30))]

    def tokens():
        return [
            result.tokens
            for chosen in (prompts, prompts[:1])
            for result in [generate(decoder, chosen, max_new_tokens=50)]
        ]

    with decode_step_for(decoder, 3, 80) as step:
        assert isinstance(step, CpuDecodeStep)
    found = tokens()
    kernels.use("reference", torch.device("cpu"))
    try:
        with decode_step_for(decoder, 3, 80) as step:
            assert step is None
        assert tokens() == found
    finally:
        kernels.use("auto", torch.device("cpu"))
    assert [len(text) for text in found[0]] == [50, 50, 34]  # the last one has filled the context


def test_there_is_a_step_for_small_batches_and_the_layers_that_it_computes(make_decoder):
    def exists(batch_size=1, **changes):
        with decode_step_for(make_decoder(**changes).eval(), batch_size, 4) as step:
            return step is not None

    assert exists(cpu_decode.MAX_SEQUENCES) and not exists(cpu_decode.MAX_SEQUENCES + 1)
    others = {"mlp": "geglu"}, {"attention_output_bias": True}
    for changes in (*({"norm": norm} for norm in ("none", "srms", "offset")), *others):
        assert not exists(**changes), changes
    with torch.autocast("cpu", torch.bfloat16):
        assert not exists()
    assert not any(exists(norm_placement=placement) for placement in ("post", "sandwich", "output"))


def test_weights_are_not_copied_where_they_are_stored_in_the_dtype_that_they_are_used_in(make_decoder):
    decoder = make_decoder().eval()
    step = CpuDecodeStep(decoder, KeyValueCache(decoder.config, 1, 4))
    stored = {parameter.data_ptr() for parameter in decoder.parameters()}
    assert all(w.data_ptr() in stored for layer in step.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert step.head.data_ptr() in stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_decoder_that_was_cast_as_a_whole_can_generate(make_decoder, dtype):
    decoder = make_decoder(attention_bias=True, qk_norm=True, norm_bias=True).eval().to(dtype)
    for compute_dtype in (torch.float32, dtype):
        decoder.compute_dtype = compute_dtype
        assert len(generate(decoder, [[1, 2]], max_new_tokens=5).tokens[0]) == 5


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize(
    ("made", "used"),  # torch itself refuses writes to tensors of inference mode outside of it
    [(made, used) for made in MODES for used in MODES if made is not torch.inference_mode or used is made],
)
def test_a_cache_works_in_another_grad_mode_than_it_was_made_in(make_decoder, made, used):
    decoder = make_decoder().eval()
    with made():
        cache = KeyValueCache(decoder.config, 1, 4)
    with used():
        assert decoder(torch.tensor([[1, 2]]), cache=cache).shape == (1, 2, 97)
