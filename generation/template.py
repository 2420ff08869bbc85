"""Renders chat templates: the Jinja programs that come with a model and write a conversation as one text.

A template is untrusted code. It runs in Jinja's sandbox, with the settings and functions that Hugging Face
templates are written for (transformers' chat templates), and `render` runs it in a process of its own, whose time and
memory are limited: the sandbox stops neither nested loops nor huge strings.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import UserError
from generation.terminal import printable

SECONDS = 3  # of the processor for a call of `render`; a usual template takes a millisecond, starting Python 0.1 s
MAX_BYTES = 1 << 30  # of the address space
MAX_CHARACTERS = 1 << 24  # of a rendered text: more than fits into any context

Message = dict[str, Any]


class Refused(jinja2.TemplateError):
    """The template called `raise_exception`: it does not support this conversation."""


class GenerationBlock(Extension):
    """`{% generation %}`, which marks the model's own text for training. The block is rendered as it is.

    As in transformers it is a call block, so that a variable set inside is not visible outside.
    """

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body, lineno=line)

    def _text(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def compile_template(source: str) -> jinja2.Template:
    """The template with the functions that templates of Hugging Face models use."""
    extensions = [GenerationBlock, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    """JSON as it is. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """`raise_exception` of templates."""
    raise Refused(message)


def render_unlimited(
    source: str, messages: Sequence[Message], variables: dict, add_generation_prompt: bool = True
) -> str:
    """The conversation as text, in this process. `variables` are more names for it, such as bos_token."""
    arguments = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
    return join_up_to(MAX_CHARACTERS, compile_template(source).generate(messages=messages, **arguments))


def join_up_to(limit: int, parts: Iterable[str]) -> str:
    """The parts as one string; raises MemoryError when it becomes longer than `limit` characters."""
    kept, length = [], 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > limit:
            raise MemoryError
    return "".join(kept)


def render(source: str, messages: Sequence[Message], variables: dict, add_generation_prompt: bool = True) -> str:
    """As `render_unlimited`, in a process with limited time and memory. Raises `UserError` for whatever goes wrong."""
    request = json.dumps([source, messages, variables, add_generation_prompt]).encode()
    command = [sys.executable, "-m", "generation.template"]
    folder = Path(__file__).parent.parent
    try:
        process = subprocess.run(command, input=request, capture_output=True, cwd=folder, timeout=4 * SECONDS)
        too_long = hasattr(signal, "SIGXCPU") and process.returncode == -signal.SIGXCPU
    except subprocess.TimeoutExpired:
        too_long = True
    if too_long:
        raise UserError(explain_stop(f"took longer than {SECONDS} seconds"))
    if process.returncode:
        raise UserError(explain_stop(f"ended its process with status {process.returncode}"))
    answer = json.loads(process.stdout)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["text"]


def explain_stop(reason: str) -> str:
    """The error for a template that was not allowed to finish."""
    return f"the chat template was stopped because it {reason}; use a template from a source that you trust."


def limit_resources() -> None:
    """Limit this process where the system can; Windows cannot. The parent limits the time too, if it still exists."""
    try:
        import resource
    except ImportError:
        return
    for kind, limit in ((resource.RLIMIT_AS, MAX_BYTES), (resource.RLIMIT_CPU, SECONDS)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already, or macOS ignores this one
            resource.setrlimit(kind, (limit, limit + 1))  # at a hard limit of time, a process is killed instead


def main() -> None:
    """Answer one call of `render`: JSON on standard input, JSON on standard output."""
    limit_resources()
    try:
        answer = {"text": render_unlimited(*json.load(sys.stdin.buffer))}
    except Refused as error:
        answer = {"error": f"the model's chat template does not support this conversation: {one_line(error)}"}
    except jinja2.TemplateSyntaxError as error:
        answer = {"error": f"the chat template is not valid at its line {error.lineno}: {one_line(error)}"}
    except MemoryError:
        answer = {"error": explain_stop("needed too much memory")}
    except Exception as error:  # a template can raise almost anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        answer = {"error": f"the chat template failed ({reason}); get another version of the model."}
    sys.stdout.write(json.dumps(answer))


def one_line(error: Exception) -> str:
    """The error's message, at most 300 characters: it is the template's text."""
    return printable(" ".join(str(error).split()))[:300]


if __name__ == "__main__":
    main()
