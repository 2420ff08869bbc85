"""Runs in several processes, as torchrun starts them, also with --shard: equal to one process, resumed, refused."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained
from errors import UserError, is_main_process
from model.decoder import Decoder
from tests.conftest import ROOT, run_python
from tests.training.runs import losses, open_session, resume, train_run
from training import session
from training.checkpoint import find_last, read_state
from training.loop import train_steps
from training.processes import Processes, shard, start_processes
from training.settings import MachineSettings


def run_groups(folder: Path, *groups: tuple) -> tuple[list[list[int]], str, str]:
    """Run groups of processes (count, arguments, {step: what happens}) in a folder."""
    (folder / "groups.json").write_text(json.dumps(groups))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ended = run_python(Path(__file__).with_name("run_processes.py"), cwd=folder, timeout=500, env=environment)
    statuses = [json.loads(line[9:]) for line in ended.stdout.splitlines() if line.startswith("statuses ")]
    assert len(statuses) == len(groups), ended.stderr[-3000:]
    return statuses, ended.stdout, ended.stderr


def sharded(flags: list[str], *more: str) -> list[str]:
    return [*flags, "--shard", "--steps", "16", "--evaluate-every", "8", "--vocab-size", "401", *more]


def one(flags: list[str], folder: Path, *more: str) -> list[float]:
    """The losses of the same run in one process."""
    return losses(train_run(folder / "one", *sharded(flags, *more)))


def test_neither_a_failed_write_nor_a_kill_in_a_save_changes_a_loss(flags, tmp_path):
    way = ("--evaluate-every", "4", "--norm", "layer", "--activation-checkpointing", "--no-tie-word-embeddings")
    new, run = sharded(flags, *way, "--micro-batch-size", "1"), tmp_path / "run"
    resumed = ["--resume", "run"]
    stopped = [(2, [*new, "--out", "run"], {8: "fail"}), (2, resumed, {12: "kill"})]
    statuses, out, errors = run_groups(tmp_path, *stopped, (2, resumed, {}))
    assert statuses == [[2, 2], [2, -9], [0, 0]], errors[-3000:]
    assert errors.count("error: another process ended or does not answer") == 2 and "Warning" not in errors
    assert errors.count("error: step 8 cannot be saved ([Errno 28] No space left on device") == 1
    assert [out.count(f"resuming from run/last, step {step} of 16") for step in (4, 8)] == [1, 1]
    assert out.count("next: ") == 1
    assert losses(run) == pytest.approx(one(flags, tmp_path, *way), abs=1e-5)
    held = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert all(0.9 < 2 * mine / whole < 1.1 for mine, whole in held)  # 401 rows are no multiple of it
    for file in ("training_state-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (run / "last" / file).unlink()
        with pytest.raises(UserError, match=f"{file} is not beside it"):
            resume(run, "--steps", "30")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumed_by_other_numbers_of_processes_is_that_of_one(flags, tmp_path, optimizer):
    new = sharded(flags, "--optimizer", optimizer, "--out", "run")
    again = ["--resume", "run"]
    stopped = [(4, new, {3: "stop"}), (2, again, {6: "stop"}), (1, again, {9: "stop"}), (2, again, {12: "stop"})]
    statuses, _, errors = run_groups(tmp_path, *stopped, (4, again, {}))
    assert statuses == [[143] * 4, [143] * 2, [143], [143] * 2, [0] * 4], errors[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(one(flags, tmp_path, "--optimizer", optimizer), abs=1e-5)
    for name in ("best", "last"):
        directory = tmp_path / "run" / name
        assert {path.suffix for path in directory.iterdir()} == {".safetensors", ".json", ".model"}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokens = torch.arange(30)[None]
        with torch.no_grad():
            assert torch.allclose(theirs(tokens).logits, load_pretrained(directory)(tokens), atol=1e-5)


@pytest.mark.parametrize("norm, dtype", [("dyt", torch.float32), ("rms", torch.float16)])
def test_scalars_and_float16_cannot_be_sharded(make_config, norm, dtype):
    model = Decoder(make_config(norm=norm), compute_dtype=dtype)
    with pytest.raises(UserError, match="--shard needs --dtype bfloat16 or float32, and a --norm without"):
        shard(model, torch.device("cpu"), compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "--optimizer adamw --norm rms --tie-word-embeddings --activation-checkpointing --micro-batch-size 2",
        "--optimizer muon --norm rms --vocab-size 4097 --no-tie-word-embeddings",
        "--optimizer adamw --norm layer --compile --micro-batch-size 2",
        "--optimizer muon --norm layer --attention-bias --compile --activation-checkpointing",
        "--freeze *_proj.* embed_tokens.* lm_head.* --norm layer",
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_every_kind_of_run_is_that_of_one_process(flags, tmp_path, way, count):
    way = way.split()
    statuses, _, errors = run_groups(tmp_path, (count, sharded(flags, *way, "--out", "run"), {}))
    assert statuses == [[0] * count], errors[-3000:]
    expected = one(flags, tmp_path, *(word for word in way if word != "--compile"))
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=3e-5)  # the gradient's norm is another sum


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_trained_beside_a_sharded_model(flags, tmp_path, dtype):
    one(flags, tmp_path)
    few = sharded(flags, "--steps", "10", "--dtype", dtype, "--lora", "4", "--init-from", str(tmp_path / "one"))
    statuses, _, errors = run_groups(tmp_path, (2, [*few, "--out", "run"], {5: "stop"}), (2, ["--resume", "run"], {}))
    assert statuses == [[143] * 2, [0] * 2], errors[-3000:]
    alone = losses(train_run(tmp_path / "alone", *few))
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5 if dtype == "float32" else 0.01)
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run_after_the_timeout(flags, tmp_path):
    new = sharded(flags, "--timeout-minutes", "1", "--out", "run")
    statuses, _, errors = run_groups(tmp_path, (2, new, {5: "hang"}))
    assert statuses == [[2, -9]] and errors.count("error: another process ended or does not answer") == 1


@pytest.mark.parametrize("stopped", ["SIGTERM", pytest.param("kill", marks=pytest.mark.slow)])
def test_two_processes_train_the_run_of_one_and_it_resumes_after_a_signal_or_a_kill(flags, tmp_path, stopped):
    flags = [*flags, "--steps", "100000", "--micro-batch-size", "2", "--activation-checkpointing"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command, run = [*torchrun, str(ROOT / "train.py"), *flags, "--out", "run"], tmp_path / "run"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    try:
        file, deadline = run / "metrics.jsonl", time.monotonic() + 100
        while not file.exists() or file.read_bytes().count(b"\n") < 16:  # past the save of step 10
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if stopped == "kill":
            psutil.Process(process.pid).children()[1].kill()
    finally:
        process.terminate()
        out, errors = process.communicate(timeout=200)
    assert process.returncode != 0 and out.count("stopped and saved at step") == (1 if stopped == "SIGTERM" else 0)
    assert out.count("run: ") == 1 and "Warning" not in errors  # only the main process prints
    state = read_state(find_last(run))
    assert state.tokens == state.step * 8 * 32
    one = itertools.islice(train_steps(open_session(tmp_path, *flags)), state.step)
    assert losses(run)[: state.step] == pytest.approx([result.loss for result in one], rel=1e-4)
    assert resume(run, "--steps", str(state.step + 2)) == 0
    assert read_state(run / "last").step == state.step + 2


def test_processes_must_be_given_equal_texts_tokenizers_settings_and_saves(flags, text_folder, tmp_path, monkeypatch):
    def compared(*more: str, resume: bool = False) -> dict[str, object]:
        """What a process compares with the others."""
        given = {}
        with monkeypatch.context() as patch:
            patch.setattr(Processes, "check_equal", lambda _, **values: given.update(values))
            open_session(tmp_path / "run", *more, resume=resume)
        return given

    copy = shutil.copytree(text_folder, tmp_path / "copy")
    run = train_run(tmp_path / "run", *flags, "--steps", "2")
    tokenizer = ["--tokenizer", str(shutil.copytree(run / "last", tmp_path / "tokenizer"))]
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    alike = compared(*flags)
    copied = [*flags[2:], "--data", str(copy)]
    assert compared(*copied, *tokenizer, "--out", "x", "--cache", str(tmp_path / "cache")) == alike
    config.write_text(config.read_text().replace('"add_bos_token": true', '"add_bos_token": false'))
    (copy / "00.txt").write_text("another text")
    others = {
        "texts": compared(*copied, "--tokenizer", str(run / "last")),
        "tokenizers": compared(*flags, *tokenizer),
        "settings": compared(*flags, "--learning-rate", "1e-3"),
        "saves": compared("--resume", str(run), *flags, resume=True),
    }
    for name, values in others.items():
        assert [key for key in alike if values[key] != alike[key]] == [name]
    monkeypatch.setattr(Processes, "reduce", lambda *operation: operation)  # maximum and minimum differ
    with pytest.raises(UserError, match="the texts of the processes differ; give all the same files"):
        Processes().check_equal(**alike)


def test_what_several_processes_cannot_train_is_a_line(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "start_processes", lambda *_: Processes(count=4))
    for flag, value, message in (
        ("--norm", "batch", "has statistics of its own in each process"),
        ("--batch-size", "2", "cannot be divided by 4 processes"),
    ):
        with pytest.raises(UserError, match=f"{flag} {value} {message}"):
            open_session(tmp_path, *flags, flag, value)


def test_a_process_alone_is_the_main_one_whatever_rank_the_environment_has(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_main_process() and start_processes(MachineSettings()).rank == 0
