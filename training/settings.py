"""Every setting of a training run, as one tree of dataclasses that TOML files and command-line flags both fill.

Each source overrides the one before: the defaults here, the TOML file (`--config`), the shape of the checkpoint
(`--init-from`), the flags. `--help` and benchmarks need neither torch nor the command-line library.
"""

import argparse
import dataclasses
import difflib
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypedDict, TypeVar

from checkpoints.families import load_config
from checkpoints.find import find_checkpoint
from data.settings import DataSettings
from errors import UserError, reading
from files import read_toml, replace_text
from flags import arg, optional
from model.config import ModelConfig

CONFIGS = Path(__file__).parent.parent / "configs"
Table = TypeVar("Table")


@dataclass(frozen=True)
class Actions:
    """What to do, and where the settings come from. These flags are not saved with the run."""

    config: str = "tiny"
    """TOML file with the settings: a path, or a name in configs/ (tiny, small, 124m, 1b; finetune with --init-from)."""
    resume: Annotated[str | None, optional("RUN")] = None
    """Resume this run folder (runs/NAME) exactly where it stopped, with its own settings and any flags given now."""
    prepare: bool = False  # Do not train; make the tokenizer and all tokens of --data, so that training starts at once.
    eval_only: bool = False  # Do not train; evaluate the weights of --init-from on all of --data.
    dry_run: bool = False  # Do not train; print the parameters, FLOPs, memory and, from three steps, the time it needs.


@dataclass(frozen=True)
class RunSettings:
    """The run itself: its folder, its seed, the weights it starts from, and how often it is evaluated."""

    out: Annotated[str | None, optional("FOLDER")] = None
    """Folder of the run, new or empty. Default: a new runs/CONFIG-NORM, with --data runs/DATA-NORM."""
    seed: int = 1  # Seed of the initial weights, the order of the batches and the text samples.
    init_from: Annotated[str | None, optional("RUN")] = None
    """Start from the weights of a run, a checkpoint directory or a Hub model (org/name@revision); --norm may differ."""
    previous_token_head: bool = False  # With --attention-bias: begin with a head that attends to the token before each.
    center_weights: bool = True
    """With --init-from a LayerNorm run and --norm rms: center the weights that write to the residual stream. With the
    bias (--norm-bias, the default then) and an untied head, the model computes the same as before."""
    lora: Annotated[int | None, optional("RANK")] = None
    """Train an adapter of this rank to --init-from (LoRA). best/ and last/ then have only that, as PEFT writes it."""
    lora_alpha: Annotated[int | None, optional("INT")] = None
    """The adapter's output is multiplied by this divided by RANK. Default: 2 RANK."""
    train_only: Literal["all", "norms"] = "all"  # Which parameters learn: all, or only those of the norms.
    evaluate_every: int = 500  # Steps between evaluations; each also saves and prints a text sample.
    sample_prompts: tuple[str, ...] = ("",)
    """Prompts of the samples: the first at each evaluation, all at the end. With --data, of held-out documents."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and the schedule of its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # AdamW, or Muon for matrices of the layers and AdamW for the rest.
    steps: int = 1000  # Number of optimizer steps.
    learning_rate: float = 3e-3  # Peak learning rate.
    embedding_lr_multiplier: float = 1.0  # Learning rate of embedding and head, in multiples of --learning-rate.
    norm_lr_multiplier: float = 1.0  # Learning rate of norms and biases, in multiples of --learning-rate.
    schedule: Literal["cosine", "wsd"] = "wsd"  # After the warm-up: cosine decay, or constant and then a linear one.
    warmup_steps: int = 50  # Steps of linear warm-up.
    decay_fraction: float = 0.5  # Fraction of the steps that wsd spends in its decay, at the end.
    final_learning_rate: float = 0.0  # Learning rate at the last step, as a fraction of the peak.
    weight_decay: float = 0.1  # Decoupled weight decay of matrices, and of the offsets of --norm offset.
    embedding_weight_decay: Annotated[float | None, optional("FLOAT")] = None
    """The same for the embedding and the head. Default: --weight-decay."""
    beta1: float = 0.9  # AdamW: decay of the moving average of the gradient (Muon's is 0.95).
    beta2: float = 0.95  # AdamW: decay of the moving average of the squared gradient.
    clip: float = 1.0  # Maximum norm of the gradient of all parameters; a larger gradient is scaled down to it.


@dataclass(frozen=True)
class MachineSettings:
    """Where the run computes, and in which precision."""

    device: str = "auto"  # auto (CUDA, else MPS, else CPU) or a torch device such as cuda:1.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of activations; weights stay float32. auto: bfloat16 if it is fast, else float16 on CUDA, else float32."""
    kernels: Literal["auto", "triton", "torch"] = "auto"  # Fused Triton kernels, or plain PyTorch.
    compile: bool = False  # Compile the model with torch.compile: slow first step, faster training.
    activation_checkpointing: bool = False  # Recompute activations in the backward pass: less memory, more time.
    shard: bool = False  # With several processes: divide weights, gradients and moments among them (FSDP2).
    timeout_minutes: int = 10  # With several processes: give up when one has not answered the others for this long.


# What numbers must be, in the words of the error -> a test, and the settings, here and of comparisons. All are finite.
RULES = {
    "at least 1": (
        lambda number: number >= 1,
        "steps batch_size micro_batch_size sequence_length first_sequence_length evaluate_every timeout_minutes "
        "sweep_seeds",
    ),
    "at least 2": (lambda number: number >= 2, "pilot_seeds"),
    "greater than 0": (lambda number: number > 0, "learning_rate clip lora lora_alpha hours learning_rates"),
    "0 or more": (
        lambda number: number >= 0,
        "seed validation_salt warmup_steps weight_decay embedding_weight_decay embedding_lr_multiplier "
        "norm_lr_multiplier first_seed rerun_seeds perturbations margin",
    ),
    "between 0 and 1": (lambda number: 0 <= number <= 1, "validation_fraction decay_fraction final_learning_rate"),
    "at least 0 and below 1": (lambda number: 0 <= number < 1, "beta1 beta2"),
}


def check_numbers(values: dict[str, object]) -> None:
    """Raise `UserError` for a number, or one of several, that breaks its rule; None is always allowed."""
    for words, (works, keys) in RULES.items():
        for key in keys.split():
            numbers = values.get(key)
            for number in numbers if isinstance(numbers, tuple) else [numbers]:
                name = f"--{key.replace('_', '-')}"
                if number == math.inf:
                    raise UserError(f"{name} is inf and must be finite.")
                if number is not None and not works(number):
                    raise UserError(f"{name} is {number} and must be {words}.")


@dataclass(frozen=True)
class Settings:
    """All settings of a run, as saved in settings.toml in its folder."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)

    def __post_init__(self) -> None:
        """Raise `UserError` for values that cannot work."""
        data, model, run = self.data, self.model, self.run
        if not data.data:
            raise UserError("--data needs a file, a folder or another text; leave it out for that of Python itself.")
        check_numbers(vars(run) | vars(data) | vars(self.optimizer) | vars(self.machine))
        lora_works = self.optimizer.optimizer == "adamw" and run.train_only == "all" and run.init_from is not None
        if (run.lora or run.lora_alpha) and not (run.lora and lora_works):
            raise UserError("LoRA needs --lora RANK, --init-from MODEL, --optimizer adamw and --train-only all.")
        length, first = data.sequence_length, data.first_sequence_length or data.sequence_length
        if length > model.max_position_embeddings:
            raise UserError(
                f"--sequence-length {length} is longer than the model's context of {model.max_position_embeddings} "
                "tokens; shorten it or raise --max-position-embeddings."
            )
        if length % first or (length // first).bit_count() != 1:
            raise UserError(
                f"--first-sequence-length {first} is not --sequence-length {length} divided by 2, 4, 8 or another "
                "power of two; None: the same length from the start."
            )
        if model.norm == "batch" and self.machine.activation_checkpointing:
            raise UserError("--norm batch would update its statistics twice; leave out --activation-checkpointing.")


@dataclass(frozen=True)
class Command:
    """All flags of train.py. The defaults shown here are those of the TOML file."""

    actions: Annotated[Actions, arg(name="what-to-do")]
    settings: Annotated[Settings, arg(name="")]


def parse(arguments: list[str], description: str) -> Command:
    """Read the command line; unknown flags and bad values end the program with status 2 and the nearest known name.

    It is read twice: first for the few flags that decide the defaults of all others, then for all flags.
    `init_from` is resolved here, once: in the returned settings it is the checkpoint directory itself.
    """
    if any(argument.partition("=")[0] == "--epochs" for argument in arguments):
        raise UserError("--epochs is not a setting: training is measured in --steps, each of --batch-size sequences.")
    if arguments and not arguments[0].startswith("-"):
        raise UserError(f"{arguments[0]} is no flag; give a text with --data {arguments[0]}.")
    if "-h" in arguments or "--help" in arguments:
        print(description)
        sys.exit()
    import tyro

    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    parser = argparse.ArgumentParser(usage="train.py [FLAGS]", add_help=False, allow_abbrev=False)
    for name in ("config", "resume", "init-from", "out", "sequence-length"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--norm-bias", "--norm_bias", action=argparse.BooleanOptionalAction)
    sources, _ = parser.parse_known_args(arguments)
    default = defaults(sources)
    command = tyro.cli(Command, args=arguments, default=default, prog="train.py", config=(tyro.conf.OmitArgPrefixes,))
    before, given = default.settings, command.settings
    run, model = given.run, given.model
    if given.data.data != before.data.data and run.sample_prompts == before.run.sample_prompts:  # made for other text
        run = dataclasses.replace(run, sample_prompts=())
    if sources.init_from is not None:
        run = dataclasses.replace(run, init_from=before.run.init_from)
        if sources.norm_bias is None and before.model.has_norm_bias:
            model = dataclasses.replace(model, norm_bias=True)
    return dataclasses.replace(command, settings=dataclasses.replace(given, run=run, model=model))


def defaults(sources: argparse.Namespace) -> Command:
    """The defaults of all flags: the run to resume, or the TOML file and the shape of --init-from."""
    config = sources.config or ("finetune" if sources.init_from else "tiny")
    if sources.resume is None:
        settings = load_settings(config_path(config))
    elif sources.config or sources.init_from or sources.out:
        raise UserError("--resume uses the settings of the run itself; leave out --config, --init-from and --out.")
    else:
        settings = load_settings(Path(sources.resume) / "settings.toml")
    run, model, data = settings.run, settings.model, settings.data
    if sources.init_from is not None:
        run = dataclasses.replace(run, init_from=str(find_checkpoint(sources.init_from)))
        model = load_config(run.init_from)
    length = min(data.sequence_length, model.max_position_embeddings)
    if sources.sequence_length is not None or length < data.sequence_length:  # also of the first sequences
        data = dataclasses.replace(data, sequence_length=length, first_sequence_length=None)
    return Command(Actions(config), dataclasses.replace(settings, run=run, model=model, data=data))


def config_path(name: str, folder: Path = CONFIGS) -> Path:
    """The TOML file that a name stands for: a path, or a name in the folder."""
    for path in (Path(name), folder / f"{name}.toml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in folder.glob("*.toml"))
    raise UserError(f"{name} is neither a file nor one of {', '.join(known)}.{nearest(name, known)}")


def load_settings(path: Path) -> Settings:
    """Read a TOML file; its tables and keys are the names in this module, and any other is refused."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; a run folder contains settings.toml, last/ and best/.")
    return read_table(path, Settings, read_toml(path))


def read_table(path: Path, kind: type[Table], values: dict) -> Table:
    """The dataclass `kind`, and those in its fields, from the values of a TOML file; checks their names and types."""
    import msgspec

    types = {f.name: f.type for f in dataclasses.fields(kind)}
    with reading(path, "correct it"):
        for name, value in values.items():
            if name not in types:
                close = nearest(name, types) or f" Known: {', '.join(types)}."
                raise UserError(f"{path}: unknown key {name}.{close}")
            if dataclasses.is_dataclass(types[name]):
                values[name] = read_table(path, types[name], value)
        converted = msgspec.convert(values, TypedDict(kind.__name__, types, total=False))
        try:
            return kind(**converted)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def save_settings(settings: Settings, path: Path) -> None:
    """Write settings as TOML, without the fields that are None."""
    import tomli_w

    tables = dataclasses.asdict(settings)
    given = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
    replace_text(path, tomli_w.dumps(given))


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """The fields in which two settings differ, as `key: before -> after`; `out` is left out."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(after)
    return [
        f"{key}: {old[table][key]} -> {value}"
        for table, values in new.items()
        for key, value in values.items()
        if old[table][key] != value and key != "out"
    ]


def nearest(name: str, known) -> str:
    """` Did you mean X?`, or an empty string when no known name is close or has these initials, as lr and wd."""
    by_initials = {"".join(word[:1] for word in re.split("[-_]", other)): other for other in known}
    close = by_initials.get(name.strip("-")) or next(iter(difflib.get_close_matches(name, known)), None)
    return f" Did you mean {close}?" if close else ""
