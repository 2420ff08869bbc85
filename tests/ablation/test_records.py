"""runs.jsonl after kills, and with what JSON does not have."""

import dataclasses
import math

import pytest

from ablation.plan import Run
from ablation.records import append, read_rows


@pytest.fixture
def rows(row) -> list:
    return [dataclasses.asdict(row(Run("rms", "final", seed, 1e-3), 3.0, curve=[(1, 5.0)])) for seed in (1, 2, 3)]


def test_a_line_cut_at_any_byte_is_ignored_and_overwritten_by_the_next(rows, tmp_path):
    path = tmp_path / "runs.jsonl"
    append(path, *rows[:2])
    content = path.read_bytes()
    assert read_rows(path)[0] | {"curve": [(1, 5.0)]} == rows[0]
    first = content.index(b"\n") + 1
    for end in range(first, len(content), 7):
        path.write_bytes(content[:end])
        assert len(read_rows(path)) == 1
        append(path, rows[2])
        assert [line["seed"] for line in read_rows(path)] == [1, 3]


def test_a_number_that_json_does_not_have_is_refused_and_nothing_is_written(rows, tmp_path):
    with pytest.raises(ValueError):
        append(tmp_path / "runs.jsonl", rows[0] | {"loss": math.nan})
    assert not (tmp_path / "runs.jsonl").exists()
