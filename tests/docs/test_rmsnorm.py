"""docs/rmsnorm.md, in both languages: its blocks run as printed, and the lines and names it quotes are in the code."""

import ast
import json
import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.decoder import Decoder
from model.inspect import inspect
from studies.inside import growth

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rmsnorm.md", "rmsnorm.zh.md"))
LANGUAGES = pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])


def blocks(text: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def functions(text: str) -> str:
    """The source of the functions that a text names as `file.py:function`."""
    sources = []
    for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        sources += [
            ast.get_source_segment(source, node) for node in ast.parse(source).body if vars(node).get("name") == name
        ]
    return "\n".join(sources)


def test_every_block_runs_as_it_is_printed_is_short_and_ends_with_an_assertion():
    namespace = {}
    assert len(blocks(ENGLISH)) > 10
    for block in blocks(ENGLISH):
        exec(compile(block, "docs/rmsnorm.md", "exec"), namespace)
        assert isinstance(ast.parse(block).body[-1], ast.Assert) and block.count("\n") <= 10, block


def test_both_languages_have_the_same_blocks_sections_and_links():
    assert blocks(CHINESE) == blocks(ENGLISH)
    for what in (r"^## (\d+)\.", r"\]\((?!#|rmsnorm)([^)]+)\)"):
        assert sorted(re.findall(what, CHINESE, re.MULTILINE)) == sorted(re.findall(what, ENGLISH, re.MULTILINE))


@LANGUAGES
def test_a_line_of_code_beside_a_formula_is_in_the_function_that_the_section_names(text):
    lines = 0
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    for section in (sections[2], sections[5]):
        source = functions(section)
        for row in re.findall(r"^\|.*\|$", section, re.MULTILINE):
            for line in re.findall(r"`([^`]+ [-+*]?= [^`]+)`", row.split(" | ")[-1]):
                assert line in source, line
                lines += 1
    assert lines == 12


@LANGUAGES
def test_names_in_the_section_on_triton_are_in_its_kernels(text):
    section = re.split(r"^## ", text, flags=re.MULTILINE)[9]
    source = (ROOT / "kernels" / "norm.py").read_text(encoding="utf-8")
    code = re.findall(r"`([^`]+)`", re.sub(r"\[`[^`]+`\]", "", section))
    names = {name for inline in code for name in re.findall(r"[A-Za-z_]{2,}", inline)}
    assert len(names) > 20 and {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


@LANGUAGES
def test_the_times_of_the_gpu_and_their_limits_are_those_of_the_record(text):
    record = json.loads((ROOT / "speed" / "norms-nvidia-h200.json").read_text(encoding="utf-8"))
    rates = record["machine"]
    cases = {case["title"]: case for case in record["tables"]}
    expected = []
    for after in ("", " after addition"):
        rms, layer = (cases[f"{kind} norm{after}, 8192 x 4096"] for kind in ("rms", "layer"))
        for part in ("forward", "backward"):
            times = rms["limits"][part], *(median(case["seconds"]["ours"][part]) for case in (rms, layer))
            expected.append([round(seconds * 1e6) for seconds in times])
    rows = re.findall(r"^\|[^|]+\| (\d) \+ (\d) \|[^|]+\| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert [[int(cell) for cell in row[2:]] for row in rows] == expected
    for read, written, limit, *_ in rows:
        moved = 8192 * 4096 * (int(read) + int(written))
        assert round(moved / rates["copy_bytes_per_second"] * 1e6) == int(limit)
    assert f"{rates['product_flops_per_second'] / rates['copy_bytes_per_second']:.0f} " in text


def test_the_picture_shows_what_the_norms_read_and_divide():
    config = ModelConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, norm_eps=1e-12)
    decoder = Decoder(config, seed=1)
    rms = inspect(decoder, range(40)).rms
    torch.testing.assert_close(rms[0], decoder.embed_tokens.weight[:40].detach().square().mean(-1).sqrt())
    stream, divided = (line.get_ydata() for line in growth(rms, config.norm_eps).axes[0].lines)
    assert stream == pytest.approx(rms.quantile(0.5, dim=1).numpy()) and divided == pytest.approx(np.ones(7))
