"""Compare any settings of train.py over paired seeds: `python ablate.py`."""

import signal
import sys

if __name__ == "__main__":  # Ctrl-C and a missing package are one line in the slow imports below, too
    from errors import exit_on_user_error

    with exit_on_user_error():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        from ablate import main

        sys.exit(main())

import contextlib
import dataclasses
import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ablation.plan import JUDGED_PAIRS, STUDIES, TYPES, Plan, base_settings, find_plan, load_plan
from errors import UserError, exit_with, fit_stdout, printable
from files import locked, read_json
from flags import call_with_flags, optional, parse_flags

DESCRIPTION = """Compare settings of train.py over paired seeds, with intervals and a verdict.
python ablate.py                   RMSNorm or LayerNorm; --quick: in minutes
python ablate.py --vary norm=layer,dyt    values of a setting, or of several
python ablate.py factorial         repeat a study of studies/
python ablate.py judge --a "" --b "qk_norm=true"    keep or discard a change
python ablate.py judge --campaign FOLDER --b "..."  many, one after another
python ablate.py report FOLDER     write the report of a folder of results again
Ctrl-C stops it, the same command resumes it. Its results are in report.md.
Defaults are those of this command; for others: judge --help, PLAN --help.""".replace("\n", "\n\n")
RUNS_DEPEND_ON = ("config", "steps", "learning_rates", "perturbations")  # flags that make other runs


@dataclass(frozen=True)  # comments and docstrings of fields are the help of the flags
class Command:
    plan_file: Annotated[str | None, optional("[PLAN]"), tyro.conf.Positional] = None
    """A TOML file, or a study in studies/, whose plan is run again; flags override what it says"""
    varied: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, optional("SETTING=V,V", name="vary")] = ()
    """Values of a setting to compare, the first as baseline; several times: a grid"""
    a: Annotated[str | None, optional('"S=V ..."')] = None
    """Settings of the baseline, such as "norm=layer steps=600"; "" is the config as it is"""
    b: Annotated[str | None, optional('"S=V ..."')] = None  # Settings of what is compared with it; without those of --a
    campaign: Annotated[Path | None, optional("FOLDER")] = None
    """judge: the folder of many ideas. It gives the level, new seeds and, without --a, the baseline that --b changes"""
    fdr: Annotated[float | None, optional("SHARE")] = None
    """judge --campaign: the most, of what is kept, that may do nothing; fixed by the first idea (default: 0.1)"""
    adopt: bool = False  # judge --campaign: if the idea is kept, it is the baseline of the next
    pairs: Annotated[Path | None, optional("FILE")] = None
    """judge: losses of any program, a CSV (or .jsonl) file with the columns idea, seed, arm (a or b) and loss"""
    quick: bool = False  # Three pairs of 300 steps at one learning rate: only large differences show
    out: Annotated[Path | None, optional("FOLDER")] = None
    """Folder of the results (default: runs/ablation-NAME, or one in that of --campaign)"""
    device: str = "auto"  # auto (all GPUs, else MPS, else the cores of the CPU) or a torch device
    jobs: Annotated[int | None, optional("INT")] = None  # Runs at once; by default one for each GPU, or core of a CPU
    ray: Annotated[str | None, optional("ADDRESS")] = None  # Use a Ray cluster: auto, or the address of its head
    dry_run: bool = False  # Only print the plan, and what a run needs
    plan: Annotated[Plan, tyro.conf.arg(name="plan")] = field(default_factory=Plan)

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"ablation-{self.plan.name}"


def parse(arguments: list[str], judging: bool = False) -> Command:
    """The command line; read twice, since the plan that it names gives the defaults of the flags."""
    options = {"description": DESCRIPTION, "prog": "ablate.py", "config": (tyro.conf.OmitArgPrefixes,)}
    without_help = [argument for argument in arguments if argument not in ("-h", "--help")]
    first, unknown = parse_flags(Command, args=without_help, return_unknown_args=True, **options)
    for argument in unknown:
        name = argument.partition("=")[0][2:].replace("-", "_")
        if name in TYPES and name != "learning_rate":  # for which there is --learning-rates
            raise UserError(f"{argument} is a setting of train.py; --vary {name}=VALUE,VALUE compares values of it.")
    if any(argument.startswith("--") for argument in unknown):
        parse_flags(Command, args=without_help, **options)  # raises what is wrong
    check_flags(first, judging)
    plan = default_plan(first, judging)
    command = parse_flags(Command, args=arguments, default=Command(plan=plan), **options)
    if judging and not (plan.arms or plan.vary or command.pairs):
        raise UserError('judge needs --b "SETTING=VALUE" and, without --campaign, --a "...", or --pairs FILE.')
    others = [name for name in RUNS_DEPEND_ON if getattr(command.plan, name) != getattr(plan, name)]
    suffix = "".join(f"-{name}-{getattr(command.plan, name)}" for name in others)
    name = command.plan.name + re.sub(r"[^\w.]+", "-", suffix).rstrip("-")
    return dataclasses.replace(command, plan=dataclasses.replace(command.plan, name=name))


def check_flags(command: Command, judging: bool) -> None:
    """`UserError` for flags that do not go together."""
    if not judging and (command.campaign or command.pairs):
        raise UserError("--campaign and --pairs belong to judge.")
    if not command.campaign and (command.adopt or command.fdr is not None):
        raise UserError("--fdr and --adopt belong to judge --campaign FOLDER.")
    if command.campaign and command.b is None and not command.pairs:  # the ledger names an idea by its settings
        raise UserError('--campaign judges an idea at a time: give it as --b "SETTING=VALUE", or as --pairs FILE.')
    if command.campaign and command.out:
        raise UserError("the results of an idea are in the folder of --campaign; leave out --out.")


def default_plan(command: Command, judging: bool) -> Plan:
    """The plan before the flags that change it: `starting_plan` with what --quick and judge set."""
    plan = starting_plan(command, judging)
    if command.quick:
        rate = plan.learning_rates[:1] or (base_settings(plan.config).optimizer.learning_rate,)
        quick = {"name": f"{plan.name}-quick", "seeds": 3, "steps": 300, "rerun_seeds": 0, "learning_rates": rate}
        plan = dataclasses.replace(plan, **quick)
    return dataclasses.replace(plan, seeds=plan.seeds or JUDGED_PAIRS, rerun_seeds=0) if judging else plan


def starting_plan(command: Command, judging: bool) -> Plan:
    """The plan of the file, of --vary, or of --a and --b; with a name that tells it from others."""
    if "=" in (command.plan_file or ""):
        raise UserError(f"{command.plan_file} stands alone; settings of one flag are one text in quotes.")
    for text in command.varied:
        if "=" not in text:
            raise UserError(f"--vary {text} has no values; write --vary {text}=V,V.")
        if command.plan_file and not Path(command.plan_file).exists() and not (STUDIES / command.plan_file).exists():
            joined = f"{text.rstrip(',')},{command.plan_file}"
            raise UserError(f"{command.plan_file} is no plan; join values by commas: --vary {joined}")
    a, b = command.a, command.b
    if command.campaign and b is not None:
        from ablation.judge import load_campaign  # imports matplotlib

        campaign = load_campaign(command.campaign)
        if a is None:
            a = "" if campaign.baseline == "default" else campaign.baseline
            b = " ".join(f"{name}={value}" for name, value in (assignments(a) | assignments(b)).items())
        campaign.check_new(a or "default", b)
    arms = {text or "default": assignments(text) for text in (a, b) if text is not None}
    if len(arms) == 1:
        raise UserError('--a and --b need each other, and differ; --a "" is the config as it is.')
    vary = {name: value.split(",") for name, value in assignments(" ".join(command.varied)).items()}
    if not arms and not vary and (command.plan_file or not judging):
        return load_plan(find_plan(command.plan_file or "norms"))
    plan = load_plan(find_plan(command.plan_file)) if command.plan_file else Plan(config=command.plan.config)
    config = [plan.config] if not command.plan_file and plan.config != Plan.config else []
    texts = (a, b, *command.varied, *config)
    words = filter(None, (command.plan_file and plan.name, *texts))
    text = re.sub(r"[^\w.]+", "-", " ".join(words)).strip("-")
    flags_hash = hashlib.blake2b(repr((command.plan_file, *texts)).encode(), digest_size=3).hexdigest()
    name = f"{text[:48]}-{flags_hash}"
    return dataclasses.replace(plan, name=name, arms=arms or plan.arms, vary=plan.vary | vary)


def run_flags(plan: Plan) -> str:
    """The flags that make the runs of a campaign: they stay from idea to idea."""
    steps = f" --steps {plan.steps}" if plan.steps else ""
    rates = f" --learning-rates {' '.join(map(str, plan.learning_rates))}" if plan.learning_rates else ""
    return f"--config {plan.config}{steps}{rates}"


def assignments(text: str) -> dict[str, str]:
    """The settings in a text such as `weight_decay=0.5 qk_norm=true`."""
    values: dict[str, str] = {}
    for assignment in text.split():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"{assignment} must be SETTING=VALUE; several are one text in quotes.")
        if "=" in value or value.endswith(","):
            raise UserError(f"{assignment}: a space separates settings (--vary again for each), a comma values.")
        if name in values:
            raise UserError(f"{name} is given twice; --vary takes all values of a setting at once: {name}=V,V,V.")
        values[name] = value
    return values


def write_report(folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")], /) -> int:
    """Write the report of a folder of results, such as runs/ablation-norms, again."""
    from ablation import judge, report, study

    if (Path(folder) / judge.LEDGER).is_file():
        path = judge.load_campaign(Path(folder)).write_report()
    else:
        path = report.write(study.load(find_plan(folder).parent), find_plan(folder).parent)
    print(printable(f"written: {path}"))
    return 0


def run_comparison(command: Command, plan: Plan, folder: Path, level: float | None = None) -> int:
    from ablation import execute  # imports torch

    return execute.compare(plan, folder, command.device, command.jobs, command.ray, level, command.dry_run)


def run_judge(command: Command) -> int:
    """Judge an idea alone or in a campaign, or the ideas of a table of losses; returns the exit status."""
    from ablation import judge, report, stats

    if not command.campaign and command.pairs:
        judge.judge_pairs(command.pairs, None)
        return 0
    if not command.campaign:
        return run_comparison(command, command.plan, command.folder, stats.SIGNIFICANCE)
    with contextlib.nullcontext() if command.dry_run else locked(command.campaign):
        campaign = judge.load_campaign(command.campaign, command.fdr, command.adopt)
        folder = campaign.idea_folder(command.plan.name)
        plan = dataclasses.replace(command.plan, first_seed=campaign.first_seed)
        if command.pairs:
            judge.judge_pairs(command.pairs, campaign)
            return 0
        campaign.check_flags(run_flags(plan))
        status = run_comparison(command, plan, folder, campaign.level)
        if not status and not command.dry_run:
            result = read_json(folder / report.JUDGE_RESULT)
            campaign.add(*plan.all_arms, [*plan.phase_seeds["final"]], result, run_flags(plan))
        return status


def main() -> int:
    """Do what the command line says; returns the exit status."""
    fit_stdout()
    if sys.argv[1:2] == ["report"]:
        return call_with_flags(write_report, args=sys.argv[2:], prog="ablate.py report")
    judging = sys.argv[1:2] == ["judge"]
    command = parse(sys.argv[2 if judging else 1 :], judging)
    try:
        return run_judge(command) if judging else run_comparison(command, command.plan, command.folder)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the process has ended
        exit_with(f"stopped; the same command resumes it: python {shlex.join(sys.argv)}", 130)
