"""Compare any settings of train.py over paired seeds: `python ablate.py`."""

import signal
import sys

if __name__ == "__main__":  # Ctrl-C and a missing package are one line in the slow imports below, too
    from errors import exit_on_user_error, interrupt_once

    with exit_on_user_error():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt_once)
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

from ablation.plan import JUDGED_PAIRS, TYPES, Plan, as_settings, base_settings, find_plan, load_plan, plan_path
from errors import UserError, exit_with, printable
from files import locked
from flags import call_with_flags, optional, parse_flags
from terminal import fit_stdout

DESCRIPTION = """Compare settings of train.py over paired seeds, with intervals and a verdict.
python ablate.py                   RMSNorm or LayerNorm; --quick: in minutes
python ablate.py --vary norm=layer,dyt    values of a setting, or of several
python ablate.py factorial         repeat a study of studies/
python ablate.py judge --a "" --b "qk_norm=true"    keep or discard a change
python ablate.py judge --campaign FOLDER --b "..."  many, one after another
python ablate.py report FOLDER     write the report of a folder of results again
Ctrl-C stops it, the same command resumes it. Its results are in report.md.
Defaults are those of this command; for others add --help to them.""".replace("\n", "\n\n")
JUDGE_DESCRIPTION = """Keep or discard b, a change of a: up to 20 pairs (--seeds), in five looks.
It stops as soon as a test can decide, and prints its verdict as JSON.
python ablate.py judge --a "" --b "qk_norm=true"
python ablate.py judge --campaign FOLDER --b "..."  many ideas, few kept wrongly
python ablate.py judge --pairs pairs.csv            losses of any program""".replace("\n", "\n\n")
RUNS_DEPEND_ON = ("config", "steps", "learning_rates", "perturbations")  # flags that make other runs


@dataclass(frozen=True)  # comments and docstrings of fields are the help of the flags
class CompareFlags:
    plan_files: Annotated[tuple[str, ...], optional("[PLAN]"), tyro.conf.Positional] = ()
    """A TOML file, or a study in studies/, whose plan is run again; flags override what it says"""
    varied: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, optional("SETTING=V,V", name="vary")] = ()
    """Values of a setting to compare, the first as baseline; several times: a grid"""
    a: Annotated[str | None, optional('"S=V ..."')] = None
    """Settings of the baseline, such as "norm=layer steps=600"; "" is the config as it is"""
    b: Annotated[str | None, optional('"S=V ..."')] = None  # All settings of what is compared with it: --a adds none
    config: Annotated[str | None, tyro.conf.arg(metavar="STR")] = None
    """What the arms share: a TOML file, or a name in configs/"""
    quick: bool = False  # Three pairs of 300 steps at one learning rate: only large differences show; not for judge
    out: Annotated[Path | None, optional("FOLDER")] = None
    """Folder of the results (default: runs/ablation-NAME, or one in that of judge --campaign)"""
    device: str = "auto"  # auto (all GPUs, else MPS, else the cores of the CPU) or a torch device
    jobs: Annotated[int | None, optional("INT")] = None
    """Runs at once, which share all cores; by default one for each GPU or core"""
    ray: Annotated[str | None, optional("ADDRESS")] = None  # Use a Ray cluster: auto, or the address of its head
    dry_run: bool = False  # Only print the plan, and what a run needs
    plan: Annotated[Plan, tyro.conf.arg(name="plan")] = field(default_factory=Plan)


@dataclass(frozen=True)
class JudgeFlags(CompareFlags):
    campaign: Annotated[Path | None, optional("FOLDER")] = None
    """The folder of many ideas. It gives the level, new seeds and, without --a, the baseline that --b changes"""
    fdr: Annotated[float | None, optional("SHARE")] = None
    """With --campaign: the most, of what is kept, that may do nothing; fixed by the first idea (default: 0.1)"""
    adopt: bool = False  # With --campaign: if the idea is kept, it is the baseline of the next
    pairs: Annotated[Path | None, optional("FILE")] = None
    """Losses of any program, a CSV (or .jsonl) file with the columns idea, seed, arm (a or b) and loss"""


def compare_plan(command: CompareFlags) -> Plan:
    """The plan that flags change: that of the file, of --vary, or of --a and --b; shorter with --quick."""
    plan = starting_plan(command)
    if not command.quick:
        return plan
    config = command.config or plan.config
    rates = plan.learning_rates[:1] if config == plan.config else ()
    if not rates and not all("learning_rate" in arm.changes for arm in plan.all_arms.values()):
        rates = (base_settings(config).optimizer.learning_rate,)
    return dataclasses.replace(plan, name=f"{plan.name}-quick", seeds=3, steps=300, rerun_seeds=0, learning_rates=rates)


def judge_plan(command: JudgeFlags) -> Plan:
    """The plan of judge; `UserError` for flags that do not go together."""
    if command.quick:
        raise UserError("--quick is not for judge, which needs ten pairs or more; leave it out.")
    if not command.campaign and (command.adopt or command.fdr is not None):
        raise UserError("--fdr and --adopt belong to judge --campaign FOLDER.")
    if command.campaign and command.b is None and not command.pairs:  # the ledger names an idea by its settings
        raise UserError('--campaign judges an idea at a time: give it as --b "SETTING=VALUE", or as --pairs FILE.')
    if command.campaign and command.out:
        raise UserError("the results of an idea are in the folder of --campaign; leave out --out.")
    pairs_flags = {name: getattr(command, name) for name in ("pairs", "campaign", "fdr", "adopt")}
    if command.pairs and command != JudgeFlags(**pairs_flags):
        raise UserError("--pairs has the losses of a and b; of other flags it takes --campaign, --fdr and --adopt.")
    if command.campaign and command.b is not None:
        from ablation.judge import load_campaign  # imports matplotlib

        campaign = load_campaign(command.campaign)
        a, b = command.a, command.b
        if a is None:  # the campaign's baseline, which b changes
            a = "" if campaign.baseline == "default" else campaign.baseline
            b = " ".join(f"{name}={value}" for name, value in (assignments(a) | assignments(b)).items())
        campaign.check_new(a or "default", b)
        command = dataclasses.replace(command, a=a, b=b)
    plan = compare_plan(command)
    return dataclasses.replace(plan, seeds=plan.seeds or JUDGED_PAIRS, rerun_seeds=0)


def parse(arguments: list[str], command_type: type[CompareFlags] = CompareFlags) -> CompareFlags:
    """The command line; read twice, since the plan that it names gives the defaults of the flags."""
    check_words(arguments, command_type)
    options = {"description": DESCRIPTION, "prog": "ablate.py", "config": (tyro.conf.OmitArgPrefixes,)}
    if command_type is JudgeFlags:
        options |= {"description": JUDGE_DESCRIPTION, "prog": "ablate.py judge"}
    without_help = [argument for argument in arguments if argument not in ("-h", "--help")]
    first = parse_flags(command_type, args=without_help, **options)
    named = judge_plan(first) if command_type is JudgeFlags else compare_plan(first)
    defaults = command_type(config=first.config or named.config, plan=named)
    command = parse_flags(command_type, args=arguments, default=defaults, **options)
    plan = dataclasses.replace(command.plan, config=command.config)
    changed = [name for name in RUNS_DEPEND_ON if getattr(plan, name) != getattr(named, name)]
    suffix = "".join(f"-{name}-{getattr(plan, name)}" for name in changed)
    name = plan.name + re.sub(r"[^\w.]+", "-", suffix).rstrip("-")
    out = command.out or Path("runs") / f"ablation-{name}"
    return dataclasses.replace(command, plan=dataclasses.replace(plan, name=name), out=out)


def check_words(arguments: list[str], command_type: type[CompareFlags]) -> None:
    """`UserError` for flags of train.py and judge."""
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""
        if name in TYPES.keys() - {"steps", "learning_rate"}:  # there are --steps and --learning-rates
            use = f"--vary {name}=VALUE sets it in all runs, --vary {name}=VALUE,VALUE compares values"
            raise UserError(f"{word} is a setting of train.py; {use}.")
        if name in JudgeFlags.__annotations__ and command_type is not JudgeFlags:
            raise UserError(f"{word} belongs to judge: python ablate.py judge {word} ...")


def starting_plan(command: CompareFlags) -> Plan:
    """The plan of the file, of --vary, or of --a and --b; with a name that tells it from others."""
    for word in command.plan_files:
        if "=" in word:
            raise UserError(f"{word} stands alone; settings of one flag are one text in quotes.")
    for text in command.varied:
        if "=" not in text:
            raise UserError(f"--vary {text} has no values; write --vary {text}=V,V.")
    values = [word for word in command.plan_files if not plan_path(word) and not Path(word).exists()]
    if values and command.varied:
        text = next((text for text in command.varied if text.endswith(",")), command.varied[-1])
        joined = ",".join([text.rstrip(","), *values])
        raise UserError(f"{values[0]} is no plan; join values by commas: --vary {joined}")
    plan_file, *others = command.plan_files or (None,)
    plan = load_plan(find_plan(plan_file)) if plan_file else None
    if others:
        raise UserError(f"{plan_file} and {others[0]} are two plans; give one.")
    arms = {text or "default": assignments(text) for text in (command.a, command.b) if text is not None}
    if (command.a is None) != (command.b is None):
        raise UserError(f'--{"a" if command.a is None else "b"} is missing; --a "" is the config as it is.')
    if len(arms) == 1:
        raise UserError('--a and --b are equal, and have to differ; --a "" is the config as it is.')
    vary = {name: value.split(",") for name, value in assignments(" ".join(command.varied)).items()}
    if not arms and not vary:
        return plan or load_plan(find_plan("norms"))
    texts = [command.a, command.b, *command.varied]
    if plan is None:
        plan = Plan(name="", config=command.config or Plan.config)
        if plan.config != Plan.config:
            texts.append(plan.config)
    text = re.sub(r"[^\w.]+", "-", " ".join(filter(None, [plan.name, *texts]))).strip("-")
    texts_hash = hashlib.blake2b(repr((plan_file, *texts)).encode(), digest_size=3).hexdigest()
    return dataclasses.replace(plan, name=f"{text[:48]}-{texts_hash}", arms=arms or plan.arms, vary=plan.vary | vary)


def run_flags(plan: Plan) -> str:
    """The flags that make the runs of a campaign: they stay from idea to idea."""
    steps = f" --steps {plan.steps}" if plan.steps else ""
    rates = f" --learning-rates {' '.join(map(str, plan.learning_rates))}" if plan.learning_rates else ""
    flags = f"--config {plan.config}{steps}{rates}"
    for name, values in plan.vary.items():
        if len(values) == 1:  # a setting that all runs share
            value = " ".join(values[0]) if isinstance(values[0], tuple) else values[0]
            flags += f" --vary {shlex.quote(f'{name}={value}')}"
    return flags


def assignments(text: str) -> dict[str, str]:
    """The settings in a text such as `weight_decay=0.5 data=my texts qk_norm=true`."""
    values: dict[str, str] = {}
    start, *parts = re.split(r"""(?:^|\s+)['"]?([\w-]+)=""", text.strip())
    if start:
        raise UserError(f"{start} must be SETTING=VALUE; several are one text in quotes.")
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        name = "learning_rate" if name == "lr" else name
        if "=" in value or value.endswith(","):
            raise UserError(f"{name}={value}: a space separates settings (--vary again for each), a comma values.")
        if name in values:
            raise UserError(f"{name} is given twice; --vary takes all values of a setting at once: {name}=V,V,V.")
        values[name] = value.replace("\\ ", " ").strip("'\"")  # as shells have a space in a path
    return values


def write_report(folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")], /) -> int:
    """Write the report of a folder of results, such as runs/ablation-norms, again."""
    from ablation import judge, report, study

    if (Path(folder) / judge.LEDGER).is_file():
        path = judge.load_campaign(Path(folder)).write_report()
    else:
        experiment = find_plan(folder).parent
        path = report.write(study.load(experiment), experiment)
    print(f"written: {path}")
    return 0


def lock(folder: Path | None, command: CompareFlags) -> contextlib.AbstractContextManager:
    """Hold the lock of a folder that the command writes to."""
    return contextlib.nullcontext() if folder is None or command.dry_run else locked(folder)


def compare_arms(command: CompareFlags) -> int:
    """Train what is missing of the plan, and report. Returns the exit status."""
    from ablation import execute  # imports torch

    with lock(command.out, command):
        experiment = execute.open_experiment(command.plan, command.out, command.device, command.jobs, command.ray)
        if command.dry_run:
            execute.estimate_runs(experiment, command.device)
        else:
            execute.compare(experiment)
    return experiment.exit_status


def judge_idea(command: JudgeFlags) -> int:
    """Judge an idea alone or in a campaign, or the ideas of a table of losses; returns the exit status."""
    from ablation import judge, stats

    plan, folder, level = command.plan, command.out, stats.SIGNIFICANCE
    if not (command.pairs or command.plan_files or command.varied or command.b is not None):
        raise UserError('judge needs --b "SETTING=VALUE" and, without --campaign, --a "...", or --pairs FILE.')
    with lock(command.campaign, command):
        campaign = judge.load_campaign(command.campaign, command.fdr, command.adopt) if command.campaign else None
        if command.pairs:
            judge.judge_pairs(command.pairs, campaign)
            return 0
        if campaign:
            folder, level = campaign.idea_folder(plan.name, run_flags(plan)), campaign.level
            plan = dataclasses.replace(plan, first_seed=campaign.first_seed)
        if len(plan.all_arms) != 2:
            raise UserError(f"judge compares two arms, a baseline and another; here are {len(plan.all_arms)}.")
        if plan.seeds < 2 * judge.LOOKS:
            raise UserError(f"judge needs --seeds {2 * judge.LOOKS} or more, not {plan.seeds}.")
        from ablation import execute  # imports torch

        with lock(folder, command):
            experiment = execute.open_experiment(plan, folder, command.device, command.jobs, command.ray)
            looks = ", ".join(map(str, judge.pairs_of_looks(plan.seeds)))
            print(f"at most: a verdict after {looks} pairs ends it", flush=True)
            if command.dry_run:
                execute.estimate_runs(experiment, command.device)
                return 0
            judgement = execute.judge(experiment, level)
        if campaign and not experiment.exit_status:
            campaign.add(judgement, [*plan.phase_seeds["final"]], run_flags(plan))
    return experiment.exit_status


def main() -> int:
    fit_stdout(printable)  # also what others wrote
    subcommand = sys.argv[1] if len(sys.argv) > 1 else ""
    if subcommand == "report" and any(word.startswith("--margin") for word in sys.argv):
        raise UserError("report takes no --margin; give the command of the comparison again with another --margin.")
    if subcommand == "report":
        return call_with_flags(write_report, args=sys.argv[2:], prog="ablate.py report")
    try:
        if subcommand == "judge":
            return judge_idea(parse(sys.argv[2:], JudgeFlags))
        return compare_arms(parse(sys.argv[1:]))
    except UserError as error:
        raise UserError(as_settings(str(error))) from error
    except KeyboardInterrupt:
        if {"--dry-run", "--dry_run"} & {*sys.argv}:
            raise
        exit_with(f"stopped; the same command resumes it: python {shlex.join(sys.argv)}", 130)
