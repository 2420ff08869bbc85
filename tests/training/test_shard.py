"""Runs with --shard: equal to one process, saved and resumed by other numbers of processes, and what goes wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained
from errors import UserError
from model.decoder import Decoder
from training import metrics, session
from training.checkpoint import find_last, read_state
from training.loop import train
from training.processes import Processes
from training.settings import parse
from training.shard import shard

SCRIPT = Path(__file__).parent / "run_processes.py"


@pytest.fixture
def groups(tmp_path):
    """A function that runs groups of processes (count, arguments, what happens, at which step) in the test's folder."""

    def run(*groups: tuple) -> tuple[list[list[int]], str, str]:
        (tmp_path / "groups.json").write_text(json.dumps(groups))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, str(SCRIPT)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, env=environment)
        statuses = [json.loads(line[9:]) for line in ended.stdout.splitlines() if line.startswith("statuses ")]
        assert len(statuses) == len(groups), ended.stderr[-3000:]
        return statuses, ended.stdout, ended.stderr

    return run


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics.read(run) if "loss" in line]


def sharded(flags: list[str], *more: str) -> list[str]:
    return [*flags, "--shard", "--steps", "16", "--evaluate-every", "8", "--vocab-size", "401", *more]


@pytest.fixture
def one(flags, tmp_path):
    """A function that trains the same run in one process and returns its losses."""

    def run(*more: str) -> list[float]:
        train(parse(sharded(flags, *more), "test").settings, tmp_path / "one")
        return losses(tmp_path / "one")

    return run


@pytest.mark.parametrize("counts", [(4, 2), pytest.param((4, 2, 1, 2, 4), marks=pytest.mark.slow)])
def test_a_run_resumed_by_other_numbers_of_processes_is_that_of_one(flags, tmp_path, groups, one, counts):
    way = ("--optimizer", "muon", "--norm", "layer", "--activation-checkpointing", "--no-tie-word-embeddings")
    new = sharded(flags, *way, "--micro-batch-size", "1", "--out", "run")
    parts = [(count, ["--resume", "run"] if i else new, "stop", 3 * i + 3) for i, count in enumerate(counts)]
    statuses, out, errors = groups(*parts[:-1], parts[-1][:2])
    assert statuses == [*([143] * count for count in counts[:-1]), [0] * counts[-1]], errors[-3000:]
    assert out.count("next: ") == 1 and "Warning" not in errors
    assert losses(tmp_path / "run") == pytest.approx(one(*way), abs=3e-6)
    held = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(counts[-1])]
    assert all(0.9 < mine / whole * counts[-1] < 1.1 for mine, whole in held)  # 401 rows are no multiple of it
    for name in ("best", "last"):
        directory = tmp_path / "run" / name
        assert {path.suffix for path in directory.iterdir()} == {".safetensors", ".json", ".model"}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokens = torch.arange(30)[None]
        with torch.no_grad():
            assert torch.allclose(theirs(tokens).logits, load_pretrained(directory)(tokens), atol=1e-5)


def test_a_failed_write_is_a_line_and_a_kill_in_a_save_loses_only_that_save(flags, tmp_path, groups, one):
    new = sharded(flags, "--evaluate-every", "4", "--out", "run")
    statuses, out, errors = groups((2, new, "fail", 4), (2, [*new[:-1], "killed"], "kill", 8))
    assert statuses[0] == [0, 0], errors[-3000:]
    assert out.count("note: step 4 is not saved ([Errno 28] No space left on device") == 1
    assert statuses[1][1] == -9 and statuses[1][0] != 0
    assert read_state(find_last(tmp_path / "killed")).step == 4
    train(parse(["--resume", str(tmp_path / "killed")], "test").settings, tmp_path / "killed", resume=True)
    expected = one("--evaluate-every", "4")
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=3e-6)
    assert losses(tmp_path / "killed") == pytest.approx(expected, abs=3e-6)

    def resume_error(file: str) -> str:
        broken = tmp_path / file
        shutil.copytree(tmp_path / "run", broken)
        if file == "other":
            shutil.copytree(other, broken / "last", dirs_exist_ok=True)
        else:
            (broken / "last" / file).unlink()
        with pytest.raises(UserError) as caught:
            train(parse(["--resume", str(broken), "--steps", "30"], "test").settings, broken, resume=True)
        return str(caught.value)

    for file in ("model-00002-of-00002.safetensors", "training_state-00001-of-00002.safetensors"):
        assert f"{file} cannot be read (No such file" in resume_error(file)
    wide = parse(sharded(flags, "--steps", "2", "--hidden-size", "64"), "test").settings
    train(wide, tmp_path / "wide")
    other = tmp_path / "wide" / "last"
    assert "do not fit this model: hidden_size 64 instead of 32" in resume_error("other")


def test_more_processes_than_sequences_is_a_line(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda device, _: (Processes(count=4), device))
    with pytest.raises(UserError, match="--batch-size 2 cannot be divided by 4 processes"):
        session.set_up(parse(sharded(flags, "--batch-size", "2"), "test").settings, tmp_path, resume=False)


@pytest.mark.parametrize("norm, dtype", [("dyt", torch.float32), ("rms", torch.float16)])
def test_scalars_and_float16_cannot_be_sharded(make_config, norm, dtype):
    model = Decoder(make_config(norm=norm), compute_dtype=dtype)
    with pytest.raises(UserError, match="--shard needs --dtype bfloat16 or float32, and a --norm whose"):
        shard(model, torch.device("cpu"), compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "--optimizer adamw --norm rms --tie-word-embeddings --activation-checkpointing --micro-batch-size 2",
        "--optimizer muon --norm rms --vocab-size 4097 --no-tie-word-embeddings",
        "--optimizer adamw --norm layer --compile --micro-batch-size 2",
        "--optimizer muon --norm layer --attention-bias --compile --activation-checkpointing",
        "--train-only norms --norm layer",
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_every_kind_of_run_is_that_of_one_process(flags, tmp_path, groups, one, way, count):
    way = way.split()
    statuses, _, errors = groups((count, sharded(flags, *way, "--out", "run")))
    assert statuses == [[0] * count], errors[-3000:]
    expected = one(*(word for word in way if word != "--compile"))
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=3e-5)  # the gradient's norm is another sum


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_trained_beside_a_sharded_model(flags, tmp_path, groups, one, dtype):
    one()
    few = sharded(flags, "--steps", "10", "--dtype", dtype, "--lora", "4", "--init-from", str(tmp_path / "one"))
    statuses, _, errors = groups((2, [*few, "--out", "run"], "stop", 5), (2, ["--resume", "run"]))
    assert statuses == [[143] * 2, [0] * 2], errors[-3000:]
    train(parse(few, "test").settings, tmp_path / "alone")
    tolerance = 3e-6 if dtype == "float32" else 0.01
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=tolerance)
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run_after_the_timeout(flags, groups):
    statuses, _, _ = groups((2, sharded(flags, "--timeout-minutes", "1", "--out", "run"), "hang", 5))
    assert statuses[0][0] not in (0, -9)
