"""Damaged files and hostile values: a program ends well or in one line, within seconds and little memory.

Hypothesis draws the damage. The ordinary suite tries 2 to 100 of each kind, the same in each run. A long search tries
200 times as many:
`python -m pytest -n 0 tests/test_fuzz.py --hypothesis-profile=long`. What a search finds becomes a test of its own
beside the code that it concerns.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ablate
import generate
from ablation import command
from ablation.plan import Plan, arm_settings
from checkpoints.find import find_checkpoint
from checkpoints.pretrained import save_pretrained
from data.corpus import read_documents, resolve, without_other_files
from errors import exit_on_user_error
from generation import session
from generation.settings import Settings as GenerationSettings
from model.config import ModelConfig
from model.decoder import Decoder
from training import commands
from training.settings import parse

SECONDS = 5  # of the processor; the wait for it may be six times as long
MEMORY = 300  # MB more than twice the files


def fuzz(share: float = 1) -> settings:
    """So many examples, as a share of those of the profile: 100, or 20,000 in `long` (see tests/conftest.py)."""
    fixtures = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=round(share * settings.default.max_examples), deadline=None, suppress_health_check=fixtures
    )


SCALARS = [
    *(None, True, False, 0, 1, -1, 2, 7, 3.5, -0.5, 1e-320, 1e300, 2**31, 2**53, 2**62, 2**63, 10**20, 10**400),
    *("", "x", "x" * 100_000, "../../x", "/etc/hostname", "\0", "\ud800", "rms", "llama", "1", "auto", "</s>"),
]
VALUES = [*SCALARS, [], {}, [None], [[]], {"": {}}, {"a": 1}, [0] * 1000, ["x"] * 3, {"content": 5}, {"type": "x"}]
BYTES = [b"", b"\0", b"\xff", b"{", b"}", b'"', b"9" * 400, b"\r\n", b"\xef\xbb\xbf", b"NaN"]
WHOLE = [b"", b"null", b"[]", b"{}", b"0", b'"x"', b"{" * 100_000, bytes(1000), b"version https://git-lfs"]


def value_in(tree: object, source: random.Random) -> tuple[list | dict, int | str] | None:
    """A random place in a tree of JSON: a container and a key or an index of it."""
    found = None
    while isinstance(tree, list | dict) and tree and (found is None or source.random() < 0.7):
        key = source.choice(sorted(tree)) if isinstance(tree, dict) else source.randrange(len(tree))
        found, tree = (tree, key), tree[key]
    return found


def damaged_json(tree: object, source: random.Random) -> str:
    """JSON in which a value is removed, renamed or another one."""
    place = value_in(tree, source)
    if place is None:
        return json.dumps(source.choice(VALUES))
    container, key = place
    kind = source.choice(("replace", "replace", "replace", "remove", "rename", "add", "nest"))
    if kind == "replace":
        container[key] = source.choice(VALUES)
    elif kind == "remove":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[source.choice((str(key).upper(), str(key) + "x", str(key)[:-1], ""))] = container.pop(key)
    elif kind == "add" and isinstance(container, dict):
        container[source.choice(("x", "dtype", "rope_scaling", "layer_types", "head_dim"))] = source.choice(VALUES)
    elif kind == "nest":
        container[key] = {"x": [container[key]]}
    return json.dumps(tree)


def damaged_bytes(content: bytes, source: random.Random) -> bytes:
    """Bytes of which some are lost, changed, repeated or new."""
    start = source.randrange(len(content) + 1)
    stop = min(len(content), start + source.choice((1, 1, 1, 4, 100, 100_000)))
    kind = source.choice(("cut", "flip", "remove", "repeat", "insert", "whole"))
    if kind == "cut":
        return content[:start]
    if kind == "flip" and start < len(content):
        return content[:start] + bytes([content[start] ^ (1 << source.randrange(8))]) + content[start + 1 :]
    if kind == "remove":
        return content[:start] + content[stop:]
    if kind == "repeat":
        return content[:stop] + content[start:]
    if kind == "insert":
        return content[:start] + source.choice(BYTES) + content[start:]
    return source.choice(WHOLE)


def damaged_header(content: bytes, source: random.Random) -> bytes:
    """A safetensors file with another header, of the length that it says."""
    length = int.from_bytes(content[:8], "little")
    header = damaged_json(json.loads(content[8 : 8 + length]), source).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def damage(path: Path, source: random.Random) -> str:
    """Damage one file; returns how."""
    content, kind = path.read_bytes(), source.choice(("values", "values", "values", "bytes", "bytes", "file"))
    if kind == "file":
        path.unlink()
        kind = source.choice(("missing", "folder", "pipe", "loop", "endless"))
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe" and sys.platform != "win32":
            os.mkfifo(path)
        elif kind == "loop" and sys.platform != "win32":
            path.symlink_to(path.name)
        elif kind == "endless" and Path("/dev/zero").exists():
            path.symlink_to("/dev/zero")
    elif kind == "values" and path.suffix in (".json", ".jsonl"):
        lines = content.decode("utf-8").split("\n") if path.suffix == ".jsonl" else [content.decode("utf-8")]
        index = source.randrange(len(lines))
        lines[index] = damaged_json(json.loads(lines[index]) if lines[index] else None, source)
        path.write_text("\n".join(lines), encoding="utf-8")
    elif kind == "values" and path.suffix == ".safetensors":
        path.write_bytes(damaged_header(content, source))
    else:
        path.write_bytes(damaged_bytes(content, source))
    return f"{path.name}: {kind}"


def damage_some(folder: Path, source: random.Random, names: tuple[str, ...] = ("*",)) -> list[Path]:
    """Damage one to three files of a folder; returns which."""
    files = sorted({path for name in names for path in folder.rglob(name) if path.is_file() and path.name != ".lock"})
    chosen = source.sample(files, min(len(files), source.choice((1, 1, 1, 2, 3))))
    for path in chosen:
        note(damage(path, source))
    return chosen


class TooSlow(BaseException):
    """More seconds than allowed."""


def peak_memory(reset: bool = False) -> int | None:
    """The most memory that this process has had since the last reset, in bytes; None where only Linux says it."""
    with contextlib.suppress(OSError, IndexError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    return None


@contextlib.contextmanager
def limits(folder: Path) -> Iterator[None]:
    """Fail for a block that takes too long or needs too much memory."""

    def stop(*_: object) -> None:
        raise TooSlow

    sizes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    before, start = peak_memory(reset=True), time.process_time()
    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if timed:
        previous = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    try:
        yield
    except TooSlow:
        raise AssertionError(f"longer than {6 * SECONDS} seconds") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    assert time.process_time() - start < SECONDS
    assert before is None or peak_memory() - before < MEMORY * 1e6 + 2 * sizes


def ends_well(folder: Path, act: Callable[[], object]) -> bool:
    """Whether `act` succeeds; if not, it must say why and exit with status 2: one line, or tyro's box for bad flags."""
    errors, status = io.StringIO(), 0
    with limits(folder), contextlib.redirect_stderr(errors):
        try:
            with exit_on_user_error():
                act()
        except SystemExit as stop:
            status = stop.code or 0
    assert status in (0, 2), errors.getvalue()
    if status == 2:
        text = errors.getvalue().strip()
        note(text[-1000:])
        said = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and text.endswith(said[0]) if said else "--help" in text  # as in tyro's box
        assert len(text) < 10_000 and "Traceback" not in text
    return status == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was stopped after two of its four steps."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text").mkdir()
    words = "the quick brown fox jumps over a lazy dog while seven wizards mix potions beneath an old bridge".split()
    draw = random.Random(0)
    for number in range(40):
        lines = (" ".join(draw.choices(words, k=8)) + f", {number} times.\n" for _ in range(20))
        (folder / "text" / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    shape = "--vocab-size 300 --hidden-size 16 --intermediate-size 24 --num-hidden-layers 1 --num-attention-heads 2"
    shape += (
        " --num-key-value-heads 1 --max-position-embeddings 32 --sequence-length 16 --batch-size 2 --warmup-steps 1"
    )
    places = ["--data", str(folder / "text"), "--cache", str(folder / "cache"), "--out", str(folder / "run")]
    times = "--steps 2 --warmup-steps 1 --evaluate-every 1 --device cpu"
    commands.run(parse([*shape.split(), *places, *times.split()], ""))
    return folder / "run"


@pytest.fixture(scope="module")
def checkpoints(run, tmp_path_factory) -> list[Path]:
    """Models of several families, in one file and in shards, with and without a chat template."""
    shape = dict(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, max_position_embeddings=64)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.1}
    yarn |= {"beta_fast": 32, "beta_slow": 1, "truncate": True}
    configs = {
        "llama": ModelConfig(**shape, rope_scaling=yarn),
        "stablelm": ModelConfig(**shape, norm="layer", tie_word_embeddings=False),
        "qwen3": ModelConfig(
            **shape, qk_norm=True, sliding_window=8, layer_types=["full_attention", "sliding_attention"]
        ),
        "prenorm": ModelConfig(**shape, norm="rms", norm_bias=True),
    }
    folders = []
    for name, config in configs.items():
        folder = tmp_path_factory.mktemp(name)
        save_pretrained(Decoder(config, seed=1), folder, bos_token_id=1, eos_token_id=2)
        for path in (run / "last").glob("tokenizer*"):
            shutil.copy(path, folder)
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        fields = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": template}))
        folders.append(folder)
    sharded = tmp_path_factory.mktemp("sharded")
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    model.save_pretrained(sharded, max_shard_size="20KB")
    for path in folders[0].glob("tokenizer*"):
        shutil.copy(path, sharded)
    return [*folders, sharded]


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to))


def generates_or_ends(folder: Path, source: random.Random, *, chat: bool) -> None:
    """Damage a copy of a checkpoint, and generate three tokens with it."""
    damage_some(folder, source)
    options = GenerationSettings(prompt=("Each",), max_new_tokens=3, device="cpu", dtype="float32", chat=chat)
    ends_well(
        folder,
        lambda: session.run(options, find_checkpoint(folder), ["Each line"], lambda text: None, lambda line: None),
    )


@fuzz()
@given(source=st.randoms(use_true_random=False))
def test_a_damaged_checkpoint_generates_or_ends_in_one_line(checkpoints, tmp_path, source):
    generates_or_ends(copy_of(source.choice(checkpoints), tmp_path / "model"), source, chat=False)


@fuzz(0.02)
@given(source=st.randoms(use_true_random=False))
def test_a_damaged_chat_model_answers_or_ends_in_one_line(checkpoints, tmp_path, source):
    generates_or_ends(copy_of(source.choice(checkpoints), tmp_path / "model"), source, chat=True)


def resume(folder: Path, run: Path) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return commands.run(parse(["--resume", str(folder), "--steps", "3", "--cache", str(run.parent / "cache")], ""))


@pytest.fixture(scope="module")
def resumed_weights(run) -> dict[str, torch.Tensor]:
    """The weights of the undamaged run after its third step. Also imports all that resuming needs."""
    folder = copy_of(run, run.parent / "resumed")
    assert resume(folder, run) == 0
    return load_file(folder / "last" / "model.safetensors")


@fuzz(0.1)
@given(source=st.randoms(use_true_random=False))
def test_a_damaged_run_resumes_or_ends_in_one_line_and_bit_for_bit_with_its_state_intact(
    run, resumed_weights, tmp_path, source
):
    folder = copy_of(run, tmp_path / "run")
    changed = damage_some(folder, source)
    path = folder / "settings.toml"
    if path.is_file() and b"data = " not in path.read_bytes():
        return  # then it reads the default text, 8 MB, which takes the time and memory that it takes
    if ends_well(folder, lambda: sys.exit(resume(folder, run))):
        weights = load_file(folder / "last" / "model.safetensors")
        assert weights.keys() == resumed_weights.keys()
        own = {"settings.toml", "state.json", "model.safetensors", "training_state.safetensors"}
        if not own & {path.name for path in changed}:
            assert all(torch.equal(weights[name], tensor) for name, tensor in resumed_weights.items())


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """The same few documents in every format."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("texts")
    documents = [f"Document {number} é 漢字\n" * (number % 7 + 1) for number in range(30)]
    rows = "".join(json.dumps({"text": document, "id": index}) + "\n" for index, document in enumerate(documents))
    (folder / "a.txt").write_text("".join(documents), encoding="utf-8")
    (folder / "b.jsonl").write_text(rows, encoding="utf-8")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for name, codec in (("d", "snappy"), ("e", "gzip")):
        parquet.write_table(pyarrow.table({"text": documents}), folder / f"{name}.parquet", compression=codec)
    return folder


@fuzz(0.5)
@given(source=st.randoms(use_true_random=False))
def test_a_damaged_text_is_read_or_ends_in_one_line(texts, tmp_path, source):
    folder = copy_of(texts, tmp_path / "texts")
    path = source.choice(sorted(folder.iterdir()))
    note(damage(path, source))
    named = str(source.choice((path, folder, folder / "*")))

    def read() -> None:
        for document in read_documents(without_other_files(resolve([named]))):
            for block in document:
                block.encode("utf-8")

    ends_well(folder, read)


def toml(value: object) -> str:
    """A value of JSON in TOML, which has no null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml(part)}' for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return (
        "nan" if value is None else json.dumps(value).replace("\\ud800", "x") if isinstance(value, str) else str(value)
    )


@fuzz(0.25)
@given(source=st.randoms(use_true_random=False))
def test_hostile_settings_and_flags_end_in_one_line_or_are_estimated(run, tmp_path, source):
    path = copy_of(run, tmp_path / "run") / "settings.toml"
    lines = path.read_text("utf-8").splitlines()
    for _ in range(source.choice((0, 1, 1, 2))):
        index = source.randrange(len(lines))
        key = lines[index].partition(" = ")[0]
        lines[index] = source.choice((f"{key} = {toml(source.choice(VALUES))}", "", lines[index] * 2, f"{key}x = 1"))
    path.write_text("\n".join(lines), encoding="utf-8")
    if source.random() < 0.2:
        note(damage(path, source))
    names = [line.partition(" = ")[0].replace("_", "-") for line in lines if " = " in line]
    flags = hostile_flags(names, source) if source.random() < 0.7 else []
    with contextlib.redirect_stdout(io.StringIO()):
        ends_well(path.parent, lambda: commands.run(parse(["--config", str(path), "--dry-run", *flags], "")))


def hostile_flags(names: list[str], source: random.Random) -> list[str]:
    """One to three flags with values that nobody means."""
    flags = []
    for _ in range(source.choice((1, 1, 2, 3))):
        value = str(source.choice([*SCALARS, "nan", "inf", "-1e-9", "1e-9", "a/b", "~", "."]))[:5000]
        value = value.replace("\0", "").replace("\ud800", "\udc80")  # as Python decodes arguments
        flags += [f"--{source.choice(names)}", *([value] if source.random() < 0.9 else [])]
    note(" ".join(flags)[:1000])
    return flags


@fuzz(0.25)
@given(source=st.randoms(use_true_random=False))
def test_hostile_flags_of_generate_end_in_one_line_or_in_a_text(checkpoints, tmp_path, source):
    names = [
        field.name.replace("_", "-") for field in dataclasses.fields(GenerationSettings) if field.name != "sampling"
    ]
    names += ["temperature", "top-k", "top-p", "min-p", "repetition-penalty"]
    path = tmp_path / "prompts.txt"
    path.write_text(source.choice(("Each\0 line\nis", "\ufeffx\r\n\r\ny", "Each " * 1000)), encoding="utf-8")
    basis = [str(checkpoints[0]), *("--prompt-file", str(path), "--max-new-tokens", "3", "--device", "cpu")]
    flags = hostile_flags(names, source)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        patch.setattr(sys, "argv", ["generate.py", *basis, *flags])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Each line")))
        ends_well(tmp_path, generate.main)


@fuzz(0.25)
@given(source=st.randoms(use_true_random=False))
def test_hostile_flags_of_ablate_end_in_one_line_or_in_a_plan(tmp_path, source):
    flags = hostile_flags([field.name.replace("_", "-") for field in dataclasses.fields(Plan)], source)

    def read() -> None:
        plan = command.named(command.parse(flags))
        for arm in plan.arms:
            arm_settings(plan, arm)

    with contextlib.redirect_stdout(io.StringIO()):
        ends_well(tmp_path, read)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A committed comparison, without the runs that it was made of."""
    results = Path(__file__).parent.parent / "benchmarks" / "results" / "ablation-conversion"
    return Path(shutil.copytree(results, tmp_path_factory.mktemp("study") / "study"))


@fuzz(0.25)
@given(source=st.randoms(use_true_random=False))
def test_a_damaged_comparison_is_reported_or_ends_in_one_line(study, tmp_path, source):
    folder = copy_of(study, tmp_path / "study")
    damage_some(folder, source, ("*.jsonl", "plan.toml"))

    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ablate.py", "--cells", str(folder)])
        patch.setattr(ablate, "open_streams", lambda: None)
        ends_well(folder, ablate.main)
