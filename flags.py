"""The help of a command line, and marks on the fields of settings. Without their library the marks mean nothing."""

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

try:
    from tyro.conf import DisallowNone, Suppress, arg
except ImportError:  # models and benchmarks do not need a command line
    DisallowNone = Suppress = None
    arg = dict


def optional(metavar: str, **options: object) -> object:
    """For a setting that may be absent; its docstring says what happens then."""
    return arg(metavar=metavar, help_behavior_hint="", **options)


def help_text(description: str, tables: Sequence[object], only: Sequence[str] = ()) -> str:
    """Every flag of these settings, by table, or the `only` ones with the first sentence, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    entries, sections = {}, [description]
    for table in tables:
        texts = field_docstrings(type(table))
        fields = [f for f in dataclasses.fields(table) if Suppress not in getattr(f.type, "__metadata__", ())]
        for f in fields:
            text, value = texts[f.name], getattr(table, f.name)
            text = text.partition(". ")[0].removesuffix(".") + "." if only else text
            shown = " ".join(value) if isinstance(value, tuple) else value
            text = text if shown in (None, "", False) else f"{text} (default: {shown})"
            wrapped = [line for part in (usage(f), text) for line in wrap(part, width - 6)]
            entries[f.name] = "  " + "\n      ".join(wrapped)
        title = "\n".join(wrap(inspect.getdoc(table), width))
        sections.append("\n".join([title, *(entries[f.name] for f in fields)]))
    if only:
        sections[1:] = ["\n".join([*map(entries.get, only), "  --help-all\n      Show all flags."])]
    return "\n\n".join(sections)


def wrap(text: str, width: int) -> list[str]:
    """The lines of a paragraph; flags such as --batch-size are not broken."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def field_docstrings(table: type) -> dict[str, str]:
    """The text below each field of a dataclass, in one line."""
    body = ast.parse(inspect.getsource(table)).body[0].body
    pairs = ((a, b) for a, b in itertools.pairwise(body) if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr))
    return {a.target.id: " ".join(b.value.value.split()) for a, b in pairs}


def usage(field: dataclasses.Field) -> str:
    """A flag and what it takes, such as `--steps INT`."""
    flag, kind = field.name.replace("_", "-"), field.type
    metavars = [mark.metavar for mark in getattr(kind, "__metadata__", ()) if getattr(mark, "metavar", None)]
    kind = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if metavars:
        return f"--{flag} {metavars[0]}"
    if get_origin(kind) is Literal:
        return f"--{flag} {{{', '.join(get_args(kind))}}}"
    if bool in (kind, *get_args(kind)):
        return f"--{flag}, --no-{flag}"
    return f"--{flag} {'STR ...' if get_origin(kind) is tuple else kind.__name__.upper()}"


__all__ = ["DisallowNone", "Suppress", "arg", "help_text", "optional"]
