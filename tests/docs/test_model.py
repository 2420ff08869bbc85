"""The Python block of docs/model.md runs as printed, on a model with real weights."""

import re
from pathlib import Path

import torch


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
