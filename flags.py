"""The command line of all programs, which tyro reads: types of settings, and one line for a flag that is wrong."""

import contextlib
import dataclasses
import difflib
import functools
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import tyro
from msgspec import Meta
from tyro.conf import UseAppendAction, arg

from errors import UserError
from terminal import COLOUR_CODES, fit_stdout

Name = Annotated[str, Meta(min_length=1)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0, lt=1e18)]  # finite
NonNegativeFloat = Annotated[float, Meta(ge=0, lt=1e18)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def optional(metavar: str, **options: object) -> object:
    """For tyro, a setting that may be None: --help shows METAVAR and no default; the setting's own help tells it."""
    return arg(metavar=metavar, help_behavior_hint="", **options)


OptionalInt = Annotated[PositiveInt | None, optional("INT")]


def convert(name: str, value: object, kind: Any, *, strict: bool = True) -> Any:
    """The value of a setting as its type; `UserError` for a value of another type or out of range."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        problem = str(error)
        if choices:
            problem = f"it must be one of {', '.join(choices)}"
        elif limit := re.match(r"Expected `(?:int|float)` ([<>]=?) (\S+)", problem):
            or_none = ", or none" if type(None) in get_args(getattr(kind, "__origin__", kind)) else ""
            problem = f"it must be {LIMITS[limit[1]]} {limit[2]}{or_none}"
        elif problem.startswith("Expected `bool`"):
            problem = "it must be true or false"
        raise UserError(f"{name} is {value!r}: {problem}.{nearest(str(value), choices)}") from None


def check_fields(table: object) -> None:
    """Convert each field of a dataclass to its type."""
    for field in dataclasses.fields(table):
        value = convert(field.name, getattr(table, field.name), field.type)
        object.__setattr__(table, field.name, value)  # it is frozen


def setting_types(kind: Callable) -> Iterator[tuple[str, Any, tuple]]:
    """The name, the type and its annotations of a function's arguments or a dataclass's fields, and of those within."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        annotations = getattr(hint, "__metadata__", ())
        hint = hint.__origin__ if annotations else hint
        yield name, hint, annotations
        if dataclasses.is_dataclass(hint):
            yield from setting_types(hint)


def check_arguments(arguments: list[str], kind: Callable) -> None:
    """`UserError` for a flag of several values that is given twice, as the last alone would count; and for one that
    begins with other dashes, as Chinese keyboards and text processors write them. A text may begin so."""
    settings = [*setting_types(kind)]
    given = Counter(argument.partition("=")[0].replace("_", "-") for argument in arguments)
    given["--learning-rates"] += given["--lr"]
    for name, hint, annotations in settings:
        flag = f"--{name.replace('_', '-')}"
        if given[flag] > 1 and get_origin(hint) is tuple and UseAppendAction not in annotations:
            raise UserError(f"{flag} is given twice; give it once, with all its values.")
    names = {name for name, *_ in settings} | {"help", "help_all", "traceback", "lr", "vary"}
    for argument in arguments:
        flag = argument.lstrip("-\u2010\u2013\u2014\uff0d")
        has_other_dash = re.match("-*[\u2010\u2013\u2014\uff0d]", argument)
        if has_other_dash and flag.partition("=")[0].replace("-", "_").removeprefix("no_") in names:
            raise UserError(f"{argument} begins with another dash; write two hyphens: --{flag}")


def parse_flags(kind: Callable, **options: object) -> Any:
    """`tyro.cli`, with a `UserError` in place of its box, which alone says which flag or value it does not accept."""
    arguments = options.get("args", sys.argv[1:])
    check_arguments(arguments, kind)
    if {"-h", "--help"} & {*arguments}:
        fit_stdout()
        return tyro.cli(kind, **options)
    box = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000000"  # so that no word is broken in the box
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, **options)
    except SystemExit:
        raise UserError(explain_box(box.getvalue())) from None
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def explain_box(box: str) -> str:
    """What tyro's box says, as one line. In colours, it looks so:

    ╭─ Unrecognized options ──────────────────╮
    │ Unrecognized options: --nrom, rms       │
    │ ─────────────────────────────────────── │
    │ Perhaps you meant:                      │
    │     --norm STR                          │
    │         Norm of the layers.             │
    """
    _title, *lines = COLOUR_CODES.sub("", box).splitlines()
    text = " ".join(line.strip("│ ") for line in lines if not line.startswith("│         "))  # without help of flags
    reason = text.partition(" ──")[0].rstrip(".")
    reason = re.sub("^Missing value for argument '(.*)'.*", r"\1 needs a value after it", reason)
    reason = re.sub(r"^Error parsing (\S+): invalid literal.*?('.*')", r"\1 is \2, no whole number", reason)
    reason = re.sub(r"^Error parsing (\S+): (?:could not|no type).*?('.*?').*", r"\1 is \2, no number", reason)
    similar = re.search("Perhaps you meant: (--[a-z0-9-]+)", text)
    return f"{reason}; see --help.{f' Did you mean {similar[1]}?' if similar else ''}"


def call_with_flags(function: Callable, **options: object) -> Any:
    """Call a function with the arguments that the command line gives, once `parse_flags` has accepted them."""

    @functools.wraps(function)  # tyro calls what it is given, and reads its signature
    def bind(*arguments: object, **named: object) -> Callable[[], Any]:
        return functools.partial(function, *arguments, **named)

    return parse_flags(bind, **options)()


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?`, the name with these initials (lr: learning_rate) or the closest one; or an empty text."""
    names = [*names]
    by_initials = {"".join(word[:1] for word in re.split("[-_]", other)): other for other in names}
    begins = [other for other in names if name.startswith(f"{other}_")]  # lora_rank: lora
    close = begins + difflib.get_close_matches(name.lower(), names)
    close = by_initials.get(name.strip("-")) or next(iter(close), None)
    return f" Did you mean {close}?" if close else ""
