"""The table and the pictures over many comparisons."""

import dataclasses
import math
import re

import numpy as np
import pytest

import ablate
from ablation import report
from ablation.cells import cells, is_about_norms, pooled
from ablation.plan import save_plan
from ablation.results import append_lines


@pytest.fixture
def found(study, with_losses):
    layer = np.array([3.0, 3.1, 3.05])
    return cells(
        [with_losses(study, {"layer": layer, "rms": np.add(layer, [0.01, 0.02, 0.04]), "center": layer + 0.5})]
    )


def test_a_cell_is_rms_minus_layer_in_the_final_runs_or_at_a_learning_rate_of_the_sweep(found, study):
    final, *sweep = found  # not center
    assert final.compared == "rms minus layer" and final.differences == pytest.approx([0.01, 0.02, 0.04])
    assert final.loss.n == 3 and final.bits.estimate == pytest.approx(0.07 / 3 / 2.2)
    assert final.deviation == pytest.approx(math.sqrt(((0.04 / 3) ** 2 + (0.01 / 3) ** 2 + (0.05 / 3) ** 2) / 2))
    assert final.place.startswith(f"{final.parameters / 1e6:.3g}M, 0.00154M tokens, {final.learning_rate:g}, ")
    assert [(cell.learning_rate, cell.verdict, cell.loss.n) for cell in sweep] == [
        (rate, "sweep", 2) for rate in (5e-3, 2e-2, 0.5)
    ]
    losses = {
        (r.arm.norm, r.seed): r.validation_loss for r in study.results if r.phase == "sweep" and r.learning_rate == 0.5
    }
    expected = [losses["rms", seed] - losses["layer", seed] for seed in (1001, 1002)]
    assert sweep[2].differences == pytest.approx(expected) and len(sweep[2].noise.differences) == 2


def test_what_differs_in_more_than_the_norm_is_no_cell(study):
    rms, layer = study.plan.arms[:2]
    assert is_about_norms(rms, layer) and is_about_norms(dataclasses.replace(rms, norm_bias=True), rms)
    assert not is_about_norms(dataclasses.replace(rms, mlp="geglu"), rms)
    assert not is_about_norms(dataclasses.replace(rms, norm="center"), layer)


def test_the_table_names_both_learning_rates_and_an_arm_that_is_not_well_tuned(study, with_sweep):
    (final, *_) = cells([with_sweep(study, {"rms": (3.1, 3.2, 3.3)})])
    assert final.loss.untuned and final.bits.untuned
    row = [value.strip() for value in report.cells_table([final]).splitlines()[2].split("|")]
    assert row[5] == "0.005 and 0.02" and row[-2] == f"{final.verdict} (not well tuned)"


def test_deviations_of_cells_at_one_learning_rate_are_pooled(found):
    one, two = (dataclasses.replace(found[0], differences=values) for values in ([1.0, 3.0], [5.0, 5.0, 5.0]))
    assert pooled([one, two]) == ([found[0].learning_rate], [pytest.approx(math.sqrt(2 / 3))])


def test_the_script_prints_the_table_and_writes_both_pictures(study, tmp_path, monkeypatch, capsys):
    save_plan(study.plan, tmp_path / "plan.toml")
    append_lines(tmp_path / "runs.jsonl", *study.results)
    picture = tmp_path / "norms.png"
    monkeypatch.setattr("sys.argv", ["ablate.py", "--cells", str(tmp_path), "--picture", str(picture)])
    assert ablate.main() == 0
    assert len(re.findall(r"^\| rms minus layer ", capsys.readouterr().out, re.MULTILINE)) == 4
    assert picture.stat().st_size > 1000 and (tmp_path / "norms-noise.png").stat().st_size > 1000
