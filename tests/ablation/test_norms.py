"""A norm is a row in NORMS and a function in model/norm.py; the ablation follows from the row."""

import re

import pytest

from ablation import report
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


def test_every_norm_is_offered_on_the_command_line():
    plan = Plan(norms=tuple(NORMS))
    assert [arm.norm for arm in plan.arms] == list(NORMS)
