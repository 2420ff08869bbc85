"""What an ablation compares, stated before it runs: arms, seeds, learning rates, metric, bound.

Imports no torch, so that `python ablate.py --help` answers at once. An arm is a norm together with the other choices;
within a seed all arms share initial weights and batches. Rates are chosen on seeds that the final runs do not use.
"""

import dataclasses
import functools
import itertools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from errors import UserError
from model.config import GATED, NORMS, PLACEMENTS, PLAIN
from training.settings import CONFIGS, Settings, as_flags, config_path, load_settings, nearest

PLANS = CONFIGS / "ablations"
FIRST_RATE_SEED = 1001  # seeds for choosing rates begin here, those of the final runs at 1


@dataclass(frozen=True)
class Plan:
    """The comparison. Every combination of arms, positions, gates, dtypes and epsilons is one arm."""

    name: str = "norms"
    """Name of the comparison and of its folder."""
    arms: tuple[Literal[*NORMS], ...] = ("rms", "layer")
    """Norms to compare; each is compared with `layer` where that is among them."""
    positions: tuple[Literal[*PLACEMENTS], ...] = ("pre",)
    """Where the norms stand."""
    gates: tuple[Literal[*GATED, *PLAIN], ...] = ("swiglu",)
    """Activations of the MLP, at equal numbers of parameters."""
    dtypes: tuple[Literal["auto", "float32", "bfloat16", "float16"], ...] = ("auto",)
    """Dtypes of the activations."""
    epsilons: tuple[float, ...] = (1e-5,)
    """Values of the norm's eps."""
    initializations: tuple[float, ...] = (1.0,)
    """Initial weights, as multiples of the config's."""
    seeds: int = 5
    """Final runs of each arm, paired by seed."""
    learning_rates: tuple[float, ...] = ()
    """Rates to choose from, for each arm its own; none: that of the config for all, and nothing is chosen."""
    rate_seeds: int = 1
    """Runs of each arm and rate."""
    config: str = "ablation"
    """Model, text and schedule: a TOML file, or a name in configs/."""
    steps: int | None = None
    """Steps of a run; by default the config's."""
    bound: float = 0.01
    """Differences of validation loss within this bound count as none, nats per token."""
    switch: bool = False
    """Also switch finished LayerNorm runs to RMSNorm: at once, after training the norms alone, after training all."""
    speed: bool = True
    """Also time both norms in interleaved blocks, apart from training."""

    def __post_init__(self) -> None:
        for name in ("arms", "positions", "gates", "dtypes", "epsilons", "initializations"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"--{name} needs at least one value and each once, not {list(values)}.")
        for name, least in {"seeds": 2, "rate_seeds": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)} and must be at least {least}.")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps is {self.steps} and must be at least 1.")
        if not 0 < self.bound < math.inf:
            raise UserError(f"--bound is {self.bound} and must be greater than 0.")
        rates = self.learning_rates
        if any(not 0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise UserError(f"--learning-rates {list(rates)} must be greater than 0 and each given once.")
        if self.switch and "layer" not in self.arms:
            raise UserError("--switch starts from LayerNorm: add layer to --arms.")


@dataclass(frozen=True)
class Arm:
    """One combination of choices."""

    label: str
    norm: str
    position: str
    gate: str
    dtype: str
    eps: float
    initialization: float = 1.0


@dataclass(frozen=True)
class Run:
    """One training run."""

    arm: Arm
    purpose: Literal["rate", "final"]
    seed: int
    learning_rate: float

    @property
    def key(self) -> str:
        """Name of its folder."""
        label = self.arm.label.replace(", ", "-").replace(" ", "")
        return f"{label}-{self.purpose}-{self.learning_rate:g}-{self.seed}"


def arms_of(plan: Plan) -> list[Arm]:
    """All arms; a label names what differs between them."""
    choices = plan.arms, plan.positions, plan.gates, plan.dtypes, plan.epsilons, plan.initializations
    words = "{}", "{}", "{}", "{}", "eps {:g}", "start x {:g}"
    arms = []
    for values in itertools.product(*choices):
        named = [
            word.format(value) for word, value, among in zip(words, values, choices, strict=True) if len(among) > 1
        ]
        arms.append(Arm(", ".join(named) or values[0], *values))
    return arms


def baseline_of(arm: Arm, arms: list[Arm]) -> Arm | None:
    """What an arm is compared with: the arm that differs in one choice, and there has LayerNorm, SwiGLU or the first.

    That choice is the first of norm, gate, position, dtype, eps and initialization that there are several of.
    """
    fields = ("norm", "gate", "position", "dtype", "eps", "initialization")
    field = next((f for f in fields if len({getattr(a, f) for a in arms}) > 1), None)
    if field is None:
        return None
    values = list(dict.fromkeys(getattr(a, field) for a in arms))
    value = next((v for v in ("layer", "swiglu") if v in values), values[0])
    if getattr(arm, field) == value:
        return None
    wanted = dataclasses.replace(arm, label="", **{field: value})
    return next((a for a in arms if dataclasses.replace(a, label="") == wanted), None)


@functools.cache
def settings_from(config: str) -> Settings:
    """The settings of a configuration, read once."""
    return load_settings(config_path(config))


def settings_of(plan: Plan, run: Run) -> Settings:
    """The settings of a training run."""
    settings = settings_from(plan.config)
    arm, steps = run.arm, plan.steps or settings.optimizer.steps
    model = dataclasses.replace(
        settings.model,
        norm=arm.norm,
        norm_placement=arm.position,
        mlp=arm.gate,
        norm_eps=arm.eps,
        initializer_range=settings.model.initializer_range * arm.initialization,
    )
    optimizer = dataclasses.replace(
        settings.optimizer,
        steps=steps,
        max_minutes=None,  # all arms do all steps, however fast the machine is
        learning_rate=run.learning_rate,
        warmup_steps=min(settings.optimizer.warmup_steps, steps // 10),
    )
    return dataclasses.replace(
        settings,
        model=model,
        optimizer=optimizer,
        machine=dataclasses.replace(settings.machine, dtype=arm.dtype),
        run=dataclasses.replace(settings.run, seed=run.seed, evaluate_every=steps),
    )


def rate_runs(plan: Plan) -> list[Run]:
    """Runs that choose each arm's rate; seed by seed, so that a stop leaves whole rows."""
    seeds = range(FIRST_RATE_SEED, FIRST_RATE_SEED + plan.rate_seeds)
    return [
        Run(arm, "rate", seed, rate) for seed in seeds for arm in arms_of(plan) for rate in sorted(plan.learning_rates)
    ]


def final_runs(plan: Plan, rates: dict[str, float]) -> list[Run]:
    """Runs that are compared, at the rate of each arm's label; an arm without one diverged at every rate."""
    return [
        Run(arm, "final", seed, rates[arm.label])
        for seed in range(1, plan.seeds + 1)
        for arm in arms_of(plan)
        if arm.label in rates
    ]


def load_plan(name: str) -> Plan:
    """A TOML file, or a name in configs/ablations/."""
    path = next((path for path in (Path(name), PLANS / f"{name}.toml") if path.is_file()), None)
    if path is None:
        known = sorted(path.stem for path in PLANS.glob("*.toml"))
        raise UserError(f"{name} is neither a file nor one of {', '.join(known)}.{nearest(name, known)}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable TOML file: {error}.") from None
    keys = {field.name for field in dataclasses.fields(Plan)}
    for key in values:
        if key not in keys:
            raise UserError(f"{path}: unknown key {key}.{nearest(key, keys)}")
    arguments = [flag for key, value in values.items() for flag in as_flags(key, value)]
    return tyro.cli(Plan, args=arguments, prog=str(path))
