"""A verdict on a published claim follows from the effects and the region of the claim, and from nothing else."""

import math

from ablation.stats import Effect, mean_effect
from studies.claims import judge


def effect(low: float, high: float, n: int = 9) -> Effect:
    middle, reach = (low + high) / 2, 0.4 * (high - low)
    return Effect("e", middle, (low, high), (middle - reach, middle + reach), 0.5, "", n)


def test_a_claim_holds_inside_its_region_does_not_outside_and_is_inconclusive_at_its_ends():
    assert judge(effect(0.1, 0.2), 0.0, math.inf) == "holds"
    assert judge(effect(-0.2, -0.1), 0.0, math.inf) == "does not hold"
    assert judge(effect(-0.1, 0.2), 0.0, math.inf) == "inconclusive"
    assert judge(effect(0.0, 0.0, n=0), 0.0, math.inf) == "does not hold"
    assert judge(effect(0.5, 0.5, n=0), 0.0, 1.0) == "holds"
    assert judge(mean_effect("e", [0.1], ""), 0.0, math.inf) == "inconclusive"  # one pair
    # Between two bounds the 90% interval of five pairs decides: two one-sided tests at 5%.
    assert judge(effect(-1.1, 1.1), -1.0, 1.0) == "holds"
    assert judge(effect(-1.1, 1.1, n=4), -1.0, 1.0) == "inconclusive"
    assert judge(effect(-1.1, 1.1), -1.0, math.inf) == "inconclusive"
    assert judge(effect(1.1, 1.2, n=4), -1.0, 1.0) == "does not hold"
