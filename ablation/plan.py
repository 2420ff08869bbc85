"""What is compared, fixed before the first run: arms, which are sets of settings of train.py, seeds and learning rates.
Arms of a seed read equal batches, unless they differ in tokenizer, steps or shape of a batch. Imports no torch.
"""

import dataclasses
import functools
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from msgspec import Meta
from tyro.conf import Suppress, arg

from checkpoints.families import load_config
from checkpoints.find import find_checkpoint
from data.settings import TEXT_SETTINGS
from errors import UserError
from files import read_toml, replace_text
from flags import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_fields, convert, nearest, optional
from model.config import ModelConfig
from training.settings import CONFIGS, Settings, config_path, implied, load_settings, read_table, replace_settings

STUDIES = CONFIGS.parent / "studies"
MAX_SEEDS = 500  # final runs of an arm
JUDGED_PAIRS = 20  # without --seeds, the most that `judge` trains
EVALUATIONS = 12  # along a run
CURVE_TOKENS = 16_384  # of the validation set, for these; the final loss uses all
SWEEP_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # multiples of the config's learning rate that a sweep tries
RUN_SETTINGS = ("seed", "out", "device", "evaluate_every", "cache", "sample_prompts", "timeout_minutes")  # of no arm
SETTINGS = [setting for table in dataclasses.fields(Settings) for setting in dataclasses.fields(table.type)]
TYPES = {setting.name: setting.type for setting in SETTINGS if setting.name not in RUN_SETTINGS}  # names are unique


def read_value(name: str, value: object) -> Any:
    """The value of a setting of an arm, from a TOML file or as text."""
    if name not in TYPES:
        hint = " All arms have the same seeds: --seeds N, --first-seed N." if "seed" in name else nearest(name, TYPES)
        raise UserError(f"{name} is not a setting that arms can have.{hint}")
    if get_origin(TYPES[name]) is tuple and isinstance(value, str):
        value = [value] if value else []
    kind = getattr(TYPES[name], "__origin__", TYPES[name])  # without what tyro reads
    if str(value).lower() == "none" and type(None) in get_args(kind):  # such as lora=none,8
        return None
    return convert(name, value, TYPES[name], strict=False)


def label(name: str, value: object) -> str:
    """A setting as a part of an arm's name: layer (such words stand alone), no attention_bias, weight_decay=0.5."""
    if value is None:
        return f"{name}=none"
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, tuple):
        return f"{name}={' '.join(map(str, value))}" if value else f"no {name}"
    return value if isinstance(value, str) else f"{name}={value}"


def as_settings(message: str) -> str:
    """A message of train.py with its flags as settings of arms: sequence_length=64 for --sequence-length 64."""
    if "python train.py" in message:
        return message
    for name in TYPES.keys() - {"steps", "learning_rate"}:  # a comparison has these flags, too
        flag = rf"--{name.replace('_', '-')}\b(?!-)"
        message = re.sub(flag, name, re.sub(f"{flag}(=| (?=[A-Z0-9]))", f"{name}=", message))
    return message


@functools.cache
def base_settings(config: str) -> Settings:
    return load_settings(config_path(config))


@functools.cache
def checkpoint_model(init_from: str) -> tuple[str, ModelConfig | None]:
    """The directory of a checkpoint, and its model; None if there is none, as for the models of `studies.convert`."""
    try:
        directory = str(find_checkpoint(init_from))
    except UserError:
        return init_from, None
    return directory, load_config(directory)


@dataclass(frozen=True)
class Arm:
    changes: dict[str, Any]  # by the short name of a setting, such as {"norm": "layer"}
    settings: Settings  # of its runs, but for seed and learning rate
    baseline: str | None  # the arm that it is compared with; None for a baseline

    def value(self, name: str) -> Any:
        """The value of a setting: as the plan wrote it where the arm changes it, else as in `settings`."""
        return (self.settings.by_name() | self.changes)[name]


@dataclass(frozen=True)
class Plan:
    """The runs: what they share, how many there are, and at which learning rates."""  # as the help of flags

    name: Annotated[str, Suppress] = "norms"
    # Settings by arm, the baseline first. Without them each value of vary's first setting is an arm. Every other
    # setting in vary multiplies the arms.
    arms: Annotated[dict[str, dict[str, Any]], Suppress] = field(default_factory=dict)
    vary: Annotated[dict[str, list[Any]], Suppress] = field(default_factory=dict)
    titles: Annotated[dict[str, str], Suppress] = field(default_factory=dict)  # in documents, by choice in `vary`
    prediction: Annotated[str, Suppress] = ""  # for the report
    config: Annotated[str, Suppress] = "ablation"  # what the arms share: a TOML file, or a name in configs/
    steps: Annotated[PositiveInt | None, optional("INT")] = None
    """Steps of a run, of which at most a tenth warm up; by default the config's"""
    seeds: Annotated[Annotated[int, Meta(ge=2, le=MAX_SEEDS)] | None, optional("INT")] = None
    """Final pairs; by default as many as the pilot asks for. With judge: at most, 10 or more, by default 20"""
    pilot_seeds: Annotated[int, Meta(ge=2)] = 8  # Runs of each arm that fix how many are final; unused with --seeds
    rerun_seeds: NonNegativeInt = 3  # Seeds that a baseline repeats from changed initial weights
    perturbations: tuple[NonNegativeFloat, ...] = (1e-6, 0.05)
    """How much, relatively: rounding, and a change that means nothing"""
    first_seed: NonNegativeInt = 1  # Seed of the first final runs; the others follow
    hours: Annotated[PositiveFloat, arg(help_behavior_hint="")] = 12.0
    """The most that all runs may take, sweep and pilot included: 12, or what the plan says"""
    learning_rates: Annotated[tuple[PositiveFloat, ...], arg(help_behavior_hint="", aliases=("--lr",))] = ()
    """Several: a sweep. None: the config's, or a sweep where norm (not rms, layer), placement, MLP, LoRA or optimizer
    differ"""
    sweep_seeds: PositiveInt = 3  # Runs of each arm at each learning rate of the sweep
    margin: NonNegativeFloat = 0.005  # Smaller differences (nats per token, or the report's unit) are equivalent

    def __post_init__(self) -> None:
        check_fields(self)
        if {*self.phase_seeds["final"]} & {*self.phase_seeds["sweep"], *self.phase_seeds["pilot"]}:
            raise UserError(f"--first-seed {self.first_seed}: final runs would have seeds of the sweep or the pilot.")
        arms = {arm: {name: read_value(name, value) for name, value in own.items()} for arm, own in self.arms.items()}
        vary = {name: [read_value(name, value) for value in values] for name, values in self.vary.items()}
        object.__setattr__(self, "arms", arms)  # as the class is frozen
        object.__setattr__(self, "vary", vary)

    @functools.cached_property
    def all_arms(self) -> dict[str, Arm]:
        """Every combination of `arms` and `vary`, by name. A baseline is the first arm of its combination."""
        arms = self.arms
        vary = [[(name, value) for value in values] for name, values in self.vary.items()]
        vary.sort(key=lambda choices: len(choices) == 1)  # a constant is no arm, also where it comes first
        if not arms and vary:
            arms = {label(name, value): {name: value} for name, value in vary.pop(0)}
        combined: dict[str, Arm] = {}
        for choices in itertools.product(*vary):
            baseline = None
            for arm, own in arms.items():
                name = ", ".join([arm, *(label(*choice) for choice in choices if len(self.vary[choice[0]]) > 1)])
                changes = own | dict(choices)
                combined[name] = Arm(changes, changed_settings(self.config, self.steps, changes), baseline)
                baseline = baseline or name
        if len(combined) < 2:
            raise UserError("a comparison needs two arms or more: --vary SETTING=VALUE,VALUE, or --a and --b.")
        for a, b in itertools.combinations(combined, 2):
            if combined[a].settings == combined[b].settings:
                raise UserError(f"the arms {a} and {b} have the same settings.")
        for setting in TEXT_SETTINGS:
            if len({arm.value(setting) for arm in combined.values()}) > 1:
                fix = f"give all the same (--vary {setting}=VALUE, or both of --a and --b; otherwise: docs/compare.md)"
                raise UserError(f"arms that differ in {setting} have losses of different texts; {fix}.")
        return combined

    @functools.cached_property
    def candidate_learning_rates(self) -> dict[str, tuple[float, ...]]:
        """The learning rates by arm: one, or several in ascending order from which a sweep chooses."""
        rates = tuple(sorted({*self.learning_rates}))
        if not rates:
            default = base_settings(self.config).optimizer.learning_rate
            norms = {arm.value("norm") for arm in self.all_arms.values()}
            needs_sweep = {"norm_placement", "mlp", "optimizer", "lora"} & {*self.varied}  # their best rates differ
            if "norm" in self.varied and norms - {"rms", "layer"}:
                needs_sweep.add("norm")
            rates = tuple(factor * default for factor in SWEEP_FACTORS) if needs_sweep else (default,)
        own = {name: arm.changes.get("learning_rate") for name, arm in self.all_arms.items()}
        if self.learning_rates and None not in own.values():
            raise UserError("every arm has a learning_rate of its own; leave out --learning-rates.")
        return {name: rates if rate is None else (rate,) for name, rate in own.items()}

    @property
    def varied(self) -> list[str]:
        """The settings in which the arms differ."""
        names = dict.fromkeys(name for arm in self.all_arms.values() for name in arm.changes)
        return [name for name in names if len({arm.value(name) for arm in self.all_arms.values()}) > 1]

    @property
    def phase_seeds(self) -> dict[str, range]:
        """The seeds of each phase; with a pilot, the final runs are as many of theirs as it asks for."""
        pilot_seeds, seeds = (0, self.seeds) if self.seeds else (self.pilot_seeds, MAX_SEEDS)
        return {
            "sweep": range(1001, 1001 + self.sweep_seeds),
            "pilot": range(2001, 2001 + pilot_seeds),
            "final": range(self.first_seed, self.first_seed + seeds),
        }


@dataclass(frozen=True)
class Run:
    """One training run of a plan; its fields are also the key of its row."""

    arm: str
    phase: Literal["sweep", "pilot", "rerun", "final"]
    seed: int
    learning_rate: float
    perturbation: float = 0.0  # relative change of the initial weights

    def __str__(self) -> str:
        changed = f", weights changed by {self.perturbation:g}" if self.perturbation else ""
        return f"{self.arm}, {self.phase} seed {self.seed}, learning rate {self.learning_rate:g}{changed}"


def changed_settings(config: str, steps: int | None, changes: dict[str, Any]) -> Settings:
    """Those of `config` with `changes`, and `steps` unless None; what train.py derives is derived as there."""
    given = ({"steps": steps} if steps else {}) | changes
    settings = base_settings(config)
    init_from = given.get("init_from", settings.run.init_from)
    directory, parent = (None, None) if init_from is None else checkpoint_model(init_from)
    derived = implied(given, settings, parent) | given
    if parent is not None:
        derived = vars(parent) | derived | {"init_from": directory}
    steps = given.get("steps", settings.optimizer.steps)
    derived["evaluate_every"] = max(1, steps // EVALUATIONS)
    if "steps" in given and "warmup_steps" not in given:  # the config's is for its own steps
        derived["warmup_steps"] = min(settings.optimizer.warmup_steps, max(steps // 10, 1))
    return replace_settings(settings, derived)


def run_settings(plan: Plan, run: Run) -> Settings:
    return replace_settings(plan.all_arms[run.arm].settings, {"learning_rate": run.learning_rate, "seed": run.seed})


def plan_path(name: str) -> Path | None:
    """The TOML file that a name stands for: a path, a folder of results, or its name in studies/ or runs/."""
    folders = (Path(name), STUDIES / name, Path("runs") / f"ablation-{name}")
    return next(filter(Path.is_file, [Path(name), *(folder / "plan.toml" for folder in folders)]), None)


def find_plan(name: str) -> Path:
    """`plan_path`, or a `UserError`."""
    path = plan_path(name)
    if path is not None:
        return path
    if Path(name).is_dir():
        inside = [str(path.parent) for path in sorted(Path(name).glob("*/plan.toml"))] or ["runs/ablation-norms"]
        raise UserError(f"{name} has no plan.toml; give the folder of one experiment, such as {inside[0]}.")
    studies = [path.parent.name for path in STUDIES.glob("*/plan.toml")]
    experiments = sorted(Path("runs").glob("ablation-*"), key=lambda folder: -folder.stat().st_mtime)[:5]
    listed = f" Newest experiments: {', '.join(map(str, experiments))}." if experiments else ""
    plans = [path.name for path in Path().glob("*.toml")]
    close = nearest(name, [*plans, *studies, "judge", "report", "--quick", *map(str, experiments)])
    raise UserError(f"{name} is no file, experiment or study in studies/.{close or listed}")


def load_plan(path: Path) -> Plan:
    """Read a plan; its default name is that of its file, or of the folder of a plan.toml."""
    name = path.parent.name if path.name == "plan.toml" else path.stem
    values = {"name": name} | read_toml(path)
    for key in values.keys() & TYPES.keys() - {f.name for f in dataclasses.fields(Plan)}:
        fix = f"write vary = {{{key} = [VALUE]}} for all arms, or give it in arms"
        raise UserError(f"{path}: {key} is a setting of train.py; {fix}.")
    return read_table(path, Plan, values)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan that `load_plan` reads, without what is empty."""
    values = {name: value for name, value in dataclasses.asdict(plan).items() if value not in (None, (), {}, "")}
    for arm in values.get("arms", {}).values():
        arm.update({name: "none" for name in arm if arm[name] is None})  # TOML has no None
    for choices in values.get("vary", {}).values():
        choices[:] = ["none" if value is None else value for value in choices]
    replace_text(path, tomli_w.dumps(values))
