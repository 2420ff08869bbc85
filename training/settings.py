"""Every setting of a training run, as one tree of dataclasses that TOML files and command-line flags both fill.

Each overrides the one before: the defaults here, the TOML file (`--config`), the model of `--init-from`, the flags.
The type of a field is also the range of its values, which each table checks. Imports no torch.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import tyro

import flags
from checkpoints.families import load_config
from checkpoints.find import find_checkpoint, is_complete, newest_runs
from data.settings import TEXT_SETTINGS, DataSettings
from errors import UserError, note, reading
from files import read_toml, replace_text
from flags import Beta, Fraction, Name, NonNegativeFloat, NonNegativeInt, OptionalInt, PositiveFloat, PositiveInt
from model.config import NORMS, ModelConfig

CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Actions:
    """What to do, and where the settings come from. These flags are not saved with the run."""

    config: str = "tiny"
    """TOML file: a path, or a name in configs/ (tiny, small, 124m, 1b; with --init-from finetune). Keys that a file
    lacks have defaults of their own, not those of tiny: --config FILE --help-all shows all."""
    resume: Annotated[str | None, flags.optional("RUN")] = None  # Resume this run; flags override its settings.
    prepare: bool = False  # Do not train; make the tokenizer and all tokens of --data, so that training starts at once.
    eval_only: bool = False  # Do not train; evaluate the weights of --init-from on all of --data.
    dry_run: bool = False  # Do not train; prepare a small text, and print the memory and, from a few steps, the time.

    def __post_init__(self) -> None:
        if [self.prepare, self.eval_only, self.dry_run].count(True) > 1:
            raise UserError("--prepare, --eval-only and --dry-run exclude each other; give one.")
        if self.eval_only and self.resume:
            raise UserError(f"--eval-only evaluates --init-from {self.resume}; leave out --resume.")


@dataclass(frozen=True)
class RunSettings:
    """The run itself: its folder, its seed, the weights it starts from, and how often it is evaluated."""

    out: Annotated[Name | None, flags.optional("FOLDER")] = None
    """Folder of the run, new or empty. Default: a new runs/CONFIG-NORM, with --data runs/DATA-NORM."""
    seed: NonNegativeInt = 1  # Seed of the initial weights, the order of the batches and the text samples.
    init_from: Annotated[str | None, flags.optional("RUN")] = None
    """Start from the weights of a run, a checkpoint directory or a Hub model (org/name@revision); --norm may differ."""
    previous_token_head: bool = False  # With --attention-bias: begin with a head that attends to the token before each.
    center_weights: bool = True
    """With --init-from a LayerNorm run and --norm rms: center the weights that write to the residual stream. With the
    bias (--norm-bias, the default then) and an untied head, the model computes the same as before."""
    lora: Annotated[PositiveInt | None, flags.optional("RANK")] = None
    """Train an adapter of this rank to --init-from (LoRA). best/ and last/ then have only that, as PEFT writes it."""
    lora_alpha: OptionalInt = None  # The adapter's output is multiplied by this divided by RANK. Default: 2 RANK.
    freeze: tuple[str, ...] = ()  # Parameters that keep their initial value: names, or patterns like 'layers.*.bias'.
    evaluate_every: PositiveInt = 500  # Steps between evaluations; each also saves and prints a text sample.
    sample_prompts: tuple[str, ...] = ("",)  # Prompts of the text samples. With --data: of held-out documents.
    __post_init__ = flags.check_fields


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and the schedule of its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # AdamW, or Muon for matrices of the layers and AdamW for the rest.
    steps: PositiveInt = 1000  # Number of optimizer steps.
    learning_rate: Annotated[PositiveFloat, tyro.conf.arg(aliases=("--lr",))] = 3e-3  # Peak learning rate.
    embedding_lr_multiplier: NonNegativeFloat = 1.0  # Learning rate of embedding and head, times --learning-rate.
    norm_lr_multiplier: NonNegativeFloat = 1.0  # Learning rate of norms and biases, times --learning-rate.
    schedule: Literal["cosine", "wsd"] = "wsd"  # After the warm-up: cosine decay, or constant and then a linear one.
    warmup_steps: NonNegativeInt = 50  # Steps of linear warm-up.
    decay_fraction: Fraction = 0.5  # Fraction of the steps that wsd spends in its decay, at the end.
    final_learning_rate: Fraction = 0.0  # Learning rate at the last step, as a fraction of the peak.
    weight_decay: NonNegativeFloat = 0.1  # Decoupled weight decay of matrices, and of the offsets of --norm offset.
    embedding_weight_decay: Annotated[NonNegativeFloat | None, flags.optional("FLOAT")] = None
    """The same for the embedding and the head. Default: --weight-decay."""
    beta1: Beta = 0.9  # AdamW: decay of the moving average of the gradient (Muon's is 0.95).
    beta2: Beta = 0.95  # AdamW: decay of the moving average of the squared gradient.
    clip: PositiveFloat = 1.0  # Maximum norm of the gradient of all parameters; a larger gradient is scaled down to it.
    __post_init__ = flags.check_fields


@dataclass(frozen=True)
class MachineSettings:
    """Where the run computes, and in which precision."""

    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a torch device such as cuda:1. OMP_NUM_THREADS sets a CPU's threads."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of activations; weights stay float32. auto: bfloat16 if it is fast, else float16 on CUDA, else float32."""
    kernels: Literal["auto", "triton", "torch"] = "auto"  # Triton kernels, or PyTorch (on a CPU: with kernels/cpu.py).
    compile: bool = False  # Compile the model with torch.compile: slow first step, faster training.
    activation_checkpointing: bool = False  # Recompute activations in the backward pass: less memory, more time.
    shard: bool = False  # With several processes: divide weights, gradients and moments among them (FSDP2).
    timeout_minutes: PositiveInt = 10  # With several processes: give up when one has not answered for this long.
    __post_init__ = flags.check_fields


@dataclass(frozen=True)
class Settings:
    """All settings of a run, as saved in settings.toml in its folder."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)

    def __post_init__(self) -> None:
        """Raise `UserError` for values that cannot work together."""
        data, model, run = self.data, self.model, self.run
        if not data.data:
            raise UserError("--data needs a file, a folder or another text.")
        if run.lora or run.lora_alpha:
            needs = {"--lora RANK": run.lora, "--init-from MODEL": run.init_from, "no --freeze": not run.freeze}
            needs["--optimizer=adamw"] = self.optimizer.optimizer == "adamw"
            for flag, is_given in needs.items():
                if not is_given:
                    raise UserError(f"LoRA needs {flag}.")
        length, context = data.sequence_length, model.max_position_embeddings
        first = data.first_sequence_length or length
        if length > context:
            fix = "lower the first or raise the second"
            raise UserError(f"--sequence-length {length} is above --max-position-embeddings {context}; {fix}.")
        if first > length or not math.log2(length / first).is_integer():
            raise UserError(f"--first-sequence-length {first} is not --sequence-length {length} divided by 2, 4, ...")
        if model.norm == "batch" and self.machine.activation_checkpointing:
            raise UserError("--norm batch would update its statistics twice; leave out --activation-checkpointing.")

    def by_name(self) -> dict[str, Any]:
        """All settings of all tables: a name is in one of them."""
        return {name: value for table in vars(self).values() for name, value in vars(table).items()}


@dataclass(frozen=True)
class Command:
    """All flags of train.py. The defaults shown here are those of the TOML file."""

    actions: Annotated[Actions, tyro.conf.arg(name="what-to-do")]
    settings: Annotated[Settings, tyro.conf.arg(name="")]


def parse(arguments: list[str], description: str) -> Command:
    """Read the command line twice, as a few flags name the file or model with the defaults of all others."""
    if "-h" in arguments or "--help" in arguments:
        print(description)
        sys.exit()
    flags.check_arguments(arguments, Command)
    given = {}  # the word after each flag, by the flag's name as a setting
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name.startswith("-"):
            given[name.lstrip("-").replace("-", "_")] = value if equals else following
    check_common_mistakes(arguments, given)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    options = {"prog": "train.py", "config": (tyro.conf.OmitArgPrefixes,), "default": defaults(given)}
    command = flags.parse_flags(Command, args=arguments, **options)
    found = {"init_from": options["default"].settings.run.init_from}  # the directory, not what was typed
    return Command(command.actions, replace_settings(command.settings, found))


def check_common_mistakes(arguments: list[str], given: Mapping[str, str]) -> None:
    """`UserError` for what people often write, with what they may have meant."""
    if arguments and not arguments[0].startswith("-"):
        flag = "--init-from (or --resume)" if (Path(arguments[0]) / "last").exists() else "--data"
        raise UserError(f"{arguments[0]} is no flag; write {flag} {arguments[0]}.")
    if "epochs" in given:
        raise UserError("--epochs is not a setting: training is measured in --steps, each of --batch-size sequences.")
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        has_value = value != "" and not value.startswith("-")
        if name in ("config", "resume", "init_from", "norm", "freeze") and not has_value:  # said before tyro does
            choices = f": one of {', '.join(NORMS)}" if name == "norm" else "; --help-all says which"
            raise UserError(f"{flag} needs a value after it{choices}.")
        if name in ("eval_only", "dry_run", "prepare") and has_value:
            raise UserError(f"{flag} takes no value; a run is named by --init-from {value}, a text by --data {value}.")


def defaults(given: Mapping[str, str]) -> Command:
    """The defaults of all flags: the settings of the run, file and model that are given, with what flags imply."""
    resume = given.get("resume")
    if resume is not None and given.keys() & {"config", "init_from", "out"}:
        raise UserError("--resume uses the settings of the run itself; leave out --config, --init-from and --out.")
    config = given.get("config", "finetune" if "init_from" in given else "tiny")
    path = config_path(config) if resume is None else Path(resume) / "settings.toml"
    settings = load_settings(path)
    init_from = given.get("init_from", settings.run.init_from)
    parent, changes = None, {}
    if init_from is not None and resume is None:
        directory = find_checkpoint(init_from)
        parent = load_config(directory)
        changes = vars(parent) | {"init_from": str(directory)}
        if settings.data.data == DataSettings.data and "data" not in given:
            changes |= text_of_run(directory)
        if settings.model not in (ModelConfig(), parent):
            note(f"the model is that of {directory}; the [model] of --config {config} is not used.")
    if "data" in given and path.parent == CONFIGS:
        changes["sample_prompts"] = ()  # those of the file are for its own text
    changes |= implied(given, settings, parent)
    if "norm" in given:
        changes["norm"] = given["norm"]
    return Command(Actions(config, resume), replace_settings(settings, changes))


def text_of_run(directory: Path) -> dict[str, object]:
    """The text of the run that saved this checkpoint, and its prompts; nothing if no run did."""
    path = directory.parent / "settings.toml"
    if not is_complete(directory) or not path.is_file():
        return {}
    settings = load_settings(path).by_name()
    return {name: settings[name] for name in (*TEXT_SETTINGS, "sample_prompts")}


def implied(given: Collection[str], settings: Settings, parent: ModelConfig | None) -> dict[str, object]:
    """Values that settings have, unless they are given too, because of `given` ones and of the model of --init-from."""
    values = {}
    if parent is not None and "norm" in given and parent.has_norm_bias:
        values["norm_bias"] = True  # a norm is converted with its bias
    context = settings.model.max_position_embeddings if parent is None else parent.max_position_embeddings
    if "sequence_length" in given or settings.data.sequence_length > context:
        values |= {"sequence_length": min(settings.data.sequence_length, context), "first_sequence_length": None}
    return values


def replace_settings(settings: Settings, changes: dict[str, Any]) -> Settings:
    tables = {}
    for name, table in vars(settings).items():
        tables[name] = dataclasses.replace(table, **{key: changes[key] for key in vars(table) if key in changes})
    return Settings(**tables)


def config_path(name: str) -> Path:
    """The TOML file that a name stands for: a path, or a name in configs/."""
    for path in (Path(name), CONFIGS / f"{name}.toml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in CONFIGS.glob("*.toml"))
    raise UserError(f"{name} is neither a file nor one of {', '.join(names)}.{flags.nearest(name, names)}")


def load_settings(path: Path) -> Settings:
    """Read a TOML file; its tables and keys are the names in this module, and any other is refused."""
    if not path.is_file():
        runs = newest_runs(path.parent.parent, path.parent.name)
        raise UserError(f"{path} does not exist; give the folder of a run.{runs}")
    return read_table(path, Settings, read_toml(path))


def read_table(path: Path, kind: type, values: dict) -> Any:
    """The dataclass `kind`, and those in its fields, from the values of a TOML file."""
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    with reading(path, "correct it"):
        for name, value in values.items():
            if name not in types:
                tables = [table for table, type in types.items() if name in getattr(type, "__annotations__", ())]
                fix = f" It belongs in [{tables[0]}]." if tables else flags.nearest(name, types)
                if path.name == "settings.toml":
                    fix += " If another version of this code wrote it, remove the line."
                known = ", ".join(types) if kind is not Settings else f"[{'], ['.join(types)}]"  # tables
                raise UserError(f"{path}: unknown key {name}.{fix or f' Known: {known}'}")
            if dataclasses.is_dataclass(types[name]):
                if not isinstance(value, dict):
                    raise UserError(f"{path}: {name} is a table; write [{name}] on a line above its keys.")
                values[name] = read_table(path, types[name], value)
        try:
            return kind(**values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def save_settings(settings: Settings, path: Path) -> None:
    """Write settings as TOML, without the fields that are None, and `out`, as other runs may use the file."""
    tables = dataclasses.asdict(settings)
    for name, table in tables.items():
        tables[name] = {key: value for key, value in table.items() if value is not None and key != "out"}
    replace_text(path, tomli_w.dumps(tables))


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """The fields in which two settings differ, as `key: before -> after`."""
    old, new = before.by_name(), after.by_name()
    return [f"{name}: {old[name]} -> {new[name]}" for name in new if new[name] != old[name]]
