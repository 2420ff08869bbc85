"""Damaged files, whatever reads them: a program ends well, or in one line and a status that is not 0; never in a hang.

Hypothesis draws the damage, the same in each run. A long search tries 200 times as much:
`python -m pytest -n 0 tests/test_fuzz.py --hypothesis-profile=long`.
"""

import contextlib
import gzip
import io
import json
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import generate
from ablation import study
from checkpoints.pretrained import save_pretrained
from data.readers import read_documents
from data.sources import resolve
from errors import exit_on_user_error
from model.config import ModelConfig
from model.decoder import Decoder
from training import commands
from training.settings import parse

SECONDS = 30  # that one example may take on a busy machine
VALUES = [None, True, 0, -1, 7, 3.5, 1e300, 2**62, "", "x", "../../x", "\0", [], {}, [None], {"": {}}, ["x"] * 3]
BYTES = [b"", b"\0", b"\xff", b"{", b'"', b"9" * 400, b"NaN"]
ROOT = Path(__file__).parent.parent


def damaged_json(text: str, source: random.Random) -> str:
    """JSON in which one value is another one, missing, or has another name."""
    tree = json.loads(text)
    place = tree
    while isinstance(place, list | dict) and place:
        container, key = place, source.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        place = container[key]
        if source.random() < 0.4:
            break
    kind = source.choice(("replace", "replace", "remove", "rename"))
    value = container.pop(key)
    if kind == "replace":
        value = source.choice(VALUES)
    if kind != "remove" and isinstance(container, dict):
        container[f"{key}x" if kind == "rename" else key] = value
    return json.dumps(tree)


def damaged_bytes(content: bytes, source: random.Random) -> bytes:
    """Bytes of which some are lost, changed, repeated or new."""
    start = source.randrange(len(content) + 1)
    stop = min(len(content), start + source.choice((1, 1, 4, 100)))
    flipped = bytes(byte ^ (1 << source.randrange(8)) for byte in content[start : start + 1])
    return source.choice(
        (
            content[:start],
            content[:start] + content[stop:],
            content[:start] + flipped + content[start + 1 :],
            content[:stop] + content[start:],
            content[:start] + source.choice(BYTES) + content[start:],
        )
    )


def damage(path: Path, source: random.Random) -> None:
    """Damage one file."""
    kind = source.choice(("values", "values", "values", "bytes", "bytes", "missing"))
    note(f"{path.name}: {kind}")
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "values" and path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        index = source.randrange(len(lines))
        lines[index] = damaged_json(lines[index], source)
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    elif kind == "values" and path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        header = damaged_json(content[8 : 8 + length].decode(), source).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    else:
        path.write_bytes(damaged_bytes(content, source))


def ends_well(act: Callable[[], object]) -> None:
    """Do what a program does; if it fails, it says why in one line, with a status that is not 0."""

    def stop(*_: object) -> None:
        raise AssertionError(f"longer than {SECONDS} seconds")

    errors, status = io.StringIO(), 0
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
    try:
        out = io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out), exit_on_user_error():
            act()
    except SystemExit as end:
        status = end.code or 0
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.alarm(0)
    said = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    assert len(said) == bool(status) and status in (0, 2), errors.getvalue()[-2000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps, with a chat template."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.txt").write_text(
        "".join(f"The quick brown fox jumps {n} times over {n * n} dogs.\n" for n in range(900))
    )
    shape = "--vocab-size 300 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 1 --num-attention-heads 2"
    shape += " --num-key-value-heads 1 --max-position-embeddings 64 --sequence-length 16 --batch-size 2 --device cpu"
    places = ["--data", str(folder / "a.txt"), "--cache", str(folder / "cache"), "--out", str(folder / "run")]
    commands.run(parse([*shape.split(), *places, *"--steps 2 --warmup-steps 1 --evaluate-every 1".split()], ""))
    for path in (folder / "run").glob("*/tokenizer_config.json"):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"chat_template": template}))
    return folder / "run"


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory) -> dict[str, Path]:
    """For each reader, a folder of what it reads."""
    import pyarrow
    from pyarrow import parquet

    stablelm = tmp_path_factory.mktemp("stablelm")
    shape = dict(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = ModelConfig(**shape, num_key_value_heads=1, norm="layer", tie_word_embeddings=False)
    save_pretrained(Decoder(config, seed=1), stablelm, bos_token_id=1, eos_token_id=2)
    for path in (run / "last").glob("tokenizer*"):
        shutil.copy(path, stablelm)
    texts = tmp_path_factory.mktemp("texts")
    rows = "".join(json.dumps({"text": f"Document {n} é 漢字\n" * (n % 7 + 1)}) + "\n" for n in range(30))
    (texts / "a.txt").write_text(rows, encoding="utf-8")
    (texts / "b.jsonl").write_text(rows, encoding="utf-8")
    (texts / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    parquet.write_table(pyarrow.table({"text": [f"Document {n}" for n in range(30)]}), texts / "d.parquet")
    comparison = ROOT / "benchmarks" / "results" / "ablation-conversion"
    return {"model": run / "best", "other model": stablelm, "run": run, "texts": texts, "comparison": comparison}


def generate_text(folder: Path, *flags: str) -> None:
    sys.argv = ["generate.py", str(folder), "--prompt", "The", "--max-new-tokens", "3", "--device", "cpu", *flags]
    generate.main()


def compare(folder: Path) -> None:
    assert isinstance(study.load(folder).comparisons, list)


def resume(folder: Path) -> None:
    commands.run(parse(["--resume", str(folder), "--steps", "3"], ""))


def read_texts(folder: Path) -> None:
    files = resolve([str(path) for path in folder.iterdir()], "text", folder)
    for file in files:
        for document in read_documents(file, []):
            "".join(document).encode("utf-8")


READERS = {  # share of the examples of a profile, what is read, and by what
    "a model": (1.0, "model", generate_text),
    "a model with LayerNorm": (0.5, "other model", generate_text),
    "a chat model": (0.4, "model", lambda folder: generate_text(folder, "--chat")),
    "a run": (0.1, "run", resume),
    "a text": (0.9, "texts", read_texts),
    "a comparison": (0.1, "comparison", compare),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_ends_in_one_line(folders, reader, tmp_path, monkeypatch):
    share, kind, act = READERS[reader]
    monkeypatch.setattr(sys, "argv", ["program"])

    @settings(
        max_examples=round(share * settings.default.max_examples),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(source=st.randoms(use_true_random=False))
    def try_damage(source: random.Random) -> None:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folders[kind], copy)
        files = sorted(
            path for path in copy.rglob("*") if path.is_file() and path.suffix not in (".png", ".lock", ".toml")
        )
        for path in source.sample(files, min(len(files), source.choice((1, 1, 2)))):
            damage(path, source)
        ends_well(lambda: act(copy))

    try_damage()
