"""The timing harness: whose turn it is, what a block's time is, and what the tables say."""

import json
from pathlib import Path

import torch

from benchmarks import timing


def test_blocks_take_turns_in_an_order_that_reverses_after_every_turn():
    order = []

    def make(name):
        return {part: lambda part=part: order.append(name + part) or len(order) for part in "12"}

    seconds, failures = timing.measure({name: lambda name=name: make(name) for name in "abc"}, 4)
    warm_up, timed = order[:6], "".join(order[6:])
    assert warm_up == ["a1", "a2", "b1", "b2", "c1", "c2"] and timed[::4] == "cbaabccbaabc" and not failures
    assert seconds["c"] == {"1": [7, 17, 19, 29], "2": [8, 18, 20, 30]} and list(seconds) == list("abc")


def test_what_cannot_run_is_left_out_with_its_reason_and_the_others_are_measured(capsys):
    def fail():
        raise ZeroDivisionError("none of this\nhere")

    makers = {"fails": fail, "late": lambda: {"part": fail}, "runs": lambda: {"part": lambda: 0.5}}
    table = timing.compare("title", makers, {"part": 0.1}, 2)
    assert table["seconds"] == {"runs": {"part": [0.5, 0.5]}}
    assert table["not_run"] == dict.fromkeys(("fails", "late"), "ZeroDivisionError: none of this")
    lines = capsys.readouterr().out.splitlines()
    assert "| late | not run: ZeroDivisionError: none of this |" in lines


def test_a_row_has_medians_tokens_per_second_the_share_of_the_limit_and_the_ratios_within_turns(capsys):
    values = {"a": iter([9, 0.02, 0.06, 0.04]), "b": iter([9, 0.01, 0.02, 0.04])}
    makers = {name: lambda name=name: {"step": lambda: next(values[name])} for name in values}
    table = timing.compare("title", makers, {"step": 0.01}, 3, tokens=8)
    assert table["seconds"]["b"] == {"step": [0.01, 0.02, 0.04]}
    lines = capsys.readouterr().out.splitlines()
    assert "|  | step, ms | tokens/s | of the limit | speed, times a |" in lines
    assert "| b | 20.0 | 400 | 50% | 2.00 (1.00 to 3.00) |" in lines


def test_published_records_look_like_what_a_benchmark_prints_today(capsys):
    table = timing.compare("title", {"a": lambda: {"step": lambda: 0.1}}, {"step": 0.1}, 1)
    printed = timing.results(torch.device("cpu"), [table])
    for path in (Path(__file__).parents[2] / "speed").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record.keys() == printed.keys() and record["machine"].keys() >= printed["machine"].keys()
        assert all(measured.keys() == table.keys() for measured in record["tables"]), path
