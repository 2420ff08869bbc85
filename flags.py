"""Types of settings: the range of a number, and what the command line says of a value that may be absent."""

from typing import Annotated

from msgspec import Meta
from tyro.conf import arg

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
