"""Keep or discard a change, by pairs of runs until a group-sequential test can say which; campaigns of many changes.

At each of five looks, the p-value of a t-test is compared with that of the boundary of O'Brien and Fleming (1979,
Biometrics 35): |z| = C sqrt(5 / k) at look k, where C = 2.040 for a two-sided level of 5% (Jennison and Turnbull 2000,
Group Sequential Methods, table 2.3 and section 4.4). docs/compare.md has the error rates.

A campaign is a folder whose campaign.jsonl (the ledger) has a line for each idea. On average at most `fdr` of the
kept ideas do nothing. This needs valid p-values: a t-test's are, if differences are about normal. Idea t is kept
wrongly with a probability of at most fdr * 10 / ((t + 9) (t + 10)) * (1 + keeps before it); the middle factor adds up
to 1 over all t (LOND: Javanmard and Montanari 2015, arXiv 1502.06197). Any number of ideas may follow from any
verdicts, as long as this holds given all that happened before: so each has new seeds.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize, special

from ablation.records import Judgement, append, read_lines
from ablation.report import save_table, table
from ablation.stats import SIGNIFICANCE, six_digits, standard_error, t_test_p
from ablation.study import Study
from errors import UserError, log, reading
from files import replace_text

LOOKS = 5
LEDGER = "campaign.jsonl"


def crossing_probability(constant: float, looks: int) -> float:
    """How often |z| reaches constant * sqrt(looks / k) at any look k if nothing differs (Armitage et al. 1969)."""
    limit = constant * math.sqrt(looks)  # of z sqrt(k), a sum of k normal steps; its density is integrated by look
    nodes, weights = np.polynomial.legendre.leggauss(100)
    weights = limit * weights
    sums = limit * nodes
    step = np.exp(-((sums[:, None] - sums) ** 2) / 2) / math.sqrt(2 * math.pi) * weights
    density = np.exp(-(sums**2) / 2) / math.sqrt(2 * math.pi)
    crossed = 2 * special.ndtr(-limit)
    for _ in range(looks - 1):
        crossed += (weights * density) @ (special.ndtr(sums - limit) + special.ndtr(-sums - limit))
        density = step @ density
    return float(crossed)


@functools.cache
def boundary(level: float, looks: int) -> float:
    """The constant at which `crossing_probability` is this two-sided level."""
    return optimize.brentq(lambda constant: crossing_probability(constant, looks) - level, 0.01, 40)


def pairs_of_looks(maximum: int) -> list[int]:
    """The pairs at each look; at the last the maximum."""
    return [maximum * look // LOOKS for look in range(1, LOOKS + 1)]


def decide(differences: np.ndarray, looks: list[int], level: float, **about: object) -> Judgement:
    """The judgement on the pairs of one of the looks, at a two-sided level; about: its fields beside the test."""
    n, mean = len(differences), differences.mean()
    look = looks.index(n) + 1
    share = look / len(looks)
    limit = boundary(level, len(looks)) / math.sqrt(share)  # of |z|
    reach = -special.stdtrit(n - 1, special.ndtr(-limit)) * standard_error(differences)
    verdict, decided = "inconclusive", "not decided"
    if abs(mean) > reach:
        verdict, decided = ("keep" if mean < 0 else "discard"), "decided"
    z = -special.ndtri(max(t_test_p(differences) / 2, 1e-300))
    return Judgement(
        **about,
        verdict=verdict,
        reason=f"{decided} after {n} of at most {looks[-1]} pairs",
        difference=six_digits(mean),
        interval=(six_digits(mean - reach), six_digits(mean + reach)),
        pairs=n,
        looks=tuple(looks[:look]),
        p=six_digits(crossing_probability(z * math.sqrt(share), len(looks))),
        level=six_digits(level),
    )


def judge_study(study: Study, looks: list[int], level: float) -> Judgement:
    """What judge prints: `decide` on the final pairs, or why there is no test."""
    base, arm = study.plan.all_arms
    about = {"baseline": base, "idea": arm, "unit": study.unit, "learning_rates": study.chosen_learning_rates}
    about["hours"] = six_digits((study.rows.seconds / study.rows.workers).sum() / 3600)
    differences = np.array(study.comparisons[0].differences if study.comparisons else [])
    diverged = [name for name in (base, arm) if (study.rows_of("final", name).status == "diverged").any()]
    if diverged == [arm]:
        return Judgement(**about, verdict="discard", reason=f"{arm} diverged", level=six_digits(level))
    if len(differences) < study.plan.seeds:
        about["reason"] = "runs did not complete, or the hours are used up"
        return Judgement(**about, verdict="inconclusive", pairs=len(differences), level=six_digits(level))
    judgement = decide(differences, looks, level, **about)
    steps = study.in_steps(base, judgement.difference, judgement.interval)
    return dataclasses.replace(judgement, steps=steps)


def lond_level(fdr: float, number: int, keeps: int) -> float:
    return fdr * 10 / ((number + 9) * (number + 10)) * (1 + keeps)


@dataclass(frozen=True, kw_only=True)
class LedgerLine(Judgement):
    seeds: list[int]  # also those that an early verdict left unused
    fdr: float
    next_baseline: str
    flags: str | None = None  # those of the runs; None with --pairs


@dataclass(frozen=True)
class Campaign:
    folder: Path
    fdr: float
    adopt: bool  # whether an idea that is kept becomes the next baseline
    ledger: list[LedgerLine]

    @property
    def level(self) -> float:
        """The two-sided level of the next idea: twice the probability of a wrong keep."""
        return 2 * lond_level(self.fdr, len(self.ledger) + 1, sum(line.verdict == "keep" for line in self.ledger))

    @property
    def baseline(self) -> str:
        """The settings with which the next idea is compared; "default" are those of the config."""
        return self.ledger[-1].next_baseline if self.ledger else "default"

    @property
    def first_seed(self) -> int:
        """The first seed of the next idea, above the seeds of earlier ideas, of sweeps and of pilots."""
        return 1 + max([3000, *(max(line.seeds) for line in self.ledger)])

    def check_new(self, baseline: str, idea: str) -> None:
        """`UserError` if an idea has a verdict, or is the baseline."""
        if idea == baseline:
            raise UserError(f"{idea} is the baseline; give --b a change of it.")
        if any((line.idea, line.baseline) == (idea, baseline) for line in self.ledger):
            raise UserError(f"{idea} has a verdict: {self.folder / 'report.md'}")

    def idea_folder(self, name: str, flags: str) -> Path:
        """The folder of the runs of the next idea. `UserError`: their flags differ from those of earlier ideas, or
        another idea has begun and has no verdict.
        """
        for line in self.ledger:
            if line.flags not in (None, flags):
                raise UserError(f"the ideas of {self.folder} are judged with {line.flags}, not {flags}.")
        folder = self.folder / f"{len(self.ledger) + 1:03d}-{name}"
        for rows in self.folder.glob(f"{folder.name[:4]}*/runs.jsonl"):
            if rows.parent != folder:
                raise UserError(f"{rows.parent} has no verdict; repeat the command that began it, or delete it.")
        return folder

    def add(self, judgement: Judgement, seeds: list[int], flags: str | None = None) -> None:
        """Append a judgement to the ledger, and write the report."""
        following = self.baseline if self.ledger else judgement.baseline
        if self.adopt and judgement.verdict == "keep":
            following = judgement.idea
        line = LedgerLine(**vars(judgement), seeds=seeds, fdr=self.fdr, next_baseline=following, flags=flags)
        self.ledger.append(line)
        append(self.folder / LEDGER, dataclasses.asdict(line))
        self.write_report()

    def write_report(self) -> Path:
        """Write report.md, whose path is returned: the ideas in order, also as CSV and LaTeX; the level of the next."""
        rows = []
        for line in self.ledger:
            low, high = line.interval or (None, None)
            row = {name: getattr(line, name) for name in ("idea", "baseline", "verdict", "unit", "difference")}
            row |= {"low": low, "high": high, "worth": line.steps, "looks": ", ".join(map(str, line.looks))}
            rows.append(row | {"p": line.p, "level": line.level})
        narrow = ["idea", "baseline", "difference", "low", "high", "p", "level", "verdict"]
        save_table(self.folder / "ideas", pd.DataFrame(rows), narrow)
        keeps = "; ".join(line.idea for line in self.ledger if line.verdict == "keep")
        text = f"Kept: {keeps or 'nothing'}. On average at most {self.fdr:.0%} of what is kept does nothing, if "
        text += "differences are about normal (docs/compare.md has what happens otherwise). "
        text += f"The level of the next idea, against {self.baseline}, is {self.level:.3g}. "
        text += "Difference, low, high: loss of the idea minus that of its baseline, and the interval of its last look."
        path = self.folder / "report.md"
        replace_text(path, f"# {self.folder.name}\n\n{text}\n\n{table(rows)}\n")
        return path


def load_campaign(folder: Path, fdr: float | None = None, adopt: bool = False) -> Campaign:
    """The campaign of a folder, which need not exist. fdr: 0.1 by default, and fixed by the first line."""
    ledger = read_lines(folder / LEDGER, LedgerLine)
    if ledger and fdr not in (None, ledger[0].fdr):
        raise UserError(f"--fdr {fdr:g}: {folder} began with {ledger[0].fdr:g}, which holds for all its ideas.")
    if fdr is None:
        fdr = ledger[0].fdr if ledger else 0.1
    if not 0 < fdr < 1:
        raise UserError(f"--fdr {fdr:g} must be above 0 and below 1.")
    return Campaign(folder, fdr, adopt, ledger)


def read_pairs(path: Path) -> dict[str, pd.Series]:
    """By idea the loss of b minus that of a, by seed, from a table of losses: CSV, or (.jsonl) lines of JSON."""
    columns = ["idea", "seed", "arm", "loss"]
    with reading(path, f"it needs rows with the columns {', '.join(columns)}"):
        rows = pd.DataFrame(read_lines(path)) if path.suffix == ".jsonl" else pd.read_csv(path, dtype={"idea": str})
    if missing := [name for name in columns if name not in rows]:
        hint = f"it has {', '.join(rows)}" if len(rows.columns) > 1 else "a CSV file has commas between its columns"
        raise UserError(f"{path} has no column {', '.join(missing)}; {hint}.")
    if rows.empty:
        raise UserError(f"{path} has no rows.")
    as_read = rows[columns]
    numbers = as_read[["seed", "loss"]].apply(pd.to_numeric, errors="coerce")
    rows = as_read.assign(idea=as_read.idea.map(str, na_action="ignore"), **numbers)
    problems = {
        "it has no idea, or an arm other than a and b": rows.idea.isna() | ~rows.arm.isin(["a", "b"]),
        "the seed is not a whole number, or the loss not finite": (rows.seed % 1 != 0) | ~np.isfinite(rows.loss),
        "an earlier row has this idea, seed and arm": rows.duplicated(columns[:3]),
        "the seed has no run of the other arm": ~rows.duplicated(columns[:2], keep=False),
        "the idea has one pair, and needs two or more": rows.groupby("idea").seed.transform("size") < 4,
    }
    for problem, wrong in problems.items():
        if wrong.any():
            values = ",".join(map(str, as_read.iloc[wrong.argmax()]))
            raise UserError(f"{path}, row {wrong.argmax() + 1} ({values}): {problem}.")
    losses = rows.pivot_table("loss", ["idea", "seed"], "arm", sort=False)
    return {str(idea): (pairs.b - pairs.a).droplevel(0) for idea, pairs in losses.groupby(level=0, sort=False)}


def judge_pairs(path: Path, campaign: Campaign | None) -> None:
    """Print judgements on a table of losses as JSON: one test of all pairs of an idea; without those in the ledger."""
    ideas = read_pairs(path)
    if len(ideas) > 1 and not campaign:
        log("note: --campaign FOLDER limits how many of several ideas, each with its own seeds, are kept wrongly")
    judged = {seed: line.idea for line in campaign.ledger for seed in line.seeds} if campaign else {}
    if campaign:
        idea_by_seed = dict(judged)
        for idea, pairs in ideas.items():
            for seed in map(int, pairs.index):
                other = idea_by_seed.setdefault(seed, idea)
                if other != idea:
                    raise UserError(f"{path}: {idea} and {other} share seed {seed}; each idea needs its own.")
    for idea, pairs in ideas.items():
        seeds = sorted(map(int, pairs.index))
        if judged.keys() & {*seeds}:
            log(f"{idea} has a verdict: {campaign.folder / 'report.md'}")
            continue
        if np.ptp(pairs) <= 1e-9 * abs(pairs).max():  # a test would be certain of it
            raise UserError(f"{path}: all differences of {idea} are equal; give the losses with more digits.")
        if len(seeds) < 2 * LOOKS:
            log(f"note: {idea} has few pairs, {len(seeds)}: a test errs more often where differences are not normal")
        baseline, level = (campaign.baseline, campaign.level) if campaign else ("a", SIGNIFICANCE)
        about = {"baseline": baseline, "idea": idea, "unit": f"that of {path.name}"}
        judgement = decide(pairs.to_numpy(), [len(seeds)], level, **about)
        if campaign:
            campaign.add(judgement, seeds)
        print(judgement, flush=True)
