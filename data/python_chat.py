"""Questions and answers about the standard library, from the docstrings in its sources: `--data python-chat`."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PUBLIC_NAMES = {"posixpath": "os.path", "_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
LENGTH = range(20, 161)  # characters of a sentence; a signature may be shorter


def questions_and_answers(path: Path) -> Iterator[dict]:
    """Rows of two messages, in the order of a source file; none for private modules."""
    parts = path.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    name = PUBLIC_NAMES.get(name, name)
    if name == "ntpath" or name.startswith("_") or "._" in name:
        return
    for question, answer in about(ast.parse(path.read_bytes()), name):
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def about(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Questions about a module, class or function and the public ones in it, with their answers."""
    sentence = first_sentence(node)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if sentence:
        yield (f"What does {name} do?" if is_function else f"What is {name}?"), sentence
    if is_function:
        outer, _, own = name.rpartition(".")
        if sentence:
            yield f"Which function of {outer} does this: {sentence[:-1]}?", f"That is {name}."
        arguments = re.sub("^(self|cls)(, |$)", "", ast.unparse(node.args))
        if arguments and len(arguments) < LENGTH.stop:
            yield f"What are the arguments of {name}?", f"It is called as {own}({arguments})."
        return
    for child in node.body:
        if hasattr(child, "body") and not getattr(child, "name", "_").startswith("_"):
            yield from about(child, f"{name}.{child.name}")


def first_sentence(node: ast.AST) -> str | None:
    """The first sentence of a docstring in one line, None unless it has a sensible length."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    sentence = re.match(r"[A-Z].*?[\w)\]'\"`]\.(?= [A-Z]|$)", text)
    return sentence[0] if sentence and len(sentence[0]) in LENGTH and sentence[0].count(" ") > 2 else None
