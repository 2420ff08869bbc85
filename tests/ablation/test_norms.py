"""A norm is a row in NORMS and a function in model/norm.py; the ablation follows from the row."""

import itertools
import re

import numpy as np
import pytest

from ablation import plots, report
from ablation.plan import Plan, arm_settings
from model.config import NORMS
from model.decoder import Decoder
from model.norm import is_norm_parameter


@pytest.fixture(scope="module")
def dyt(train_plan, config):
    """DyT against LayerNorm, without a sweep."""
    plan = Plan(norms=("dyt", "layer"), seeds=2, noise_seeds=0, steps=3, config=str(config), timing=False)
    return train_plan(plan)


def test_dyt_is_trained_compared_and_counted_like_any_norm(dyt, panels, tmp_path):
    study = dyt.study
    assert [r.status for r in study.results] == ["completed"] * 4 and study.sweeps == []
    (found,) = study.comparisons
    assert (found.arm, found.baseline, found.loss.n) == ("dyt", "layer", 2)
    report.write(study, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for arm in study.arms:
        model = Decoder(arm_settings(study.plan, arm.arm).model, seed=1)
        norms = sum(p.numel() for name, p in model.named_parameters() if is_norm_parameter(name))
        row = next(line for line in text.splitlines() if line.startswith(f"| {arm.label} | 0.005 | 2 of 2 |"))
        assert row.endswith(f"| {model.num_parameters()} | {norms} |")
    assert study.arms[0].norm_parameters != study.arms[1].norm_parameters  # alpha
    assert "- **dyt**: " in text and re.search(r"^\| dyt minus layer \|", text, re.MULTILINE)
    assert all(caption.startswith(("dyt", "layer")) for caption in panels if "line: training" in caption)
    for name in ("sweep", "Learning rates"):
        assert f"## {name}" not in text
    assert "All arms ran at the same learning rate, which was not tuned for any of them." in text


def oklab(color: str) -> np.ndarray:
    """A color "#rrggbb" in Oklab (Ottosson 2020): a distance there is the difference that is seen."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cones += [[0.0883024619, 0.2817188376, 0.6299787005]]
    opponents = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    opponents += [[0.0259040371, 0.7827717662, -0.8086757660]]
    return np.array(opponents) @ np.cbrt(np.array(cones) @ linear)


def luminance(color: str) -> float:
    """Relative luminance of a color, as WCAG 2 defines it."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(("theme", "page"), [("light", "#ffffff"), ("dark", "#121314")])
def test_every_norm_has_a_color_of_its_own_that_is_seen_on_the_page_and_is_unlike_the_others(theme, page):
    assert len(NORMS) <= 12
    colors = [plots.Style(theme).color(number) for number in range(12)]
    for one, other in itertools.combinations(colors, 2):
        assert np.linalg.norm(oklab(one) - oklab(other)) > 0.11, (one, other)
    for color in colors:
        dark, bright = sorted((luminance(color), luminance(page)))
        assert (bright + 0.05) / (dark + 0.05) >= 2.99, color


def test_no_two_of_150_arms_have_the_same_color_and_marker():
    for theme in ("light", "dark"):
        style = plots.Style(theme)
        looks = {(style.color(number), plots.MARKERS[number % len(plots.MARKERS)]) for number in range(150)}
        assert len(looks) == 150


def test_every_norm_is_offered_on_the_command_line():
    plan = Plan(norms=tuple(NORMS))
    assert [arm.norm for arm in plan.arms] == list(NORMS)
