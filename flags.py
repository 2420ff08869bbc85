"""Types of settings: the range of a number, and what the command line says of a value that may be absent."""

import dataclasses
from typing import Annotated, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from tyro.conf import arg

from errors import UserError

Name = Annotated[str, Meta(min_length=1)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0, lt=1e18)]  # finite
NonNegativeFloat = Annotated[float, Meta(ge=0, lt=1e18)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


def optional(metavar: str, **options: object) -> object:
    """The mark of a setting that may be absent; the setting's docstring says what happens then."""
    return arg(metavar=metavar, help_behavior_hint="", **options)


OptionalInt = Annotated[PositiveInt | None, optional("INT")]


def check_fields(table: object) -> None:
    """Convert each field of a dataclass to its type; `UserError` for a value of another type or out of range."""
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        try:
            vars(table)[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            is_choice = get_origin(field.type) is Literal
            reason = f"Expected {', '.join(get_args(field.type))}" if is_choice else error
            raise UserError(f"{field.name} is {value!r}: {reason}.") from None
