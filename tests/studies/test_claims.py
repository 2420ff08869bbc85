"""A verdict on a published claim follows from the effects and the region of the claim, and from nothing else."""

import math
import re
from pathlib import Path

from ablation.stats import Effect, mean_effect
from studies.claims import claims_table, judge

ROOT = Path(__file__).parents[2]


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


def test_the_table_of_claims_in_the_findings_is_that_of_its_command():
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    folders = re.search(r"studies\.claims (.+)", text)[1].split()

    def rows(table: str) -> list[str]:
        return [
            row for row in re.findall(r"^\| C\d.*", table, re.MULTILINE) if "relative change" not in row
        ]  # rounding

    published = rows(text)
    assert len(published) == 36 and published == rows(claims_table([ROOT / folder for folder in folders]))
