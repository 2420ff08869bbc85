"""Questions and answers about the standard library, from the docstrings in its sources: `--data python-chat`.

Sources are parsed, never imported. A model that has read them learns to answer, without a download.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PUBLIC_NAMES = {"posixpath": "os.path", "_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
PUBLIC_NAMES |= {"_collections_abc": "collections.abc", "_strptime": "time"}
LENGTH = range(20, 161)  # characters of a sentence
ARGUMENTS = range(1, 121)  # characters of a signature
VERBS = """add append apply build call check clear close compare compile compute convert copy create decode delete
 determine dump encode execute extract find format generate get handle insert iterate join list load make match merge
 move open parse pop print process put raise read register release remove replace reset return run save search select
 send set shut skip sort split start stop store test try update wait wrap write yield""".split()


def questions_and_answers(path: Path) -> Iterator[dict]:
    """Rows with two messages each, in the order of a source file."""
    parts = path.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = PUBLIC_NAMES.get(module, module)
    if module == "ntpath" or any(part.startswith("_") for part in module.split(".")):
        return
    tree = ast.parse(path.read_bytes())
    if sentence := first_sentence(tree):
        yield row(f"What is the module {module}?", sentence)
    yield from about(tree, module)


def about(parent: ast.AST, name: str) -> Iterator[dict]:
    """Questions about the public functions and classes in a module or class called `name`."""
    for node in parent.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        full, sentence = f"{name}.{node.name}", first_sentence(node)
        if isinstance(node, ast.ClassDef):
            if sentence:
                yield row(f"What is {full}?", sentence)
            yield from about(node, full)
            continue
        verb, _, rest = (sentence or "").partition(" ")
        if sentence:
            yield row(f"What does {full} do?", sentence)
        if verb.lower() in VERBS:
            kind = "method" if isinstance(parent, ast.ClassDef) else "function"
            yield row(f"Which {kind} of {name} {third_person(verb.lower())} {rest[:-1]}?", f"{full} does that.")
        arguments = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
        if len(arguments) in ARGUMENTS:
            yield row(f"What are the arguments of {full}?", f"{full} is called as {node.name}({arguments}).")


def first_sentence(node: ast.AST) -> str | None:
    """The first sentence of a docstring on one line, None unless it is one of sensible length."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    found = re.match(r"[A-Z].*?[\w)\]'\"`]\.(?= [A-Z]|$)", text)
    return found[0] if found and len(found[0]) in LENGTH and found[0].count(" ") > 2 else None


def third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def row(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
