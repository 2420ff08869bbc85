"""Documents (README, its Chinese version, CONTRIBUTING, docs/) name what exists; their tables and code are right."""

import re

import pytest
import torch

from studies.tables import MARKED, filled
from tests.conftest import ROOT, run_python

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
README = TEXTS[ROOT / "README.md"]
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


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_module_config_and_plan_that_a_document_names_exists(document):
    named = re.findall(rf"`((?:{'|'.join([*PACKAGES, 'tests', 'configs'])})/[\w/.-]+\.\w+)[`:]", TEXTS[document])
    for command in commands(TEXTS[document]):
        named += re.findall(r"python (\w+\.py)", command) + re.findall(r"\stests/\S+\.py", command)
        named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (\w+\.\w+)", command)]
        named += [f"configs/{name}.toml" for name in re.findall(r"--config (\w[\w-]*)(?![\w.-])", command)]
        studies = set(re.findall(r"ablate\.py (\w[\w-]*)", command)) - {"judge", "report", "NAME"}
        named += [f"studies/{name}/plan.toml" for name in studies]
    assert [name for name in named if not (ROOT / name.strip()).is_file()] == []


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


def test_every_function_that_a_document_names_exists():
    named = re.findall(r"`([\w/]+\.py):(\w+)`", "".join(TEXTS.values()))
    assert named
    for file, name in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def |class )?{name}\b", source, re.MULTILINE), (file, name)


def test_the_example_of_a_norm_consists_of_lines_of_the_source():
    source = "".join((ROOT / "model" / name).read_text(encoding="utf-8") for name in ("config.py", "norm.py"))
    source_lines = {line.split("  #")[0].strip() for line in source.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", section("Compare two settings"), re.DOTALL)
    code = "".join(blocks).replace("mine", "dyt")  # under another name than in the source
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
    rows = re.findall(
        r"^\|[^|]+\|([^|]+\|[^|]+(?:torch\.compile|transformers|llama)[^|]*)\|$", TEXTS[ROOT / name], re.M
    )
    speeds = [speed for row in rows for speed in re.findall(r"(?<![\w.])\d[\d,.]+(?!\w)", row)]
    assert len(speeds) == 17 and [speed for speed in speeds if speed not in tables] == []


def test_a_table_that_differs_from_its_records_is_written_again_and_the_text_around_it_is_kept():
    marks = "<!-- table: contrasts factorial bias-2e-3 -->\n{}\n<!-- end -->\nafter\n"
    first, second = (filled(marks.format(text), depth=1) for text in ("| 0.5 |", ""))
    assert first == second and first.endswith("<!-- end -->\nafter\n")
    row = "| [small model, 2,400 steps](../studies/factorial/report.md) | 30 | +0.0029 [+0.0021, +0.0038] |"
    assert row[:-2] in first and "| [bias alone, rate 2e-3](../studies/bias-2e-3/report.md) | 17 |" in first


def test_the_block_runs_and_the_changed_weight_changes_the_losses(stories260k_directory, tmp_path, monkeypatch, capsys):
    [block] = re.findall(r"^```python\n(.*?)^```", TEXTS[ROOT / "docs" / "model.md"], re.MULTILINE | re.DOTALL)
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
    [block] = re.findall(r"^```python\n(.*?)^```", TEXTS[ROOT / "docs" / "lab" / "recipe.md"], re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    alone, after_training_text = map(float, capsys.readouterr().out.split())
    assert 1 < after_training_text < alone < 3
