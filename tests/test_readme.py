"""README.md and docs/*.md name only commands, flags, files and sections that exist."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
README = TEXTS[ROOT / "README.md"]
PACKAGES = sorted(path.name for path in ROOT.iterdir() if next(path.glob("*.py"), None) and path.name != "tests")


def section(title: str) -> str:
    """The text of the README's section `title`."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def parse(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    """The command lines of a document that start a script or module of ours, in code blocks and inline."""
    code = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in code for line in block.splitlines()]
    lines += [" ".join(inline.split()) for inline in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return [part for line in lines for part in line.split("&&") if re.match(r"\s*python (-m )?\w", part)]


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
        named += [f"configs/{name}.toml" for name in re.findall(r"--config (\w[\w-]*)", command)]
        named += [f"configs/comparisons/{name}.toml" for name in re.findall(r"ablate\.py (\w[\w-]*)", command)]
    assert [name for name in named if not (ROOT / name.strip()).is_file()] == []


@pytest.mark.parametrize("script", ["train.py", "generate.py", "ablate.py", "serve.py"])
def test_every_flag_in_the_commands_of_the_documents_exists(script):
    used = [command for text in TEXTS.values() for command in commands(text) if f"python {script}" in command]
    flags = {flag for command in used for flag in re.findall(r"\s(--\w[\w-]*)", command)}
    command = [sys.executable, script, "--help-all" if script == "train.py" else "--help"]
    help_text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout + "--help-all"
    assert used and flags - set(re.findall(r"--\w[\w-]*", help_text)) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_picture_of_a_document_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[document])
    for link in links:
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_file(), link
        assert not anchor or anchor in anchors(TEXTS[target]), link


def test_every_document_is_linked_from_the_readme():
    assert [path.name for path in DOCUMENTS if path.parent == ROOT / "docs" and f"docs/{path.name}" not in README] == []


def test_every_ablation_plan_is_in_the_table_of_plans():
    plans = {path.stem for path in (ROOT / "configs" / "comparisons").glob("*.toml")}
    assert plans == set(re.findall(r"^\| `([\w-]+)` \|", TEXTS[ROOT / "docs" / "norms.md"], re.MULTILINE))


def top_level_names(path: Path) -> set[str]:
    """Functions, classes and assigned names of a source file."""
    names = set()
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


PLACES = sorted({place for text in TEXTS.values() for place in re.findall(r"`([\w/]+\.py):(\w+)`", text)})


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_a_function_that_a_document_names_exists(file, name):
    assert name in top_level_names(ROOT / file)


def test_the_example_of_a_norm_consists_of_lines_of_the_source():
    source = "".join((ROOT / "model" / name).read_text(encoding="utf-8") for name in ("config.py", "norm.py"))
    source_lines = {line.strip() for line in source.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", section("Compare your own"), re.DOTALL)
    code = "".join(blocks).replace("mine", "dyt")  # under another name than in the source
    lines = [line.split("  #")[0].strip() for line in code.splitlines()]
    assert len(lines) >= 4
    assert [line for line in lines if line not in source_lines] == []


@pytest.mark.slow
def test_a_norm_that_is_added_as_in_the_example_leaves_the_tests_of_norms_green(tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "runs"))
    row, function = re.findall(r"```python\n(.*?)```", section("Compare your own"), re.DOTALL)
    for name, before, added in (
        ("config.py", '    "none": ', f"    {row}"),
        ("norm.py", "# Names as in files", f"{function}\n\n"),
    ):
        path = copy / "model" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added + before), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "norm or mine"]
    packages = ["tests/model", "tests/checkpoints", "tests/training"]
    done = subprocess.run([*command, *packages], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_table_of_packages_lists_every_package():
    assert sorted(re.findall(r"\| `(\w+)/` \|", section("Code map"))) == sorted([*PACKAGES, "tests"])
