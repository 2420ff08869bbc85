"""The decoding step for a GPU against `Decoder.forward`, in Triton's interpreter, and what keeps a step and its graph.

Tolerance: the two add the same float32 numbers in different orders, through two layers: 2e-6, as in test_decoder.py.
"""

import gc
import weakref

import pytest
import torch

import kernels
from generation import steps
from generation.steps import MAX_GPU_SEQUENCES, GpuDecodeStep, decode_step
from tests.checkpoints.test_transformers import YARN
from tests.generation import test_cpu_step

pytestmark = [
    pytest.mark.skipif(kernels.gpu is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("few_programs"),
]

VARIANTS = {
    "rms": {},
    "layer, biases, qk norm, untied": test_cpu_step.LAYER | {"tie_word_embeddings": False},
    "layer without bias, one wide kv head": dict(norm="layer", norm_bias=False, num_key_value_heads=1, head_dim=20),
    "yarn": {"rope_scaling": YARN},
}


def random_tokens(batch, count):
    return torch.randint(97, (batch, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_and_cache_equal_the_decoders(make_decoder, relative, variant):
    """Of two tokens after left-padded prompts of 5, 2 and 1 tokens."""
    decoder = make_decoder(num_hidden_layers=2 if variant.get("qk_norm") else 1, **variant).eval()
    logits, expected, caches = test_cpu_step.steps(decoder, [5, 2, 1], 2, GpuDecodeStep)
    assert relative(logits, expected) < 2e-6 and test_cpu_step.cache_error(relative, caches, [5, 2, 1]) < 2e-6


def test_a_fused_step_exists_for_triton_small_batches_and_the_layers_that_it_computes(make_decoder, request):
    def exists(batch_size=1, **changes):
        return isinstance(decode_step(make_decoder(**changes).eval(), batch_size, 4), GpuDecodeStep)

    assert not exists()
    request.getfixturevalue("triton")
    assert exists(1) and exists(MAX_GPU_SEQUENCES) and exists(norm="layer") and not exists(MAX_GPU_SEQUENCES + 1)
    others = [{"mlp": "geglu"}, {"attention_output_bias": True}]
    others += [{"norm": norm} for norm in ("none", "srms", "offset")]
    others += [{"norm_placement": placement} for placement in ("post", "sandwich", "output")]
    assert not any(exists(**changes) for changes in others)


def decode(decoder, tokens, positions=8):
    """Logits of tokens (B, T), one after another, from the step that is kept for this decoder; and the step."""
    step = decode_step(decoder, len(tokens), positions)
    return torch.cat([step(token[:, None], None).clone() for token in tokens.unbind(1)], 1), step


@pytest.mark.usefixtures("triton")
@torch.inference_mode()
def test_the_next_prompt_uses_the_same_step_with_an_empty_cache_no_padding_and_new_weights(make_decoder, relative):
    decoder, padding = make_decoder(num_hidden_layers=1).eval(), torch.tensor([2])
    first, second = random_tokens(1, 3), random_tokens(1, 6)[:, 3:]
    step = decode_step(decoder, 1, 8)
    decoder(first, cache=step.cache, padding=padding)
    step(first[:, :1], padding)
    decoder.layers[0].mlp.down_proj.weight.data *= 2
    logits, again = decode(decoder, second, positions=11)  # room for as many as before, rounded up
    assert again is step
    assert relative(logits, decoder(second)) < 2e-6


@pytest.mark.usefixtures("triton")
def test_a_step_is_made_again_where_its_graph_would_read_other_memory_or_the_shape_changes(make_decoder):
    decoder = make_decoder(max_position_embeddings=600).eval()
    weight = decoder.layers[0].mlp.down_proj.weight
    made = []

    def use_step(batch_size=1, positions=8):
        made.append(decode_step(decoder, batch_size, positions))

    use_step()
    weight.data = weight.data * 2
    use_step()
    decoder.compute_dtype = torch.bfloat16
    use_step()
    decoder.rope.cos = decoder.rope.cos.clone()
    use_step()
    use_step(positions=9)
    assert made.pop() is made[-1]
    use_step(batch_size=3)
    use_step(positions=300)
    assert len({id(step) for step in made}) == 6


@pytest.mark.usefixtures("triton")
@torch.inference_mode()
def test_one_step_is_kept_and_as_long_as_its_decoder(make_decoder):
    first, second = (make_decoder(seed, num_hidden_layers=1).eval() for seed in (1, 2))
    step = decode_step(first, 1, 8)
    assert decode_step(first, 1, 8) is step
    other = decode_step(second, 1, 8)
    assert other is not step and [step for _, step in steps._last_step.values()] == [other]
    cache = weakref.ref(other.cache)
    del step, other, second
    gc.collect()
    assert cache() is None and not steps._last_step


@pytest.mark.usefixtures("triton")
@torch.inference_mode()
def test_if_a_kernel_fails_the_decoder_continues_and_says_so(make_decoder, relative, monkeypatch, capsys):
    decoder, tokens = make_decoder(num_hidden_layers=1).eval(), random_tokens(2, 3)
    run, calls = kernels.decode.project, []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > 1:  # after the position in the cache is written
            raise RuntimeError("ptxas fatal: no such luck\nand more")
        run(*arguments)

    monkeypatch.setattr(kernels.decode, "project", fail)
    logits, step = decode(decoder, tokens)
    assert step.unavailable_reason == "RuntimeError: ptxas fatal: no such luck"
    assert relative(logits, decoder(tokens)) < 2e-6
    printed = capsys.readouterr().err
    assert printed == f"fused decoding: {step.unavailable_reason}; the decoder runs without it.\n"
