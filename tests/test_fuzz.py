"""Damaged files, whatever reads them: a program ends well, or in one line and status 2.

Hypothesis draws the damage, the same in each run. A long search tries 200 times as much:
`python -m pytest -n 0 tests/test_fuzz.py --hypothesis-profile=long`.
"""

import contextlib
import io
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import generate
from data.readers import read_documents
from data.settings import DataSettings
from data.sources import resolve
from errors import exit_on_user_error
from tests.test_mistakes import train_small_run
from training import commands
from training.settings import parse

VALUES = [None, True, 0, -1, 7, 3.5, 1e300, 2**62, "", "x", "../../x", "\0", [], {}, [None], {"": {}}, ["x"] * 3]


def damaged_json(text: str, source: random.Random) -> str:
    """JSON in which one value is another one or missing."""
    tree = json.loads(text)
    place = tree
    while isinstance(place, list | dict) and place:
        container, key = place, source.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        place = container[key]
        if source.random() < 0.4:
            break
    if source.random() < 0.3:
        del container[key]
    else:
        container[key] = source.choice(VALUES)
    return json.dumps(tree)


def damage(path: Path, source: random.Random) -> None:
    """Delete a file, change a value in JSON or in the header of a safetensors file, or lose, change or add bytes."""
    kind, content = source.choice(("values", "values", "values", "bytes", "bytes", "missing")), path.read_bytes()
    note(f"{path.name}: {kind}")
    if kind == "missing":
        path.unlink()
    elif kind == "values" and path.suffix in (".json", ".jsonl"):
        first, newline, rest = content.decode().partition("\n" if path.suffix == ".jsonl" else "no newline")
        path.write_text(damaged_json(first, source) + newline + rest, encoding="utf-8")
    elif kind == "values" and path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        header = damaged_json(content[8 : 8 + length].decode(), source).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    else:
        start, lost = source.randrange(len(content) + 1), source.choice((0, 1, 4, 100, len(content)))
        path.write_bytes(content[:start] + source.randbytes(source.choice((0, 1, 4))) + content[start + lost :])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """For each reader a folder of what it reads: a run of two steps with a chat template, and texts."""
    folder = tmp_path_factory.mktemp("fuzz")
    train_small_run(folder, "--evaluate-every", "1")
    for path in (folder / "RUN").glob("*/tokenizer_config.json"):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"chat_template": template}))
    texts = tmp_path_factory.mktemp("texts")
    documents = []
    for n in range(30):
        lines = 1 + n % 7
        documents.append(f"Document {n} é 漢字\n" * lines)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    for name in ("a.txt", "b.jsonl", "c.jsonl"):
        (texts / name).write_text(rows, encoding="utf-8")
    return {"model": folder / "RUN/best", "chat": folder / "RUN/best", "run": folder / "RUN", "texts": texts}


def generate_text(folder: Path, *flags: str) -> None:
    sys.argv = ["generate.py", str(folder), "--prompt", "The", "--max-new-tokens", "3", "--device", "cpu", *flags]
    generate.main()


def read_texts(folder: Path) -> None:
    for file in resolve(DataSettings(data=tuple(map(str, folder.iterdir())))):
        for document in read_documents(file):
            "".join(document).encode("utf-8")


READERS = {  # share of the examples of a profile, and what reads the files
    "model": (1.0, generate_text),
    "chat": (0.4, lambda folder: generate_text(folder, "--chat")),
    "run": (0.1, lambda folder: commands.run(parse(["--resume", str(folder), "--steps", "3"], ""))),
    "texts": (0.9, read_texts),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_ends_in_one_line(folders, reader, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    share, act = READERS[reader]
    examples = round(share * settings.default.max_examples)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(source=st.randoms(use_true_random=False))
    def try_damage(source: random.Random) -> None:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folders[reader], copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix not in (".png", ".toml"))
        for path in source.sample(files, min(len(files), source.choice((1, 1, 2)))):
            damage(path, source)
        (errors, out), status = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)), 0
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out), exit_on_user_error():
                act(copy)
        except SystemExit as end:
            status = end.code or 0
        text = errors.buffer.getvalue().decode()
        said = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(said) == bool(status) and status in (0, 2), text[-2000:]

    try_damage()
