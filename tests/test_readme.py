"""Documents (README, its Chinese version, CONTRIBUTING, docs/) name what exists; their tables and code are right.

Last come tests of docs/rmsnorm.md in both languages: its blocks run, and the lines that it quotes are in the code.
"""

import ast
import json
import re
from statistics import median

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.decoder import Decoder
from model.inspect import inspect
from studies.inside import growth
from studies.tables import MARKED, filled
from tests.conftest import ROOT, run_python

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
README = TEXTS[ROOT / "README.md"]
ENGLISH, CHINESE = (TEXTS[ROOT / "docs" / name] for name in ("rmsnorm.md", "rmsnorm.zh.md"))
LANGUAGES = pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
PACKAGES = sorted(path.name for path in ROOT.iterdir() if next(path.glob("*.py"), None) and path.name != "tests")


def section(title: str) -> str:
    """The text of the README's section `title`."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[str]:
    """The commands of a document that start a script or module of ours, in code blocks and inline, without comments."""
    code = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0] for block in code for line in block.splitlines()]
    lines += [" ".join(inline.split()) for inline in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return [command for line in lines for command in line.split("&&") if re.match(r"\s*python (-m )?\w", command)]


def blocks(text: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_module_function_config_and_plan_that_a_document_names_exists(document):
    named = re.findall(rf"`((?:{'|'.join([*PACKAGES, 'tests', 'configs'])})/[\w/.-]+\.\w+)[`:]", TEXTS[document])
    for command in commands(TEXTS[document]):
        named += re.findall(r"python (\w+\.py)", command) + re.findall(r"\stests/\S+\.py", command)
        named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (\w+\.\w+)", command)]
        named += [f"configs/{name}.toml" for name in re.findall(r"--config (\w[\w-]*)(?![\w.-])", command)]
        studies = set(re.findall(r"ablate\.py (\w[\w-]*)", command)) - {"judge", "report", "NAME"}
        named += [f"studies/{name}/plan.toml" for name in studies]
    assert [name for name in named if not (ROOT / name.strip()).is_file()] == []
    functions(TEXTS[document])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_block_of_commands_can_be_pasted_because_explanations_are_comments(document):
    assert [command for command in commands(TEXTS[document]) if re.search(r"\S {2,}\S", command)] == []


@pytest.mark.parametrize("script", ["train.py", "generate.py", "ablate.py", "serve.py"])
def test_every_flag_in_the_commands_of_the_documents_exists(script):
    used = [command for text in TEXTS.values() for command in commands(text) if f"python {script}" in command]
    flags = {flag for command in used for flag in re.findall(r"\s(--\w[\w-]*)", command)}
    ask = {"train.py": ["--help-all"], "ablate.py": ["judge", "--help"]}.get(script, ["--help"])
    help_text = "--help-all" + run_python(script, *ask).stdout
    assert used and flags - set(re.findall(r"--\w[\w-]*", help_text)) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_picture_of_a_document_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[document])
    for link in links:
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_file(), link
        assert not anchor or anchor in anchors(TEXTS[target]), link


def test_the_readme_links_every_document_and_lists_every_package():
    assert [path.name for path in DOCUMENTS if path.parent == ROOT / "docs" and f"docs/{path.name}" not in README] == []
    assert sorted(re.findall(r"\b(\w+)/ +", section("Read the code"))) == sorted([*PACKAGES, "speed"])


def test_both_languages_of_the_readme_have_the_same_code():
    for pattern in (r"^(?:python|pip|lm_eval)(?: \S+)+", r"```python\n.*?```", r"\]\((docs/\w+\.png)\)"):
        texts = README, TEXTS[ROOT / "README.zh.md"]
        english, chinese = (re.findall(pattern, text, re.MULTILINE | re.DOTALL) for text in texts)
        assert english == chinese and english


def functions(text: str) -> list[str]:
    """The sources of the functions, classes and constants that a text names as `file.py:name`, each of which exists."""
    sources = []
    for file, name in re.findall(r"`([\w/]+\.py):(\w+)`", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), (file, name)
        nodes = [node for node in ast.parse(source).body if vars(node).get("name") == name]
        sources += [ast.get_source_segment(source, node) for node in nodes]
    return sources


def test_the_example_of_a_norm_consists_of_lines_of_the_source():
    source = "".join((ROOT / "model" / name).read_text(encoding="utf-8") for name in ("config.py", "norm.py"))
    source_lines = {line.split("  #")[0].strip() for line in source.splitlines()}
    # under another name than in the source
    code = "".join(blocks(section("Compare two settings"))).replace("mine", "dyt")
    lines = [line.split("  #")[0].strip() for line in code.splitlines()]
    assert len(lines) == 3
    assert [line for line in lines if line not in source_lines] == []


@pytest.mark.parametrize("document", [path for path in TEXTS if MARKED.search(TEXTS[path])], ids=lambda path: path.name)
def test_the_tables_of_a_document_are_what_the_records_give(document):
    text = TEXTS[document]
    assert filled(text, len(document.relative_to(ROOT).parts) - 1) == text
    assert text.count("<!-- table:") == text.count("<!-- end -->") == len(MARKED.findall(text))


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_speeds_that_a_readme_repeats_are_those_of_the_notebook(name):
    tables = "".join(match[0] for text in TEXTS.values() for match in MARKED.finditer(text))
    row = r"^\|[^|]+\|([^|]+\|[^|]+(?:torch\.compile|transformers|llama)[^|]*)\|$"
    rows = re.findall(row, TEXTS[ROOT / name], re.MULTILINE)
    speeds = [speed for row in rows for speed in re.findall(r"(?<![\w.])\d[\d,.]+(?!\w)", row)]
    assert len(speeds) == 17 and [speed for speed in speeds if speed not in tables] == []


def test_a_table_that_differs_from_its_records_is_written_again_and_the_text_around_it_is_kept():
    marks = "<!-- table: contrasts factorial bias-2e-3 -->\n{}\n<!-- end -->\nafter\n"
    first, second = (filled(marks.format(text), depth=1) for text in ("| 0.5 |", ""))
    assert first == second and first.endswith("<!-- end -->\nafter\n")
    row = "| [small model, 2,400 steps](../studies/factorial/report.md) | 30 | +0.0029 [+0.0021, +0.0038] |"
    assert row[:-2] in first and "| [bias alone, rate 2e-3](../studies/bias-2e-3/report.md) | 17 |" in first


def test_the_block_runs_and_the_changed_weight_changes_the_losses(stories260k_directory, tmp_path, monkeypatch, capsys):
    [block] = blocks(TEXTS[ROOT / "docs" / "model.md"])
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


@pytest.mark.slow
def test_the_block_of_the_notebook_measures_two_compressed_sizes(tmp_path, monkeypatch, capsys):
    [block] = blocks(TEXTS[ROOT / "docs" / "lab" / "recipe.md"])
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    alone, after_training_text = map(float, capsys.readouterr().out.split())
    assert 1 < after_training_text < alone < 3


def test_every_block_on_rmsnorm_runs_as_it_is_printed_is_short_and_ends_with_an_assertion():
    namespace = {}
    assert len(blocks(ENGLISH)) > 10
    for block in blocks(ENGLISH):
        exec(compile(block, "docs/rmsnorm.md", "exec"), namespace)
        assert isinstance(ast.parse(block).body[-1], ast.Assert) and block.count("\n") <= 10, block


def test_both_languages_on_rmsnorm_have_the_same_blocks_sections_and_links():
    assert blocks(CHINESE) == blocks(ENGLISH)
    for what in (r"^## (\d+)\.", r"\]\((?!#|rmsnorm)([^)]+)\)"):
        assert sorted(re.findall(what, CHINESE, re.MULTILINE)) == sorted(re.findall(what, ENGLISH, re.MULTILINE))


@LANGUAGES
def test_a_line_of_code_beside_a_formula_is_in_the_function_that_the_section_names(text):
    lines = 0
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    for section in (sections[2], sections[5]):
        source = "\n".join(functions(section))
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
