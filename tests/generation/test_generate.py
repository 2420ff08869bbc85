"""Generation of token ids: the cache, batches of prompts of different lengths, seeds, and every finish reason."""

import pytest
import torch

import kernels
from errors import UserError
from generation.generate import PrefixCache
from generation.sampling import sample, sequence_generator
from generation.settings import Sampling
from generation.steps import GpuDecodeStep
from model.config import ModelConfig
from model.decoder import Decoder
from tests.generation.conftest import LIMIT, generate_all

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
PROMPTS = [[1, 7, 9], [1, *range(20, 31)], [1], [1, 5, 5, 5, 270, 3]]


def without_cache(decoder, prompt, count, sampling, seed=0, number=0):
    """The reference: for every new token, all tokens so far go through the model."""
    ids, generator = list(prompt), sequence_generator(seed, number, torch.device("cpu"))
    for _ in range(count):
        with torch.no_grad():
            logits = decoder(torch.tensor([ids]))[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[0, ids] = True
        ids += sample(logits, sampling, [generator], seen).tolist()
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=len)
def test_generation_with_the_cache_equals_generation_without_it(decoder, prompt, sampling):
    [tokens], _ = generate_all(decoder, [prompt], max_new_tokens=20, sampling=sampling, seed=4)
    assert tokens == without_cache(decoder, prompt, 20, sampling, seed=4)
    assert len(set(tokens)) > 5  # repeating one token would hide a wrong position


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_prompts_of_different_lengths_equals_each_prompt_alone(decoder, sampling):
    # To the end of the context, where sequences finish at different steps and the padded ones continue at cache
    # positions that exceed max_position_embeddings.
    for count in (25, 99):
        options = dict(max_new_tokens=count, sampling=sampling, seed=4, eos_ids={17}, prefix=PrefixCache())
        alone = [generate_all(decoder, [prompt], **options) for prompt in PROMPTS]
        tokens, ends = generate_all(decoder, PROMPTS, **options)
        assert tokens == [ids for [ids], _ in alone] and ends == [end for _, [end] in alone]
    assert "context" in ends and len({tuple(ids) for ids in tokens}) == len(PROMPTS) and not options["prefix"].tokens


@pytest.mark.skipif(kernels.gpu is None, reason="Triton is not installed")
@pytest.mark.usefixtures("few_programs")
def test_fused_decoding_gives_the_same_tokens_to_the_end_of_the_context(request, monkeypatch, capsys):
    shape = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    config = ModelConfig(**shape, num_hidden_layers=1, max_position_embeddings=14, initializer_range=0.5)
    decoder, prompts, calls = Decoder(config, seed=3).eval(), [[1, 7, 9, 4, 5, 6, 8], [1]], []
    step = GpuDecodeStep.__call__
    monkeypatch.setattr(GpuDecodeStep, "__call__", lambda *arguments: calls.append(1) or step(*arguments))
    options = dict(max_new_tokens=99, sampling=SAMPLED, seed=4)
    expected = generate_all(decoder, prompts, **options)
    assert not calls and expected[1] == ["context", "context"]
    # The first sequence stays in the batch when it has filled the context, while the second, padded one continues. A
    # read past the rotary tables would find NaN and make its logits NaN, which `generate` raises an error for.
    for name in ("cos", "sin"):
        table = getattr(decoder.rope, name)
        setattr(decoder.rope, name, torch.cat((table, torch.full_like(table, torch.nan)))[: len(table)])
    request.getfixturevalue("triton")
    result = generate_all(decoder, prompts, **options)
    assert result == expected and len(calls) == 12 and len(set(result[0][1])) > 5
    assert not capsys.readouterr().err  # the decoder did not have to replace the kernels


def test_the_same_seed_gives_the_same_tokens_and_another_seed_or_sample_number_gives_others(decoder):
    def tokens(seed, numbers=(0,)):
        prompts = [PROMPTS[0]] * len(numbers)
        return generate_all(decoder, prompts, max_new_tokens=12, seed=seed, sample_numbers=numbers)[0]

    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert tokens(1) == tokens(1) and torch.equal(before, torch.get_rng_state())
    several = tokens(1, (0, 1, 2)) + tokens(2, (0, 1, 2))
    assert several[0] == tokens(1)[0] and several[5] == tokens(2, (2,))[0]
    assert len(set(map(tuple, several))) == 6


def test_a_prompt_that_fills_the_context_is_a_user_error_with_both_lengths(decoder):
    too_long = rf"the prompt has {LIMIT} tokens.* context is {LIMIT} .*; shorten it"
    refused = {too_long: [[1] * LIMIT], "no embedding of token 320;": [[1, 320]], "prompt 2 has": [[1], [1] * LIMIT]}
    for words, prompts in refused.items():
        with pytest.raises(UserError, match=words):
            generate_all(decoder, prompts, max_new_tokens=1)


def test_a_sequence_ends_before_an_eos_id_and_the_others_do_not_change(decoder):
    free, _ = generate_all(decoder, PROMPTS, max_new_tokens=20, sampling=GREEDY)
    eos = free[0][4]
    tokens, ends = generate_all(decoder, PROMPTS, max_new_tokens=20, sampling=GREEDY, eos_ids={eos})
    lengths = [(ids.index(eos) if eos in ids else 20) for ids in free]
    assert lengths[0] == 4 and tokens == [ids[:length] for ids, length in zip(free, lengths, strict=True)]
    assert ends == ["length" if length == 20 else "eos" for length in lengths]


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(decoder):
    uniform = Sampling(temperature=50.0, repetition_penalty=1.5)  # nearly
    assert max(generate_all(decoder, [[1]], max_new_tokens=40, sampling=uniform)[0][0]) >= 100
    assert max(generate_all(decoder, [[1]], max_new_tokens=40, sampling=uniform, vocab_size=100)[0][0]) < 100


def test_logits_that_are_not_finite_are_a_user_error():
    broken = Decoder(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), seed=1)
    broken.norm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        generate_all(broken, [[1, 2]], max_new_tokens=3)
