"""What README.md and docs/findings.md say about the source tree is true."""

import ast
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS, NORMS = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("findings.md", "norms.md"))
PACKAGES = sorted(path.name for path in ROOT.iterdir() if next(path.glob("*.py"), None) and path.name != "tests")


def section(title: str) -> str:
    """The text of the README's section `title`."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def parse(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def count_lines(*paths: Path) -> int:
    """Lines of all files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


COMMON = {"errors", "files", "flags", "lock"}  # files that every package may import
LINES = dict(re.findall(r"\| `(\w+)/` \| ([\d,]+) \|", section("Packages")))


def test_the_table_of_packages_lists_every_package():
    assert sorted(LINES) == sorted([*PACKAGES, "tests"])


@pytest.mark.parametrize("package", LINES)
def test_a_package_has_the_number_of_lines_in_the_table_within_5_percent(package):
    lines = count_lines(*(ROOT / package).rglob("*.py"))
    assert int(LINES[package].replace(",", "")) == pytest.approx(lines, rel=0.05)


@pytest.mark.parametrize("text", [README, FINDINGS, NORMS], ids=["README", "findings", "norms"])
def test_every_script_module_config_plan_and_file_that_the_documents_name_exists(text):
    named = re.findall(r"python (\w+\.py)", text)
    named += [f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m ((?!pytest)\w+\.\w+)", text)]
    named += [f"configs/{name}.toml" for name in re.findall(r"--config (\w[\w-]*)", text)]
    named += [f"configs/ablations/{name}.toml" for name in re.findall(r"ablate\.py (\w[\w-]*)", text)]
    named += re.findall(rf"`((?:{'|'.join(PACKAGES)}|configs|docs)/[\w/.-]+\.\w+)[`:]", text)
    named += re.findall(r"!\[.+\]\((.+)\)", text)
    assert len(named) > 6
    assert [name for name in named if not ((ROOT / name).is_file() or (ROOT / "docs" / name).is_file())] == []


def test_every_ablation_plan_is_in_the_table_of_plans():
    plans = {path.stem for path in (ROOT / "configs" / "ablations").glob("*.toml")}
    assert plans == set(re.findall(r"^\| `([\w-]+)` \|", NORMS, re.MULTILINE))


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


PLACES = re.findall(r"`([\w/]+\.py):(\w+)`", section("Where is X?"))


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_a_place_in_the_table_where_is_x_exists(file, name):
    assert name in top_level_names(ROOT / file)


def test_every_row_of_the_table_where_is_x_has_a_place_and_a_shape():
    _, _, *rows = section("Where is X?").strip().splitlines()
    assert len(rows) >= 12
    for row in rows:
        _, concept, where, shape, _ = row.split("|")
        assert re.search(r"`[\w/]+\.py:\w+`|the same two functions", where) and shape.strip(), concept


def test_the_files_of_the_reading_path_exist():
    text = section("Reading path")
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)
    assert len(set(files)) == 12 and all((ROOT / file).is_file() for file in files)


def test_the_example_of_a_norm_consists_of_lines_of_the_source():
    source = "".join((ROOT / "model" / name).read_text(encoding="utf-8") for name in ("config.py", "norm.py"))
    source_lines = {line.strip() for line in source.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", section("Add your own norm"), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(lines) >= 5
    assert [line for line in lines if line not in source_lines] == []


@pytest.mark.slow
def test_a_norm_that_is_added_as_in_the_example_leaves_the_tests_of_norms_green(tmp_path):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "runs"))
    row, function = re.findall(r"```python\n(.*?)```", section("Add your own norm"), re.DOTALL)
    for name, before, added in (
        ("config.py", '    "none": ', f"    {row}"),
        ("norm.py", "FUNCTIONS = ", f"{function}\n\n"),
    ):
        path = copy / "model" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added.replace("dyt", "mine") + before), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "norm or mine", "tests/model", "tests/checkpoints"]
    done = subprocess.run(
        [*command, "tests/training", "tests/ablation/test_norms.py"], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def imported_packages(paths: list[Path]) -> set[str]:
    """First-party packages and scripts that the files import, anywhere in them."""
    modules = set()
    for path in paths:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module)
    scripts = {path.stem for path in ROOT.glob("*.py")}
    return {module.split(".")[0] for module in modules} & {*PACKAGES, *scripts}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """For each package and each script (`train.py`), what it imports besides itself and `COMMON`."""
    found = {name: imported_packages([*(ROOT / name).rglob("*.py")]) for name in PACKAGES}
    found |= {path.name: imported_packages([path]) for path in ROOT.glob("*.py") if path.stem not in COMMON}
    return {name: targets - {name} - COMMON for name, targets in found.items()}


@pytest.fixture(scope="module")
def chains() -> list[list[list[str]]]:
    """The lines of arrows in the README: each a list of groups, each group the names between two arrows."""
    lines = [line for line in section("Packages").splitlines() if "→" in line]
    return [[re.findall(r"`([\w.]+)`", group) for group in line.split("→")] for line in lines]


def reachable(name: str, chains: list[list[list[str]]]) -> set[str]:
    """Everything that the arrows lead to from `name`."""
    found = set()
    for chain in chains:
        at = next((i for i, group in enumerate(chain) if name in group), len(chain))
        found.update(*chain[at + 1 :])
    return found.union(*(reachable(target, chains) for target in found))


def test_every_import_between_packages_follows_the_arrows_in_the_readme(imports, chains):
    against = {name: targets - reachable(name, chains) for name, targets in imports.items()}
    assert {name: targets for name, targets in against.items() if targets} == {}


def test_every_arrow_in_the_readme_is_an_import(imports, chains):
    for chain in chains:
        for left, right in itertools.pairwise(chain):
            for name in left:
                assert imports[name] & reachable(name, [chain]), f"{name} imports nothing that its arrow leads to"
            for target in right:
                assert any(target in imports[name] for name in left), f"nothing in {left} imports {target}"
