"""The tables of the documents are what the records of the studies give, and the block of docs/model.md runs."""

import re
from pathlib import Path

import pytest
import torch

from studies.tables import MARKED, filled

ROOT = Path(__file__).parents[2]
DOCUMENTS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if MARKED.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_a_document_are_what_the_records_give(document):
    text = document.read_text(encoding="utf-8")
    assert filled(text, len(document.relative_to(ROOT).parts) - 1) == text
    assert text.count("<!-- table:") == text.count("<!-- end -->") == len(MARKED.findall(text))


def test_a_table_that_differs_from_its_records_is_written_again_and_the_text_around_it_is_kept():
    marks = "<!-- table: contrasts factorial bias-2e-3 -->\n{}\n<!-- end -->\nafter\n"
    first, second = (filled(marks.format(text), depth=1) for text in ("| 0.5 |", ""))
    assert first == second and first.endswith("<!-- end -->\nafter\n")
    row = "| [small model, 2,400 steps](../studies/factorial/report.md) | 30 | +0.0029 [+0.0021, +0.0038] |"
    assert row[:-2] in first and "| [bias alone, rate 2e-3](../studies/bias-2e-3/report.md) | 17 |" in first


def test_the_block_runs_and_the_changed_weight_changes_the_losses(stories260k_directory, tmp_path, monkeypatch, capsys):
    [block] = re.findall(r"^```python\n(.*?)^```", Path("docs/model.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block.count("\n") == 10
    (tmp_path / "runs" / "tiny-rms").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-rms" / "best").symlink_to(stories260k_directory)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(compile(block, "docs/model.md", "exec"), namespace)
    inside, ids, [output, *_] = namespace["inside"], namespace["ids"], namespace["outputs"]
    stream = namespace["decoder"].embed_tokens.weight[ids]
    assert inside.rms.shape == (11, len(ids)) and output.shape == (1, len(ids), 64) and stream.shape == output[0].shape
    assert capsys.readouterr().out.count("tensor(") == 2 and torch.isfinite(inside.losses).all()
