"""Ideas judged one after another: the ledger, what is refused, losses of other programs, and how often it is wrong."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import ablate
from ablation import execute
from ablation.judge import judge_pairs, load_campaign, lond_level, read_pairs
from ablation.plan import load_plan, run_settings
from ablation.records import append, read_lines
from ablation.run import settings_hash
from errors import UserError
from tests.ablation.simulated import arm_with_itself, recorded_comparisons, simulate

normal = np.random.Generator.standard_normal


def test_of_campaigns_without_a_true_idea_at_most_one_in_ten_keeps_any_and_most_true_ones_are_kept():
    for share, least_power in ((0.0, 0.0), (0.1, 0.8)):
        (rate, judge_rate), (power, _) = simulate(200, normal, share)
        assert rate < 0.1 < judge_rate and power >= least_power
    assert sum(lond_level(0.1, number, 0) for number in range(1, 10**5)) == pytest.approx(0.1, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "fields", "rates", "power"),  # each of a campaign, and of verdicts at 5%
    [
        (normal, {"share": 0}, (0.078, 0.732), (0, 0)),
        (normal, {"share": 0.1}, (0.031, 0.193), (0.874, 0.987)),
        (normal, {"share": 0.1, "fading": 0.8}, (0.045, 0.251), (0.500, 0.662)),
        (arm_with_itself, {"share": 0}, (0.094, 0.771), (0, 0)),
        (recorded_comparisons, {"share": 0}, (0.338, 0.848), (0, 0)),
        (recorded_comparisons, {"share": 0.1}, (0.095, 0.251), (0.953, 0.995)),
    ],
)
def test_the_rates_of_false_keeps_are_those_of_the_documents(draw, fields, rates, power):
    assert simulate(10_000, draw, **fields) == (pytest.approx(rates, abs=0.01), pytest.approx(power, abs=0.01))


@pytest.fixture
def judge(config, tmp_path, monkeypatch, row, start_of) -> Callable:
    """Runs `ablate.py judge --campaign`, with losses by run instead of training; returns the ledger."""

    def run(*flags: str, loss: Callable, status: int = 0) -> list[dict]:
        def start(experiment, run, device):
            of_run = settings_hash(run_settings(experiment.plan, run))
            more = {"device": experiment.workers.device, "settings_hash": of_run}
            return start_of(lambda run, device: row(run, loss(run), **more))(experiment, run, device)

        monkeypatch.setattr(execute, "start_process", start)
        arguments = ["judge", "--campaign", f"{tmp_path}", "--config", f"{config}", "--device", "cpu", "--seeds", "10"]
        monkeypatch.setattr("sys.argv", ["ablate.py", *arguments, *flags])
        assert ablate.main() == status
        return read_lines(tmp_path / "campaign.jsonl")

    return run


def better(run) -> float:
    return 3 + 0.001 * math.sin(run.seed) - 0.1 * ("qk_norm" in run.arm) + 0.0001 * len(run.arm) * math.sin(run.seed**2)


def test_a_ledger_gives_new_seeds_stricter_levels_and_what_was_kept_as_baseline(judge, tmp_path, capsys, monkeypatch):
    judge("--b", "qk_norm=true", "--adopt", loss=better)
    first, second = judge("--b", "weight_decay=0.5", "--adopt", loss=better)
    assert (first["baseline"], first["idea"], first["verdict"]) == ("default", "qk_norm=true", "keep")
    assert (second["baseline"], second["idea"]) == ("qk_norm=true", "qk_norm=true weight_decay=0.5")
    assert not {*first["seeds"]} & {*second["seeds"]} and first["looks"] == [2, 4] and first["p"] <= first["level"]
    assert (first["level"], second["level"]) == pytest.approx((0.2 / 11, 2 * 0.2 * 10 / (11 * 12)), rel=1e-5)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["level"] == second["level"]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Kept: qk_norm=true. On average at most 10%" in report and "against qk_norm=true, is 0.0256" in report
    ideas = pd.read_csv(tmp_path / "ideas.csv")
    assert ideas[["low", "high"]].iloc[0].tolist() == first["interval"] and {*ideas.unit} == {"nats per token"}
    (tmp_path / "report.md").unlink()
    monkeypatch.setattr("sys.argv", ["ablate.py", "report", f"{tmp_path}"])
    assert ablate.main() == 0 and (tmp_path / "report.md").read_text(encoding="utf-8") == report
    path = tmp_path / "campaign.jsonl"
    path.write_text(path.read_text().rstrip())  # as an editor may leave it
    append(path, *read_lines(path)[1:])
    assert read_lines(path) == [first, second, second]
    with pytest.raises(UserError, match=r"qk_norm=true weight_decay=0.5 has a verdict: .*report.md"):
        judge("--b", "weight_decay=0.5", loss=better)
    with pytest.raises(UserError, match=r"are judged with --config .*toml, not --config .*toml --steps 7"):
        judge("--b", "norm=layer", "--steps", "7", loss=better)
    with pytest.raises(UserError, match="--fdr 0 must be above 0"):
        load_campaign(tmp_path / "another", 0)
    with pytest.raises(UserError, match=r"--fdr 0.2: .* began with 0.1, which holds for all its ideas"):
        load_campaign(tmp_path, 0.2)
    path.write_text(path.read_text() + '{"idea": "norm=layer"}\n')
    with pytest.raises(UserError, match=r"campaign.jsonl, line 4, cannot be read"):
        load_campaign(tmp_path)


def test_ideas_add_to_the_baseline_of_the_first(judge):
    judge("--a", "norm=layer", "--b", "norm=layer qk_norm=true", loss=better)
    *_, last = judge("--b", "weight_decay=0.5", loss=better)
    assert (last["baseline"], last["idea"]) == ("norm=layer", "norm=layer weight_decay=0.5")
    with pytest.raises(UserError, match=r"not --config .* --vary hidden_size=16"):  # of all runs
        judge("--b", "weight_decay=0.9", "--vary", "hidden_size=16", loss=better)


def test_an_interrupted_idea_resumes_and_no_other_begins_before_it(judge, tmp_path):
    judge("--b", "weight_decay=0.5", loss=lambda run: better(run) if run.seed == 3001 else 1 / 0, status=1)
    with pytest.raises(UserError, match="has no verdict"):
        judge("--b", "qk_norm=true", loss=better)
    assert not (tmp_path / "campaign.jsonl").exists()  # failed runs are no verdict
    assert load_plan(next(tmp_path.glob("001-*/plan.toml"))).seeds == 2, "of the first look"
    (line,) = judge("--b", "weight_decay=0.5", loss=better)
    assert line["idea"] == "weight_decay=0.5" and line["seeds"][0] == 3001 and not [*tmp_path.rglob("changes.jsonl")]
    judge("--b", "qk_norm=true", "--adopt", loss=better)
    *_, last = judge("--a", "", "--b", "norm=layer", loss=better)  # against another baseline, and not kept
    assert last["baseline"] == "default" and last["next_baseline"] == "qk_norm=true"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("wide,1,a,3", "row 5 .*: an earlier row has this idea, seed and arm"),
        ("wide,3,a,3", "row 5 .*: the seed has no run of the other arm"),
        ("wide,3,c,3", "row 5 .wide,3,c,3.0.: it has no idea, or an arm other than a and b"),
        ("wide,3,a,nan", "row 5 .*: the seed is not a whole number, or the loss not finite"),
        ("wide,3,a", "row 5 .*: .* or the loss not finite"),
        ("deep,3,a,3\ndeep,3,b,3", "row 5 .*: the idea has one pair, and needs two or more"),
        ("wide,3,a,3,4", "cannot be read .*line 6"),
    ],
)
def test_a_wrong_row_of_a_table_of_losses_is_named(tmp_path, line, reason):
    text = "idea,seed,arm,loss\nwide,1,a,3\nwide,1,b,2\nwide,2,b,2.1\nwide,2,a,3.1\n"
    (path := tmp_path / "pairs.csv").write_text(text)
    assert dict(read_pairs(path)["wide"]) == pytest.approx({1: -1, 2: -1})
    with pytest.raises(UserError, match="all differences of wide are equal; give the losses with more digits"):
        judge_pairs(path, None)
    runs = itertools.product(("1.1", "1.10"), (1, 2), "ab")
    path.write_text("idea,seed,arm,loss\n" + "".join(f"{idea},{seed},{arm},3\n" for idea, seed, arm in runs))
    assert [*read_pairs(path)] == ["1.1", "1.10"]
    path.write_text(text + line)
    with pytest.raises(UserError, match=reason):
        read_pairs(path)
    path.write_text("idea,seed,arm,loss\n")
    with pytest.raises(UserError, match="has no rows"):
        read_pairs(path)


def test_losses_of_hugging_faces_trainer_are_judged_as_a_t_test_would(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = np.random.default_rng(1).normal(3, 0.1, 8)
    losses = {"a": base, "b": base - 0.1 + 0.01 * np.sin(np.arange(8) ** 2)}
    for arm, seed in itertools.product(losses, range(8)):
        (folder := Path(f"runs/wider/{seed}/{arm}")).mkdir(parents=True)
        log = [{"step": 1, "loss": 3.5}, {"step": 9, "eval_loss": losses[arm][seed]}, {"train_loss": 4}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    guide = (Path(ablate.__file__).parent / "docs" / "compare.md").read_text(encoding="utf-8")
    exec(guide.split("```python\n")[1].split("```")[0], {})
    (path := Path("pairs.csv")).write_text(capsys.readouterr().out)
    pd.read_csv(path).to_json("pairs.jsonl", orient="records", lines=True)
    test = stats.ttest_rel(losses["b"], losses["a"])
    for name, campaign in (("pairs.csv", None), ("pairs.jsonl", load_campaign(tmp_path))):
        judge_pairs(Path(name), campaign)
        result = json.loads(capsys.readouterr().out)
        assert (result["verdict"], result["idea"], result["pairs"]) == ("keep", "wider", 8)
        assert result["p"] == pytest.approx(test.pvalue, rel=1e-4)
        assert result["interval"] == pytest.approx(test.confidence_interval(1 - result["level"]), rel=1e-4)
    path.write_text("idea,seed,arm,loss\nwider,-1,a,3\nwider,-1,b,2\n" + path.read_text().partition("\n")[2])
    judge_pairs(path, load_campaign(tmp_path))
    assert capsys.readouterr().out == "" and len(load_campaign(tmp_path).ledger) == 1
    path.write_text(path.read_text().replace("wider", "other"))
    with pytest.raises(UserError, match="other and wider share seed 0; each idea needs its own"):
        judge_pairs(path, load_campaign(tmp_path))
