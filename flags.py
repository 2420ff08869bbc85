"""Types and marks of the fields of settings: ranges of values, and command lines. Models need neither library."""

from typing import Annotated

try:
    from msgspec import Meta
    from tyro.conf import DisallowNone, Suppress, arg
except ImportError:
    DisallowNone = Suppress = None
    arg = Meta = dict

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
