"""Settings of train.py by their short names, such as `norm`, which are unique over the tables of `Settings`."""

import functools
from dataclasses import fields, replace
from typing import Any, get_args, get_origin

import msgspec

from errors import UserError
from flags import nearest
from training.settings import Settings, config_path, load_settings

TYPES = {setting.name: setting.type for table in fields(Settings) for setting in fields(table.type)}
for name in ("seed", "out", "device", "evaluate_every"):  # those of a run or the program, which no arm can have
    del TYPES[name]


def read_value(name: str, value: object) -> Any:
    """The value of a setting of an arm, from a TOML file or as text."""
    if name not in TYPES:
        raise UserError(f"{name} is not a setting that arms can have.{nearest(name, TYPES)}")
    is_tuple = get_origin(TYPES[name]) is tuple
    if is_tuple and value == "":
        return ()
    try:
        return msgspec.convert([value] if is_tuple and isinstance(value, str) else value, TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        choices = [choice for choice in get_args(TYPES[name]) if isinstance(choice, str)]
        all_choices = f" Known: {', '.join(choices)}." if choices else ""
        raise UserError(f"{name}={value}: {error}.{nearest(str(value), choices) or all_choices}") from None


def label(name: str, value: object) -> str:
    """A setting as a part of an arm's name: layer, attention_bias, no attention_bias, weight_decay=0.5."""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, tuple):
        return f"{name}={' '.join(map(str, value))}" if value else f"no {name}"
    return value if isinstance(value, str) else f"{name}={value}"


@functools.cache
def base_settings(config: str) -> Settings:
    """The settings of a configuration, read once."""
    return load_settings(config_path(config))


def replace_settings(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with those values changed."""
    tables = {}
    for name, table in vars(settings).items():
        tables[name] = replace(table, **{key: changes[key] for key in vars(table) if key in changes})
    return Settings(**tables)
