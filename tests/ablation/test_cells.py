"""The table and the pictures over many comparisons."""

import dataclasses
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

import ablate
from ablation import report
from ablation.cells import cells, draw_noise, draw_pairs, is_about_norms, pooled, save_pictures
from ablation.plan import save_plan
from ablation.results import append_lines
from errors import UserError


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


def test_the_table_has_a_row_for_each_cell(found):
    lines = report.cells_table(found).splitlines()
    assert len(lines) == 2 + len(found)
    row = [value.strip() for value in lines[2].split("|")]
    assert row[1] == "rms minus layer" and row[5:8] == ["0.02", "3", "+0.0233 [-0.0146, +0.0613]"]
    assert row[-2] == found[0].verdict == "not resolved"


def test_the_table_names_both_learning_rates_and_an_arm_that_is_not_well_tuned(study, with_sweep):
    (final, *_) = cells([with_sweep(study, {"rms": (3.1, 3.2, 3.3)})])
    assert final.loss.untuned and final.bits.untuned
    row = [value.strip() for value in report.cells_table([final]).splitlines()[2].split("|")]
    assert row[5] == "0.005 and 0.02" and row[-2] == f"{final.verdict} (not well tuned)"


def test_every_pair_is_a_dot_in_the_row_of_its_cell_and_no_dot_is_outside(found):
    axes = Figure().add_subplot()
    draw_pairs(axes, found)
    low, high = axes.get_xlim()
    for row, cell in enumerate(found):
        drawn = [line.get_xydata().tolist() for line in axes.lines]
        assert [[value, row] for value in cell.differences] in drawn
        assert all(low < value < high for value in cell.differences)
        assert [[end, row] for end in cell.loss.interval] in drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == [cell.place for cell in found]
    shaded = [band.get_paths()[0].get_extents() for band in axes.collections]
    assert [box.x1 for box in shaded] == pytest.approx([cell.noise.deviation for cell in found])


def test_deviations_of_cells_at_one_learning_rate_are_pooled(found):
    one, two = (dataclasses.replace(found[0], differences=values) for values in ([1.0, 3.0], [5.0, 5.0, 5.0]))
    assert pooled([one, two]) == ([found[0].learning_rate], [pytest.approx(math.sqrt(2 / 3))])


def test_the_noise_is_drawn_beside_the_deviation_of_the_pairs(found):
    axes = Figure().add_subplot()
    draw_noise(axes, found)
    pairs, equal, *legend = axes.lines
    assert [line.get_label() for line in legend] == ["filled: rms minus layer", "hollow: equal runs"]
    assert pairs.get_xydata().tolist() == np.transpose(pooled(found)).tolist()
    by_rate = {cell.learning_rate: cell.noise.deviation for cell in found}
    assert equal.get_xydata().tolist() == [[rate, by_rate[rate]] for rate in sorted(by_rate)]


def test_the_noise_is_that_of_the_comparison_with_most_cells(found):
    study = found[0].study
    other = next(arm for arm in study.plan.arms if arm.norm == "center")
    axes = Figure().add_subplot()
    draw_noise(axes, [dataclasses.replace(found[0], arm=other), *found])
    assert axes.lines[0].get_xydata().tolist() == np.transpose(pooled(found)).tolist()


def test_the_script_prints_the_table_and_writes_both_pictures(study, tmp_path, monkeypatch, capsys):
    save_plan(study.plan, tmp_path / "plan.toml")
    append_lines(tmp_path / "runs.jsonl", *study.results)
    picture = tmp_path / "norms.png"
    monkeypatch.setattr("sys.argv", ["ablate.py", "--cells", str(tmp_path), "--picture", str(picture)])
    assert ablate.main() == 0
    assert len(re.findall(r"^\| rms minus layer ", capsys.readouterr().out, re.MULTILINE)) == 4
    assert picture.stat().st_size > 1000 and (tmp_path / "norms-noise.png").stat().st_size > 1000


def test_what_cannot_be_drawn_is_a_one_line_error(found, tmp_path):
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        save_pictures(found, tmp_path / "norms.gif")
    with pytest.raises(UserError, match="have no pairs of rms and layer to draw"):
        save_pictures([], tmp_path / "norms.png")
    with pytest.raises(UserError, match="cannot be written"):
        save_pictures(found, tmp_path / "missing" / "norms.png")
