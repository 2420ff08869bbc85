"""Generation at the level of ids: the cache, batches of unequal prompts, seeds, and every way in which a text ends."""

import json

import pytest
import torch

import kernels
from errors import UserError
from generation.generate import complete, generate
from generation.sampling import generator_for, sample
from generation.settings import Sampling
from model.config import ModelConfig
from model.decoder import Decoder
from model.fused_decode import DecodeStep

LIMIT = 48  # of the decoder in conftest.py
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
PROMPTS = [[1, 7, 9], [1, *range(20, 31)], [1], [1, 5, 5, 5, 270, 3]]


def without_cache(decoder, prompt, count, sampling, seed=0, number=0):
    """The plain definition: all of the text goes through the model for every new token."""
    ids, generator = list(prompt), generator_for(seed, number, torch.device("cpu"))
    for _ in range(count):
        with torch.no_grad():
            logits = decoder(torch.tensor([ids]))[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[0, ids] = True
        ids += sample(logits, sampling, [generator], seen).tolist()
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=len)
def test_the_cache_gives_the_tokens_that_the_whole_text_gives(decoder, prompt, sampling):
    tokens = generate(decoder, [prompt], max_new_tokens=20, sampling=sampling, seed=4).tokens[0]
    assert tokens == without_cache(decoder, prompt, 20, sampling, seed=4)
    assert len(set(tokens)) > 5  # a text that repeats one token would hide a wrong position


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_unequal_prompts_equals_each_prompt_alone(decoder, sampling):
    alone = [generate(decoder, [p], max_new_tokens=25, sampling=sampling, seed=4, eos_ids={17}) for p in PROMPTS]
    # On to the end of the context, where rows end at different steps and columns run out before positions do.
    alone += [generate(decoder, [p], max_new_tokens=99, sampling=sampling, seed=4, eos_ids={17}) for p in PROMPTS]
    for count, expected in ((25, alone[:4]), (99, alone[4:])):
        together = generate(decoder, PROMPTS, max_new_tokens=count, sampling=sampling, seed=4, eos_ids={17})
        assert together.tokens == [result.tokens[0] for result in expected]
        assert together.endings == [result.endings[0] for result in expected]
    assert {"context"} <= set(together.endings) and len({tuple(row) for row in together.tokens}) == len(PROMPTS)


@pytest.mark.skipif(kernels.gpu is None, reason="Triton is not installed")
def test_the_kernels_for_decoding_give_the_same_tokens_to_the_end_of_the_context(monkeypatch):
    shape = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    config = ModelConfig(**shape, num_hidden_layers=1, max_position_embeddings=14, initializer_range=0.5)
    decoder, prompts, calls = Decoder(config, seed=3).eval(), [[1, 7, 9, 4, 5, 6, 8], [1]], []
    step = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda *arguments: calls.append(1) or step(*arguments))
    options = dict(max_new_tokens=99, sampling=SAMPLED, seed=4)
    expected = generate(decoder, prompts, **options)
    assert not calls and expected.endings == ["context", "context"]
    kernels.use("triton", torch.device("cpu"))
    try:
        found = generate(decoder, prompts, **options)  # the second text goes on where the first one ends
    finally:
        kernels.use("auto", torch.device("cpu"))
    assert (found.tokens, found.endings) == (expected.tokens, expected.endings)
    assert len(calls) == found.steps == 12 and len(set(found.tokens[1])) > 5


def test_rows_that_ended_early_do_not_disturb_the_others(decoder):
    whole = generate(decoder, PROMPTS, max_new_tokens=99, sampling=GREEDY)
    cut = generate(
        decoder, PROMPTS, max_new_tokens=99, sampling=GREEDY, on_token=lambda row, token: row in (0, 1) and token >= 0
    )
    assert cut.endings == ["stopped", "stopped", "context", "context"]
    assert cut.tokens == [whole.tokens[0][:1], whole.tokens[1][:1], *whole.tokens[2:]]


def test_the_same_seed_gives_the_same_text_and_another_seed_or_sample_another(decoder):
    def text(seed, numbers=(0,)):
        prompts = [PROMPTS[0]] * len(numbers)
        return generate(decoder, prompts, max_new_tokens=12, seed=seed, sample_numbers=numbers).tokens

    assert text(1) == text(1)
    several = text(1, (0, 1, 2)) + text(2, (0, 1, 2))
    assert several[0] == text(1)[0] and several[5] == text(2, (2,))[0]
    assert len(set(map(tuple, several))) == 6


def test_temperature_0_does_not_depend_on_the_seed_and_draws_nothing(decoder):
    texts = [generate(decoder, [[1]], max_new_tokens=12, sampling=GREEDY, seed=seed).tokens for seed in (1, 2)]
    assert texts[0] == texts[1]


def test_no_row_writes_past_the_context_and_the_text_says_why_it_ends(decoder):
    prompts = [[1] * (LIMIT - 1), [1] * (LIMIT - 3), [1]]
    result = generate(decoder, prompts, max_new_tokens=5, sampling=GREEDY)
    assert [len(row) for row in result.tokens] == [1, 3, 5]
    assert result.endings == ["context", "context", "length"]


@pytest.mark.parametrize("extra", [0, 1, 50])
def test_a_prompt_that_fills_the_context_is_a_sentence_with_both_lengths(decoder, extra):
    with pytest.raises(UserError, match=rf"the prompt has {LIMIT + extra} tokens .* ends at {LIMIT}; shorten it to"):
        generate(decoder, [[1] * (LIMIT + extra)], max_new_tokens=1)
    with pytest.raises(UserError, match="prompt 2 has"):
        generate(decoder, [[1], [1] * (LIMIT + extra)], max_new_tokens=1)


def test_an_eos_id_ends_a_row_and_is_not_part_of_it(decoder):
    free = generate(decoder, PROMPTS[:2], max_new_tokens=20, sampling=GREEDY).tokens
    eos = {free[0][4], free[1][9]} - set(free[0][:4])
    result = generate(decoder, PROMPTS[:2], max_new_tokens=20, sampling=GREEDY, eos_ids=eos)
    ends = [next((i for i, token in enumerate(row) if token in eos), 20) for row in free]
    assert result.tokens == [row[:end] for row, end in zip(free, ends, strict=True)]
    assert result.endings[0] == "end of text" and ends[0] == 4
    assert result.steps == max(ends)  # it stops when all rows have


def test_callbacks_see_every_token_once_and_each_end_once(decoder):
    seen, ends = [[] for _ in PROMPTS], []
    result = generate(
        decoder,
        PROMPTS,
        max_new_tokens=6,
        on_token=lambda row, token: seen[row].append(token),
        on_end=lambda row, ending: ends.append((row, ending)),
    )
    assert seen == result.tokens
    assert sorted(ends) == [(row, "length") for row in range(len(PROMPTS))]


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(decoder):
    wild = Sampling(temperature=50.0, repetition_penalty=1.5)  # nearly uniform
    assert max(generate(decoder, [[1]], max_new_tokens=40, sampling=wild).tokens[0]) >= 100
    assert max(generate(decoder, [[1]], max_new_tokens=40, sampling=wild, vocabulary=100).tokens[0]) < 100


def test_a_repetition_penalty_beyond_all_measure_repeats_nothing(decoder):
    sampling = Sampling(temperature=0, repetition_penalty=1e6)
    prompt = PROMPTS[1]
    tokens = generate(decoder, [prompt, [1]], max_new_tokens=30, sampling=sampling).tokens
    assert len(set(prompt + tokens[0])) == len(prompt) + 30 and len(set(tokens[1])) == 30


def test_logits_that_are_not_finite_are_a_sentence():
    broken = Decoder(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), seed=1)
    with torch.no_grad():
        broken.norm.weight[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        generate(broken, [[1, 2]], max_new_tokens=3)


def test_complete_is_a_function_of_its_arguments_and_leaves_the_global_generator_alone(decoder, tokenizer):
    torch.manual_seed(11)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    texts = [complete(decoder, tokenizer, "def ", 15, SAMPLED, seed) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def ") for text in texts)
    assert complete(decoder, tokenizer, "", 15, GREEDY) == complete(
        decoder, tokenizer, max_new_tokens=15, sampling=GREEDY
    )


def test_training_goes_on_with_the_same_gradients_after_a_sample(decoder, tokenizer):
    model = Decoder(decoder.config, seed=5)
    tokens = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(2))

    def gradient():
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward(upstream)
        return model.embed_tokens.weight.grad.clone()

    expected = gradient()
    complete(model, tokenizer, "def ", 8)
    assert torch.equal(gradient(), expected)


def test_the_trained_stories_model_writes_what_the_reference_program_writes(stories260k_directory, shared):
    from data.tokenizer import load_tokenizer
    from model.pretrained import load_pretrained

    model, tokenizer = load_pretrained(stories260k_directory), load_tokenizer(stories260k_directory)
    golden = json.loads((shared / "stories260K" / "golden.json").read_text("utf-8"))
    for part in ("from_BOS", "from_prompt"):
        prompt, ids = golden[part]["prompt_ids"], golden[part]["greedy_ids"]
        result = generate(model, [prompt], max_new_tokens=len(ids) - len(prompt), sampling=GREEDY)
        assert prompt + result.tokens[0] == ids
    text = complete(model, tokenizer, max_new_tokens=200, sampling=GREEDY) + "\n"
    assert text.encode() == (shared / "stories260K" / "greedy_200_steps.txt").read_bytes()
