"""From a study to report.md: headline and table of differences. To be replaced by the full report."""

from collections.abc import Sequence
from pathlib import Path

from ablation.study import Study
from errors import replace_text


def headline(study: Study) -> list[str]:
    """A line for each comparison."""
    return [
        f"{c.effect.name}: {c.verdict} ({c.effect.estimate:+.4f} {c.effect.unit} over {c.effect.n} pairs)"
        for c in study.comparisons
    ]


def write(study: Study, folder: Path) -> list[Path]:
    """Write report.md and its pictures; returns their paths, report.md first."""
    replace_text(folder / "report.md", "\n\n".join(headline(study)) + "\n")
    return [folder / "report.md"]


def claims_table(folders: Sequence[Path]) -> str:
    """One table of published claims over several comparisons."""
    raise NotImplementedError
