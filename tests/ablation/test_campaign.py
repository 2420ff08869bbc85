"""Ideas judged one after another: the ledger, what is refused, losses of other programs, and how often it is wrong."""

import json
import math
from collections.abc import Callable

import pandas as pd
import pytest
from scipy import stats

import ablate
from ablation import execute
from ablation.campaign import judge_pairs, load_campaign, lond_level, read_pairs
from ablation.execute import Experiment
from ablation.plan import run_settings
from ablation.records import read_lines
from ablation.run import settings_hash
from errors import UserError
from tests.ablation.simulated import arm_with_itself, normal, recorded_comparisons, simulate


def test_of_campaigns_without_a_true_idea_at_most_one_in_ten_keeps_any_and_most_true_ones_are_kept():
    for share, least_power in ((0.0, 0.0), (0.1, 0.8)):
        rate, error, power, judge_rate, *_ = simulate(200, normal, share)
        assert rate - error < 0.1 < judge_rate and power >= least_power
    assert sum(lond_level(0.1, number, 0) for number in range(1, 10**5)) == pytest.approx(0.1, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "fields", "expected"),
    [  # rates of false keeps and power: of a campaign, of verdicts at 5%
        (normal, {"share": 0}, (0.078, 0, 0.732, 0)),
        (normal, {"share": 0.1}, (0.031, 0.874, 0.193, 0.987)),
        (normal, {"share": 0.1, "fading": 0.8}, (0.045, 0.500, 0.251, 0.662)),
        (arm_with_itself, {"share": 0}, (0.094, 0, 0.771, 0)),
        (arm_with_itself, {"share": 0.1}, (0.036, 0.865, 0.209, 0.982)),
        (recorded_comparisons, {"share": 0}, (0.311, 0, 0.836, 0)),
        (recorded_comparisons, {"share": 0.1}, (0.088, 0.956, 0.242, 0.997)),
    ],
)
def test_the_rates_of_false_keeps_are_those_of_the_documents(draw, fields, expected):
    rate, _, power, judge_rate, _, judge_power = simulate(10_000, draw, **fields)
    assert (rate, power, judge_rate, judge_power) == pytest.approx(expected, abs=0.01)


@pytest.fixture
def judge(config, tmp_path, monkeypatch, row, start_of) -> Callable:
    """Runs `ablate.py judge --campaign`, with losses by run instead of training; returns the ledger."""

    def run(*flags: str, loss: Callable, status: int = 0) -> list[dict]:
        def start(experiment: Experiment, run, device: str):
            recorded = {"device": experiment.device, "settings_hash": settings_hash(run_settings(experiment.plan, run))}
            return start_of(lambda run, device: row(run, loss(run), **recorded))(run, device)

        monkeypatch.setattr(execute, "start_process", start)
        arguments = ["judge", "--campaign", f"{tmp_path}", "--config", f"{config}", "--device", "cpu", "--seeds", "10"]
        monkeypatch.setattr("sys.argv", ["ablate.py", *arguments, *flags])
        assert ablate.main() == status
        return read_lines(tmp_path / "campaign.jsonl")

    return run


def better(run) -> float:
    return 3 + 0.001 * math.sin(run.seed) - 0.1 * ("qk_norm" in run.arm) + 0.0001 * len(run.arm) * math.sin(run.seed**2)


def test_a_ledger_gives_new_seeds_stricter_levels_and_what_was_kept_as_baseline(judge, tmp_path, capsys):
    judge("--b", "qk_norm=true", "--adopt", loss=better)
    first, second = judge("--b", "weight_decay=0.5", "--adopt", loss=better)
    assert (first["baseline"], first["idea"], first["verdict"]) == ("default", "qk_norm=true", "keep")
    assert (second["baseline"], second["idea"]) == ("qk_norm=true", "qk_norm=true weight_decay=0.5")
    assert not {*first["seeds"]} & {*second["seeds"]} and len(second["seeds"]) == 10
    assert first["level"] == pytest.approx(0.2 / 11) and second["level"] == pytest.approx(2 * 0.2 * 10 / (11 * 12))
    assert first["p"] <= first["level"] and first["looks"] == [2, 4]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["level"] == second["level"]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Kept: qk_norm=true. On average at most 10%" in report and "against qk_norm=true, is 0.0256" in report
    *_, third = judge("--a", "", "--b", "qk_norm=true", loss=better)  # again, against another baseline
    assert third["baseline"] == third["next_baseline"] == "default" and not {*third["seeds"]} & {*first["seeds"]}


def test_an_interrupted_idea_resumes_and_no_other_begins_before_it(judge, tmp_path):
    def stops(run) -> float:
        if run.seed > 3001:
            raise KeyboardInterrupt
        return better(run)

    with pytest.raises(BaseException):  # noqa: B017
        judge("--b", "weight_decay=0.5", loss=stops)
    assert not (tmp_path / "campaign.jsonl").exists()
    with pytest.raises(UserError, match="has no verdict"):
        judge("--b", "qk_norm=true", loss=better)
    assert judge("--b", "weight_decay=0.5", loss=lambda run: 1 / 0, status=1) == []  # failed runs are no verdict
    (line,) = judge("--b", "weight_decay=0.5", loss=better)
    assert line["idea"] == "weight_decay=0.5" and line["seeds"][0] == 3001


def test_a_damaged_line_and_another_share_are_one_line(judge, tmp_path):
    judge("--b", "qk_norm=true", loss=better)
    with pytest.raises(UserError, match=r"--fdr 0.2 must be .* that of the folder's first idea"):
        judge("--b", "norm=layer", "--fdr", "0.2", loss=better)
    path = tmp_path / "campaign.jsonl"
    for damaged in ('{"idea": "norm=layer"}', "{", '{"idea": 3}'):
        path.write_text(path.read_text().splitlines()[0] + f"\n{damaged}\n")
        with pytest.raises(UserError, match=r"campaign.jsonl, line 2, cannot be read"):
            load_campaign(tmp_path)


@pytest.fixture
def pairs(tmp_path):
    """A table of losses of an idea that is better by 1, with two pairs."""
    rows = [f"wide,{seed},{arm},{3 + seed / 10 - (arm == 'b')}" for seed in (1, 2) for arm in "ab"]
    (tmp_path / "pairs.csv").write_text("\n".join(["idea,seed,arm,loss", *rows]))
    return tmp_path / "pairs.csv"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("wide,1,a,3", "row 5: an earlier row has this idea, seed and arm"),
        ("wide,3,a,3", "row 5: the seed has no run of the other arm"),
        ("wide,3,c,3", "row 5: it has no idea, or an arm other than a and b"),
        (",3,a,3", "row 5: it has no idea"),
        ("wide,3,a,nan", "row 5: the seed is not a whole number, or the loss not finite"),
        ("wide,3.5,a,3", "row 5: the seed is not a whole number"),
        ("wide,3,a", "row 5: .* or the loss not finite"),
        ("deep,3,a,3\ndeep,3,b,3", "row 5: the idea has one pair, and needs two or more"),
        ("wide,3,a,3,4", "cannot be read"),
    ],
)
def test_a_wrong_row_of_a_table_of_losses_is_named(pairs, line, reason):
    pairs.write_text(f"{pairs.read_text()}\n{line}")
    with pytest.raises(UserError, match=reason):
        read_pairs(pairs)


def test_losses_of_another_program_are_judged_without_training_from_csv_and_json(pairs, tmp_path):
    table = pd.read_csv(pairs)
    table.to_json(tmp_path / "pairs.jsonl", orient="records", lines=True)
    for name in ("pairs.csv", "pairs.jsonl"):
        assert {idea: dict(values) for idea, values in read_pairs(tmp_path / name).items()} == {"wide": {1: -1, 2: -1}}
    (tmp_path / "pairs.jsonl").write_text('{"idea": "wide", "seed": 1}\n{\n')
    with pytest.raises(UserError, match="line 2, cannot be read"):
        read_pairs(tmp_path / "pairs.jsonl")
    more = [
        (idea, 100 * (idea == "none") + seed, arm) for idea in ("wide", "none") for seed in range(8) for arm in "ab"
    ]
    table = pd.DataFrame(more, columns=["idea", "seed", "arm"])
    wider = (table.idea == "wide") & (table.arm == "b")
    table["loss"] = [3 + 0.01 * math.sin(i * i) for i in range(len(table))] - 0.1 * wider
    table.to_csv(pairs, index=False)
    wide, none = map(json.loads, judge_pairs(pairs, None))
    assert (wide["verdict"], none["verdict"]) == ("keep", "inconclusive") and not (tmp_path / "campaign.jsonl").exists()
    losses = table[table.idea == "wide"].pivot(index="seed", columns="arm", values="loss")
    assert wide["p"] == pytest.approx(stats.ttest_rel(losses.b, losses.a).pvalue, rel=1e-4)
    assert wide["interval"] == pytest.approx(stats.ttest_rel(losses.b, losses.a).confidence_interval(0.95), rel=1e-4)
    assert len([*judge_pairs(pairs, load_campaign(tmp_path))]) == 2
    assert not [*judge_pairs(pairs, load_campaign(tmp_path))] and len(load_campaign(tmp_path).ledger) == 2
    table.replace("none", "other").to_csv(pairs, index=False)
    with pytest.raises(UserError, match="other needs new seeds; none has used some of"):
        [*judge_pairs(pairs, load_campaign(tmp_path))]
