"""Many ideas judged one after another: a folder whose campaign.jsonl, the ledger, has a line for each verdict.

Of the ideas that are kept, a share of `fdr` at most does nothing, in expectation and as far as the p-values hold, which
a t-test gives for differences that are about normal. Idea t is kept wrongly with a probability of at most fdr * 10 /
((t + 9) (t + 10)) * (1 + keeps before it); the middle factor adds up to 1 over all t (LOND: Javanmard and Montanari
2015, On Online Control of False Discovery Rate, arXiv 1502.06197). Any number of ideas may follow from any verdicts, as
long as this probability holds given all that happened before: so each has new seeds.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pandas as pd

from ablation.judge import decide
from ablation.records import append, read_lines
from ablation.report import in_words, save_table, table
from ablation.stats import SIGNIFICANCE
from errors import UserError, reading
from files import replace_text

LEDGER = "campaign.jsonl"


def lond_level(fdr: float, number: int, keeps: int) -> float:
    return fdr * 10 / ((number + 9) * (number + 10)) * (1 + keeps)


@dataclass(frozen=True)
class LedgerLine:
    baseline: str  # settings of a, or "default"
    idea: str  # settings of b
    seeds: list[int]  # also those that an early verdict left unused
    looks: list[int]  # pairs at each
    p: float  # two-sided: the smallest level at which the last look would have decided
    level: float  # two-sided
    verdict: Literal["keep", "discard", "inconclusive"]
    difference: float | None
    interval: list[float] | None
    steps: dict | None  # the difference as `Study.in_steps`
    fdr: float
    next_baseline: str
    unit: str = ""  # of the difference; empty in older ledgers


@dataclass(frozen=True)
class Campaign:
    folder: Path
    fdr: float
    adopt: bool  # whether an idea that is kept becomes the next baseline
    ledger: list[LedgerLine]

    @property
    def level(self) -> float:
        """The two-sided level of the next idea: twice the probability of a wrong keep."""
        keeps = sum(line.verdict == "keep" for line in self.ledger)
        return 2 * lond_level(self.fdr, len(self.ledger) + 1, keeps)

    @property
    def baseline(self) -> str:
        """The settings that the last line leaves for the next idea, or "default": those of the config."""
        return self.ledger[-1].next_baseline if self.ledger else "default"

    @property
    def first_seed(self) -> int:
        """That of the next idea: after those of earlier ideas, of sweeps and of pilots."""
        return 1 + max([3000, *(max(line.seeds) for line in self.ledger)])

    def idea_folder(self, name: str) -> Path:
        """The folder of the runs of the next idea; `UserError` where another has begun and has no verdict."""
        folder = self.folder / f"{len(self.ledger) + 1:03d}-{name}"
        for rows in self.folder.glob(f"{folder.name[:4]}*/runs.jsonl"):
            if rows.parent != folder:
                raise UserError(f"{rows.parent} has no verdict; repeat the command that began it, or delete it.")
        return folder

    def add(self, baseline: str, idea: str, seeds: list[int], result: dict) -> None:
        """Append what judge said of an idea to the ledger, and write the report."""
        following = idea if self.adopt and result["verdict"] == "keep" else baseline
        own = {"baseline": baseline, "idea": idea, "seeds": seeds, "fdr": self.fdr, "next_baseline": following}
        self.ledger.append(msgspec.convert(result | own, LedgerLine))
        append(self.folder / LEDGER, vars(self.ledger[-1]))
        self.write_report()

    def write_report(self) -> Path:
        """Write report.md, whose path is returned: the ideas in order, also as CSV and LaTeX; the level of the next."""
        ideas = pd.DataFrame(self.ledger)
        ideas = ideas.assign(low=ideas.interval.str[0], high=ideas.interval.str[1], worth=ideas.steps.map(in_words))
        columns = ["idea", "baseline", "verdict", "unit", "difference", "low", "high", "worth", "looks", "p", "level"]
        rows = ideas[columns].to_dict("records")
        save_table(self.folder / "ideas", rows)
        keeps = "; ".join(line.idea for line in self.ledger if line.verdict == "keep")
        text = f"Kept: {keeps or 'nothing'}. On average at most {self.fdr:.0%} of what is kept does nothing, if "
        text += "differences are about normal (docs/compare.md has what happens otherwise). "
        text += f"The level of the next idea, against {self.baseline}, is {self.level:.3g}. "
        text += "Difference, low, high: loss of the idea minus that of its baseline, and its interval at the level."
        path = self.folder / "report.md"
        replace_text(path, f"# {self.folder.name}\n\n{text}\n\n{table(rows)}\n")
        return path


def load_campaign(folder: Path, fdr: float | None = None, adopt: bool = False) -> Campaign:
    """The campaign of a folder, which need not exist. fdr: 0.1 by default, and fixed by the first line."""
    ledger = read_lines(folder / LEDGER, LedgerLine)
    fixed = ledger[0].fdr if ledger else fdr or 0.1
    if not 0 < fixed < 1:
        raise UserError(f"--fdr {fixed:g} must be above 0 and below 1.")
    if fdr not in (None, fixed):
        raise UserError(f"--fdr {fdr:g}: {folder} began with {fixed:g}, which holds for all its ideas.")
    return Campaign(folder, fixed, adopt, ledger)


def read_pairs(path: Path) -> dict[str, pd.Series]:
    """By idea the loss of b minus that of a, by seed, from a table of losses: CSV, or (.jsonl) lines of JSON."""
    columns = ["idea", "seed", "arm", "loss"]
    with reading(path, f"it needs rows with the columns {', '.join(columns)}"):
        rows = pd.DataFrame(read_lines(path)) if path.suffix == ".jsonl" else pd.read_csv(path)
        rows = rows[columns]
    for name in ("seed", "loss"):
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    problems = {
        "it has no idea, or an arm other than a and b": rows.idea.isna() | ~rows.arm.isin(["a", "b"]),
        "the seed is not a whole number, or the loss not finite": (rows.seed % 1 != 0) | ~np.isfinite(rows.loss),
        "an earlier row has this idea, seed and arm": rows.duplicated(columns[:3]),
        "the seed has no run of the other arm": ~rows.duplicated(columns[:2], keep=False),
        "the idea has one pair, and needs two or more": rows.groupby("idea").seed.transform("size") < 4,
    }
    for problem, wrong in problems.items():
        if wrong.any():
            raise UserError(f"{path}, row {wrong.argmax() + 1}: {problem}.")
    losses = rows.pivot_table("loss", ["idea", "seed"], "arm", sort=False)
    return {str(idea): (pairs.b - pairs.a).droplevel(0) for idea, pairs in losses.groupby(level=0, sort=False)}


def judge_pairs(path: Path, campaign: Campaign | None) -> None:
    """Print verdicts on a table of losses as JSON: one test of all pairs of an idea; without those in the ledger."""
    ideas = read_pairs(path)
    ledger = campaign.ledger if campaign else []
    idea_by_seed = {seed: line.idea for line in ledger for seed in line.seeds}
    judged_seeds = {*idea_by_seed}
    for idea, pairs in ideas.items() if campaign else ():
        for seed in map(int, pairs.index):
            other = idea_by_seed.setdefault(seed, idea)
            if other != idea:
                raise UserError(f"{path}: {idea} and {other} share seed {seed}; each idea needs its own.")
    for idea, pairs in ideas.items():
        seeds = sorted(map(int, pairs.index))
        if seeds[0] in judged_seeds:
            print(f"{idea} has a verdict: {campaign.folder / 'report.md'}", file=sys.stderr)
            continue
        result = decide(pairs.to_numpy(), 1, [len(seeds)], campaign.level if campaign else SIGNIFICANCE)
        result |= {"steps": None, "b": idea, "unit": f"that of {path.name}"}
        if campaign:
            campaign.add(campaign.baseline, idea, seeds, result)
        print(json.dumps(result), flush=True)
