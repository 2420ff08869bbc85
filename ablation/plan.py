"""What a comparison compares, fixed before it runs: arms, seeds, learning rates, equivalence margin, hours. Within a
seed, arms read the same batches, and weights of equal name and shape start equal. Imports no torch.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from tyro.conf import Suppress, arg

from errors import UserError
from files import read_toml, replace_text
from flags import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, optional
from training.settings import CONFIGS, Settings, check_fields, config_path, load_settings, nearest, read_table

STUDIES = CONFIGS.parent / "studies"
FIRST_SEEDS = {"sweep": 1001, "pilot": 2001}
MAX_SEEDS = 500  # final runs of an arm
JUDGED_PAIRS = 20  # at most
EVALUATIONS = 12  # along a run
SWEEP_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # multiples of the config's learning rate that a sweep tries
GIVEN = ("seed", "out", "device", "evaluate_every")  # settings of the program, not of an arm


@dataclass(frozen=True)
class Arm:
    name: str
    settings: dict[str, Any]  # what it changes, by the short name of a setting, such as {"norm": "layer"}
    baseline: str | None  # the arm that it is compared with; None for a baseline


@dataclass(frozen=True)
class Plan:
    """The comparison. `arms` has settings by arm, the baseline first; every arm gets every combination of the values by
    setting in `vary`, whose first setting makes the arms where there are no others. Comments are the help of flags.
    """

    name: Annotated[str, Suppress] = "norms"
    arms: Annotated[dict[str, dict[str, Any]], Suppress] = field(default_factory=dict)
    vary: Annotated[dict[str, list[Any]], Suppress] = field(default_factory=dict)
    titles: Annotated[dict[str, str], Suppress] = field(default_factory=dict)  # in documents, by choice in `vary`
    config: str = "ablation"  # What the arms share: a TOML file, or a name in configs/
    steps: Annotated[PositiveInt | None, optional("INT")] = None  # Steps of a run; by default the config's
    seeds: Annotated[Annotated[int, Meta(ge=2, le=MAX_SEEDS)] | None, optional("INT")] = None
    """Final pairs; by default as many as the pilot asks for"""
    pilot_seeds: Annotated[int, Meta(ge=2)] = 8  # Runs of each arm that fix how many are final; unused with --seeds
    rerun_seeds: NonNegativeInt = 3  # Seeds that a baseline repeats from changed initial weights
    perturbations: tuple[NonNegativeFloat, ...] = (1e-6, 0.05)
    """How much, relatively: rounding, and a change that means nothing"""
    first_seed: NonNegativeInt = 1  # Seed of the first final runs; the others follow
    hours: PositiveFloat = 12.0  # The most that all runs may take, sweep and pilot included
    learning_rates: Annotated[tuple[PositiveFloat, ...], arg(help_behavior_hint="")] = ()
    """One for all arms, or several to sweep. By default the config's, or a sweep around it where the arms differ in the
    norm (beyond rms and layer), its placement, the MLP or the optimizer"""
    sweep_seeds: PositiveInt = 3  # Runs of each arm at each learning rate of the sweep
    margin: NonNegativeFloat = 0.005  # Smaller differences (nats per token, or the report's unit) are equivalent

    def __post_init__(self) -> None:
        check_fields(self)
        if {*self.phase_seeds["final"]} & {*self.phase_seeds["sweep"], *self.phase_seeds["pilot"]}:
            raise UserError(f"--first-seed {self.first_seed}: final runs would have seeds of the sweep or the pilot.")
        vars(self).update(arms={name: read_settings(given) for name, given in self.arms.items()})
        vars(self).update(vary=read_settings(self.vary, several=True))

    @functools.cached_property
    def compared(self) -> dict[str, Arm]:
        """All arms by name: every combination of `arms` and `vary`. A baseline is the first arm of its combination."""
        arms, vary = self.arms, [[(name, value) for value in values] for name, values in self.vary.items()]
        if not arms and vary:
            arms = {label(name, value): {name: value} for name, value in vary.pop(0)}
        found: dict[str, Arm] = {}
        for choices in itertools.product(*vary):
            baseline = None
            for arm, settings in arms.items():
                name = ", ".join([arm, *(label(*choice) for choice in choices)])
                found[name] = Arm(name, settings | dict(choices), baseline)
                baseline = baseline or name
        if len(found) < 2:
            raise UserError("a comparison needs two arms or more: --vary SETTING=VALUE,VALUE, or --a and --b.")
        settings = {name: arm_settings(self, arm) for name, arm in found.items()}
        for a, b in itertools.combinations(found, 2):
            if settings[a] == settings[b]:
                raise UserError(f"the arms {a} and {b} have the same settings.")
        return found

    @functools.cached_property
    def rates(self) -> tuple[float, ...]:
        """Learning rates at which the sweep begins, ascending; empty: there is no sweep."""
        if self.learning_rates:
            return tuple(sorted({*self.learning_rates})) if len(self.learning_rates) > 1 else ()
        norms = {self.value(arm, "norm") for arm in self.compared.values() if "norm" in self.varied}
        if norms <= {"rms", "layer"} and not {"norm_placement", "mlp", "optimizer"} & {*self.varied}:
            return ()
        rate = base_settings(self.config).optimizer.learning_rate
        return tuple(factor * rate for factor in SWEEP_FACTORS)

    @property
    def varied(self) -> list[str]:
        """The settings in which the arms differ."""
        names = dict.fromkeys(name for arm in self.compared.values() for name in arm.settings)
        return [name for name in names if len({self.value(arm, name) for arm in self.compared.values()}) > 1]

    def value(self, arm: Arm, setting: str) -> Any:
        """What an arm has for a setting: its own value, or that of the config."""
        table, _ = known_settings()[setting]
        return arm.settings.get(setting, getattr(getattr(base_settings(self.config), table), setting))

    def fixed_rate(self, arm: Arm) -> float | None:
        """The learning rate of an arm for which none is chosen; None where the sweep chooses one."""
        if "learning_rate" in arm.settings:
            return arm.settings["learning_rate"]
        if self.rates:
            return None
        return self.learning_rates[0] if self.learning_rates else base_settings(self.config).optimizer.learning_rate

    @property
    def phase_seeds(self) -> dict[str, range]:
        """The seeds of each phase; with a pilot, the final runs are as many of theirs as it asks for."""
        pilot, final = (0, self.seeds) if self.seeds else (self.pilot_seeds, MAX_SEEDS)
        counts = {"sweep": self.sweep_seeds, "pilot": pilot, "final": final}
        first = FIRST_SEEDS | {"final": self.first_seed}
        return {phase: range(first[phase], first[phase] + count) for phase, count in counts.items()}


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


@functools.cache
def known_settings() -> dict[str, tuple[str, Any]]:
    """Every setting of `train.py`: the table of `Settings` that has it, and its type."""
    tables = dataclasses.fields(Settings)
    return {f.name: (table.name, f.type) for table in tables for f in dataclasses.fields(table.type)}


def read_setting(name: str, value: object) -> tuple[str, Any]:
    """The short name and the value of a setting, from a TOML file or as text; `model.norm` is `norm`."""
    table, _, short = name.rpartition(".")
    if short in GIVEN or short not in known_settings() or table not in ("", known_settings()[short][0]):
        raise UserError(f"{name} is not a setting that arms can have.{nearest(short, {*known_settings()} - {*GIVEN})}")
    kind = known_settings()[short][1]
    try:
        texts = [value] if get_origin(kind) is tuple and isinstance(value, str) else value
        return short, msgspec.convert(texts, kind, strict=False)
    except msgspec.ValidationError as error:
        choices = [str(choice) for choice in get_args(kind) if isinstance(choice, str)]
        known = f" Known: {', '.join(choices)}." if choices else ""
        raise UserError(f"{name}={value}: {error}.{nearest(str(value), choices) or known}") from None


def read_settings(given: dict[str, Any], *, several: bool = False) -> dict[str, Any]:
    """Settings by short name; `several`: with a list of values each."""
    found = {}
    for name, value in given.items():
        read = [read_setting(name, one) for one in (value if several else [value])]
        short = read[0][0]
        if short in found:
            raise UserError(f"{short} is given twice, once as {name}.")
        found[short] = [one for _, one in read] if several else read[0][1]
    return found


def label(setting: str, value: object) -> str:
    """A value as part of an arm's name: layer, attention_bias, no attention_bias, weight_decay=0.5."""
    if isinstance(value, bool):
        return setting if value else f"no {setting}"
    return value if isinstance(value, str) else f"{setting}={value}"


@functools.cache
def base_settings(config: str) -> Settings:
    """The settings of a configuration, read once."""
    return load_settings(config_path(config))


def replace_settings(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with those values, by short name, changed."""
    changed = {
        table: dataclasses.replace(before, **{name: changes[name] for name in vars(before) if name in changes})
        for table, before in vars(settings).items()
    }
    return Settings(**changed)


def arm_settings(plan: Plan, arm: Arm) -> Settings:
    """The settings of an arm's runs, but for seed and learning rate."""
    given = {"steps": plan.steps} if plan.steps else {}
    settings = replace_settings(base_settings(plan.config), given | arm.settings)
    steps, warmup = settings.optimizer.steps, settings.optimizer.warmup_steps
    schedule = {"warmup_steps": min(warmup, max(steps // 10, 1)), "evaluate_every": max(1, steps // EVALUATIONS)}
    return replace_settings(settings, schedule)


def run_settings(plan: Plan, run: Run) -> Settings:
    of_arm = arm_settings(plan, plan.compared[run.arm])
    return replace_settings(of_arm, {"learning_rate": run.learning_rate, "seed": run.seed})


def quick(plan: Plan) -> Plan:
    """The plan in minutes: three pairs of 300 steps at one learning rate."""
    rate = plan.learning_rates[:1] or (base_settings(plan.config).optimizer.learning_rate,)
    return dataclasses.replace(plan, name=f"{plan.name}-quick", seeds=3, steps=300, rerun_seeds=0, learning_rates=rate)


def find_plan(name: str) -> Path:
    """The TOML file that a name stands for: a path, the folder of a study, or its name in studies/."""
    for path in (Path(name), Path(name) / "plan.toml", STUDIES / name / "plan.toml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise UserError(f"{name} has no plan.toml; give the folder of a comparison, such as runs/ablation-norms.")
    known = sorted(path.parent.name for path in STUDIES.glob("*/plan.toml"))
    raise UserError(f"{name} is neither a file nor a study ({', '.join(known)}).{nearest(name, known)}")


def load_plan(path: Path) -> Plan:
    """Read a plan; its default name is that of its file, or of the folder of a plan.toml."""
    name = path.parent.name if path.name == "plan.toml" else path.stem
    return read_table(path, Plan, {"name": name} | read_toml(path))


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan that `load_plan` reads, without what is empty."""
    import tomli_w

    values = {name: value for name, value in dataclasses.asdict(plan).items() if value not in (None, (), {})}
    replace_text(path, tomli_w.dumps(values))
