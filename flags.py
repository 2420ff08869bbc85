"""Marks on the fields of settings, for their command line. Without its library they mean nothing."""

try:
    from tyro.conf import DisallowNone, Suppress, arg
except ImportError:  # models and benchmarks do not need a command line
    DisallowNone = Suppress = None
    arg = dict


def optional(metavar: str, **options: object) -> object:
    """The mark of a setting that may be absent; the setting's docstring says what happens then."""
    return arg(metavar=metavar, help_behavior_hint="", **options)


__all__ = ["DisallowNone", "Suppress", "arg", "optional"]
