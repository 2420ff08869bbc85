"""What an ablation compares, fixed before it runs: arms, seeds, learning rates, metric, equivalence margin.

Imports no torch, so that `python ablate.py --help` answers at once. Within a seed, all arms read the same batches, and
weights that two arms share start equal. Learning rates are chosen in a sweep, the number of final runs by a pilot, each
on seeds that the final runs do not use; other runs measure the noise.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tomli_w

from errors import UserError, read_toml, replace_text
from flags import arg, optional
from model.config import GATED, NORMS, PLACEMENTS, PLAIN, ModelConfig, canonical_norm_bias
from training.settings import CONFIGS, Settings, config_path, load_settings, nearest, read_table

PLANS = CONFIGS / "ablations"
FIRST_SWEEP_SEED, FIRST_PILOT_SEED = 1001, 2001  # where the seeds of the sweep and of the pilot begin
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_SEEDS = 500  # of the final runs
LIMITS = {
    "seeds": (2, 10_000),
    "pilot_seeds": (3, 10_000),
    "noise_seeds": (0, 10_000),
    "sweep_seeds": (1, 10_000),
    "first_seed": (0, 2**62),
    "steps": (1, 10**9),
    "evaluations": (1, 10**6),
}


@dataclass(frozen=True)
class Arm:
    """One combination of choices. Records of earlier versions lack the last two fields and read as their defaults."""

    norm: Literal[*NORMS]
    placement: Literal[*PLACEMENTS]
    mlp: Literal[*GATED, *PLAIN]
    dtype: Literal[*DTYPES]
    eps: float
    init_scale: float
    norm_bias: bool | None = None
    """As in `ModelConfig`: None is the norm's own default, also where that was asked for."""
    qk_norm: bool | None = None
    """None: as the config says."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "norm_bias", canonical_norm_bias(self.norm, self.norm_bias)
        )  # equal arms must be equal


@dataclass(frozen=True)
class Plan:
    """The comparison. Every combination of norms, placements, MLPs, dtypes and so on is one arm."""

    name: str = "norms"
    """Name of the comparison and of its folder."""
    norms: tuple[Literal[*NORMS], ...] = ("rms", "layer")
    """Norms to compare; the baseline is layer if it is listed, else the first."""
    placements: tuple[Literal[*PLACEMENTS], ...] = ("pre",)
    """Where the norms are: before the blocks (pre), after the additions (post), around the blocks (sandwich) or after
    the blocks (output)."""
    mlps: tuple[Literal[*GATED, *PLAIN], ...] = ("swiglu",)
    """Activations of the MLP, at equal numbers of parameters."""
    dtypes: tuple[Literal[*DTYPES], ...] = ("auto",)
    """Dtypes of the activations."""
    eps: tuple[float, ...] = (1e-5,)
    """Values of the norm's eps."""
    init_scales: tuple[float, ...] = (1.0,)
    """Factors on the standard deviation of the initial weights."""
    norm_biases: Annotated[tuple[bool, ...], arg(help_behavior_hint="")] = ()
    """Whether the norms have a bias; without values, each norm's own default."""
    qk_norms: Annotated[tuple[bool, ...], arg(help_behavior_hint="")] = ()
    """Whether queries and keys go through RMSNorm; without values, as the config says."""
    seeds: Annotated[int | None, optional("INT")] = None
    """Final runs of each arm, paired by seed; without a value as many as the pilot asks for, at least five."""
    pilot_seeds: int = 8
    """Runs of each arm that only measure how far pairs differ, to fix the number of final runs; unused with --seeds."""
    noise_seeds: int = 3
    """On how many seeds the baseline is trained once more, from initial weights changed by a millionth: how far two
    runs that should be equal drift apart."""
    first_seed: int = 1
    """Seed of the first final runs; the others follow. Final seeds must not be those of earlier runs of any kind."""
    hours: float = 12.0
    """The most that all runs may take: where the pilot asks for more final runs, as many are done as fit."""
    learning_rates: Annotated[tuple[float, ...], arg(help_behavior_hint="")] = ()
    """Learning rates to choose from, separately for each arm; without them every arm uses the config's."""
    sweep_seeds: int = 3
    """Runs of each arm at each learning rate of the sweep. Where an arm is best at the lowest or highest one, the sweep
    is extended beyond it."""
    config: str = "ablation"
    """Model, text and schedule: a TOML file, or a name in configs/."""
    steps: Annotated[int | None, optional("INT")] = None
    """Steps of a run; by default the config's."""
    evaluations: int = 12
    """Evaluations along each run, on the first part of the validation text."""
    margin: float = 0.005
    """Equivalence margin in nats per token: smaller differences of validation loss are treated as equivalent."""
    convert: bool = False
    """Also convert finished LayerNorm runs to RMSNorm, with and without their bias, and evaluate them without training,
    after training only the norms, and after training all parameters."""
    timing: bool = True
    """Also time every arm in interleaved blocks of five processes, apart from training."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w .-]{0,63}", self.name):
            raise UserError(f"--name {self.name!r} must be 1 to 64 letters, digits, spaces, dots or dashes.")
        for name in DIMENSIONS.values():
            values = [f"{value:g}" if isinstance(value, float) else value for value in getattr(self, name)]
            if not (values or name in OPTIONAL) or len(set(values)) < len(values):
                raise UserError(f"--{flag(name)} needs one or more different values, not {values}.")
        for name, (lowest, highest) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                bound = f"least {lowest}" if value < lowest else f"most {highest:,}"
                raise UserError(f"--{flag(name)} is {value} and must be at {bound}.")
        for others, what in ((self.seeds_of_sweep, "a sweep"), (self.seeds_of_pilot, "a pilot")):
            common = [seed for seed in others if seed in self.final_seeds]
            if common:
                raise UserError(f"seeds {common} are those of {what}, not of final runs; change --first-seed.")
        for name in ("margin", "hours"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"--{name} is {getattr(self, name)} and must be a finite number greater than 0.")
        rates = self.learning_rates
        if any(not 0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise UserError(f"--learning-rates {list(rates)} must be different numbers greater than 0.")
        if self.convert and "layer" not in self.norms:
            raise UserError("--convert starts from LayerNorm: add layer to --norms.")
        if self.convert and any(len(getattr(self, name)) > 1 for name in DIMENSIONS.values() if name != "norms"):
            raise UserError("--convert takes one value of every choice but --norms; give one of each.")
        if self.convert and self.norm_biases:
            raise UserError("--convert starts from LayerNorm with its bias; leave out --norm-biases.")

    @property
    def arms(self) -> list[Arm]:
        """Every combination of the choices, each once: a norm without parameters has no bias to add or drop."""
        choices = (getattr(self, name) or (None,) for name in DIMENSIONS.values())
        return list(dict.fromkeys(Arm(*values) for values in itertools.product(*choices)))

    @property
    def final_seeds(self) -> range:
        """Seeds of the final runs: with a pilot, the seeds from which it takes as many as it needs."""
        return range(self.first_seed, self.first_seed + (self.seeds or MAX_SEEDS))

    @property
    def seeds_of_pilot(self) -> range:
        """Seeds of the pilot, if there is one."""
        return range(FIRST_PILOT_SEED, FIRST_PILOT_SEED + (0 if self.seeds else self.pilot_seeds))

    @property
    def seeds_of_sweep(self) -> range:
        """Seeds of the sweep, if there is one."""
        return range(FIRST_SWEEP_SEED, FIRST_SWEEP_SEED + self.sweep_seeds)

    @property
    def has_sweep(self) -> bool:
        """Whether learning rates are chosen by this comparison."""
        return len(self.learning_rates) > 1


DIMENSIONS = {  # a field of Arm -> the field of Plan that lists its values
    "norm": "norms",
    "placement": "placements",
    "mlp": "mlps",
    "dtype": "dtypes",
    "eps": "eps",
    "init_scale": "init_scales",
    "norm_bias": "norm_biases",
    "qk_norm": "qk_norms",
}
OPTIONAL = ("norm_biases", "qk_norms")  # without values an arm has None
LABELS = {"eps": "eps {:g}", "init_scale": "initial weights x {:g}"}


@dataclass(frozen=True)
class Run:
    """One training run of a plan."""

    arm: Arm
    phase: Literal["sweep", "pilot", "noise", "final"]
    seed: int
    learning_rate: float

    @property
    def folder_name(self) -> str:
        """Name of the folder of its state while it trains."""
        choices = [
            f"{field}-{value}" if isinstance(value, bool) else str(value)
            for field, value in vars(self.arm).items()
            if value is not None
        ]
        return "-".join([*choices, self.phase, str(self.learning_rate), str(self.seed)])


def flag(name: str) -> str:
    return name.replace("_", "-")


def label(plan: Plan, arm: Arm) -> str:
    """The values in which the plan's arms differ, as text; the norm if there is only one arm.

    A norm is named with its bias where that is not its default: rms, rms with bias, layer, layer without bias.
    """
    varying = [field for field, name in DIMENSIONS.items() if len(getattr(plan, name)) > 1]
    bias = {None: "", True: " with bias", False: " without bias"}[arm.norm_bias]
    words = [
        LABELS.get(field, "{}").format(getattr(arm, field))
        for field in varying
        if field not in ("norm", "norm_bias", "qk_norm")
    ]
    if {"norm", "norm_bias"} & {*varying} or not varying:
        words.insert(0, arm.norm + bias)
    if "qk_norm" in varying:
        words.append("qk norm" if arm.qk_norm else "no qk norm")
    return ", ".join(words)


# What arms are compared by: the first of these choices that has several values. A norm and its bias are one choice.
COMPARED = (("norm", "norm_bias"), ("mlp",), ("placement",), ("dtype",), ("eps",), ("init_scale",), ("qk_norm",))
PREFERRED = (("layer", None), ("layer", False), ("swiglu",))  # baselines, where the plan has them


def baseline(plan: Plan, arm: Arm) -> Arm | None:
    """The arm that this one is compared with; None for the baseline itself.

    It differs in one choice alone, see `COMPARED`. Its value is one of `PREFERRED`, or else the plan's first value.
    """
    for fields in COMPARED:
        values = list(dict.fromkeys(tuple(getattr(a, field) for field in fields) for a in plan.arms))
        if len(values) > 1:
            value = next((preferred for preferred in PREFERRED if preferred in values), values[0])
            base = dataclasses.replace(arm, **dict(zip(fields, value, strict=True)))
            return None if base == arm else base
    return None


@functools.cache
def base_settings(config: str) -> Settings:
    """The settings of a configuration, read once."""
    return load_settings(config_path(config))


def default_learning_rate(plan: Plan) -> float:
    """The learning rate of every arm of a plan without a sweep."""
    return (plan.learning_rates or (base_settings(plan.config).optimizer.learning_rate,))[0]


def steps_of(plan: Plan) -> int:
    """Optimizer steps of every run."""
    return plan.steps or base_settings(plan.config).optimizer.steps


def model_config(plan: Plan, arm: Arm) -> ModelConfig:
    """The model of an arm."""
    model = base_settings(plan.config).model
    return dataclasses.replace(
        model,
        norm=arm.norm,
        norm_bias=arm.norm_bias,
        qk_norm=model.qk_norm if arm.qk_norm is None else arm.qk_norm,
        norm_placement=arm.placement,
        mlp=arm.mlp,
        norm_eps=arm.eps,
        initializer_range=model.initializer_range * arm.init_scale,
    )


def arm_settings(plan: Plan, arm: Arm) -> Settings:
    """The settings of an arm's runs, but for seed and learning rate."""
    settings, steps = base_settings(plan.config), steps_of(plan)
    optimizer = dataclasses.replace(
        settings.optimizer,
        steps=steps,
        warmup_steps=min(settings.optimizer.warmup_steps, steps // 10),
    )
    return dataclasses.replace(
        settings,
        model=model_config(plan, arm),
        optimizer=optimizer,
        machine=dataclasses.replace(settings.machine, dtype=arm.dtype),
        run=dataclasses.replace(settings.run, evaluate_every=max(1, steps // plan.evaluations)),
    )


def run_settings(plan: Plan, run: Run) -> Settings:
    """The settings of a training run."""
    settings = arm_settings(plan, run.arm)
    return dataclasses.replace(
        settings,
        optimizer=dataclasses.replace(settings.optimizer, learning_rate=run.learning_rate),
        run=dataclasses.replace(settings.run, seed=run.seed),
    )


def sweep_runs(plan: Plan, rates: Sequence[float]) -> list[Run]:
    """The runs that choose each arm's learning rate; seed by seed, so that an early stop leaves complete rows."""
    if not plan.has_sweep:
        return []
    return [Run(arm, "sweep", seed, rate) for seed in plan.seeds_of_sweep for arm in plan.arms for rate in rates]


def noise_runs(plan: Plan, rates: Sequence[float]) -> list[Run]:
    """The baselines once more, from perturbed initial weights, at these learning rates.

    Each repeats a run of the sweep; without a sweep one of the pilot, and without either a final one.
    """
    arms = [arm for arm in plan.arms if baseline(plan, arm) is None]
    seeds = (plan.seeds_of_sweep if plan.has_sweep else plan.seeds_of_pilot or plan.final_seeds)[: plan.noise_seeds]
    return [Run(arm, "noise", seed, rate) for seed in seeds for arm in arms for rate in rates]


def pilot_runs(plan: Plan, learning_rates: dict[Arm, float]) -> list[Run]:
    """The runs that only measure the spread of the pairs' differences."""
    arms = [arm for arm in plan.arms if arm in learning_rates]
    return [Run(arm, "pilot", seed, learning_rates[arm]) for seed in plan.seeds_of_pilot for arm in arms]


def final_runs(plan: Plan, learning_rates: dict[Arm, float], pairs: int) -> list[Run]:
    """The runs that are compared; an arm that diverged at every learning rate of the sweep has none."""
    arms = [arm for arm in plan.arms if arm in learning_rates]
    return [Run(arm, "final", seed, learning_rates[arm]) for seed in plan.final_seeds[:pairs] for arm in arms]


def load_plan(name: str) -> Plan:
    """Read a TOML file, or a name in configs/ablations/."""
    path = next((path for path in (Path(name), PLANS / f"{name}.toml") if path.is_file()), None)
    if path is None:
        known = sorted(path.stem for path in PLANS.glob("*.toml"))
        raise UserError(f"{name} is neither a file nor one of {', '.join(known)}.{nearest(name, known)}")
    return read_table(path, Plan, read_toml(path))


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan that `load_plan` reads, without fields that are None or empty."""
    values = {key: value for key, value in dataclasses.asdict(plan).items() if value not in (None, ())}
    replace_text(path, tomli_w.dumps(values))
