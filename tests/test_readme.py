"""The README keeps what it says about the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("room", "said"), re.findall(r"\| `(\w+)/` \| ([\d,]+) \|", README))
def test_a_room_has_about_as_many_lines_as_the_readme_says(room, said):
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / room).rglob("*.py"))
    assert abs(lines / int(said.replace(",", "")) - 1) < 0.1


def test_every_script_module_config_and_file_that_it_names_is_there():
    for script in re.findall(r"python (\w+\.py)", README):
        assert (ROOT / script).is_file()
    for module in re.findall(r"python -m ((?:benchmarks|training|ablation)\.\w+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    for name in re.findall(r"--config (\w+)", README):
        assert (ROOT / "configs" / f"{name}.toml").is_file()
    for name in re.findall(r"ablate\.py (\w+)", README):
        assert (ROOT / "configs" / "ablations" / f"{name}.toml").is_file()
    for path in re.findall(r"`((?:kernels|model|training|docs|benchmarks)/[\w/]+\.\w+)`", README):
        assert (ROOT / path).is_file()
