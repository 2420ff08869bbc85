"""Each filter against a reference in Python loops and float64, and sampling against the expected distribution."""

import math

import pytest
import torch

from errors import UserError
from generation import sampling
from generation.settings import Sampling

ROWS, VOCABULARY = 6, 40
DRAWS = [sampling.sample_inverse_cdf, sampling.sample_gumbel]


@pytest.fixture
def logits() -> torch.Tensor:
    return 1.5 + 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(7))


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def allowed(logits: torch.Tensor) -> list[set[int]]:
    return [{i for i, value in enumerate(row) if value > -math.inf} for row in logits.tolist()]


def reference_top_k(row: list[float], k: int) -> set[int]:
    return set(sorted(range(len(row)), key=lambda i: -row[i])[:k])


def reference_top_p(row: list[float], p: float) -> set[int]:
    """The smallest set of most likely tokens with mass p or more, found by trying every size."""
    probabilities, sets = softmax(row), [reference_top_k(row, k) for k in range(1, len(row) + 1)]
    return next((ids for ids in sets if math.fsum(probabilities[i] for i in ids) >= p), sets[-1])


def reference_min_p(row: list[float], p: float) -> set[int]:
    return {i for i, probability in enumerate(softmax(row)) if probability >= p * max(softmax(row))}


REFERENCES = {"top_k": reference_top_k, "top_p": reference_top_p, "min_p": reference_min_p}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens(logits):
    seen = torch.rand(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(8)) < 0.3
    expected = [
        [(x / 1.7 if x > 0 else x * 1.7) if was_seen else x for x, was_seen in zip(row, seen_row, strict=True)]
        for row, seen_row in zip(logits.tolist(), seen.tolist(), strict=True)
    ]
    torch.testing.assert_close(sampling.penalize_repetition(logits, seen, 1.7), torch.tensor(expected))


@pytest.mark.parametrize("temperature", [1e-60, 0.3, 0.8, 1.0, 2.5])
def test_temperature_divides_the_logits(logits, temperature):
    expected = [softmax([x / temperature for x in row]) for row in logits.tolist()]
    torch.testing.assert_close(sampling.apply_temperature(logits, temperature).softmax(-1), torch.tensor(expected))


VALUES = {
    "top_k": [1, 2, 7, VOCABULARY, VOCABULARY + 5],
    "top_p": [1e-6, 0.1, 0.5, 0.9, 0.999],
    "min_p": [0.01, 0.1, 0.5, 1.0],
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_filter_keeps_the_tokens_of_its_reference_and_their_logits(logits, name):
    for value in VALUES[name]:
        result = sampling.filter_logits(logits, Sampling(temperature=1.0, **{name: value}))
        assert allowed(result) == [REFERENCES[name](row, value) for row in logits.tolist()]
        expected = sampling.apply_temperature(logits, 1.0)
        assert torch.equal(result[result > -math.inf], expected[result > -math.inf])


def test_top_p_keeps_no_more_tokens_when_their_probability_is_exactly_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert allowed(sampling.keep_top_p(logits, 0.75)) == [{0, 1}]


def test_filters_apply_in_the_order_temperature_top_k_top_p_min_p(logits):
    settings = Sampling(temperature=1.8, top_k=20, top_p=0.8, min_p=0.12)
    steps = []
    for row in logits.tolist():
        row = [x / settings.temperature for x in row]
        for name, reference in REFERENCES.items():
            ids = reference(row, getattr(settings, name))
            row = [x if i in ids else -math.inf for i, x in enumerate(row)]
            steps.append(len(ids))
        assert allowed(sampling.filter_logits(logits[len(steps) // 3 - 1][None], settings)) == [ids]
    # The order matters only if each filter removes tokens in some row.
    assert max(steps[0::3]) < VOCABULARY and steps[0::3] != steps[1::3] and steps[1::3] != steps[2::3]


@pytest.mark.parametrize("penalty", [1.0, 5.0])
def test_temperature_0_takes_the_largest_logit_after_the_repetition_penalty(logits, penalty):
    seen = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter_(1, logits.argmax(-1, keepdim=True), True)
    settings = Sampling(temperature=0, repetition_penalty=penalty, top_k=3, top_p=0.5)
    expected = sampling.penalize_repetition(logits, seen, penalty).argmax(-1)
    assert sampling.sample(logits, settings, [], seen).tolist() == expected.tolist()
    assert (penalty > 1) == (expected.tolist() != logits.argmax(-1).tolist())


@pytest.mark.parametrize("draw", DRAWS)
def test_samples_follow_the_softmax(draw):
    logits, draws = torch.tensor([[2.0, 1.0, 0.0, 1.5, -math.inf]]), 4000
    generator = sampling.sequence_generator(3, 0, torch.device("cpu"))
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[draw(logits, [generator])[0]] += 1
    expected = draws * logits.softmax(-1)[0]
    assert counts[4] == 0
    chi_square = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001; not flaky: the seed is fixed


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53], ids=["minimum", "maximum"])
def test_no_filtered_token_or_none_at_all_is_sampled_whatever_the_random_number_is(monkeypatch, draw, uniform, logits):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.fill_(uniform))
    monkeypatch.setattr(torch, "rand", lambda *size, generator, dtype: torch.full(size, uniform, dtype=dtype))
    assert (draw(logits, [torch.Generator()] * ROWS) < VOCABULARY).all()  # float32 probabilities do not sum to 1
    logits = torch.full((2, 5), -math.inf)
    logits[0, 1], logits[1, 2:4] = 0.5, torch.tensor([3.0, -90.0])  # a likely token, and one whose probability is 4e-41
    assert draw(logits, [torch.Generator(), torch.Generator()]).tolist() == [1, 2]


def test_generators_of_nearby_seeds_and_sample_numbers_all_differ():
    pairs = [(seed, sample) for seed in range(-2, 9) for sample in range(9)]
    generators = [sampling.sequence_generator(*pair, torch.device("cpu")) for pair in pairs]
    assert len({torch.rand(1, generator=generator).item() for generator in generators}) == len(pairs)


def test_rows_with_logits_that_are_not_finite_give_minus_1_and_other_rows_a_token():
    logits = torch.tensor([[0.0, 1, 2], [0, math.nan, 2], [0, math.inf, 2], [-math.inf, 3, 2], [-math.inf] * 3])
    assert sampling.sample(logits, Sampling(temperature=0), []).tolist() == [2, -1, -1, 1, -1]


WRONG = {"temperature": [-0.1, math.inf, "0.6"], "top_k": [-2, 2.5, True], "top_p": [-0.1, 1.1, [1]]}
WRONG |= {"min_p": [math.nan, 2.0], "repetition_penalty": [0.0]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_value_outside_its_range_is_a_user_error_that_names_it(name, value):
    with pytest.raises(UserError, match=f"{name} is .*: (it must be|Expected)"):
        Sampling(**{name: value})
